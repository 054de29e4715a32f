"""How calls are written: the text between the markers of a call, to its name and its arguments as JSON.

    Piece --feed()--> [Call | Arguments | Close, ...] --end()--> the rest

Each class is a CallReader (channels.py), one for each way of writing a call:

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
from collections.abc import Collection, Generator, Iterator
from typing import Literal

import sse
from channels import Arguments, Call, CallReader, Close, Finder, Output, Piece, Schemas, is_object
from dialects.json_schema import JSON_TYPES, property_types
from request.tools import MAX_QUALIFIED_NAME

# --- JSON ---------------------------------------------------------------------------------------------------

# A lexeme: characters that mean nothing to us, as many as there are, or one that may.
IN_STRING = re.compile(r'[^"\\]+|.', re.DOTALL)
OUTSIDE = re.compile(r'[^\s"{}\[\],:]+|.', re.DOTALL)
KEYS = {"name": "name", "arguments": "arguments", "parameters": "arguments"}  # Llama 3 writes "parameters"


class Strings:
    """Follows where the strings of a JSON text begin and end."""

    def __init__(self) -> None:
        self.is_open = False
        self._is_escaped = False  # "\\" | "n": the next character of the string is escaped

    def lexemes(self, text: str) -> Iterator[str]:
        """Yield the lexemes of the text; `is_open` is what holds after each."""
        position = 0
        while lexeme := (IN_STRING if self.is_open else OUTSIDE).match(text, position):
            position = lexeme.end()
            if lexeme[0] == '"' and not self._is_escaped:
                self.is_open = not self.is_open
            self._is_escaped = self.is_open and not self._is_escaped and lexeme[0] == "\\"
            yield lexeme[0]


class JsonCalls:
    """`{"name": NAME, "arguments": VALUE}` by lexeme: NAME announces the call, VALUE leaves as written.

    There may be several: in an array as Mistral has it, or one after the other. `names`, the functions on
    offer, are given if no marker tells calls from JSON that is the answer: a call names one of them.

    `_expect` says what comes next. "open": a call; "key", "colon", "value": its members. From its first
    lexeme to its last, a key or a value is in `_written`; arguments that can leave at once leave it empty.

        {"name"    key, then colon          "arguments"    key, then colon
        :          value                    : {"a":        value; Arguments('{"a":')
        "f",       Call('f'), then key      1}             Arguments(' 1}'), then key
                                            }              open
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self.called = False
        self.in_string = False
        self.malformed = names is not None and not names
        self._names = names
        self._strings = Strings()
        self._expect: Literal["open", "key", "colon", "value"] = "open"
        self._begin_call()

    def _begin_call(self) -> None:
        """Forget the call before: nothing of the next one is known."""
        self._name: str | None = None
        self._key = ""  # the member being read, as KEYS has it
        self._keys_seen: set[str] = set()  # of two members of one key the first counts, for it has left
        self._written: list[str] = []  # the key or value being read, so far
        self._streams = False  # what is written are arguments that leave as they come
        self._arguments: str | None = None  # arguments that are complete, and wait for the name
        self._sent = False  # arguments have left, all or some
        self._depth = 0  # open brackets inside the value

    def feed(self, piece: Piece) -> Iterator[Output]:
        for lexeme in self._strings.lexemes(piece.text):
            if not self.malformed:
                yield from self._feed_lexeme(lexeme)
        self.in_string = self._strings.is_open
        yield from self._stream()

    def end(self) -> Iterator[Output]:
        yield from ()  # a call that the model did not finish is not completed: rule 1

    def _feed_lexeme(self, lexeme: str) -> Iterator[Output]:
        in_string = self._strings.is_open
        is_blank = lexeme.isspace()
        is_bare = self._written and not in_string and not self._depth  # a number, true, false, null
        if is_bare and (is_blank or lexeme in ",}"):
            yield from self._end_member()
        begins_value = self._expect == "value" and not is_blank
        begins_key = self._expect == "key" and in_string
        if self._written or begins_value or begins_key:
            yield from self._inside(lexeme)
        elif not is_blank:
            yield from self._between(lexeme)

    def _between(self, lexeme: str) -> Iterator[Output]:
        """Read what stands around the keys and values of a call, or around the calls."""
        match self._expect, lexeme:
            case "open", "{":
                self._begin_call()
                self._expect = "key"
            case "colon", ":":
                self._expect = "value"
            case "key", "}":
                yield from self._end_call()
            case ("key", ",") | ("open", "["):
                pass
            case _:
                self.malformed = not self.called  # after a call, all that is not another one is dropped
                self._strings.is_open = False

    def _inside(self, lexeme: str) -> Iterator[Output]:
        """Read a part of a key or a value."""
        if not self._written:
            self._streams = lexeme == "{" and self._key == "arguments" and self._name is not None
        self._written.append(lexeme)
        if not self._strings.is_open:
            self._depth += (lexeme in "{[") - (lexeme in "}]")
            if lexeme in ('"', "}", "]") and self._depth <= 0:
                yield from self._end_member()

    def _end_member(self) -> Iterator[Output]:
        """Take a key or a value that is complete."""
        yield from self._stream()
        written = "".join(self._written)
        self._written = []
        self._streams = False
        self._depth = 0
        if self._expect == "key":
            self._expect = "colon"
            key = KEYS.get(_string(written) or "", "")
            if key in self._keys_seen:
                key = ""
            self._key = key
            self._keys_seen.add(key)
            return
        self._expect = "key"
        if self._key == "name":
            yield from self._announce(_string(written) or "")
        elif self._key == "arguments" and written:
            yield from self._send_whole(_unquoted(written))

    def _announce(self, name: str) -> Iterator[Output]:
        is_offered = self._names is None or name in self._names
        if not name or not is_offered:
            self.malformed = not self.called
            return
        if self.called:
            yield Close()
        self._name = name
        self.called = True
        yield Call(name)
        if self._arguments is not None:
            yield from self._send_whole(self._arguments)

    def _send_whole(self, arguments: str) -> Iterator[Output]:
        """Send arguments that could not be streamed, for they came before the name, or as a string."""
        if self._name is None:
            self._arguments = arguments
            return
        self._arguments = None
        self._sent = True
        yield Arguments(arguments)

    def _stream(self) -> Iterator[Output]:
        text = "".join(self._written)
        if self._streams and text:
            self._sent = True
            self._written = [""]  # not [], which means that no value has begun
            yield Arguments(text)

    def _end_call(self) -> Iterator[Output]:
        self._expect = "open"
        self.malformed = not self.called
        if self._name is not None and not self._sent:
            self._sent = True
            yield Arguments("{}")


