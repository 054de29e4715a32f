r"""A grammar of a text to the grammar of the same text inside a JSON string.

    Lark or a regular expression --grammar()--> Lark, whose texts are the others with JSON's escapes

Authority: https://www.rfc-editor.org/rfc/rfc8259#section-7 (what is escaped, and how);
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md (Lark as llguidance reads it) and
https://docs.rs/regex/latest/regex/#syntax (its regular expressions).

Why we do it: a model then writes every call in the one form that it was trained on, and no marker has to end
a text that may hold any marker. How: JSON escapes single characters, so rules, groups and repetitions stay as
they are, and we replace only the atoms that match a character: `.` becomes "no special character, or the
escape of one". Why all lexemes are single characters: llguidance tells lexemes apart by the next byte, and
every escape begins with the same byte. So terminals become rules, and regular expressions too.

Rules of this file:
1. A special character (quote, backslash, control) has one escape, as json.dumps writes it; others have none.
2. We refuse what we cannot rewrite with certainty: special tokens, other grammars, `%ignore`, `&` and `~`;
   in regular expressions flags, assertions but ^ and $ at the ends, operations on classes, code points in
   braces, and properties (\p) but of letters, marks, numbers and separators.
3. The output is bounded: we write each atom once, as a rule, however often the grammar uses it.
"""

import json
import re
from functools import lru_cache

from dialects.json_schema import BadGrammar

MAX_WRITTEN = 2**18  # characters
MAX_ATOMS = 2000

# --- one character ------------------------------------------------------------------------------------------

SPECIAL = ['"', "\\", *map(chr, range(0x20))]
UNESCAPED = r"""[^"\\\x00-\x1f]"""
HARMLESS = re.compile(r"\\p(?:[LMNZ]|\{[LMNZ][a-z]?\})")  # properties of no special character
SET_OPERATION = re.compile("&&|--|~~")


@lru_cache
def _literal(character: str) -> str:
    """Return a string of Lark for the character as JSON writes it."""
    encode = json.JSONEncoder(ensure_ascii=False).encode
    return encode(encode(character)[1:-1]).replace("\x7f", r"\u007f")


# An atom of a regular expression matches one character: class, escape or dot -> the name of its rule.
_Atoms = dict[str, str]


def _name(atoms: _Atoms, atom: str) -> str:
    """Return the name of the atom's rule."""
    if len(atoms) > MAX_ATOMS:
        raise BadGrammar(f"expected at most {MAX_ATOMS} different classes, escapes and dots")
    return atoms.setdefault(atom, f"character-{len(atoms)}")


def _rule_of(atom: str) -> str:
    """Return the rule of an atom: its plain characters, and the escapes of its special ones."""
    if SET_OPERATION.search(atom):
        raise BadGrammar(f"expected a class that is a list, got {atom}")
    try:
        # ASCII: else Python's \s has U+001C to U+001F too, which that of the library has not.
        pattern = re.compile(HARMLESS.sub("a", atom), re.ASCII)
    except re.error as error:
        raise BadGrammar(f"cannot find the characters that {atom} matches: {error}") from error
    escapes = [_literal(character) for character in SPECIAL if pattern.fullmatch(character)]
    in_lark = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", atom)  # a bare slash ends a regex of Lark
    return " | ".join([f"/[{in_lark}&&{UNESCAPED}]/", *escapes])


# --- regular expressions ------------------------------------------------------------------------------------

PIECE = re.compile(
    r"""(?P<class> \[ \^? \]? (?: \\. | [^][\\] )* \] )
      | (?P<escape> \\ (?! [bBAzZ<>] ) (?: [pP] (?: \{\w*\} | . ) | x\w{2} | u\w{4} | U\w{8} | . ) )
      | (?P<opening> \( (?: \? (?: P?<\w+> | : ) | (?!\?) ) )
      | (?P<closing> \) )
      | (?P<or> \| )
      | (?P<times> (?: [*+?] | \{ [0-9]+ (?: , [0-9]* )? \} ) \?? )
      | (?P<anchor> \A\^ | \$\Z )
      | (?P<refused> [][^${}\\] | \(\? )
      | (?P<character> . )""",
    re.VERBOSE | re.DOTALL,
)
DOT = {"": r"[^\n]", "s": r"[\s\S]"}  # by the flags


def _regex(source: str, atoms: _Atoms, flags: str = "") -> str:
    """Return the same in Lark. Each group and alternative begins with an empty string, as it may be empty."""
    if flags not in DOT:
        raise BadGrammar(f"expected no flag but s, got /{source}/{flags}")
    done = ['(""']
    for lexeme in PIECE.finditer(source):
        piece = lexeme[0]
        match lexeme.lastgroup:
            case "opening":
                piece = '(""'
            case "or":
                piece = '| ""'
            case "times":
                piece = piece[0] + piece[1:].removesuffix("?")  # a lazy one fits the same texts
            case "anchor":
                piece = ""  # all of the text is to fit
            case "refused":
                raise BadGrammar(f"expected no {piece} here: {source[: lexeme.end()]}")
            case "character" if piece == ".":
                piece = _name(atoms, DOT[flags])
            case "character":
                piece = _literal(piece)
            case "class" | "escape":
                piece = _name(atoms, piece)
        done.append(piece)
    return " ".join([*done, ")"])


