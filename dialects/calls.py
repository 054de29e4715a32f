"""How calls are written: the text between the markers of a call, to its name and its arguments as JSON.

    Piece --feed()--> [Call | Arguments | Close, ...] --end()--> the rest

Each class is a CallReader (channels.py), one for each way of writing a call:

    JsonCalls      {"name": NAME, "arguments": {...}}           Hermes, Qwen, Llama 3, Mistral to v7
    XmlCalls       <function=NAME><parameter=P>VALUE...         Qwen3-Coder
    NamedCalls     NAME[CALL_ID]ID[ARGS]{...}                   Mistral from v11
    AsWritten      {...}                                        harmony: the name was in the header

Authority: the chat templates of the models that the rows name.

Rules of this file:
1. Output is never taken back: we complete and repair nothing, and mark a text that cannot be a call as
   `malformed` before any output has left: https://github.com/vllm-project/vllm/issues/10395
2. Arguments leave as they come. Arguments in XML leave as JSON: each value by its schema.
3. We look at each character once, however the text is cut.

Not here: the markers (families.py), the fate of a malformed call (channels.py, request/tool_calls.py).
"""

import ast
import json
import re
from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

import sse
from channels import Arguments, Call, Close, Finder, Output, Piece, Schemas
from dialects.json_schema import JSON_TYPES, types_of, variants
from request.tools import MAX_QUALIFIED_NAME

T = TypeVar("T")

Reading = Generator[None, str, T]  # a coroutine that is sent the parts of a text


class Coroutine:
    """A CallReader that reads with a coroutine, which waits for the next part of the text as it needs it."""

    called = malformed = in_string = False

    def __init__(self) -> None:
        self._outputs: list[Output] = []  # read, and not yet returned
        self._coroutine = self._calls()
        next(self._coroutine)

    def _calls(self) -> Reading[None]:
        """Read calls until nothing more comes."""
        raise NotImplementedError

    def _read(self, parts: Iterable[Piece | str]) -> list[Output]:
        """Read more of the text; return its outputs."""
        for part in parts:
            if not self.malformed:
                self._coroutine.send(part if isinstance(part, str) else part.text)
        outputs = self._outputs
        self._outputs = []
        return outputs

    def _announce(self, name: str) -> None:
        if self.called:
            self._say(Close())
        self.called = True
        self._say(Call(name))

    def _say(self, output: Output) -> None:
        """Say it at the end of _read(); parts of arguments are joined."""
        match self._outputs, output:
            case [*_, Arguments(before)], Arguments(text):
                self._outputs[-1] = Arguments(before + text)
            case _:
                self._outputs.append(output)


# --- JSON ---------------------------------------------------------------------------------------------------

# A lexeme: characters that mean nothing to us, as many as there are, or one that may.
IN_STRING = re.compile(r'[^"\\]+|.', re.DOTALL)
OUTSIDE = re.compile(r'[^\s"{}\[\],:]+|.', re.DOTALL)
KEYS = {"name": "name", "arguments": "arguments", "parameters": "arguments"}  # Llama 3 writes "parameters"


class Strings:
    """Follows the strings of a JSON text."""

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


