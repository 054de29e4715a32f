"""How calls are written: the text between the markers of a call, to its name and its arguments as JSON.

    Piece --feed()--> [Call | Arguments | Close, ...] --end()--> the rest

    JsonCalls      {"name": NAME, "arguments": {...}}           Hermes, Qwen, Llama 3, Mistral to v7
    XmlCalls       <function=NAME><parameter=P>VALUE...         Qwen3-Coder
    NamedCalls     NAME[CALL_ID]ID[ARGS]{...}                   Mistral from v11
    AsWritten      {...}                                        harmony: the name was in the header

Authority: the chat templates of the models that the rows name.

Rules of this file:
1. What has been said is never taken back: nothing is completed or repaired, and what cannot be a call says so
   (`malformed`) before anything has left: https://github.com/vllm-project/vllm/issues/10395
2. Arguments leave as they come. Where they are no JSON (XML), they leave as JSON: each value by its schema.
3. A character is looked at once, however the text was cut.

Not here: the markers (families.py), what a malformed call becomes (channels.py).
"""

import json
import re
from collections.abc import Collection, Generator, Iterator, Mapping
from typing import Any, Literal, NoReturn
from urllib.parse import unquote

from channels import Arguments, Call, CallReader, Close, Finder, Output, Piece, Schemas
from request.tools import MAX_QUALIFIED_NAME

# --- JSON ---------------------------------------------------------------------------------------------------

PLAIN = re.compile(r'[^"\\]+')  # of a string: all that neither ends nor escapes
KEYS = {"name": "name", "arguments": "arguments", "parameters": "arguments"}  # Llama 3's word


