"""The remote worker: a checked Request to what a model behind an upstream server says.

    Request --prepare()--> UpstreamPrompt --run()--> emit(Accepted), emit(Output), ..., emit(Finish)
                           UpstreamPrompt --count_tokens()--> int                     where the upstream can
    body of POST /v1/chat/completions --pass_through()--> Response                    relayed byte for byte

Authority: https://platform.openai.com/docs/api-reference/chat/create; what that lacks has vLLM's names.

Rules of this file:
1. An upstream's refusal goes on with its status as long as the client has got no head; later it is a failure.
2. A parameter that the client has not set is not sent: the upstream may preset it, or not know it.
3. A chat request is checked before it is passed on, so that what is wrong has our names; what is only not
   built here (pictures, vLLM's parameters) passes unchecked, for the upstream may have it.
4. Whatever becomes of a request, its usage is settled once: in the log, and in the totals of /health.

Not here: reading the answer (relay.py, deltas.py), usage and costs (metering.py), load balancing and
connections (upstreams.py).
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Literal, NamedTuple, get_args

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import sse
from channels import Accepted, Emit, Finish, Output, Usage
from gateway.chunks import Unreadable
from gateway.deltas import Deltas
from gateway.metering import Meter, Prices
from gateway.relay import Frame, Reader, Refused, Relay, forwarded
from gateway.upstreams import RETRY_AFTER_S, Died, Reply, Upstreams
from request import params
from request.messages import Message, shortened
from request.params import MOVED, Request
from request.refusals import BadInput, error_object
from streaming import SSE_HEADERS, KeptAlive, while_connected

log = logging.getLogger("remote")

PATH = "chat/completions"
# A client of a stream waits so long for the upstream's first event until it gets a head from us: prompts may
# be long. Until then a refusal keeps its status; who wants no stream waits for the answer anyway.
ACCEPT_S = 5
N_FRAMES_A_TURN = 100  # of one read: then the other streams go on
MIN_THREAD_BYTES = 2**16  # of a frame that is read in a thread
# What counts the tokens of a chat body, and the member of its answer that says how many there are.
# https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html#tokenizer-api
# https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md
COUNTERS = {
    "/tokenize": "count",  # vLLM's; llama.cpp's takes no messages, and answers without a count
    "/v1/chat/completions/input_tokens": "input_tokens",  # llama.cpp's
}
IN_PROMPT = ("model", "tools", "chat_template_kwargs")  # members of a chat body that decide the prompt


# --- the request --------------------------------------------------------------------------------------------


class UpstreamPrompt(NamedTuple):
    """A request as an upstream will be asked; a Prompt of worker.py."""

    worker: "RemoteWorker"
    request: Request
    body: dict[str, Any]  # all but the messages
    candidates: list[list[Message]]  # the messages; then, where they may be cut, without their oldest turns
    n_tokens: None = None  # only the upstream knows

    async def run(self, emit: Emit, choice: int = 0) -> None:
        await self.worker.run(self, emit)

    async def count_tokens(self) -> int:
        return await self.worker.count_tokens(self)


def responses_param(param: str) -> str:
    """A parameter of Chat Completions by the name that it has in the Responses API."""
    name, dot, member = param.partition(".")
    name = name.partition("[")[0]
    if name not in MOVED:
        return param
    if name != "response_format":  # the members have other places there
        return MOVED[name]
    return MOVED[name] + (dot + member).removeprefix(".json_schema")


def chat_body(request: Request, model: str) -> dict[str, Any]:
    """The request as the body of a chat completion, without its messages."""
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    stops = {name: getattr(request, name) for name in ("stop", "stop_token_ids", "ignore_eos")}
    for name, value in (request.sampling | stops).items():
        if name in request.explicit:  # rule 2
            body[name] = value
    if request.max_tokens is not None:
        body["max_tokens"] = request.max_tokens  # fewer servers know max_completion_tokens
    if request.n_top_logprobs is not None:
        body["logprobs"] = True
    if request.n_top_logprobs:  # at 0 llama.cpp sends no logprobs at all; left out, it sends 20 alternatives
        body["top_logprobs"] = request.n_top_logprobs
    if request.template_kwargs:
        body["chat_template_kwargs"] = request.template_kwargs
    if effort := (request.echo.get("reasoning") or {}).get("effort"):
        body["reasoning_effort"] = effort
    return body | _tools(request) | _format(request)


def _tools(request: Request) -> dict[str, Any]:
    if not request.tools:
        return {}
    tools = request.tools
    choice: Any = "auto"
    if not request.called:
        choice = "none"
    spec = request.structured_output
    if spec and spec.functions:
        allowed = {name for name, _ in spec.functions}
        choice = spec.calls
        # Only our own server knows `allowed_tools`, and to llama.cpp an object is "auto":
        # https://github.com/ggml-org/llama.cpp/issues/26535
        tools = [tool for tool in tools if tool["function"]["name"] in allowed]
        if request.named_call:
            choice = {"type": "function", "function": {"name": spec.functions[0][0]}}
    members = {"tools": marked(tools, strict_names(request)), "tool_choice": choice}
    if not request.parallel_tool_calls:
        members["parallel_tool_calls"] = False
    return members


def strict_names(request: Request) -> set[str]:
    """The functions whose arguments the upstream shall hold to their schema: all of them where a call is
    forced, for vLLM enforces no arguments that it is not asked to.
    """
    spec = request.structured_output
    if spec and spec.calls == "required":
        return {name for name, _ in spec.functions}
    return {name for name, tool in request.called.items() if tool.strict}


def marked(tools: list[dict[str, Any]], strict: set[str]) -> list[dict[str, Any]]:
    """The tools, of which the functions with these names are marked as strict."""
    copies = []
    for tool in tools:
        function = tool.get("function")
        if function and function["name"] in strict:
            tool = tool | {"function": function | {"strict": True}}
        copies.append(tool)
    return copies


def _format(request: Request) -> dict[str, Any]:
    if not request.structured_output or request.structured_output.schema is None:
        return {}
    text_format = request.echo["text"]["format"]
    if text_format["type"] == "json_object":
        return {"response_format": {"type": "json_object"}}
    members = ("name", "description", "schema", "strict")
    schema = {name: text_format[name] for name in members if text_format.get(name) is not None}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def chat_message(message: Message) -> Message:
    """A message with its calls' arguments as a string of JSON; chat templates want them as an object."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append(call | {"function": call["function"] | {"arguments": arguments}})
    return message | {"tool_calls": calls}


