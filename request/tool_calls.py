"""The calls of a model in the client's own words: custom tools and namespaces restored.

    [Call, Arguments, Close, ...] --Restorer.feed()--> the same, of the tools that the client has

Authority: https://platform.openai.com/docs/guides/function-calling (custom tools, namespaces).

Rules of this file:
1. Input leaves as it comes, decoded: never half an escape, never half a surrogate pair.
2. Arguments that are not {"input": "..."} are the input as they stand: nothing is repaired, nothing is lost.

Not here: what tools there are (tools.py).
"""

import json
from collections.abc import Mapping
from typing import Literal

from channels import Arguments, Call, Output
from request.tools import Tool


class Restorer:
    """Puts calls into the client's words; `tools` are those of the request, by Tool.known_as."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        self._input: Input | None = None  # of the custom call that is open

    def feed(self, output: Output) -> list[Output]:
        if isinstance(output, Arguments) and self._input:
            return _some(self._input.feed(output.text))
        rest = _some(self._input.close()) if self._input else []
        self._input = None
        if isinstance(output, Call) and (tool := self._tools.get(output.name)):
            self._input = Input() if tool.custom else None
            output = Call(tool.name, tool.custom, tool.namespace)
        return [*rest, output]


def _some(text: str) -> list[Output]:
    return [Arguments(text)] if text else []


OPENING = '{"input":"'
BLANKS = (0, 1, 8, 9)  # how much of it may have come before a blank


class Input:
    """The string in `{"input": "..."}`, by character."""

    def __init__(self) -> None:
        self._state: Literal["opening", "string", "over", "raw"] = "opening"
        self._n_opening = 0  # how much of OPENING has come
        self._held = ""  # what may still be OPENING; later an escape that is not complete
        self._high = 0  # first half of a surrogate pair, whose second half is an escape of its own

    def feed(self, text: str) -> str:
        return "".join(map(self._char, text))

    def close(self) -> str:
        """What was held, where the call has ended behind it; what is cut instead is never asked for it."""
        return self._said(self._held) if self._state != "over" else ""

    def _char(self, c: str) -> str:
        match self._state:
            case "opening":
                return self._open(c)
            case "string":
                return self._inside(c)
            case "raw":
                return c
            case _:  # a brace, whitespace
                return ""

    def _open(self, c: str) -> str:
        self._held += c
        if c == OPENING[self._n_opening]:
            self._n_opening += 1
            if self._n_opening == len(OPENING):
                self._held, self._state = "", "string"
        elif (self._n_opening, c) == (1, "}"):  # {}: no input
            self._state = "over"
        elif not (c.isspace() and self._n_opening in BLANKS):
            self._state = "raw"
            held, self._held = self._held, ""
            return held
        return ""

    def _inside(self, c: str) -> str:
        if not self._held and c == '"':
            self._state = "over"
            return self._said("")
        if not self._held and c != "\\":
            return self._said(c)
        self._held += c
        if len(self._held) == (6 if self._held[1:2] == "u" else 2):
            return self._escape(self._held)
        return ""

    def _escape(self, written: str) -> str:
        self._held = ""
        try:
            unit = json.loads(f'"{written}"')
        except ValueError:  # none of JSON's
            return self._said(written)
        if "\ud800" <= unit <= "\udbff":
            before, self._high = self._said(""), ord(unit)
            return before
        if "\udc00" <= unit <= "\udfff":
            high, self._high = self._high, 0
            return chr(0x10000 + (high - 0xD800) * 0x400 + ord(unit) - 0xDC00) if high else "\ufffd"
        return self._said(str(unit))

    def _said(self, text: str) -> str:
        """The text, behind half a pair whose other half has not come."""
        lone, self._high = "\ufffd" if self._high else "", 0
        return lone + text