class JsonCalls:
    """`{"name": NAME, "arguments": VALUE}` by character: NAME announces the call, VALUE leaves as written.

    There may be several: in an array as Mistral has it, or one behind the other. `names`: a call of any other
    is none, as where no marker tells calls from JSON that is the answer.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self.called = self.in_string = False
        self.malformed = names is not None and not names
        self._names = names
        self._escaped = False
        self._expect: Literal["open", "key", "colon", "value"] = "open"
        self._begin()

    def _begin(self) -> None:
        """Of one call."""
        self._name: str | None = None
        self._key = ""  # the one being read, as KEYS has it
        self._seen: set[str] = set()  # keys: of two that are the same the first counts, for it has left
        self._value: list[str] = []  # of the member being read, and of arguments that come before the name
        self._arguments: str | None = None  # complete arguments that wait for the name
        self._sent = False  # some arguments have left
        self._depth = 0  # of brackets inside the value

    def feed(self, piece: Piece) -> Iterator[Output]:
        i, text = 0, piece.text
        while i < len(text):
            plain = PLAIN.match(text, i) if self.in_string and not self._escaped else None
            if plain:
                self._value.append(plain[0])
                i = plain.end()
            else:
                yield from self._char(text[i])
                i += 1
        yield from self._stream()

    def end(self) -> Iterator[Output]:
        yield from ()  # what the model did not finish stays so

    def _char(self, c: str) -> Iterator[Output]:
        if self.in_string or (self._expect == "value" and self._value):
            bare = not self.in_string and not self._depth  # a number, true, false, null
            if bare and (c in ",}" or c.isspace()):
                yield from self._member()
                yield from self._char(c)
            else:
                yield from self._inside(c)
        elif self.malformed or c.isspace():
            pass
        elif self._expect in ("key", "value") and (self._expect == "value" or c == '"'):
            yield from self._inside(c)
        elif (self._expect, c) == ("open", "{"):
            self._begin()
            self._expect = "key"
        elif (self._expect, c) == ("colon", ":"):
            self._expect = "value"
        elif (self._expect, c) == ("key", "}"):
            yield from self._end()
        elif (self._expect, c) not in (("key", ","), ("open", "[")):
            self.malformed = not self.called  # behind a call all that is no other one is dropped

    def _inside(self, c: str) -> Iterator[Output]:
        """A character of a key or a value."""
        self._value.append(c)
        if self.in_string:
            self.in_string = self._escaped or c != '"'
            self._escaped = c == "\\" and not self._escaped
            closed = not self.in_string
        else:
            self.in_string = c == '"'
            self._depth += (c in "{[") - (c in "}]")
            closed = c in "}]"
        if closed and self._depth <= 0:
            yield from self._member()

    def _member(self) -> Iterator[Output]:
        """A key or a value is complete."""
        is_key, streams = self._expect == "key", self._streams()
        written = "" if streams else "".join(self._value)
        if streams:
            yield from self._stream()
        self._value, self._depth = [], 0
        self._expect = "colon" if is_key else "key"
        if is_key:
            key = KEYS.get(_string(written) or "", "")
            self._key = "" if key in self._seen else key
            self._seen.add(key)
        elif self._key == "name":
            yield from self._named(_string(written) or "")
        elif self._key == "arguments" and written:
            text = _string(written)  # some models write the object into a string
            self._arguments = "{}" if written == "null" else written if text is None else text
            yield from self._late()

    def _named(self, name: str) -> Iterator[Output]:
        if not name or not (self._names is None or name in self._names):
            self.malformed = not self.called
            return
        if self.called:
            yield Close()
        self._name, self.called = name, True
        yield Call(name)
        yield from self._late()

    def _late(self) -> Iterator[Output]:
        """Arguments that could not be streamed: they came before the name, or as a string."""
        if self._name is not None and self._arguments is not None:
            self._sent = True
            yield Arguments(self._arguments)
            self._arguments = None

    def _streams(self) -> bool:
        """Is an object being read that can leave as it comes?"""
        here = self._expect == "value" and self._key == "arguments" and self._name is not None
        return here and (self._sent or self._value[:1] == ["{"])

    def _stream(self) -> Iterator[Output]:
        if self._streams() and (text := "".join(self._value)):
            self._sent = True
            self._value = [""]  # not empty: the value goes on
            yield Arguments(text)

    def _end(self) -> Iterator[Output]:
        self._expect = "open"
        self.malformed = not self.called
        if self._name is not None and not self._sent:
            self._sent = True
            yield Arguments("{}")


def _string(written: str) -> str | None:
    """The value of a JSON string literal, None if it is none, or no text: "\\ud800" is half a character."""
    try:
        value = json.loads(written, strict=False)
        return value if isinstance(value, str) and value.encode() else None
    except (ValueError, RecursionError):
        return None


# --- names before arguments ---------------------------------------------------------------------------------


class AsWritten:
    """The arguments of the function that was named before them."""

    def __init__(self, name: str) -> None:
        self.called = self.malformed = self.in_string = False
        self._name = name
        self._sent = False

    def feed(self, piece: Piece) -> Iterator[Output]:
        if not self.called:
            self.called = True
            yield Call(self._name)
        if piece.text and not piece.special:  # a marker here is a stray one
            self._sent = self._sent or not piece.text.isspace()
            yield Arguments(piece.text)

    def end(self) -> Iterator[Output]:
        if not self._sent:
            yield Arguments("{}")


class NamedCalls:
    """`NAME[ARGS]{...}`, with a `[CALL_ID]ID` between them or not; or, as older models write it, JSON."""

    def __init__(self) -> None:
        self.malformed = False
        self._name = ""  # "get_w" | "eather[ARGS]": the name so far
        self._in_id = False  # "[CALL_ID]" | "a1b2": ids are not passed on, for clients get ours
        self._rest: CallReader | None = None  # reads what follows the name, or all of it if it is JSON

    @property
    def called(self) -> bool:
        return self._rest is not None and self._rest.called

    @property
    def in_string(self) -> bool:
        return self._rest is not None and self._rest.in_string

    def feed(self, piece: Piece) -> Iterator[Output]:
        if self._rest:
            yield from self._rest.feed(piece)
            self.malformed = self._rest.malformed
        elif piece.special:
            yield from self._marker(piece.special)
        elif not self._in_id:
            yield from self._more_of_the_name(piece.text)

    def end(self) -> Iterator[Output]:
        if self._rest:
            yield from self._rest.end()

    def _marker(self, marker: str) -> Iterator[Output]:
        name = self._name.strip()
        if marker == "[ARGS]" and name:
            self._rest = AsWritten(name)
            yield from self._rest.feed(Piece(""))
        elif marker == "[CALL_ID]":
            self._in_id = True
        else:
            self.malformed = True

    def _more_of_the_name(self, text: str) -> Iterator[Output]:
        self._name = (self._name + text).lstrip()
        if self._name.startswith(("[", "{")):
            self._rest = JsonCalls()
            yield from self.feed(Piece(self._name))
        elif len(self._name) > MAX_QUALIFIED_NAME:  # no tool on offer has so long a name
            self.malformed = True
            self._name = ""


# --- XML ----------------------------------------------------------------------------------------------------

TAG = re.compile(r"(?:<(function|parameter)=([^<>]+)|</function)\Z")  # up to its ">"
VALUE_END = "</parameter>"


class XmlCalls:
    """`<function=NAME>`, `<parameter=P>`VALUE`</parameter>`, ..., `</function>`, as a JSON object."""

    in_string = False

    def __init__(self, schemas: Schemas) -> None:
        self.called = self.malformed = False
        self._schemas = schemas
        self._tag: list[str] = []  # the one being read
        self._function: str | None = None  # the open one
        self._seen: set[str] = set()  # its parameters
        self._value: _Value | None = None  # of the parameter being read

    def feed(self, piece: Piece) -> Iterator[Output]:
        text = piece.text
        while text and not self.malformed:
            if self._value:
                behind = yield from self._value.feed(text)
                text = behind or ""
                self._value = self._value if behind is None else None
            else:
                head, bracket, text = text.partition(">")
                if self._tag or head.lstrip():
                    self._tag.append(head)
                    self._check_tag()
                if bracket and not self.malformed:
                    yield from self._tagged("".join(self._tag).strip())
                    self._tag = []

    def end(self) -> Iterator[Output]:
        if self._value:
            yield from self._value.end()
        yield from self._end_function()

    def _check_tag(self) -> None:
        """What is no call is known at once, not at a ">" that may never come."""
        if not self.called and len(self._tag) < 20:
            begun, first = "".join(self._tag).lstrip(), "<function="
            self.malformed = begun[: len(first)] != first[: len(begun)]

    def _tagged(self, tag: str) -> Iterator[Output]:
        found = TAG.search(tag)
        kind, name = (found[1], (found[2] or "").strip()) if found else ("", "")
        if kind == "function" and name:
            yield from self._end_function()
            if self.called:
                yield Close()
            self.called, self._function, self._seen = True, name, set()
            yield Call(name)
        elif kind == "parameter" and self._function:
            known = name in self._seen  # of two that are the same the first counts, for it has left
            if not known:
                yield Arguments(f"{', ' if self._seen else '{'}{_dumps(name)}: ")
            self._seen.add(name)
            self._value = _Value(kinds(self._schemas.get(self._function, {}), name), dropped=known)
        elif self.called:
            yield from self._end_function() if found else ()
        else:
            self.malformed = True

    def _end_function(self) -> Iterator[Output]:
        if self._function:
            yield Arguments("}" if self._seen else "{}")
        self._function = None


class _Value:
    """One parameter's, up to its end. A string leaves as it comes, another value when it is whole."""

    def __init__(self, kinds: set[str], dropped: bool) -> None:
        self._kinds = kinds
        self._dropped = dropped
        self._finder = Finder([VALUE_END, "\n" + VALUE_END])  # the newline at either end is the template's
        self._begun = False
        self._text: list[str] = []

    def feed(self, text: str) -> Generator[Output, None, str | None]:
        """Returns the text behind the value's end, None before that."""
        for found in self._finder.feed(Piece(text)):
            if isinstance(found, str):
                yield from self._finish()
                return "".join(piece.text for piece in self._finder.flush())
            yield from self._more(found.text)
        return None

    def end(self) -> Iterator[Output]:
        """The model has forgotten the end."""
        for piece in self._finder.flush():
            yield from self._more(piece.text)
        yield from self._finish()

    def _more(self, text: str) -> Iterator[Output]:
        if not self._begun:
            yield from self._begin()
            text = text.removeprefix("\n")
        if self._kinds != {"string"}:
            self._text.append(text)
        elif text and not self._dropped:
            yield Arguments(_dumps(text)[1:-1])

    def _begin(self) -> Iterator[Output]:
        self._begun = True
        if self._kinds == {"string"} and not self._dropped:
            yield Arguments('"')

    def _finish(self) -> Iterator[Output]:
        if not self._begun:
            yield from self._begin()
        if not self._dropped:
            yield Arguments('"' if self._kinds == {"string"} else _typed("".join(self._text), self._kinds))


