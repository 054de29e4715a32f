"""The remote worker: a checked Request to the outputs of a model on an upstream server.

    Request --prepare()--> UpstreamPrompt --run()--> take([Accepted]), take([Output, ...]), take([Finish])
    body of POST /v1/chat/completions --pass_through()--> RelayedChat

Authority: https://platform.openai.com/docs/api-reference/chat/create; other parameters have vLLM's names.

Rules of this file:
1. An upstream's refusal goes on with its status as long as the client has got no head; later it is a failure.
2. We send no parameter that the client has not set: the upstream may preset it, or not know it.
3. Only the upstream can count tokens: we count and drop nothing, and the upstream refuses a prompt that is
   too long. Most tell the count at the end of a stream, too late for `message_start`, which says 0; vLLM with
   --enable-force-include-usage tells it with the first text. To ask for it OpenAI's API has no name.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from channels import Accepted, Finish, Take
from gateway.answers import Asked
from gateway.metering import NO_TOTALS, Meter
from gateway.outputs import Outputs
from gateway.refused import Refused
from gateway.relay import RelayedChat, asking, forwarded
from gateway.upstreams import Reply, Timeouts, Upstreams
from request import params
from request.messages import arguments_as_text
from request.params import Request
from request.tools import NO_PARAMETERS
from sse import Object

PRESET = (*params.SAMPLING, "stop", "stop_token_ids", "ignore_eos")  # parameters that an upstream may preset
# Parameters of chat that are read here. The upstream checks the others, and the messages: it may have what is
# not built here, such as pictures.
READ_HERE = ("model", "stream", "stream_options", "n", "tools", "tool_choice", "parallel_tool_calls")

# --- the request as a chat completion -----------------------------------------------------------------------


def chat_body(request: Request, model: str) -> Object:
    """Return the request as the body of a chat completion."""
    body: Object = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    body["messages"] = arguments_as_text(request.messages)
    for message in body["messages"]:  # vLLM reads one of the names, llama.cpp and SGLang the other
        if "reasoning_content" in message:
            message["reasoning"] = message["reasoning_content"]
    known = request.sampling | vars(request)
    body |= {name: known[name] for name in PRESET if name in request.explicit}  # rule 2
    # fmt: off
    others = {
        "max_tokens":           request.max_tokens,  # fewer servers know max_completion_tokens
        "logprobs":             request.n_top_logprobs is not None or None,
        # At 0 llama.cpp sends no logprobs at all; left out, it sends 20 alternatives.
        "top_logprobs":         request.n_top_logprobs or None,
        "chat_template_kwargs": request.template_kwargs or None,
        "reasoning_effort":     request.reasoning_effort,
        "response_format":      response_format(request),
        "parallel_tool_calls":  None if request.parallel_tool_calls or not request.tools else False,
    }
    # fmt: on
    body |= {name: value for name, value in others.items() if value is not None}
    if request.tools:
        body |= tools_and_choice(request)
    return body


def tools_and_choice(request: Request) -> Object:
    """Return the tools that may be called, strict if the client set it, and whether a call is required."""
    spec = request.structured_output
    # Only our own server knows `allowed_tools`, and to llama.cpp an object is "auto":
    # https://github.com/ggml-org/llama.cpp/issues/26535
    names = [*request.called]
    choice: Any = "auto" if request.called else "none"
    if spec and spec.tools:
        names = [tool.qualified_name for tool in spec.tools]
        choice = spec.calls
    if request.named_call:
        choice = {"type": "function", "function": {"name": names[0]}}
    tools = []
    for tool in request.tools:
        # Chat templates want a description and parameters, some upstreams none that is empty.
        given = {
            name: value for name, value in tool["function"].items() if value and value is not NO_PARAMETERS
        }
        name = given["name"]
        if name in names or not names:
            if names and request.called[name].strict:
                given["strict"] = True
            tools.append({"type": "function", "function": given})
    return {"tools": tools, "tool_choice": choice}


def response_format(request: Request) -> Object | None:
    """Return the format of the text in chat's form; None: the text is free."""
    members = request.response_format | {}
    kind = members.pop("type", "text")
    if kind == "text":
        return None
    return {"type": kind} | ({kind: members} if members else {})


