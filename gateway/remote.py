"""The remote worker: a checked Request to what a model behind another server says.

    Request --prepare()--> UpstreamPrompt --run()--> Accepted, Output, ..., Finish    as worker.py demands
    body of POST /v1/chat/completions --pass_through()--> Response                    byte for byte

Authority: https://platform.openai.com/docs/api-reference/chat/create; what that lacks has vLLM's names.

Rules of this file:
1. What the upstream refuses before it says anything is refused with its status; later it is a failure.
2. What the client has not asked for is not asked of the upstream: it may preset it, or not know it.
3. Whatever becomes of a request, its usage is settled once: in the log, and in the totals of /health.

Not here: what comes (relay.py, completions.py), usage and costs (metering.py), which upstream is asked and
the connection to it (upstreams.py).
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Literal, NamedTuple, get_args

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import sse
from channels import Accepted, Finish, Output, Usage
from gateway.deltas import Deltas, Unreadable
from gateway.metering import Meter, Prices
from gateway.relay import Frame, Reader, Refused, Relay, forwarded
from gateway.upstreams import RETRY_AFTER_S, Died, Reply, Upstreams
from request.messages import Message, shortened
from request.params import MOVED, Request
from request.refusals import error_object, shown, wrong_value
from request.validation import boolean, mapping
from streaming import SSE_HEADERS, kept_alive, while_there

log = logging.getLogger("remote")

PATH = "chat/completions"
ACCEPT_S = (
    5  # how long a client waits for the upstream's first byte until it hears from us: prompts may be long
)


# --- what is asked ------------------------------------------------------------------------------------------


class UpstreamPrompt(NamedTuple):
    """A request as an upstream will be asked; a Prompt of worker.py."""

    worker: "RemoteWorker"
    request: Request
    body: dict[str, Any]  # all but the messages
    candidates: list[list[Message]]  # the messages; then, where they may be cut, without their oldest turns
    n_tokens: None = None  # only the upstream knows

    def run(self, choice: int = 0) -> AsyncGenerator[Accepted | Output | Finish]:
        return self.worker.run(self, choice)


def asked_as(param: str) -> str:
    """A parameter of chat completions, by the name that it has in the Responses API."""
    name, dot, inside = param.partition(".")
    name = name.partition("[")[0]
    if name not in MOVED:
        return param
    if name != "response_format":  # what is inside has another place
        return MOVED[name]
    return MOVED[name] + (dot + inside).removeprefix(".json_schema")


def chat_body(request: Request, model: str) -> dict[str, Any]:
    """The request in the words of chat completions.

    What the client has not set is not sent: the upstream may preset it, and not every server knows it.
    """
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    stops = {name: getattr(request, name) for name in ("stop", "stop_token_ids", "ignore_eos")}
    body |= {name: value for name, value in (request.sampling | stops).items() if name in request.explicit}
    if request.max_tokens is not None:
        body["max_tokens"] = request.max_tokens  # its newer name is known to fewer
    if request.n_top_logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": request.n_top_logprobs}
    if request.template_kwargs:
        body["chat_template_kwargs"] = request.template_kwargs
    if effort := (request.echo.get("reasoning") or {}).get("effort"):
        body["reasoning_effort"] = effort
    return body | _tools(request) | _format(request)


def _tools(request: Request) -> dict[str, Any]:
    if not request.tools:
        return {}
    tools, choice, spec = request.tools, "auto", request.structured_output
    if spec and spec.functions:  # those that may be called; no server but ours takes the others along
        names = [name for name, _ in spec.functions]
        tools = [tool for tool in tools if tool["function"]["name"] in names]
        choice = spec.calls
    strict = {name for name, tool in request.called.items() if tool.strict}
    tools = [
        {
            **tool,
            "function": tool["function"] | ({"strict": True} if tool["function"]["name"] in strict else {}),
        }
        for tool in tools
    ]
    named = {"type": "function", "function": {"name": tools[0]["function"]["name"]}}
    parallel = {} if request.parallel_tool_calls else {"parallel_tool_calls": False}
    return {"tools": tools, "tool_choice": named if request.named_call else choice} | parallel


def _format(request: Request) -> dict[str, Any]:
    if not request.structured_output or request.structured_output.schema is None:
        return {}
    asked = request.echo["text"]["format"]
    if asked["type"] == "json_object":
        return {"response_format": {"type": "json_object"}}
    schema = {k: asked[k] for k in ("name", "description", "schema", "strict") if asked.get(k) is not None}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def chat_message(message: Message) -> Message:
    """As the wire has it: arguments are a string of JSON there, an object where templates are filled."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(call | {"function": call["function"] | {"arguments": text}})
    return message | {"tool_calls": calls}


# --- the books ----------------------------------------------------------------------------------------------

Outcome = Literal["done", "error", "disconnect"]


