r"""Tool calls: the calls that a model makes, put back into the words of the client's own tools.

    [Call, Arguments, Close, ..., Finish] --Restorer.feed()--> the same, of the tools that the client has

The model is offered every tool as a function with a qualified name (tools.Tool.definition()). Restorer is the
inverse. A call of `docs__search` becomes one of `search` in the namespace `docs`. A custom tool has an input
in place of arguments: the string in {"input": "..."}, which leaves as a whole at the end of its call. Why not
as it comes: half an escape (`\ud8`) would need a decoder with states of its own.

Authority: https://platform.openai.com/docs/guides/function-calling (custom tools, namespaces).

Rules of this file:
1. Arguments that are not {"input": "..."} become the input unchanged: nothing is repaired, nothing is lost.
2. A tool in a namespace is also found by its own name, or with a dot (`docs.search`), if only one has it.
3. A function's call whose arguments are not a JSON object is incomplete, and the answer has failed: a client
   runs each completed call. https://platform.openai.com/docs/guides/function-calling
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import sse
from channels import Arguments, Call, Close, Finish, WorkerOutput
from request.tools import Tool, tool_called


@dataclass
class Restorer:
    """Translate the calls of one answer into the client's words, and mark those that can be run (rule 3)."""

    tools: Mapping[str, Tool]  # of the request, by Tool.qualified_name
    call: Call | None = None  # the open call, in the client's words
    broken: str = ""  # the name in the last call that cannot be run

    def feed(self, output: WorkerOutput) -> Iterable[WorkerOutput]:
        """Return the outputs that the client gets."""
        if self.call or self.broken or isinstance(output, Call):
            return self._restored(output)
        return [output]

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    arguments: list[str] = field(default_factory=list)  # of the open call, as the model wrote them

    def _restored(self, output: WorkerOutput) -> Iterator[WorkerOutput]:
        """Yield the outputs from the first call on. A call that cannot be run fails the answer: rule 3."""
        call = self.call
        if isinstance(output, Arguments):
            self.arguments.append(output.text)
            if not (call and call.custom):
                yield output
            return
        may_be_cut = isinstance(output, Finish) and output.reason != "stop"
        if call:  # any other output ends it
            self.call = None
            arguments = "".join(self.arguments)
            if call.custom:
                if text := input_of(arguments):
                    yield Arguments(text)
            elif not (may_be_cut or sse.is_object(arguments)):
                self.broken = call.name
                yield Close(is_cut=True)
                if isinstance(output, Close):
                    return
        match output:
            case Call(name):
                tool = tool_called(self.tools, name)
                output = self.call = output._replace(
                    name=tool.name, custom=tool.custom, namespace=tool.namespace
                )
                self.arguments = []
            case Finish("stop", usage) if self.broken:
                message = f"The arguments of the call of '{self.broken}' are not a JSON object."
                output = Finish("failed", usage, message)
        yield output


# --- the fold: a plain streamed request passes what stands above --------------------------------------------


# --- the input of a custom tool -----------------------------------------------------------------------------

CUT_ESCAPE = re.compile(r"\\(u.{0,3})?\Z")


def input_of(arguments: str) -> str:
    """Return the input in the arguments of a custom tool's call, half a surrogate pair in it as U+FFFD."""
    if arguments.strip() == "{}":  # the call had no arguments
        return ""
    cut = CUT_ESCAPE.sub("", arguments)
    for written in (arguments, f'{arguments}"}}', f'{cut}"}}'):  # a limit may have cut the string
        with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
            text = json.loads(written, strict=False)["input"]
            return str(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    return arguments