def _unquoted(arguments: str) -> str:
    """Return arguments out of the string that some models write them into; null means none."""
    if arguments == "null":
        return "{}"
    text = _string(arguments)
    return text if text and is_object(text) else arguments


def _string(literal: str) -> str | None:
    """Return the value of a JSON string literal; None for others, and for "\\ud800", half a character.

    Control characters may stand in it, which sse.loads() would refuse: models write newlines as they are.
    """
    try:
        value = json.loads(literal, strict=False)
        if isinstance(value, str) and value.encode():
            return value
    except (ValueError, RecursionError):
        pass
    return None


# --- names before arguments ---------------------------------------------------------------------------------


class AsWritten:
    """The arguments of a function that has been named already; they leave as written."""

    def __init__(self, name: str) -> None:
        self.called = False
        self.malformed = False
        self.in_string = False
        self._strings = Strings()
        self._name = name
        self._sent = False

    def feed(self, piece: Piece) -> Iterator[Output]:
        if not self.called:
            self.called = True
            yield Call(self._name)
        if piece.text and (self.in_string or not piece.special):  # a marker outside of strings is a stray one
            self._sent = self._sent or not piece.text.isspace()
            for _ in self._strings.lexemes(piece.text):
                self.in_string = self._strings.is_open
            yield Arguments(piece.text)

    def end(self) -> Iterator[Output]:
        if not self._sent:
            yield Arguments("{}")


class NamedCalls:
    """`NAME[ARGS]{...}`, with a `[CALL_ID]ID` between them or not; or, as older models write it, JSON."""

    def __init__(self) -> None:
        self.called = False
        self.malformed = False
        self.in_string = False
        self._name = ""  # "get_w" | "eather[ARGS]": the name so far
        self._in_id = False  # "[CALL_ID]" | "a1b2": ids are not passed on, for clients get ours
        self._rest: CallReader | None = None  # reads what follows the name, or all of it if it is JSON

    def feed(self, piece: Piece) -> Iterator[Output]:
        if self._rest:
            yield from self._rest.feed(piece)
            self.called = self._rest.called
            self.malformed = self._rest.malformed
            self.in_string = self._rest.in_string
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
            yield from self.feed(Piece(""))
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
FUNCTION = "<function="
VALUE_END = "</parameter>"