class JsonCalls(Coroutine):
    """`{"name": NAME, "arguments": VALUE}`: NAME announces the call, VALUE leaves as it is written.

    There may be several: in an array, as Mistral writes them, or one after another. If no marker separates
    calls from an answer in JSON, `names` are the functions on offer: a call names one of these.

        {"name"    a key                "arguments"    a key
        :                               : {"a":        Arguments('{"a":')
        "f",       Call('f')            1}             Arguments(' 1}')
                                        }              the end of the call
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self._names = names
        self._strings = Strings()
        self._unread = ""  # "," or "}" in `1}`: it ended a value, and does not belong to the value
        super().__init__()
        self.malformed = names is not None and not names

    def feed(self, piece: Piece) -> list[Output]:
        outputs = self._read(self._strings.lexemes(piece.text))
        self.in_string = self._strings.is_open
        return outputs

    def end(self) -> list[Output]:
        return []  # a call that the model did not finish is not completed: rule 1

    def _calls(self) -> Reading[None]:
        while True:
            lexeme = yield from self._next()
            if lexeme == "{":
                yield from self._call()
            elif lexeme != "[":
                self._give_up()

    def _call(self) -> Reading[None]:
        """Read a call after its opening brace."""
        name = ""
        arguments = ""  # complete, and not sent: they came before the name, or as a string
        is_sent = False  # arguments have left, or are leaving
        while (lexeme := (yield from self._next())) != "}":
            if lexeme == ",":
                continue
            if lexeme != '"':
                self._give_up()
                continue
            key = KEYS.get(_string((yield from self._value(lexeme))) or "")
            while (yield from self._next()) != ":":
                self._give_up()
            lexeme = yield from self._next()
            streams = key == "arguments" and name != "" and lexeme == "{"
            is_sent = is_sent or streams
            value = yield from self._value(lexeme, streams)
            if key == "name" and not name:
                name = _string(value) or ""
                if not name or (self._names is not None and name not in self._names):
                    self._give_up()
                    name = ""
                else:
                    self._announce(name)
            elif key == "arguments":
                arguments = _unquoted(value)
        self.malformed = not self.called
        if name and not is_sent:
            self._say(Arguments(arguments or "{}"))

    def _value(self, lexeme: str, streams: bool = False) -> Reading[str]:
        """Read a key or a value from this lexeme to its last. Say it as it comes, or return it."""
        written: list[str] = []
        depth = 0  # open brackets
        while True:
            if streams:
                self._say(Arguments(lexeme))
            else:
                written.append(lexeme)
            if not self._strings.is_open:
                depth += (lexeme in "{[") - (lexeme in "}]")
                if depth <= 0 and lexeme in '"}]':
                    break
            lexeme = yield
            is_bare = depth == 0 and not self._strings.is_open and lexeme != '"'
            if is_bare and (lexeme.isspace() or lexeme in ",}"):  # a number, true, false, null
                self._unread = lexeme
                break
        return "".join(written)

    def _next(self) -> Reading[str]:
        """Return the next lexeme that is not blank."""
        lexeme = self._unread or (yield)
        self._unread = ""
        while lexeme.isspace():
            lexeme = yield
        return lexeme

    def _give_up(self) -> None:
        """Drop malformed text after a call; without a call before it, the whole text is the answer."""
        self.malformed = not self.called
        self._strings.is_open = False


def _unquoted(arguments: str) -> str:
    """Return arguments out of the string that some models write them into; null means none."""
    if arguments == "null":
        return "{}"
    text = _string(arguments)
    return text if text and sse.is_object(text) else arguments


def _string(literal: str) -> str | None:
    """Return the value of a JSON string literal; None for others, and for "\\ud800", half a character.

    It may contain control characters, which sse.loads() would refuse: models write newlines as they are.
    """
    try:
        value = json.loads(literal, strict=False)
        if isinstance(value, str) and value.encode():
            return value
    except (ValueError, RecursionError):
        pass
    return None


# --- names before arguments ---------------------------------------------------------------------------------


class AsWritten(JsonCalls):
    """The arguments of a function that has been named already; they leave as written, blanks too.

    What a model writes after an object is no part of it, and is dropped:
    https://github.com/ml-explore/mlx-lm/pull/1448
    """

    _is_blank = True  # nothing of the arguments has come

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self._name = name

    def feed(self, piece: Piece) -> list[Output]:
        if not self.called:
            self._announce(self._name.strip())
        if piece.special and not self.in_string:  # a stray marker
            piece = Piece("")
        return super().feed(piece)

    def end(self) -> list[Output]:
        return [Arguments("{}")] if self.called and self._is_blank else []

    def _calls(self) -> Reading[None]:
        while (lexeme := (yield)).isspace():
            self._say(Arguments(lexeme))
        self._is_blank = False
        is_object = lexeme == "{"
        if is_object:
            yield from self._value(lexeme, streams=True)
        while True:
            if not is_object:  # such as the input of a custom tool, bare
                self._say(Arguments(lexeme))
            lexeme = yield


class NamedCalls(AsWritten):
    """`NAME[ARGS]{...}`, with a `[CALL_ID]ID` between them or not."""

    # "get_w" | "eather[ARGS]": the name comes in pieces
    _in_id = False  # "[CALL_ID]" | "a1b2": ids are not passed on, for clients get ours

    def feed(self, piece: Piece) -> list[Output]:
        if self.called:
            return super().feed(piece)
        match piece.special:
            case "[ARGS]" if self._name:
                return super().feed(Piece(""))
            case "[ARGS]":
                self.malformed = True
            case "[CALL_ID]":
                self._in_id = True
            case _ if not self._in_id:
                self._name = (self._name + piece.text).lstrip()
                if len(self._name) > MAX_QUALIFIED_NAME:  # no tool on offer has so long a name
                    self.malformed = True
                    self._name = ""
        return []


# --- XML ----------------------------------------------------------------------------------------------------

TAG = re.compile(r"(?:<(function|parameter)=\s*([^<>\s][^<>]*?)\s*|</function)>\Z")
FUNCTION = "<function="
TAGS = (FUNCTION, "<parameter", "</function")  # what may follow a value
MAX_TAG = 1024  # characters: a longer tag names no function on offer
VALUE_END = "</parameter>"
# A value may lack its end; the newline at either end of a value is the template's.
VALUE_ENDS = (VALUE_END, "\n</parameter>", "</tool_call>", "\n</tool_call>")


class XmlCalls(Coroutine):
    """`<function=NAME>`, `<parameter=P>`VALUE`</parameter>`, ..., `</function>`, as a JSON object.

    The coroutine is sent each ">" and each end of a value as a part of its own. Nothing is escaped, so an end
    is one only if a tag follows, or the call ends; else it is text of the value, as in a file that a model
    writes about calls: https://github.com/raullenchai/Rapid-MLX/issues/1515
    """

    _unread = ""  # of the next tag: it ended a value
    _is_bare = False  # no marker came before it: it is a call only if the function is on offer

    def __init__(self, schemas: Schemas) -> None:
        super().__init__()
        self._schemas = schemas
        self._finder = Finder([">", *VALUE_ENDS])

    def feed(self, piece: Piece) -> list[Output]:
        self._is_bare |= piece.special == FUNCTION
        return self._read(self._finder.feed(piece))

    def end(self) -> list[Output]:
        if not self.called:
            return []
        # The model may have forgotten to end the call. If it has not, what is added here means nothing.
        outputs = self._read([*self._finder.flush(), VALUE_END]) if self.in_string else []
        return outputs + self._read(["</function", ">"])

    def _calls(self) -> Reading[None]:
        function = ""  # the open one
        before = "{"  # the next of its parameters
        while True:
            found = TAG.findall((yield from self._tag()))
            kind, name = found[0] if found else ("", "")
            if kind == "parameter" and function:
                self._say(Arguments(f"{before}{_dumps(name)}: "))
                before = ", "
                yield from self._parameter(function, name)
                continue
            if function and found:
                self._say(Arguments("{}" if before == "{" else "}"))
                function = ""
            if kind == "function" and (name in self._schemas or not self._is_bare):
                self._announce(name)
                function = name
                before = "{"
            elif not self.called:
                self.malformed = True

    def _tag(self) -> Reading[str]:
        """Return what comes up to the next ">", which ends a tag."""
        tag, self._unread = self._unread, ""
        while not tag.endswith(">"):
            tag = (tag + (yield))[-MAX_TAG:]
            if not self.called:  # notice at once that this is no call: the ">" may never come
                begun = tag.lstrip()
                self.malformed = not (begun.startswith(FUNCTION) or FUNCTION.startswith(begun))
        return tag

    def _parameter(self, function: str, name: str) -> Reading[None]:
        """Read the value of a parameter. A string leaves as it comes, another value at its end."""
        types = types_of(variants(self._schemas.get(function, {}), name))
        is_string = types == {"string"}
        if is_string:
            self._say(Arguments('"'))
        written: list[str] = []
        self.in_string = True
        part = (yield).removeprefix("\n")
        end = ""  # of the value, if a tag follows: `_unread` may be the beginning of one
        while True:
            tag = (self._unread + part).lstrip()[: len(FUNCTION)]
            if end and len(self._unread) < MAX_TAG and any(each.startswith(tag) for each in TAGS):
                self._unread += part
                if tag in TAGS:
                    break
            else:
                text, self._unread = end + self._unread, ""
                end = part if part in VALUE_ENDS else ""
                text += part.removeprefix(end)
                written.append(text)
                if is_string and text:
                    self._say(Arguments(_dumps(text)[1:-1]))
            self.in_string = not end
            part = yield
        rest = '"' if is_string else _as_json("".join(written), types)
        self._say(Arguments(rest))


def _as_json(written: str, types: set[str]) -> str:
    """Return a value as JSON: a string unless it is JSON of a type that the schema allows.

    Qwen3-Coder's template shows booleans, null and lists in Python's spelling, and so the model writes them:
    https://github.com/waybarrios/vllm-mlx/issues/63
    """
    texts = [written.strip()]
    if types and "string" not in types:
        with suppress(Exception):  # sets, deep nesting, half a character, ...
            texts.append(_dumps(ast.literal_eval(texts[0])))
    for text in texts:
        with suppress(ValueError):
            value = sse.loads(text)
            if "string" not in types or types & JSON_TYPES[type(value)]:
                return text
    return _dumps(written)


_dumps = json.JSONEncoder(ensure_ascii=False).encode
