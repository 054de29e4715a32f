"""The remote worker: a checked Request to what a model of an upstream server says.

    Request --prepare()--> UpstreamPrompt --run()--> emit(Accepted), emit(Output), ..., emit(Finish)
                           UpstreamPrompt --count_tokens()--> int                     if the upstream can
    body of POST /v1/chat/completions --pass_through()--> RelayedChat

Authority: https://platform.openai.com/docs/api-reference/chat/create; what that lacks has vLLM's names.

Rules of this file:
1. An upstream's refusal goes on with its status as long as the client has got no head; later it is a failure.
2. A parameter that the client has not set is not sent: the upstream may preset it, or not know it.
"""

import asyncio
import copy
import json
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from channels import Accepted, Emit, Finish
from gateway.answers import MAX_ANSWER_BYTES, MAX_KEPT_BYTES, Asked
from gateway.metering import Ledger, Meter, Prices
from gateway.outputs import Outputs
from gateway.refused import Refused
from gateway.relay import RelayedChat, asking, checkable
from gateway.upstreams import RETRY_AFTER_S, Reply, Upstreams
from request import params
from request.messages import Message, turn_starts, without_old_turns
from request.params import MOVED, Request
from request.refusals import BadInput
from request.room import Threads

# What counts the tokens of a chat body, and the member of its answer that says how many there are.
# https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html#tokenizer-api
# https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md
COUNTERS = {
    "/tokenize": "count",  # vLLM's; llama.cpp's takes no messages, and answers without a count
    "/v1/chat/completions/input_tokens": "input_tokens",  # llama.cpp's
}
NO_SUCH_ENDPOINT = (404, 405, 501)
IN_PROMPT = ("model", "tools", "chat_template_kwargs")  # members of a chat body that decide the prompt


# --- the request as a chat completion -----------------------------------------------------------------------


def chat_body(request: Request, model: str) -> dict[str, Any]:
    """Return the request as the body of a chat completion, without its messages."""
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    stops = {name: getattr(request, name) for name in ("stop", "stop_token_ids", "ignore_eos")}
    preset = request.sampling | stops
    body |= {name: preset[name] for name in preset if name in request.explicit}  # rule 2
    # fmt: off
    others = {
        "max_tokens":           request.max_tokens,  # fewer servers know max_completion_tokens
        "logprobs":             request.n_top_logprobs is not None or None,
        # At 0 llama.cpp sends no logprobs at all; left out, it sends 20 alternatives.
        "top_logprobs":         request.n_top_logprobs or None,
        "chat_template_kwargs": request.template_kwargs or None,
        "reasoning_effort":     (request.echo.get("reasoning") or {}).get("effort"),
        "response_format":      response_format(request),
        "parallel_tool_calls":  None if request.parallel_tool_calls or not request.tools else False,
    }
    # fmt: on
    body |= {name: value for name, value in others.items() if value is not None}
    if request.tools:
        body |= tools_and_choice(request)
    return body


def tools_and_choice(request: Request) -> dict[str, Any]:
    tools = marked(request.tools, request)
    spec = request.structured_output
    if not (spec and spec.functions):
        return {"tools": tools, "tool_choice": "auto" if request.called else "none"}
    choice: Any = spec.calls
    if request.named_call:
        choice = {"type": "function", "function": {"name": spec.functions[0][0]}}
    # Only our own server knows `allowed_tools`, and to llama.cpp an object is "auto":
    # https://github.com/ggml-org/llama.cpp/issues/26535
    allowed = {name for name, _ in spec.functions}
    tools = [tool for tool in tools if tool["function"]["name"] in allowed]
    return {"tools": tools, "tool_choice": choice}


def marked(tools: list[dict[str, Any]], request: Request) -> list[dict[str, Any]]:
    """Return the tools, the functions that the upstream shall hold to their schema marked as strict.

    If a call is forced these are all that it may name: vLLM enforces no arguments that it is not asked to.
    """
    strict = {name for name, tool in request.called.items() if tool.strict}
    spec = request.structured_output
    if spec and spec.calls == "required":
        strict = {name for name, _ in spec.functions}
    copies = copy.deepcopy(tools)
    for tool in copies:
        function = tool.get("function") or {}
        if function.get("name") in strict:
            function["strict"] = True
    return copies


def response_format(request: Request) -> dict[str, Any] | None:
    """Return the format of the text in chat's form; None: the text is free."""
    members = request.echo["text"]["format"] | {}
    kind = members.pop("type")
    if kind == "text":
        return None
    return {"type": kind} | ({kind: members} if kind == "json_schema" else {})


def chat_message(message: Message) -> Message:
    """Return a message with its calls' arguments as JSON text; chat templates want them as an object."""
    message = copy.deepcopy(message)
    for call in message.get("tool_calls", ()):
        function = call["function"]
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return message


def responses_param(param: str) -> str:
    """Return the name that a parameter of Chat Completions has in the Responses API."""
    name, dot, member = param.partition(".")
    name = name.partition("[")[0]
    if name not in MOVED:
        return param
    if name != "response_format":  # the members have other places there
        return MOVED[name]
    return MOVED[name] + (dot + member).removeprefix(".json_schema")


