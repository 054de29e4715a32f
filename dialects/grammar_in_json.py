r"""A grammar of a text to the grammar of that text as it stands inside a JSON string.

    Lark or a regular expression --grammar()--> Lark, whose texts are the others with JSON's escapes

Authority: https://www.rfc-editor.org/rfc/rfc8259#section-7 (what is escaped, and how);
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md (Lark as llguidance reads it) and
https://docs.rs/regex/latest/regex/#syntax (its regular expressions).

Why it is done: a model then writes every call in the one form that it was trained on, and no marker has to
end a text that may hold any marker. How: escapes are of single characters, so rules, groups and repetitions
stay as they are, and only what stands for a character is replaced: `.` by "no special character, or the
escape of one". Why all lexemes are single characters: llguidance tells them apart by one byte that comes
next, and every escape begins with the same one. So terminals become rules, and regular expressions too.

Rules of this file:
1. A special character (quote, backslash, control) has one escape, as json.dumps writes it; others have none.
2. What cannot be rewritten with certainty is refused: special tokens, other grammars, `%ignore`, `&` and `~`;
   in regular expressions assertions but ^ and $ at the ends, operations on classes, code points in braces,
   and properties (\p) but of letters, marks, numbers and separators.

Not here: whether the grammar is one (llguidance says), where it stands in an answer (structured_output.py).
"""

import json
import re
from collections.abc import Callable


class BadSource(ValueError):
    """This grammar cannot be rewritten: what was expected, and what was found."""


# --- one character ------------------------------------------------------------------------------------------

SPECIAL = ['"', "\\", *map(chr, range(0x20))]
UNESCAPED = r"""[^"\\\x00-\x1f]"""
HARMLESS = re.compile(r"\\p(?:[LMNZ]|\{[LMNZ][a-z]?\})")  # properties of no special character
SET_OPERATION = re.compile("&&|--|~~")


def _literal(character: str, flags: str = "") -> str:
    escaped = json.dumps(character, ensure_ascii=False)[1:-1]
    in_lark = json.dumps(escaped, ensure_ascii=False).replace("\x7f", r"\u007f")
    return in_lark + ("i" if "i" in flags and escaped == character else "")  # an escape has one case


def _atom(atom: str, flags: str) -> str:
    """What a regular expression has for one character."""
    if SET_OPERATION.search(atom):
        raise BadSource(f"expected a class that is a list, got {atom}")
    try:
        held = re.compile(HARMLESS.sub("a", atom), re.ASCII)  # ASCII: of the special ones, \s holds the same
    except re.error as error:
        raise BadSource(f"cannot tell which characters {atom} stands for: {error}") from error
    atom = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], atom)  # for Lark's sake
    escapes = [_literal(character) for character in SPECIAL if held.fullmatch(character)]
    plain = f"/[{atom}&&{UNESCAPED}]/" + ("i" if "i" in flags else "")
    return f"({' | '.join([plain, *escapes])})"


# --- regular expressions ------------------------------------------------------------------------------------

PIECE = re.compile(
    r"""(?P<class> \[ \^? \]? (?: \\. | [^][\\] )* \] )
      | (?P<escape> \\ (?! [bBAzZ<>] ) (?: [pP] (?: \{\w*\} | . ) | x\w{2} | u\w{4} | U\w{8} | . ) )
      | (?P<opening> \( (?: \? (?: P?<\w+> | [a-zA-Z-]* [:)] ) | (?!\?) ) )
      | (?P<closing> \) )
      | (?P<or> \| )
      | (?P<times> (?: [*+?] | \{ [0-9]+ (?: , [0-9]* )? \} ) \?? )
      | (?P<anchor> \A\^ | \$\Z )
      | (?P<refused> [][^${}\\] | \(\? )
      | (?P<character> . )""",
    re.VERBOSE | re.DOTALL,
)
FLAGS = re.compile(r"\(\?(?P<on>[ims]*)(?:-(?P<off>[ims]*))?[:)]|\((?:\?P?<\w+>)?")
DOT = {True: r"[\s\S]", False: r"[^\n]"}


def _regex(source: str, flags: str = "") -> str:
    """What it means, in Lark. An empty string stands where there may be nothing else."""
    if set(flags) - set("ims"):
        raise BadSource(f"expected no flags but i, m and s, got /{source}/{flags}")
    groups, done = [flags], ['(""']  # flags of the group that is open, behind those around it
    for found in PIECE.finditer(source):
        piece = found[0]
        match found.lastgroup:
            case "opening":
                groups = _opened(groups, piece)
                done += ['(""'] if not piece.endswith(")") else []
            case "closing":
                groups = groups[:-1] or groups
                done.append(")")
            case "or":
                done.append('| ""')
            case "times":
                done.append(piece[0] if piece[0] in "*+?" else piece.removesuffix("?"))
            case "anchor":
                pass  # all of the text is to fit
            case "refused":
                raise BadSource(f"expected no {piece} here: {source[: found.end()]}")
            case "character" if piece == ".":
                done.append(_atom(DOT["s" in groups[-1]], groups[-1]))
            case "character":
                done.append(_literal(piece, groups[-1]))
            case _:
                done.append(_atom(piece, groups[-1]))
    return " ".join([*done, ")"])


def _opened(groups: list[str], opening: str) -> list[str]:
    """The flags behind `(`, `(?i:`, `(?<name>`, or `(?i)`, which is for the rest of the group around it."""
    given = FLAGS.fullmatch(opening)
    if given is None:
        raise BadSource(f"expected a group with no flags but i, m and s, got {opening}")
    now = (set(groups[-1]) | set(given["on"] or "")) - set(given["off"] or "")
    return [*(groups[:-1] if opening.endswith(")") else groups), "".join(now)]


