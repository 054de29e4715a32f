r"""Tool calls: the calls that a model makes, put back into the words of the client's own tools.

    [Call, Arguments, Close, ..., Finish] --Restorer.feed()--> the same, of the tools that the client has

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
2. Arguments that are not {"input": "..."} become the input unchanged, and leave at the end of the call:
   nothing is repaired, nothing is lost.
3. A function's call whose arguments are not a JSON object is incomplete, and the answer has failed: a client
   runs each completed call. https://platform.openai.com/docs/guides/function-calling
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress

import sse
from channels import Accepted, Arguments, Call, Close, Finish, Output, is_object
from request.tools import Tool


class Restorer:
    """Translate the calls of one answer into the client's words, and mark those that can be run (rule 3)."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools  # of the request, by Tool.qualified_name
        self._call: Call | None = None  # the open call, in the client's words
        self._arguments: list[str] = []  # of that call, as the model wrote them
        self._decoder = InputDecoder()  # of that call, if its tool is a custom one
        self._broken = ""  # the name in the last call that cannot be run

    def feed(self, output: Accepted | Output | Finish) -> Iterator[Accepted | Output | Finish]:
        """Yield the outputs that the client gets. A call that cannot be run fails the answer: rule 3."""
        call = self._call
        if isinstance(output, Arguments):
            self._arguments.append(output.text)
            text = output.text
            if call and call.custom:
                text = self._decoder.feed(text)
            if text:
                yield Arguments(text)
            return
        may_be_cut = isinstance(output, Finish) and output.reason != "stop"
        if call and not may_be_cut:  # any other output ends it
            self._call = None
            if call.custom:
                if rest := self._decoder.close():
                    yield Arguments(rest)
            elif not is_object("".join(self._arguments)):
                self._broken = call.name
                yield Close(is_cut=True)
                if isinstance(output, Close):
                    return
        match output:
            case Call(name):
                tool = self._tools.get(name, Tool(name))
                output = self._call = Call(tool.name, tool.custom, tool.namespace)
                self._arguments = []
                self._decoder = InputDecoder()
            case Finish("stop", usage) if self._broken:
                message = f"The arguments of the call of '{self._broken}' are not a JSON object."
                output = Finish("failed", usage, message)
        yield output


# --- the input of a custom tool -----------------------------------------------------------------------------


class InputDecoder:
    """Decodes the string in `{"input": "..."}` as its characters come; other arguments leave at the end."""

    def __init__(self) -> None:
        self._held = ""  # received, and cannot leave yet
        self._is_inside = False  # the string has begun; nothing follows its closing quote

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    def feed(self, text: str) -> str:
        self._held += text
        if not self._is_inside:
            opening = OPENING.match(self._held, 0, MAX_OPENING)
            if opening is None:
                return ""
            self._is_inside = True
            self._held = self._held[opening.end() :]
        whole = UNITS.match(self._held)
        assert whole  # at least the empty string matches
        # After the closing quote no more is kept than what an escape may lack.
        self._held = self._held[whole.end() :][:MAX_UNFINISHED]
        return ESCAPE.sub(_character, whole[0])

    def close(self) -> str:
        """Return what was held back: the rest of a string that was cut, or other arguments."""
        has_ended = self._is_inside and self._held.startswith('"')
        if has_ended or self._held.strip() == "{}":  # the call had no arguments
            return ""
        return self._held


# --- the fold: a plain streamed request passes what stands above --------------------------------------------

OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
MAX_OPENING = 64  # characters: longer arguments that do not match OPENING are not such an object
UNITS = re.compile(
    r"""(?:
    [^"\\]+                              # characters that stand for themselves
    | \\[^u]                             # a short escape
    | \\u[dD][89abAB]..                  # half a surrogate pair: with its other half,
        (?: \\u[dD][c-fC-F]..
        | (?=[^\\]|\\[^u]|\\u(?![dD][c-fC-F])..) )  # or once it is known that this does not follow
    | \\u(?![dD][89abAB])....            # any other character by its number
    )*""",
    re.DOTALL | re.VERBOSE,
)
ESCAPE = re.compile(r"\\u[dD][89abAB]..(?:\\u[dD][c-fC-F]..)?|\\u....|\\.", re.DOTALL)
MAX_UNFINISHED = len(r"\ud83d\ude0")  # characters of an escape that may be held back


def _character(escape: re.Match[str]) -> str:
    with suppress(ValueError):  # else JSON has no such escape
        return str(sse.loads(f'"{escape[0]}"', "replace"))
    return escape[0]