# fmt: off
KINDS: dict[type, set[str]] = {
    str: {"string"}, bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, list: {"array"},
    dict: {"object"}, type(None): {"null"},
}
# fmt: on


def kinds(schema: Mapping[str, Any], name: str) -> set[str]:
    """The JSON types that a property of these arguments may have; none where the schema does not say."""
    properties = schema.get("properties")
    todo = [properties.get(name)] if isinstance(properties, dict) else []
    found, seen = set[str](), set[str]()
    while todo:
        match todo.pop():
            case {"$ref": str(ref)} if ref not in seen:
                seen.add(ref)
                todo.append(target(schema, ref))
            case {"type": str(kind)}:
                found.add(kind)
            case {"type": [*several]}:
                found.update(kind for kind in several if isinstance(kind, str))
            case {"anyOf": [*several]} | {"oneOf": [*several]}:
                todo += several
            case {"enum": [*values]}:
                found.update(*(KINDS[type(value)] for value in values))
    return found


def target(root: Mapping[str, Any], ref: str) -> Any:
    """What a local $ref points to, None for others: https://www.rfc-editor.org/rfc/rfc6901"""
    if not ref.startswith("#"):
        return None
    node: Any = root
    for part in unquote(ref[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list):
            node = dict(zip(map(str, range(len(node))), node, strict=True)).get(name)
        else:
            node = node.get(name) if isinstance(node, Mapping) else None
    return node


def _typed(text: str, kinds: set[str]) -> str:
    """A value as JSON: a string if it may be one and is nothing else that it may be, or is no JSON at all."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _dumps(text)
    is_text = "string" in kinds and not kinds & KINDS[type(value)]
    return _dumps(text) if is_text else text.strip()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_dumps = json.JSONEncoder(ensure_ascii=False).encode