# --- Lark ---------------------------------------------------------------------------------------------------

LEXEME = re.compile(
    r"""(?P<comment> (?: // | \# ) [^\n]* )
      | (?P<range> (?P<low> "(?: \\. | [^"\\] )+" ) \s* \.\. \s* (?P<high> "(?: \\. | [^"\\] )+" ) )
      | (?P<string> "(?: \\. | [^"\\] )*" i? )
      | (?P<regex> / (?: \\. | [^/\\] )+ / [a-z]* )
      | (?P<import> %import \s+ common \s* (?: \. (?P<name> \w+ ) (?: \s* -> \s* (?P<as> \w+ ) )?
                                             | \( (?P<names> [^)]* ) \) ) )
      | (?P<terminal> _? [A-Z] [_A-Z0-9-]* )
      | (?P<rule> [a-z_?!] [\w-]* | -> )
      | (?P<refused> %\w* | < [^<>\s]+ > | [@"/&~] )
      | (?P<other> . )""",
    re.VERBOSE | re.DOTALL,
)

# llguidance follows rules by recursion: some 3000, each in the one before, and its stack is gone.
MAX_NAMES = 2000

# fmt: off
COMMON = {  # https://github.com/lark-parser/lark/blob/master/lark/grammars/common.lark
    "CR":             r"/\r/",
    "LF":             r"/\n/",
    "NEWLINE":        r"/(\r?\n)+/",
    "WS":             r"/[ \t\f\r\n]+/",
    "WS_INLINE":      r"/[ \t]+/",
    "DIGIT":          r"/[0-9]/",
    "HEXDIGIT":       r"/[0-9a-fA-F]/",
    "INT":            r"/[0-9]+/",
    "SIGNED_INT":     r"/[+-]?[0-9]+/",
    "DECIMAL":        r"/[0-9]+\.[0-9]*|\.[0-9]+/",
    "FLOAT":          r"/[0-9]+e[+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?/i",
    "SIGNED_FLOAT":   r"/[+-]?/ FLOAT",
    "NUMBER":         r"FLOAT | INT",
    "SIGNED_NUMBER":  r"/[+-]?/ NUMBER",
    "LCASE_LETTER":   r"/[a-z]/",
    "UCASE_LETTER":   r"/[A-Z]/",
    "LETTER":         r"/[a-zA-Z]/",
    "WORD":           r"/[a-zA-Z]+/",
    "CNAME":          r"/[_a-zA-Z][_a-zA-Z0-9]*/",
    "ESCAPED_STRING": r'/"([^"\\\n]|\\.)*"/',
}
# fmt: on


def _lark(source: str) -> str:
    done, n_names = list[str](), 0
    for found in LEXEME.finditer(source):  # up to the first that is refused: what is open is looked for once
        done.append(REWRITERS[str(found.lastgroup)](found))
        n_names += found.lastgroup in ("rule", "terminal")
        if n_names > MAX_NAMES:
            raise BadSource(f"expected at most {MAX_NAMES} names of rules and terminals")
    return "".join(done)


def _string(found: re.Match[str]) -> str:
    flags = "i" if found[0].endswith("i") else ""
    literals = [_literal(character, flags) for character in _text(found[0])]
    return f"({' '.join(literals)})" if literals else '""'


def _range(found: re.Match[str]) -> str:
    low, high = (re.escape(_text(found[side])) for side in ("low", "high"))
    return _atom(f"[{low}-{high}]", "")


def _text(literal: str) -> str:
    """What a string of Lark says: it is one of JSON, or has Python's \\xHH."""
    try:
        as_json = re.sub(r"\\(\\|x(?=[0-9a-fA-F]{2}))", _unicode_escape, literal.removesuffix("i"))
        return str(json.loads(as_json))
    except ValueError as error:
        raise BadSource(f"expected a string as in JSON, got {literal}: {error}") from error


def _unicode_escape(found: re.Match[str]) -> str:
    return r"\u00" if found[1] == "x" else found[0]


def _regex_literal(found: re.Match[str]) -> str:
    body, _, flags = found[0][1:].rpartition("/")
    return _regex(body, flags)


def _rule(name: str) -> str:
    """A terminal is a rule of this name."""
    return f"terminal-{name.lower()}"


def _import(found: re.Match[str]) -> str:
    names = re.findall(r"\w+", found["names"] or "") or [found["name"]]
    for name in names:
        if name not in COMMON:
            raise BadSource(f"expected one of common.{', '.join(COMMON)}, got {name}")
    return "\n".join(f"{_rule(found['as'] or name)}: {_lark(_spelled_out(name))}" for name in names)


def _spelled_out(name: str) -> str:
    return re.sub("[A-Z]{3,}", lambda found: f"({_spelled_out(found[0])})", COMMON[name])


def _refused(found: re.Match[str]) -> str:
    raise BadSource(f"expected rules, terminals and %import common, got {found[0]}")


REWRITERS: dict[str, Callable[[re.Match[str]], str]] = {
    "comment": lambda _: "",
    "range": _range,
    "string": _string,
    "regex": _regex_literal,
    "import": _import,
    "terminal": lambda found: _rule(found[0]),
    "rule": lambda found: found[0],
    "refused": _refused,
    "other": lambda found: found[0],
}


def grammar(syntax: str, definition: str) -> str:
    """Lark for what stands between the quotes; `syntax` is lark or regex. Raises BadSource."""
    return _lark(definition) if syntax == "lark" else f"start: {_regex(definition)}"