class UpstreamPrompt(NamedTuple):
    """A request as an upstream will be asked; a Prompt of worker.py."""

    worker: "RemoteWorker"
    request: Request
    body: dict[str, Any]  # all but the messages
    candidates: list[list[Message]]  # the messages; then, if they may be cut, without their oldest turns

    async def count_tokens(self) -> int:
        """Return the tokens of the prompt, if the upstream has an endpoint that counts; raises BadInput."""
        body = {name: self.body[name] for name in IN_PROMPT if name in self.body}
        body["messages"] = self.candidates[0]
        for path, member in COUNTERS.items():
            try:
                counted = await self.worker.upstreams.ask(path, body)
            except Refused as refused:
                if refused.upstream_status not in NO_SUCH_ENDPOINT:
                    raise
            else:
                if type(counted.get(member)) is int:
                    return int(counted[member])
        endpoints = " and no ".join(COUNTERS)
        message = f"The upstream of '{self.request.model}' cannot count tokens: it has no {endpoints}."
        raise BadInput(message, None, "unsupported_endpoint")

    async def run(self, emit: Emit, choice: int = 0) -> None:
        """Emit what the model says. Raises Refused before Accepted, and nothing after it."""
        request = self.request
        meter = Meter(self.worker.ledger.prices)
        can_wait = request.stream or request.background
        open_reply = partial(self._open, meter)
        async with asking(open_reply, can_wait, self.worker.ledger, request.model, meter) as opening:
            emit(Accepted())
            try:
                reply = await opening
                outputs = Outputs(reply.answer, request.n_top_logprobs or 0)
                async for chunks in reply:
                    if reply.answer.frames.is_stream:
                        said = outputs.read(chunks)
                    else:  # it may be megabytes: other streams go on meanwhile
                        said = await asyncio.to_thread(outputs.read, chunks)
                    for output in said:
                        emit(output)
                for last in outputs.close(meter.usage()):
                    emit(last)
            except Refused as refused:
                emit(Finish("failed", None, refused.message, refused.late_code))
            except asyncio.CancelledError:
                emit(Finish("cancelled", meter.usage()))
                raise

    async def _open(self, meter: Meter) -> Reply:
        """Ask; without the oldest turns as long as the upstream says that the prompt is too long.

        Raises Refused, which names the parameter that the client has sent.
        """
        asked = Asked(one_call=not self.request.parallel_tool_calls, max_bytes=MAX_KEPT_BYTES)
        for messages in self.candidates:
            body = self.body | {"messages": messages}
            try:
                return await self.worker.upstreams.open(body, meter, asked)
            except Refused as error:
                refused = error
            if refused.code != "context_length_exceeded":
                break
        if refused.param:
            chat_param = refused.param
            refused.param = responses_param(chat_param)
            refused.message = refused.message.replace(f"'{chat_param}'", f"'{refused.param}'")
        raise refused


# --- the worker ---------------------------------------------------------------------------------------------


class RemoteWorker:
    """A Worker that asks upstreams; without `prices` usage leaves as it came."""

    defaults: Mapping[str, Any] = {}  # of parameters: those of an upstream are not known here

    def __init__(self, upstreams: Upstreams, prices: Prices | None = None) -> None:
        self.upstreams = upstreams
        self.ledger = Ledger(prices)
        self._threads = Threads()

    def serves(self, name: str, alias: str) -> bool:
        """Return whether an upstream has the model; raises Refused if one that was never reached might."""
        models = self.upstreams.models()
        if name in models or (name == alias and models):
            return True
        if not self.upstreams.all_known():
            message = f"No upstream has '{name}', and not all of them have been reached yet."
            raise Refused(503, message, "model", "server_error", RETRY_AFTER_S)
        return False

    def _upstream_name(self, name: str) -> str:
        """Return the name by which an upstream knows the model: the alias is the first model there is."""
        models = self.upstreams.models()
        return name if name in models else next(iter(models), name)

    def counts(self) -> dict[str, int]:
        return self.upstreams.counts() | dict(self.ledger.totals)

    @property
    def alive(self) -> bool:
        """An upstream that is down may come back."""
        counts = self.upstreams.counts()
        return counts["upstreams_down"] < counts["upstreams"]

    def busy(self) -> bool:
        return self.upstreams.counts()["running"] > 0

    async def close(self) -> None:
        """Fail what still runs."""
        await self.upstreams.close()

    async def prepare(self, request: Request) -> UpstreamPrompt:
        return await self._threads.call(request.owner, self._prepare, request)  # it may be long

    def _prepare(self, request: Request) -> UpstreamPrompt:
        messages = [chat_message(message) for message in request.messages]
        starts = turn_starts(messages) if request.truncate else [0]
        candidates = [without_old_turns(messages, start) for start in starts]
        body = chat_body(request, self._upstream_name(request.model))
        return UpstreamPrompt(self, request, body, candidates)

    def pass_through(self, body: dict[str, Any]) -> RelayedChat:
        """Return the answer to a chat request, relayed from an upstream; raises BadInput."""
        request = params.from_chat(checkable(body), {})
        body = body | {"model": self._upstream_name(request.model)}
        if request.stream:
            body["stream_options"] = (body.get("stream_options") or {}) | {"include_usage": True}
        if request.tools:
            body["tools"] = marked(body["tools"], request)
        meter = Meter(self.ledger.prices)
        asked = Asked(
            request.n,
            one_call=not request.parallel_tool_calls,
            named_call=request.named_call,
            shows_usage=request.include_usage,
            max_bytes=MAX_ANSWER_BYTES if request.stream else MAX_KEPT_BYTES,
        )
        open_reply = partial(self.upstreams.open, body, meter, asked)
        opening = asking(open_reply, request.stream, self.ledger, body["model"], meter)
        return RelayedChat(opening, request.n, request.stream)