# --- the ledger ---------------------------------------------------------------------------------------------

Outcome = Literal["done", "error", "disconnect"]


class Ledger:
    """The tokens that were used, request by request, and their totals since the start."""

    def __init__(self) -> None:
        names = (*get_args(Outcome), "usage_unknown", "total")
        # All of them from the start: the rate of a counter needs its zero.
        self.totals = Counter({f"relayed_{name}": 0 for name in names})

    def settle(self, model: str, upstream: str, outcome: Outcome, meter: Meter) -> None:
        """Enter a request, once, whatever became of it."""
        usage = meter.used()
        summary = "unknown (null)"
        if meter.counts:
            if meter.prices:
                usage["cost"] = meter.prices.costs(meter.counts)["total_cost"]
            summary = " ".join(f"{name}={value}" for name, value in usage.items())
        else:
            self.totals["relayed_usage_unknown"] += 1
        log.info("%s of %s: %s, usage: %s", model, upstream or "no upstream", outcome, summary)
        self.totals[f"relayed_{outcome}"] += 1
        for name, value in usage.items():
            self.totals[f"relayed_{name}"] += value or 0


# --- the worker ---------------------------------------------------------------------------------------------


class RemoteWorker:
    """A Worker that asks upstreams; without `prices` usage leaves as it came."""

    def __init__(self, upstreams: Upstreams, prices: Prices | None = None) -> None:
        self.upstreams = upstreams
        self.prices = prices
        self.ledger = Ledger()

    def serves(self, name: str, alias: str) -> bool:
        """Whether an upstream has the model; raises Refused where one that was never reached might."""
        models = self.upstreams.models()
        if name in models or (name == alias and models):
            return True
        if not self.upstreams.all_known():
            message = f"No upstream has '{name}', and not all of them have been reached yet."
            raise Refused(503, message, "model", "server_error", RETRY_AFTER_S)
        return False

    def _upstream_name(self, name: str) -> str:
        """The name by which an upstream knows the model: the alias is the first model there is."""
        models = self.upstreams.models()
        if name in models:
            return name
        return next(iter(models), name)

    def counts(self) -> dict[str, int]:
        return self.upstreams.counts() | dict(self.ledger.totals)

    alive = True  # an upstream that is down may come back
    defaults: Mapping[str, Any] = {}  # of parameters: what an upstream presets nobody knows here

    def busy(self) -> bool:
        return self.upstreams.counts()["running"] > 0

    async def close(self) -> None:
        """Fail what still runs."""
        await self.upstreams.close()

    async def prepare(self, request: Request) -> UpstreamPrompt:
        return await asyncio.to_thread(self._prepare, request)  # a long prompt must not stop the streams

    def _prepare(self, request: Request) -> UpstreamPrompt:
        messages = [chat_message(message) for message in request.messages]
        candidates = shortened(messages) if request.truncate else [messages]
        body = chat_body(request, self._upstream_name(request.model))
        return UpstreamPrompt(self, request, body, candidates)

    async def count_tokens(self, prompt: UpstreamPrompt) -> int:
        """The tokens of a prompt, where the upstream has an endpoint that counts them; raises BadInput."""
        body = {name: prompt.body[name] for name in IN_PROMPT if name in prompt.body}
        body["messages"] = prompt.candidates[0]
        for path, member in COUNTERS.items():
            answer = await self.upstreams.ask(path, body) or {}
            if type(answer.get(member)) is int:
                return int(answer[member])
        endpoints = " and no ".join(COUNTERS)
        message = f"The upstream of '{prompt.request.model}' cannot count tokens: it has no {endpoints}."
        raise BadInput(message, None, "unsupported_endpoint")

    async def run(self, prompt: UpstreamPrompt, emit: Emit) -> None:
        """Emit what the model says. Raises Refused before Accepted, and nothing after it."""
        request = prompt.request
        meter = Meter(self.prices)
        accepted = False
        outcome: Outcome = "error"
        deltas = Deltas(not request.parallel_tool_calls, request.n_top_logprobs or 0)
        opening = asyncio.ensure_future(self._open(prompt))
        try:
            timeout_s = ACCEPT_S if request.stream or request.background else None
            await asyncio.wait({opening}, timeout=timeout_s)
            if opening.done():
                opening.result()
            emit(Accepted())
            accepted = True
            try:
                await _relay(await opening, deltas, meter, emit)
                if not deltas.failed:
                    outcome = "done"
            except Refused as refused:
                emit(Finish("failed", None, refused.message, refused.late_code))
            except (Died, Unreadable) as error:
                emit(Finish("failed", usage_of(meter), f"The answer cannot be used: {error}."))
        except asyncio.CancelledError:
            outcome = "disconnect"
            if accepted:
                emit(Finish("cancelled", usage_of(meter)))
            raise
        finally:
            self.ledger.settle(request.model, discard(opening), outcome, meter)

    async def _open(self, prompt: UpstreamPrompt) -> Reply:
        """Ask; without the oldest turns as long as the upstream says that the prompt is too long."""
        for messages in prompt.candidates[:-1]:
            try:
                return await self._ask(prompt, messages)
            except Refused as refused:
                if refused.code != "context_length_exceeded":
                    raise
        return await self._ask(prompt, prompt.candidates[-1])

    async def _ask(self, prompt: UpstreamPrompt, messages: list[Message]) -> Reply:
        """Raises Refused, which names the parameter that the client has sent."""
        try:
            return await self.upstreams.open(PATH, prompt.body | {"messages": messages})
        except Refused as refused:
            if refused.param:
                chat_param = refused.param
                refused.param = responses_param(chat_param)
                refused.message = refused.message.replace(f"'{chat_param}'", f"'{refused.param}'")
            raise

    def pass_through(self, body: dict[str, Any]) -> "PassThrough":
        """The answer to a chat request, relayed from an upstream; raises BadInput."""
        request = params.from_chat(checkable(body), {})
        body = body | {"model": self._upstream_name(request.model)}
        if request.stream:
            body["stream_options"] = (body.get("stream_options") or {}) | {"include_usage": True}
        if request.tools:
            body["tools"] = marked(body["tools"], strict_names(request))
        return PassThrough(self, request, body)