class XmlCalls:
    """`<function=NAME>`, `<parameter=P>`VALUE`</parameter>`, ..., `</function>`, as a JSON object."""

    in_string = False  # values are no strings of JSON

    def __init__(self, schemas: Schemas) -> None:
        self.called = False
        self.malformed = False
        self._schemas = schemas
        self._tag: list[str] = []  # "<func" | "tion=f>": the tag being read
        self._function: str | None = None  # the open one
        self._parameters: set[str] = set()  # those that the open function has been given
        self._value: _Value | None = None  # the one being read

    def feed(self, piece: Piece) -> Iterator[Output]:
        text = piece.text
        while text and not self.malformed:
            if self._value:
                rest = yield from self._value.feed(text)
                if rest is None:
                    return
                self._value = None
                text = rest
            else:
                head, bracket, text = text.partition(">")
                if self._tag or head.lstrip():
                    self._tag.append(head)
                    self._check_tag()
                if bracket and not self.malformed:
                    tag = "".join(self._tag).strip()
                    self._tag = []
                    yield from self._end_tag(tag)

    def end(self) -> Iterator[Output]:
        if self._value:
            yield from self._value.end()
        yield from self._end_function()

    def _check_tag(self) -> None:
        """Notice at once what is not a call, not at a ">" that may never come."""
        if not self.called and len(self._tag) < 20:  # 20 pieces tell; to join ever more takes quadratic time
            begun = "".join(self._tag).lstrip()
            self.malformed = not (begun.startswith(FUNCTION) or FUNCTION.startswith(begun))

    def _end_tag(self, tag: str) -> Iterator[Output]:
        match = TAG.search(tag)
        kind, name = "", ""
        if match and match[1]:
            kind, name = match[1], match[2].strip()
        if kind == "function" and name:
            yield from self._end_function()
            if self.called:
                yield Close()
            self.called = True
            self._function = name
            self._parameters = set()
            yield Call(name)
        elif kind == "parameter" and self._function:
            yield from self._begin_parameter(self._function, name)
        elif not self.called:
            self.malformed = True
        elif match:
            yield from self._end_function()

    def _begin_parameter(self, function: str, name: str) -> Iterator[Output]:
        is_repeated = name in self._parameters  # the first of two counts, for it has left
        if not is_repeated:
            before = ", " if self._parameters else "{"
            yield Arguments(f"{before}{_dumps(name)}: ")
        self._parameters.add(name)
        types = property_types(self._schemas.get(function, {}), name)
        self._value = _Value(types, is_dropped=is_repeated)

    def _end_function(self) -> Iterator[Output]:
        if self._function:
            yield Arguments("}" if self._parameters else "{}")
        self._function = None


class _Value:
    """The value of one parameter. A string leaves as it comes, another value at its end."""

    def __init__(self, types: set[str], is_dropped: bool) -> None:
        self._types = types
        self._is_dropped = is_dropped
        self._streams = types == {"string"} and not is_dropped
        self._finder = Finder([VALUE_END, "\n" + VALUE_END])  # the newline at either end is the template's
        self._begun = False
        self._text: list[str] = []

    def feed(self, text: str) -> Generator[Output, None, str | None]:
        """Return the text after the value's end, None before that."""
        for part in self._finder.feed(Piece(text)):
            if isinstance(part, str):
                yield from self._finish()
                return "".join(piece.text for piece in self._finder.flush())
            yield from self._more(part.text)
        return None

    def end(self) -> Iterator[Output]:
        """Say what is left: the model has forgotten the end."""
        for piece in self._finder.flush():
            yield from self._more(piece.text)
        yield from self._finish()

    def _more(self, text: str) -> Iterator[Output]:
        if not self._begun:
            self._begun = True
            text = text.removeprefix("\n")
            if self._streams:
                yield Arguments('"')
        if not self._streams:
            self._text.append(text)
        elif text:
            yield Arguments(_dumps(text)[1:-1])

    def _finish(self) -> Iterator[Output]:
        yield from self._more("")
        if self._streams:
            yield Arguments('"')
        elif not self._is_dropped:
            yield Arguments(_as_json("".join(self._text), self._types))


# Qwen3-Coder's template shows booleans and null in Python's spelling, and so the model writes them:
# https://github.com/PrimeIntellect-ai/renderers/issues/47
PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}


def _as_json(text: str, types: set[str]) -> str:
    """Return a value as JSON: a string unless it is JSON of a type that the schema allows."""
    if types and "string" not in types:
        text = PYTHON_LITERALS.get(text.strip(), text)
    try:
        value = sse.loads(text)
    except ValueError:
        return _dumps(text)
    if "string" in types and not types & JSON_TYPES[type(value)]:
        return _dumps(text)
    return text.strip()


_dumps = json.JSONEncoder(ensure_ascii=False).encode