class Ledger:
    """What was used, request by request."""

    def __init__(self) -> None:
        named = (*get_args(Outcome), "usage_unknown", "total")
        self.totals = Counter({f"relayed_{name}": 0 for name in named})  # from the start: a rate needs a zero

    def settle(self, model: str, upstream: str, outcome: Outcome, meter: Meter) -> None:
        """Once a request, whatever became of it."""
        used = meter.used()
        costs = meter.prices.costs(meter.counts) if meter.prices and meter.counts else {}
        line = used | ({"cost": costs["total_cost"]} if costs else {})
        shown = " ".join(f"{k}={v}" for k, v in line.items()) if meter.counts else "unknown (null)"
        log.info("%s of %s: %s, usage: %s", model, upstream or "no upstream", outcome, shown)
        self.totals[f"relayed_{outcome}"] += 1
        self.totals["relayed_usage_unknown"] += meter.counts is None
        for name, value in line.items():
            self.totals[f"relayed_{name}"] += value or 0


# --- the worker ---------------------------------------------------------------------------------------------


class RemoteWorker:
    """Asks upstreams; `prices` None: usage leaves as it came."""

    def __init__(self, upstreams: Upstreams, prices: Prices | None = None) -> None:
        self.upstreams = upstreams
        self.prices = prices
        self.ledger = Ledger()

    def serves(self, name: str, alias: str) -> bool:
        """Whether an upstream has the model; raises Refused where one that was never reached might."""
        models = self.upstreams.models()
        if name not in models and not (models and name == alias) and not self.upstreams.all_known():
            message = f"No upstream has '{name}', and not all of them have been reached yet."
            raise Refused(503, message, "model", "server_error", RETRY_AFTER_S)
        return name in models or (name == alias and bool(models))

    def _upstream_name(self, name: str) -> str:
        """The alias is the first model there is."""
        models = self.upstreams.models()
        return name if name in models else next(iter(models), name)

    def counts(self) -> dict[str, int]:
        return self.upstreams.counts() | dict(self.ledger.totals)

    alive = True  # an upstream that is down may come back
    defaults: Mapping[str, Any] = {}  # of parameters: what an upstream presets nobody knows here

    def busy(self) -> bool:
        return self.upstreams.counts()["running"] > 0

    async def close(self) -> None:
        """Fail what still runs."""
        await self.upstreams.close()

    def prepare(self, request: Request) -> UpstreamPrompt:
        messages = [chat_message(message) for message in request.messages]
        candidates = shortened(messages) if request.truncate else [messages]
        body = chat_body(request, self._upstream_name(request.model))
        return UpstreamPrompt(self, request, body, candidates)

    async def run(
        self, prompt: UpstreamPrompt, choice: int = 0
    ) -> AsyncGenerator[Accepted | Output | Finish]:
        """What the model says. Raises Refused before Accepted, and nothing after it."""
        meter = Meter(self.prices)
        outcome: Outcome = "disconnect"
        deltas = Deltas(one_call=not prompt.request.parallel_tool_calls)
        opening = asyncio.ensure_future(self._open(prompt))
        finish = None
        try:
            await asyncio.wait({opening}, timeout=ACCEPT_S)
            if opening.done():
                opening.result()
            yield Accepted()
            try:
                async with aclosing(_frames_of(await opening)) as frames:
                    async for frame in frames:
                        if frame.document:
                            meter.read(frame.document)
                            for output in deltas.feed(frame.document):
                                yield output
                        deltas.is_whole = deltas.is_whole or frame.is_done
                        if deltas.is_over:
                            break
                for last in deltas.close(usage(meter)):
                    if isinstance(last, Finish):
                        finish = last
                    else:
                        yield last
            except Refused as refused:
                finish = Finish("failed", None, refused.message, refused.late_code)
            except (Died, Unreadable) as error:
                finish = Finish("failed", usage(meter), f"The answer cannot be used: {error}.")
            outcome = "error" if finish and finish.reason == "failed" else "done"
        except Exception:
            outcome = "error"
            raise
        finally:
            self.ledger.settle(prompt.request.model, discard(opening), outcome, meter)
        if finish:
            yield finish

    async def _open(self, prompt: UpstreamPrompt) -> Reply:
        """Drops the oldest turns for as long as the upstream says that the prompt is too long."""
        for messages in prompt.candidates[:-1]:
            try:
                return await self._ask(prompt, messages)
            except Refused as refused:
                if refused.code != "context_length_exceeded":
                    raise
        return await self._ask(prompt, prompt.candidates[-1])

    async def _ask(self, prompt: UpstreamPrompt, messages: list[Message]) -> Reply:
        """Raises Refused, which names what the client has sent."""
        try:
            return await self.upstreams.open(PATH, prompt.body | {"messages": messages})
        except Refused as refused:
            if theirs := refused.param:
                refused.param = asked_as(theirs)
                refused.message = refused.message.replace(f"'{theirs}'", f"'{refused.param}'")
            raise

    def pass_through(self, body: dict[str, Any]) -> Response:
        """The answer to a chat request; raises BadInput."""
        return PassThrough(self, body | {"model": self._upstream_name(body["model"])})