def usage_of(meter: Meter) -> Usage | None:
    counts = meter.counts
    if counts is None:
        return None
    return Usage(counts.prompt, counts.completion, counts.reasoning, counts.cached)


async def _relay(reply: Reply, deltas: Deltas, meter: Meter, emit: Emit) -> None:
    """Emit what the model says in an answer; raises Died, Unreadable."""
    async with aclosing(_frames_of(reply)) as frames:
        async for frame in frames:
            if frame.document:
                meter.read(frame.document)
                for output in await _outputs_of(frame, deltas):
                    emit(output)
            if frame.is_done:
                deltas.note_done()
            if deltas.is_over:
                break
    for last in deltas.close(usage_of(meter)):
        emit(last)


async def _outputs_of(frame: Frame, deltas: Deltas) -> Iterable[Output]:
    """What a frame says. A large one, such as a whole answer, is read in a thread: others' streams go on."""
    outputs = deltas.feed(frame.document or {})
    if len(frame.raw) < MIN_THREAD_BYTES:
        return outputs
    return await asyncio.to_thread(list, outputs)


async def _frames_of(reply: Reply) -> AsyncGenerator[Frame]:
    """The frames of an answer, in whichever mode it comes; raises Died, Unreadable."""
    reader = Reader(reply.content_type)
    async with aclosing(reply.chunks()) as chunks:
        async for chunk in chunks:
            for n, frame in enumerate(reader.feed(chunk), 1):
                if n % N_FRAMES_A_TURN == 0:
                    await asyncio.sleep(0)
                if frame.is_done:
                    reply.note_done()
                yield frame
    if not reply.is_done:
        for frame in await asyncio.to_thread(reader.close):  # it may be all of the answer
            yield frame


