r"""Tool calls: the calls that a model makes, put back into the words of the client's own tools.

    [Call, Arguments, Close, ...] --Restorer.feed()--> the same, of the tools that the client has

The model is offered every tool as a function with a qualified name (tools.Tool.definition()). Restorer is the
inverse: a call of `docs__search` is one of `search` in the namespace `docs`, and of the arguments
{"input": "..."} of a custom tool InputDecoder takes the input out of its JSON, as it streams:

    pieces of arguments     {"in    put": "    a\n    b\ud8    3d\ude00    "}
    state behind each       opening string     string string   string      over
    input that leaves                          a, LF  b        one emoji

Authority: https://platform.openai.com/docs/guides/function-calling (custom tools, namespaces); RFC 8259,
section 7 (escapes).

Rules of this file:
1. Input leaves as it comes, decoded: never half an escape, never half a surrogate pair.
2. Arguments that are not {"input": "..."} are the input as they stand: nothing is repaired, nothing is lost.

Not here: what tools there are (tools.py), where in the model's output a call is (channels.py).
"""

import json
from collections.abc import Mapping
from typing import Literal

from channels import Arguments, Call, Output
from request.tools import Tool


class Restorer:
    """Puts the calls of one answer into the client's words."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools  # of the request, by Tool.qualified_name
        self._decoder: InputDecoder | None = None  # of the custom tool's call that is open

    def feed(self, output: Output) -> list[Output]:
        if isinstance(output, Arguments) and self._decoder:
            return _arguments(self._decoder.feed(output.text))
        restored: list[Output] = []
        if self._decoder:  # whatever else comes ends the call
            restored = _arguments(self._decoder.close())
            self._decoder = None
        if isinstance(output, Call) and output.name in self._tools:
            tool = self._tools[output.name]
            output = Call(tool.name, tool.custom, tool.namespace)
            if tool.custom:
                self._decoder = InputDecoder()
        return [*restored, output]


def _arguments(text: str) -> list[Output]:
    """Return no output for no text."""
    if not text:
        return []
    return [Arguments(text)]


# --- the input of a custom tool -----------------------------------------------------------------------------

OPENING = '{"input":"'
BLANKS_BEFORE = (0, 1, 8, 9)  # characters of OPENING before which JSON allows whitespace: { " : "
REPLACEMENT = "\ufffd"  # stands for half a surrogate pair, which is no character


class InputDecoder:
    r"""Decodes the string in `{"input": "..."}` as its characters come.

    state     next state                                            the input has
    opening   string, when OPENING is complete                      nothing of it
              over, at {}                                           nothing: there is no input
              raw, at a character that OPENING has not there        all characters so far
    string    over, at a quote                                      the characters, their escapes decoded
    raw       raw                                                   all characters
    over      over                                                  nothing more: a brace, whitespace
    """

    def __init__(self) -> None:
        self._state: Literal["opening", "string", "raw", "over"] = "opening"
        self._opening = ""  # `{ "inp`: what has come so far, to be given back should it turn out raw
        self._n_matched = 0  # `{"inp`: how many characters of OPENING those are
        self._escape = ""  # `\u00`: an escape that is not complete
        self._high_surrogate = ""  # `\ud83d`: its other half, if it comes, is an escape of its own

    def feed(self, text: str) -> str:
        return "".join(map(self._decode, text))

    def close(self) -> str:
        """Return what was held back, where the call has ended in the midst of it.

        Of a call that a limit cuts nobody asks it: half an escape is not part of the input then.
        """
        if self._state == "opening":
            return self._opening
        if self._state == "string":
            return self._behind_surrogate(self._escape)
        return ""

    def _decode(self, character: str) -> str:
        match self._state:
            case "opening":
                return self._read_opening(character)
            case "string":
                return self._read_string(character)
            case "raw":
                return character
            case "over":
                return ""

    def _read_opening(self, character: str) -> str:
        self._opening += character
        if character == OPENING[self._n_matched]:
            self._n_matched += 1
            if self._n_matched == len(OPENING):
                self._state = "string"
        elif character == "}" and self._n_matched == 1:
            self._state = "over"
        elif not character.isspace() or self._n_matched not in BLANKS_BEFORE:
            self._state = "raw"
            return self._opening
        return ""

    def _read_string(self, character: str) -> str:
        if self._escape or character == "\\":
            return self._read_escape(character)
        if character == '"':
            self._state = "over"
            return self._behind_surrogate("")
        return self._behind_surrogate(character)

    def _read_escape(self, character: str) -> str:
        r"""An escape is `\n`, or `\u` and four digits."""
        self._escape += character
        is_complete = len(self._escape) == 2 and character != "u"
        if not is_complete and len(self._escape) < 6:
            return ""
        escape = self._escape
        self._escape = ""
        try:
            code_unit: str = json.loads(f'"{escape}"')
        except ValueError:  # JSON has no such escape
            return self._behind_surrogate(escape)
        if "\ud800" <= code_unit <= "\udbff":
            before = self._behind_surrogate("")
            self._high_surrogate = code_unit
            return before
        if "\udc00" <= code_unit <= "\udfff":
            return self._pair(code_unit)
        return self._behind_surrogate(code_unit)

    def _pair(self, low_surrogate: str) -> str:
        if not self._high_surrogate:
            return REPLACEMENT
        pair = self._high_surrogate + low_surrogate
        self._high_surrogate = ""
        return pair.encode("utf-16", "surrogatepass").decode("utf-16")

    def _behind_surrogate(self, text: str) -> str:
        """Return text that does not complete a pair: what has come of one is replaced."""
        if not self._high_surrogate:
            return text
        self._high_surrogate = ""
        return REPLACEMENT + text
