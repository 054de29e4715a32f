r"""Tool calls: the calls that a model makes, put back into the words of the client's own tools.

    [Call, Arguments, Close, ...] --Restorer.feed()--> the same, of the tools that the client has

The model is offered every tool as a function with a qualified name (tools.Tool.definition()). Restorer is the
inverse. A call of `docs__search` becomes one of `search` in the namespace `docs`. A custom tool has an input
in place of arguments, so InputDecoder takes the string out of {"input": "..."} while it streams:

    pieces of arguments     {"in    put": "    a\n    b\ud8    3d\ude00    "}
    input that leaves                          a, LF  b        one emoji
    held back               {"in                       \ud8                "}

Authority: https://platform.openai.com/docs/guides/function-calling (custom tools, namespaces); RFC 8259,
section 7 (escapes).

Rules of this file:
1. Input leaves as it comes, decoded, and never half an escape or half a surrogate pair.
2. Arguments that are not {"input": "..."} are the input as they stand: nothing is repaired, nothing is lost.
"""

import json
import re
from collections.abc import Mapping

from channels import Arguments, Call, Output
from request.tools import Tool


class Restorer:
    """Puts the calls of one answer into the client's words."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools  # of the request, by Tool.qualified_name
        self._decoder: InputDecoder | None = None  # of the custom tool's call that is open

    def feed(self, output: Output) -> list[Output]:
        if self._decoder is None:
            return [self._restored(output)]
        if isinstance(output, Arguments):
            return _arguments(self._decoder.feed(output.text))
        rest = _arguments(self._decoder.close())  # any other output ends the call
        self._decoder = None
        return [*rest, self._restored(output)]

    def _restored(self, output: Output) -> Output:
        if not isinstance(output, Call) or output.name not in self._tools:
            return output
        tool = self._tools[output.name]
        if tool.custom:
            self._decoder = InputDecoder()
        return Call(tool.name, tool.custom, tool.namespace)


def _arguments(text: str) -> list[Output]:
    """Return no output for no text."""
    if not text:
        return []
    return [Arguments(text)]


# --- the input of a custom tool -----------------------------------------------------------------------------

OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
MAX_OPENING = 64  # characters: arguments that have not matched OPENING by then are no such object
UNIT = re.compile(
    r"""
    [^"\\]+                              # characters that stand for themselves
    | \\[^u]                             # a short escape
    | \\u[dD][89abAB]..                  # half a surrogate pair: with its other half,
        (?: \\u[dD][c-fC-F]..
        | (?=[^\\]|\\[^u]|\\u(?![dD][c-fC-F])..) )  # or once it is known that this does not follow
    | \\u(?![dD][89abAB])....            # any other character by its number
    """,
    re.DOTALL | re.VERBOSE,
)
MAX_UNFINISHED = len(r"\ud83d\ude0")  # characters of an escape that may be held back


class InputDecoder:
    """Decodes the string in `{"input": "..."}` as its characters come.

    It is in one of three states: before the string, inside it (up to its quote, and after that too, where
    nothing more is said), or in an input that is no such object and passes as it is.
    """

    def __init__(self) -> None:
        self._held = ""  # came, and cannot leave yet
        self._is_inside = False
        self._is_raw = False

    def feed(self, text: str) -> str:
        if self._is_raw:
            return text
        self._held += text
        if not self._is_inside:
            opening = OPENING.match(self._held)
            if opening:
                self._is_inside = True
                self._held = self._held[opening.end() :]
            else:
                self._is_raw = len(self._held) > MAX_OPENING
                return self._held if self._is_raw else ""
        decoded = ""
        end = 0
        while unit := UNIT.match(self._held, end):
            decoded += _decoded(unit[0])
            end = unit.end()
        self._held = self._held[end : end + MAX_UNFINISHED]  # more than that only follows the closing quote
        return decoded

    def close(self) -> str:
        """Return what was held back, for a call that has ended in the midst of it."""
        has_ended = self._is_raw or self._held.startswith('"')
        if has_ended or "".join(self._held.split()) == "{}":  # the call had no arguments
            return ""
        return self._held


def _decoded(unit: str) -> str:
    if not unit.startswith("\\"):
        return unit
    try:
        character: str = json.loads(f'"{unit}"')
    except ValueError:  # JSON has no such escape
        return unit
    # Half a pair is no character: U+FFFD stands for it.
    return character.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