def discard(opening: asyncio.Future[Reply]) -> str:
    """Close the reply that was opened, or is being opened; return its upstream's URL, "" if none answered."""
    opening.cancel()
    opening.add_done_callback(_close)
    return _close(opening)


def _close(opening: asyncio.Future[Reply]) -> str:
    if not opening.done() or opening.cancelled() or opening.exception():
        return ""
    reply = opening.result()
    reply.close()
    return reply.upstream.url


# --- chat, passed through -----------------------------------------------------------------------------------


# Parts of a message that only an upstream may be able to read: OpenAI's, and vLLM's for sound and video.
MEDIA = ("image_url", "input_audio", "audio_url", "video_url", "file")


def checkable(body: dict[str, Any]) -> dict[str, Any]:
    """The body without what is only not built here: our checks are not to refuse that on its way (rule 3)."""
    kept = {name: value for name, value in body.items() if name not in params.NOT_BUILT_IN_CHAT}
    messages = body.get("messages")
    if isinstance(messages, list):
        kept["messages"] = [_without_media(message) for message in messages]
    response_format = body.get("response_format")
    if isinstance(response_format, dict) and response_format.get("type") == "structural_tag":  # vLLM's
        del kept["response_format"]
    return kept


def _without_media(message: Any) -> Any:
    """A message whose pictures and the like are empty texts: each part keeps its place, which errors name."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    parts = []
    for part in message["content"]:
        if isinstance(part, dict) and part.get("type") in MEDIA:
            part = {"type": "text", "text": ""}
        parts.append(part)
    return message | {"content": parts}


class PassThrough(Response):
    """One chat completion, relayed from an upstream for as long as the client is there."""

    def __init__(self, worker: RemoteWorker, request: Request, body: dict[str, Any]) -> None:
        self._worker = worker
        self._request = request
        self._body = body  # as the upstream gets it
        self.n_choices = request.n
        self._meter = Meter(worker.prices)
        self._failed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(self._answer(scope, receive, send), receive)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome: Outcome = "disconnect"
        opening = asyncio.ensure_future(self._worker.upstreams.open(PATH, self._body))
        try:
            # Until the head is sent a refusal has its status, and the request may be retried elsewhere.
            timeout_s = ACCEPT_S if self._request.stream else None
            await asyncio.wait({opening}, timeout=timeout_s)
            headers = []
            if opening.done():
                headers = forwarded(opening.result().headers)
            ours = dict(SSE_HEADERS)
            headers = [(name, value) for name, value in headers if name not in ours]
            if self._request.stream:
                await self._send_stream(opening, headers, send)
            else:
                body = await self._completion(opening.result())
                response = Response(body, media_type="application/json")
                response.raw_headers += headers
                await response(scope, receive, send)
            outcome = "error" if self._failed else "done"
        except Refused:
            outcome = "error"
            raise
        finally:
            self._worker.ledger.settle(self._body["model"], discard(opening), outcome, self._meter)

    async def _send_stream(
        self, opening: asyncio.Future[Reply], headers: list[tuple[bytes, bytes]], send: Send
    ) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, *SSE_HEADERS]})
        async with aclosing(KeptAlive(send)) as stream, aclosing(self._frames(opening)) as frames:
            async for frame in frames:
                await stream.write(frame)
        await send({"type": "http.response.body", "body": b""})

    def _relay(self, reply: Reply) -> Relay:
        request = self._request
        one_call = not request.parallel_tool_calls
        shows_usage = request.include_usage
        return Relay(
            reply.content_type, request.stream, self._meter, shows_usage, request.n, one_call=one_call
        )

    async def _frames(self, opening: asyncio.Future[Reply]) -> AsyncGenerator[bytes]:
        """What the client gets, whole events a write; the last one is [DONE]."""
        try:
            reply = await opening
        except Refused as refused:
            self._failed = True
            error = error_object(refused.message, code=refused.code or "server_error")
            yield sse.encode(sse.dumps({"error": error}))
            yield sse.DONE
            return
        relay = self._relay(reply)
        try:
            async with aclosing(reply.chunks()) as chunks:
                async for chunk in chunks:
                    if events := relay.feed(chunk):
                        yield b"".join(events)
                    if relay.is_done:
                        reply.note_done()
            yield b"".join(await asyncio.to_thread(relay.close))  # it may be all of the answer
            self._failed = relay.failed
        except (Died, Unreadable) as error:
            self._failed = True
            yield b"".join(relay.fail(f"The answer broke off: {error}."))

    async def _completion(self, reply: Reply) -> bytes:
        relay = self._relay(reply)
        try:
            async with aclosing(reply.chunks()) as chunks:
                async for chunk in chunks:
                    relay.feed(chunk)
                    if relay.is_done:
                        reply.note_done()
            return b"".join(await asyncio.to_thread(relay.close))
        except (Died, Unreadable) as error:
            raise Refused(502, f"The answer cannot be used: {error}.") from error