# --- Lark ---------------------------------------------------------------------------------------------------

LEXEME = re.compile(
    r"""(?P<comment> (?: // | \# ) [^\n]* )
      | (?P<range> (?P<low> "(?: \\. | [^"\\] )+" ) \s* \.\. \s* (?P<high> "(?: \\. | [^"\\] )+" ) )
      | (?P<string> "(?: \\. | [^"\\] )*" (?!i\b) )
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

FLOAT = r"([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)"

# fmt: off
COMMON = {  # as regular expressions, of https://github.com/lark-parser/lark/blob/master/lark/grammars/common.lark
    "CR":             r"\r",
    "LF":             r"\n",
    "NEWLINE":        r"(\r?\n)+",
    "WS":             r"[ \t\f\r\n]+",
    "WS_INLINE":      r"[ \t]+",
    "DIGIT":          r"[0-9]",
    "HEXDIGIT":       r"[0-9a-fA-F]",
    "INT":            r"[0-9]+",
    "SIGNED_INT":     r"[+-]?[0-9]+",
    "DECIMAL":        r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT":          FLOAT,
    "SIGNED_FLOAT":   f"[+-]?{FLOAT}",
    "NUMBER":         f"{FLOAT}|[0-9]+",
    "SIGNED_NUMBER":  f"[+-]?({FLOAT}|[0-9]+)",
    "LCASE_LETTER":   r"[a-z]",
    "UCASE_LETTER":   r"[A-Z]",
    "LETTER":         r"[a-zA-Z]",
    "WORD":           r"[a-zA-Z]+",
    "CNAME":          r"[_a-zA-Z][_a-zA-Z0-9]*",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
}
# fmt: on


def _lark(source: str, atoms: _Atoms) -> str:
    done: list[str] = []
    n_names = 0
    for lexeme in LEXEME.finditer(source):  # up to the first that is refused: the work stays linear
        piece = lexeme[0]
        match lexeme.lastgroup:
            case "comment":
                piece = ""
            case "range":
                low, high = re.escape(_text(lexeme["low"])), re.escape(_text(lexeme["high"]))
                piece = _name(atoms, f"[{low}-{high}]")
            case "string":
                literals = [_literal(character) for character in _text(piece)]
                piece = f"({' '.join(literals)})" if literals else '""'
            case "regex":
                body, _, flags = piece[1:].rpartition("/")
                piece = _regex(body, atoms, flags)
            case "import":
                piece = _import(lexeme, atoms)
            case "terminal":
                n_names += 1
                piece = _rule(piece)
            case "rule":
                n_names += 1
            case "refused":
                raise BadGrammar(f"expected rules, terminals and %import common, got {piece}")
        if n_names > MAX_NAMES:
            raise BadGrammar(f"expected at most {MAX_NAMES} names of rules and terminals")
        done.append(piece)
    return "".join(done)


def _text(literal: str) -> str:
    """Decode a string of Lark: a JSON string, in which Python's \\xHH is allowed too."""
    try:
        # `\\x` is written as `\\u00`; a backslash that is escaped stays.
        return str(json.loads(re.sub(r"(\\\\)|\\x(?=[0-9a-fA-F]{2})", lambda m: m[1] or r"\u00", literal)))
    except ValueError as error:
        raise BadGrammar(f"expected a string as in JSON, got {literal}: {error}") from error


def _rule(terminal: str) -> str:
    """Return the name of the rule that a terminal becomes."""
    return f"terminal-{terminal.lower()}"


def _import(lexeme: re.Match[str], atoms: _Atoms) -> str:
    names = re.findall(r"\w+", lexeme["names"] or "") or [lexeme["name"]]
    rules: list[str] = []
    for name in names:
        if name not in COMMON:
            raise BadGrammar(f"expected one of common.{', '.join(COMMON)}, got {name}")
        rules.append(f"{_rule(lexeme['as'] or name)}: {_regex(COMMON[name], atoms)}")
    return "\n".join(rules)


def grammar(syntax: str, definition: str) -> str:
    """Return Lark for the text between the quotes; `syntax` is lark or regex. Raises BadGrammar."""
    atoms: _Atoms = {}
    rules = _lark(definition, atoms) if syntax == "lark" else f"start: {_regex(definition, atoms)}"
    for atom, name in atoms.items():
        rules += f"\n{name}: {_rule_of(atom)}"
    if len(rules) > MAX_WRITTEN:
        raise BadGrammar(f"expected a grammar that takes at most {MAX_WRITTEN} characters inside JSON")
    return rules