def usage(meter: Meter) -> Usage | None:
    counts = meter.counts
    return counts and Usage(counts.prompt, counts.completion, counts.reasoning, counts.cached)


async def _frames_of(reply: Reply) -> AsyncGenerator[Frame]:
    """An answer in whichever mode it comes; raises Died, Unreadable."""
    reader = Reader(reply.content_type)
    async with aclosing(reply.chunks()) as chunks:
        async for chunk in chunks:
            for frame in reader.feed(chunk):
                reply.is_said = reply.is_said or frame.is_done
                if frame.data and not (frame.document or frame.is_done):  # what it held is lost
                    raise Unreadable(f"expected JSON in each event, got {shown(frame.data)}")
                yield frame
    for frame in [] if reply.is_said else reader.close():
        yield frame


def discard(opening: asyncio.Future[Reply]) -> str:
    """Close what was opened, or is being opened; the upstream's URL, "" if none has answered."""
    opening.cancel()
    opening.add_done_callback(_close)
    return _close(opening)


def _close(opening: asyncio.Future[Reply]) -> str:
    if not opening.done() or opening.cancelled() or opening.exception():
        return ""
    opening.result().close()
    return opening.result().upstream.url


# --- chat, passed through -----------------------------------------------------------------------------------


class PassThrough(Response):
    """One chat completion of an upstream, for as long as the client is there."""

    def __init__(self, worker: RemoteWorker, body: dict[str, Any]) -> None:
        options = body.get("stream_options")
        self._wants_stream = boolean(body.get("stream") or False, "stream")
        if options is not None and not self._wants_stream:
            # It never turns a plain answer into a stream: cocoon, ValidateRequest.cpp
            raise wrong_value("stream_options", "stream to be true when it is set", options)
        options = mapping(options or {}, "stream_options")
        self._shows_usage = options.get("include_usage") is True or not self._wants_stream
        if self._wants_stream:
            body = body | {"stream_options": options | {"include_usage": True}}
        self._worker = worker
        self._body = body
        self._meter = Meter(worker.prices)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_there(self._answer(scope, receive, send), receive)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome: Outcome = "disconnect"
        opening = asyncio.ensure_future(self._worker.upstreams.open(PATH, self._body))
        try:
            # Until then a refusal has its status, and another upstream may be asked.
            await asyncio.wait({opening}, timeout=ACCEPT_S if self._wants_stream else None)
            headers = forwarded(opening.result().headers) if opening.done() else []
            headers = [(name, value) for name, value in headers if name not in dict(SSE_HEADERS)]
            if self._wants_stream:
                await send(
                    {"type": "http.response.start", "status": 200, "headers": [*headers, *SSE_HEADERS]}
                )
                async with aclosing(kept_alive(self._frames(opening))) as frames:
                    async for frame in frames:
                        await send({"type": "http.response.body", "body": frame, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
            else:
                whole = Response(await self._whole(opening.result()), media_type="application/json")
                whole.raw_headers += headers
                await whole(scope, receive, send)
            outcome = "error" if self._failed else "done"
        except Refused:
            outcome = "error"
            raise
        finally:
            self._worker.ledger.settle(str(self._body["model"]), discard(opening), outcome, self._meter)

    _failed = False

    def _relay(self, reply: Reply) -> Relay:
        n = self._body.get("n")
        n = n if type(n) is int else 1
        return Relay(reply.content_type, self._wants_stream, self._meter, self._shows_usage, n)

    async def _frames(self, opening: asyncio.Future[Reply]) -> AsyncGenerator[bytes]:
        """What the client gets, a write each; the last one is [DONE]."""
        try:
            reply = await opening
        except Refused as refused:
            self._failed = True
            yield sse.encode(
                sse.dumps({"error": error_object(refused.message, code=refused.code or "server_error")})
            )
            yield sse.DONE
            return
        relay = self._relay(reply)
        try:
            async with aclosing(reply.chunks()) as chunks:
                async for chunk in chunks:
                    for frame in relay.feed(chunk):
                        yield frame
                    reply.is_said = relay.done
            for frame in relay.close():
                yield frame
        except (Died, Unreadable) as error:
            self._failed = True
            for frame in relay.fail(f"The answer broke off: {error}."):
                yield frame

    async def _whole(self, reply: Reply) -> bytes:
        relay = self._relay(reply)
        try:
            async with aclosing(reply.chunks()) as chunks:
                async for chunk in chunks:
                    relay.feed(chunk)
                    reply.is_said = relay.done
            return b"".join(relay.close())
        except (Died, Unreadable) as error:
            raise Refused(502, f"The answer cannot be used: {error}.") from error