class UpstreamPrompt(NamedTuple):
    """A request as an upstream will be asked; a Prompt of worker.py."""

    worker: "RemoteWorker"
    request: Request
    headers: dict[str, str]
    body: Object

    @property
    def token_ids(self) -> list[int]:
        raise Refused(
            f"Tokens of '{self.request.model}' cannot be counted here: ask its own server.",
            code="unknown_url",
        )

    async def run(self, take: Take, choice: int = 0) -> None:
        """Hand on the model's outputs; raises Refused, after Accepted too if the upstream refuses late."""
        request = self.request
        meter = Meter(self.worker.price, request.model, self.worker.totals)
        try:
            async with asking(
                partial(self._open, meter), request.stream or request.background, meter
            ) as opening:
                for name, value in forwarded(opening):
                    if name == b"warning":
                        both = self.headers.get("Warning"), value.decode("latin-1")
                        self.headers["Warning"] = ", ".join(filter(None, both))
                take([Accepted(meter.usage.input_tokens if meter.usage else 0)])
                reply = await opening
                outputs = Outputs(reply.answer, request.n_top_logprobs or 0)
                async for chunks in reply:
                    take(outputs.read(chunks))
                take(outputs.close(meter.usage))
        except asyncio.CancelledError:
            take([Finish("cancelled", meter.usage)])
            raise

    async def _open(self, meter: Meter) -> Reply:
        """Ask an upstream; raises Refused, which names the parameter that the client has sent."""
        asked = Asked(one_call=not self.request.parallel_tool_calls)
        try:
            return await self.worker.open(self.body, meter, asked)
        except Refused as refused:
            name = re.split(r"\W", refused.param or "")[0]
            refused.param = params.MOVED.get(name, refused.param)
            raise


# --- the worker ---------------------------------------------------------------------------------------------


class RemoteWorker(Upstreams):
    """Upstreams as a Worker; `price` is that of a token, for the costs in chat's usage."""

    defaults: Mapping[str, Any] = {}  # an upstream's own defaults are not known here

    def __init__(
        self, urls: Sequence[str], api_keys: Mapping[str, str], timeouts: Timeouts, price: int | None
    ) -> None:
        super().__init__(urls, api_keys, timeouts)
        self.price = price
        self.totals = Counter(NO_TOTALS)

    def serves(self, model: str) -> bool:
        """Return whether an upstream has the model; raises Refused if one that was never reached might."""
        models = self.models()
        if model in models or (model == params.ALIAS and models):
            return True
        if not all(upstream.models for upstream in self._upstreams):
            message = f"No upstream has '{model}', and not all of them have been reached yet."
            raise Refused(message, code="server_is_overloaded")
        return False

    def _upstream_name(self, name: str) -> str:
        """Return the name by which an upstream knows the model: the alias is the first model there is."""
        models = self.models()
        return name if name in models else next(iter(models), name)

    def counts(self) -> dict[str, int]:
        return super().counts() | self.totals

    @property
    def alive(self) -> bool:
        """An upstream that is down may come back."""
        return not all(upstream.is_down for upstream in self._upstreams)

    def busy(self) -> bool:
        return self.counts()["running"] > 0

    async def prepare(self, request: Request) -> UpstreamPrompt:
        name = self._upstream_name(request.model)
        body = await asyncio.to_thread(chat_body, request, name)
        if request.truncate and not request.compacts:  # only the upstream can count tokens
            request = replace(request, not_run=(*request.not_run, "truncation"))
        return UpstreamPrompt(self, request, {}, body)

    def pass_through(self, body: Object) -> RelayedChat:
        """Return the answer to a chat request, relayed from an upstream; raises BadInput."""
        read = {name: body[name] for name in READ_HERE if name in body}
        read["messages"] = [{"role": "user", "content": ""}]
        request = params.from_chat(read, {})
        body = body | {"model": self._upstream_name(request.model)}
        if request.stream:
            body["stream_options"] = (body.get("stream_options") or {}) | {"include_usage": True}
        meter = Meter(self.price, body["model"], self.totals)
        asked = Asked(
            request.n,
            one_call=not request.parallel_tool_calls,
            named_call=request.named_call,
            shows_usage=request.include_usage,
        )
        opening = asking(partial(self.open, body, meter, asked), request.stream, meter)
        return RelayedChat(opening, request.n, request.stream)
