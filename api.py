"""The endpoints: creating, retrieving, cancelling and deleting responses; chat completions, models, health.

    HTTP request --read_request()--> body --params, items--> Request --Worker.prepare()--> Prompt
    Prompt --run_choice()--> outputs --Builder | Chunks--> EventLog --EventStream | JsonAnswer--> bytes

A response is the fold of its events. All of them go to one event log, and the client chooses how it is read:

    stream: true                        as it grows                         EventStream(log)
    stream: false                       to its end, folded                  JsonAnswer
    background: true                    its first snapshot, at once         json_response, and later GET
    GET ...?stream=true                 from any event on, as it grows      EventStream(log, after=...)

A new endpoint is one row of endpoints() and a handler, which returns a Response. It reads a body with
read_request() and refuses with BadInput: middleware.py makes status and error body of that.

Authority: https://platform.openai.com/docs/api-reference/responses and .../chat; where that is silent, the
behaviour that Azure/azure-sdk-for-net has probed, api-behaviour-contract.md (B1 to B37).

Rules of this file:
1. There is one path from a request to its events, whoever reads them, and whenever.
2. What can be refused is refused before a response is accepted, in the background too.
3. A response that is kept is stored before its last event is shown: EricLBuehler/mistral.rs#1946
4. While it runs, a foreground response belongs to its HTTP request: no other request can retrieve it.

Not here: what a request may say and refer to (request/), how long a response lives (background.py), HTTP
itself (streaming.py), keys and admission (middleware.py).
"""

import asyncio
import json
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.websockets import WebSocket

import completions
import responses
import sse
from background import Event, EventLog, NotStored, Producer, QueueFull, Reason, Registry, ResponseJob
from channels import Accepted, Compaction, Delta, Emit, Finish, Output, Usage
from gateway.refused import Refused
from gateway.remote import RemoteWorker
from request import items, params, query, tool_calls, tools
from request.body import parse_json, place, receive
from request.ids import item_ids, new_completion_id, new_id
from request.items import body_of, compacted, new_row, summary_request, unsaid
from request.refusals import BadInput, error_body, unsupported
from service import signed_content
from service.metrics import Metrics
from service.steps import Steps, StepStream
from service.websocket import Connection, Recall
from store import TERMINAL, Damaged, Row
from streaming import (
    EventStream,
    JsonAnswer,
    PiecewiseAnswer,
    error_response,
    for_client,
    json_response,
)
from worker import ALIAS, LocalWorker, Prompt, Worker

log = logging.getLogger("api")
T = TypeVar("T")

# fmt: off
#  status        why such a response cannot be cancelled; to cancel one a second time is no error
CANNOT_CANCEL = {
    "completed":  "Cannot cancel a completed response.",
    "failed":     "Cannot cancel a failed response.",
    "incomplete": "Cannot cancel a response in terminal state.",
    "queued":     "Cannot cancel a response while the server stops: its next process will run it.",
}
# fmt: on


MAX_DELTA_FRAMES = 4096  # kept, of 1 kB: of the items that grow at the same time


class Endpoint(NamedTuple):
    method: str
    path: str
    handler: Callable[[Any], Awaitable[Response | None]]
    # What a slow client may send, or read, for minutes; "stream": an answer where none is asked for;
    # "endless stream": one that ends with the server.
    slow_part: Literal["body", "stream", "endless stream", "answer", "socket", ""] = ""


class CheckedRequest(NamedTuple):
    """A body of the Responses API, with what it refers to; only the prompt is not rendered yet."""

    request: params.Request
    worker: Worker
    items: list[items.Item]  # the conversation: the chain that it continues, then its own input
    parameters: dict[str, Any]  # those that the client has set, but for the input

    @property
    def compacts(self) -> bool:
        """It asks for a compaction of its conversation, and for nothing else."""
        return items.is_trigger(self.items[-1])


ResponseOutput = Accepted | Output | Compaction | Finish
EmitOutput = Callable[[ResponseOutput], None]
Run = Callable[[EmitOutput], Awaitable[None]]  # emits them, in this order


def encode_event(number: int, event: Event) -> bytes:
    """The frame of a Responses event, which gets its number here, as it enters the log."""
    if "delta" in event and not event.get("logprobs"):
        before, between, behind = delta_frame(
            event["type"],
            event["item_id"],
            event["output_index"],
            event.get("content_index"),
            "logprobs" in event,
        )
        return f"{before}{number}{between}{sse.dumps_text(event['delta'])}{behind}".encode()
    numbered = {"type": event["type"], "sequence_number": number} | event
    return sse.encode(sse.dumps(numbered), event["type"])


@lru_cache(maxsize=MAX_DELTA_FRAMES)
def delta_frame(
    type_: str, item_id: str, output_index: int, content_index: int | None, has_logprobs: bool
) -> list[str]:
    """The frame of an item's deltas, cut where the two things stand that change: their number and their text.

    Nearly all events are deltas, and to encode one whole takes ten times as long.
    """
    event: Event = {"type": type_, "sequence_number": 0, "item_id": item_id, "output_index": output_index}
    if content_index is not None:
        event["content_index"] = content_index
    event["delta"] = ""
    if has_logprobs:
        event["logprobs"] = []
    frame = sse.encode(sse.dumps(event), type_).decode()
    return re.split('(?<="sequence_number":)0|(?<="delta":)""', frame)


def encode_chunk(_: int, chunk: completions.Chunk) -> bytes:
    return sse.encode(sse.dumps(chunk))


def remember_nothing(id: str) -> Row | None:
    """What a request recalls that comes over no WebSocket."""
    return None


def unix_time() -> int:
    return int(time.time())


class Api:
    """The endpoints, over a local worker, a remote one or both, and one store.

    `key` seals what clients keep for the server. `done_line`: a stream of a response ends with [DONE].
    `temporary`: background responses with store=false are accepted, and kept for a while.
    `reasoning_events` is a key of responses.REASONING_EVENTS. `image_texts`: the model is told that there was
    an image; else requests with one are refused. `steps` of the local worker's engine, where they are shown.
    """

    def __init__(
        self,
        local: LocalWorker | None,
        remote: RemoteWorker | None,
        registry: Registry,
        key: bytes,
        done_line: bool = True,
        temporary: bool = True,
        reasoning_events: str = "openai",
        image_texts: bool = False,
        steps: Steps | None = None,
        websocket_max_age_s: float = 3600,
    ) -> None:
        self._local = local
        self._remote = remote
        self._workers: list[Worker] = [worker for worker in (local, remote) if worker]
        self._registry = registry
        self._key = key
        self._done = sse.DONE if done_line else b""
        self._temporary = temporary
        self._reasoning_events = reasoning_events
        self._image_texts = image_texts
        self._steps = steps
        self._websocket_max_age_s = websocket_max_age_s
        self._started_at = unix_time()
        model = local.names[0] if local else "upstream"
        self.metrics = Metrics(model, self._counts, registry.live, lambda: registry.ended)

    def endpoints(self) -> list[Endpoint]:
        # fmt: off
        endpoints = [
            #        method    path                             handler                  slow part
            Endpoint("POST",   "/v1/responses",                  self.create_response,    "body"),
            Endpoint("GET",    "/v1/responses",                  self.open_websocket,     "socket"),
            Endpoint("POST",   "/v1/responses/input_tokens",     self.count_input_tokens, "body"),
            Endpoint("POST",   "/v1/responses/compact",          self.compact,            "body"),
            Endpoint("GET",    "/v1/responses/{id}",             self.get_response,       "stream"),
            Endpoint("DELETE", "/v1/responses/{id}",             self.delete_response,    "answer"),
            Endpoint("POST",   "/v1/responses/{id}/cancel",      self.cancel_response,    "answer"),
            Endpoint("GET",    "/v1/responses/{id}/input_items", self.list_input_items,   "answer"),
            Endpoint("POST",   "/v1/chat/completions",           self.create_completion,  "body"),
            Endpoint("GET",    "/v1/models",                     self.list_models),
            Endpoint("GET",    "/v1/models/{id:path}",           self.get_model),
            Endpoint("GET",    "/health",                        self.health),
            Endpoint("GET",    "/health/live",                   self.alive),
        ]
        if self._steps:
            endpoints.append(Endpoint("GET", "/debug/steps", self.read_steps, "endless stream"))
        # fmt: on
        return endpoints

    # --- Responses: making one ------------------------------------------------------------------------------

    async def create_response(self, http: HttpRequest) -> Response:
        async def read(body: Any) -> CheckedRequest:
            checked = await self._check(body, http.scope["owner"])
            request = checked.request
            if request.background and not (request.store or self._temporary):
                raise unsupported("background", "This server runs only what it may store: send store=true.")
            return checked

        checked = await read_request(http, read)
        prompt = await for_client(self._prepare(checked), http.receive)
        request = checked.request
        row, builder = await self._new_response(checked)
        if request.background:
            return await self._create_in_background(row, builder, request.stream)
        job = await self._start(row, builder, checked, prompt)
        if request.stream:
            return EventStream(job.log, job.task, self._done)
        return JsonAnswer(job.task, partial(self._folded, responses.fold, job.log, status_if_failed=200))

    async def open_websocket(self, websocket: WebSocket) -> None:
        owner = websocket.scope["owner"]

        async def start(body: Any, recall: Recall) -> ResponseJob:
            checked = await self._check(body, owner, recall)
            prompt = await self._prepare(checked)
            row, builder = await self._new_response(checked, is_remembered=True)
            return await self._start(row, builder, checked, prompt)

        connection = Connection(websocket, start, self._registry.ended_row, self._record_turn)
        await connection.run(self._registry.until_stopping(), self._websocket_max_age_s)

    def _record_turn(self, status: int, seconds: float) -> None:
        """Count a turn of a WebSocket as the request that it is."""
        self.metrics.add("http_requests", 1, "/v1/responses", "WEBSOCKET", str(status))
        self.metrics.observe("http_request_duration_seconds", seconds, "/v1/responses")

    async def _new_response(
        self, checked: CheckedRequest, is_remembered: bool = False
    ) -> tuple[Row, responses.Builder]:
        """The row of a response that is about to start, and what makes its events."""
        request = checked.request
        warn_of_hosted_tools(request)
        row = await asyncio.to_thread(new_row, request, checked.parameters, checked.items, is_remembered)
        head = {"id": row.id, "object": "response", "created_at": unix_time(), "model": request.model}
        return row, self._builder(row, head | request.echo, request.seal_reasoning)

    async def _start(
        self, row: Row, builder: responses.Builder, checked: CheckedRequest, prompt: Prompt
    ) -> ResponseJob:
        """Start a response in the foreground."""
        producer = ResponseProducer(builder, partial(self._run, prompt, checked.compacts))
        return await self._registry.start(row, producer)

    async def _check(
        self, body: Any, owner: str, recall: Recall = remember_nothing, chain_suffices: bool = False
    ) -> CheckedRequest:
        """Check a body, and look up what it refers to; raises BadInput.

        `recall` finds what is known beside the store. `chain_suffices`: a body may continue a chain without
        an `input` of its own.
        """
        worker = self._worker(params.model_name(body))
        values = await asyncio.to_thread(params.read_responses, body, worker.defaults)
        new_items = values["input"]
        if self._image_texts:
            new_items = items.with_image_texts(new_items)
        # Only what is right in itself is looked up.

        async def find(id: str) -> Row | None:
            return recall(id) or await self._find(owner, self._registry.get_to_continue, id)

        unseal = partial(signed_content.unseal, self._key, owner)
        chain, new_items = await items.resolve(new_items, values["previous_response_id"], find, unseal)
        if chain_suffices and chain and not new_items:
            new_items = chain  # as if the client had sent all of it
            chain = []

        def check_rest() -> CheckedRequest:
            request = params.responses_request(values, chain, new_items, owner)
            parameters = params.explicit_parameters(values, request.echo)
            return CheckedRequest(request, worker, items.listed(chain, new_items), parameters)

        return await asyncio.to_thread(check_rest)  # thousands of items must not stop the streams

    async def _prepare(self, checked: CheckedRequest) -> Prompt:
        """Build the prompt. For a compaction request, build the one that asks for a summary."""
        if checked.compacts:
            return await self._summary_prompt(checked)
        return await checked.worker.prepare(checked.request)

    async def _summary_prompt(self, checked: CheckedRequest) -> Prompt:
        """The question for a summary, which a compaction is made of."""
        defaults = checked.worker.defaults
        summary = await asyncio.to_thread(summary_request, checked.request, checked.items, defaults)
        return await checked.worker.prepare(summary)

    async def _create_in_background(self, row: Row, builder: responses.Builder, stream: bool) -> Response:
        try:
            job = await self._registry.start(row, self._background_producer(row, builder))
        except QueueFull as error:
            raise BadInput(str(error), "background", "rate_limit_exceeded") from error
        except NotStored:
            message = "The response could not be stored; try again later."
            return error_response(503, message, code="server_error")
        if stream:
            return EventStream(job.log, done=self._done)  # without the task, which outlives this request
        return json_response(200, job.log.events[0]["response"])

    def _builder(self, row: Row, head: Mapping[str, Any], seal_reasoning: bool) -> responses.Builder:
        seal = None
        if seal_reasoning:
            seal = partial(signed_content.seal, self._key, row.owner, "reasoning")
        return responses.Builder(head, item_ids(row.id), seal, self._reasoning_events)

    async def _run(self, prompt: Prompt, compacts: bool, emit: EmitOutput) -> None:
        """Emit what the model says of a prompt, or what is made of that."""
        take: Emit = emit
        if compacts:
            seal = partial(signed_content.seal, self._key, prompt.request.owner, "compaction")
            take = compacted(emit, seal)
        elif not prompt.request.generate:
            take = unsaid(emit)
        await run_choice(prompt, 0, self.metrics, take)

    def _background_producer(self, row: Row, builder: responses.Builder) -> Producer:
        """What waits is the row, as JSON text: prompt and tokens are made of it again when it runs."""

        async def run(emit: EmitOutput) -> None:
            body = await asyncio.to_thread(body_of, row)
            worker = self._worker(params.model_name(body))
            request = await asyncio.to_thread(params.from_responses, body, worker.defaults, row.owner)
            checked = CheckedRequest(request, worker, body["input"], body)
            prompt = await self._prepare(checked)
            await self._run(prompt, checked.compacts, emit)

        return ResponseProducer(builder, run, in_background=True)

    def _folded(
        self, fold: Callable[[list[Event]], dict[str, Any]], event_log: EventLog, status_if_failed: int
    ) -> tuple[int, dict[str, Any]]:
        """Status and body of an answer without `stream`.

        A request that fails because the server stops gets a 503: it may be tried again elsewhere.
        """
        body = fold(event_log.events)
        if not body.get("error"):
            return 200, body
        if self._registry.is_accepting:
            return status_if_failed, body
        return 503, error_body(503, body["error"]["message"], code="server_error")

    async def recover(self) -> None:
        """Run again, or end, the background responses that the last process left unfinished in the store."""

        def make_producer(row: Row) -> Producer:
            seal_reasoning = params.SEALED_REASONING in (row.request.get("include") or ())
            return self._background_producer(row, self._builder(row, row.response, seal_reasoning))

        await self._registry.recover(make_producer, interrupted_event)

    # --- Responses: tokens counted, conversations compacted -------------------------------------------------

    async def count_input_tokens(self, http: HttpRequest) -> Response:
        async def read(body: Any) -> CheckedRequest:
            if isinstance(body, dict):
                body = {"model": ALIAS} | body  # the SDK allows a body without a model
            return await self._check(body, http.scope["owner"], chain_suffices=True)

        checked = await read_request(http, read)
        prompt = await for_client(self._prepare(checked), http.receive)
        n_tokens = await prompt.count_tokens()
        return json_response(200, {"object": "response.input_tokens", "input_tokens": n_tokens})

    async def compact(self, http: HttpRequest) -> Response:
        """Answer with the user's messages and one sealed item for all the rest: the model's own summary."""

        async def read(body: Any) -> CheckedRequest:
            return await self._check(body, http.scope["owner"], chain_suffices=True)

        checked = await read_request(http, read)
        prompt = await for_client(self._summary_prompt(checked), http.receive)
        head = {"id": new_id("resp"), "created_at": unix_time()}
        producer = ResponseProducer(responses.Builder(head, new_id), partial(self._run, prompt, True))
        event_log = EventLog(encode_event)
        task = asyncio.create_task(producer.fill(event_log))
        fold = partial(compaction_object, checked.items)
        return JsonAnswer(task, partial(self._folded, fold, event_log, status_if_failed=500))

    # --- Responses: retrieving, cancelling, deleting one ----------------------------------------------------

    async def get_response(self, http: HttpRequest) -> Response:
        wants_stream = query.wants_stream(http.query_params)
        row = await self._row(http, with_events=wants_stream)
        if not wants_stream:
            return PiecewiseAnswer(row.response_json)
        after = query.starting_after(http.query_params)
        refusal = "This response cannot be streamed because it was not created with "
        if not row.background:
            raise BadInput(refusal + "background=true.", "stream")
        if not row.streamed:
            raise BadInput(refusal + "stream=true.", "stream")
        try:
            events = await self._registry.events(row.id)
        except Damaged as error:
            message = "This response can no longer be streamed: not all of its events are in the store."
            raise BadInput(message, "stream") from error
        if events is None:
            raise BadInput("This response can no longer be streamed: its events have expired.", "stream")
        return EventStream(events, done=self._done, after=after)

    async def cancel_response(self, http: HttpRequest) -> Response:
        row = await self._row(http)
        if not row.background:
            raise BadInput("Cannot cancel a synchronous response.")
        await self._registry.cancel(row.id)
        row = await self._row(http)
        if row.status != "cancelled":
            raise BadInput(CANNOT_CANCEL[row.status])
        return PiecewiseAnswer(row.response_json)

    async def delete_response(self, http: HttpRequest) -> Response:
        row = await self._row(http)
        if row.status not in TERMINAL:
            raise BadInput("Cannot delete an in-flight response.")
        await self._registry.delete(row.id)
        return json_response(200, {"id": row.id, "object": "response", "deleted": True})

    async def list_input_items(self, http: HttpRequest) -> Response:
        row = await self._row(http)
        items_of_row = await self._registry.items(row.id)
        return PiecewiseAnswer(sse.dumps(query.page(items_of_row, http.query_params)))

    async def _row(self, http: HttpRequest, with_events: bool = False) -> Row:
        """What is asked for; raises BadInput, also where there is no room to load it."""
        id_ = http.path_params["id"]
        http.scope["hold"](await self._registry.row_bytes(id_, http.scope["owner"], with_events))
        row = await self._find(http.scope["owner"], self._registry.get, id_)
        if row is None:
            raise BadInput(f"Response with id '{id_}' not found.", None, "response_not_found")
        return row

    async def _find(self, owner: str, get: Callable[[str], Awaitable[Row | None]], id: str) -> Row | None:
        """The response with this id if `owner` has made it: for others it does not exist."""
        row = await get(id)
        return row if row and row.owner == owner else None

    # --- chat completions -----------------------------------------------------------------------------------

    async def create_completion(self, http: HttpRequest) -> Response:
        async def read(body: Any) -> Response | tuple[Worker, params.Request]:
            worker = self._worker(params.model_name(body))
            if isinstance(worker, RemoteWorker):
                # A long body must not stop the streams.
                relayed = await asyncio.to_thread(worker.pass_through, body)
                http.scope["enter"](relayed.n_choices - 1)
                return relayed
            if self._image_texts:
                body["messages"] = items.with_image_texts(body.get("messages"))
            request = await asyncio.to_thread(params.from_chat, body, worker.defaults, http.scope["owner"])
            http.scope["enter"](request.n - 1)
            return worker, request

        found = await read_request(http, read)
        if isinstance(found, Response):
            return found
        worker, request = found
        prompt = await for_client(worker.prepare(request), http.receive)
        head = {
            "id": new_completion_id(),
            "created": unix_time(),
            "model": request.model,
            "system_fingerprint": f"fp_{self._started_at:x}",  # of "the backend configuration": this start
        }
        if "service_tier" in request.explicit:  # "the response body will include the service_tier value"
            head["service_tier"] = params.SERVICE_TIER
        chunks = completions.Chunks(head, new_id, request.n, request.include_usage, request.named_call)
        event_log = EventLog(encode_chunk)
        task = asyncio.create_task(self._fill_completion(event_log, prompt, chunks))
        if request.stream:
            return EventStream(event_log, task, sse.DONE)
        return JsonAnswer(task, partial(self._folded, completions.fold, event_log, status_if_failed=500))

    async def _fill_completion(self, event_log: EventLog, prompt: Prompt, chunks: completions.Chunks) -> None:
        def add(index: int, output: Accepted | Output | Finish) -> None:
            match output:
                case Accepted():
                    pass
                case Finish():
                    event_log.extend(chunks.finish(index, output))
                case _:
                    event_log.extend(chunks.feed(index, output))

        with closing(event_log):
            event_log.extend(chunks.start())
            async with asyncio.TaskGroup() as group:
                for index in range(prompt.request.n):
                    group.create_task(run_choice(prompt, index, self.metrics, partial(add, index)))
            event_log.extend(chunks.end())

    # --- models, health -------------------------------------------------------------------------------------

    async def list_models(self, _: HttpRequest) -> Response:
        return json_response(200, {"object": "list", "data": list(self._models().values())})

    async def get_model(self, http: HttpRequest) -> Response:
        name = http.path_params["id"]
        self._worker(name)  # raises where there is none
        models = self._models()
        if name in models:
            return json_response(200, models[name])
        first = next(iter(models.values()))  # the one that the alias stands for
        return json_response(200, first | {"id": name})

    async def health(self, http: HttpRequest) -> Response:
        """Whether requests are served: not without a worker that works, and not while the server stops."""
        is_ready = all(worker.alive for worker in self._workers) and self._registry.is_accepting
        counts: dict[str, int] = {}
        if http.scope["owner"] is not None:  # what others do is shown to those with a key
            counts = self._counts() | self._registry.counts()
        if is_ready:
            return json_response(200, {"status": "ok"} | counts)
        return json_response(503, {"status": "not ready"} | counts)

    async def read_steps(self, http: HttpRequest) -> Response:
        """What the engine does, step by step, from the oldest that is kept."""
        assert self._steps
        return StepStream(self._steps.read(http.scope["owner"]))

    async def alive(self, _: HttpRequest) -> Response:
        """Whether the process answers at all; else somebody should start it again."""
        return json_response(200, {"status": "ok"})

    def _counts(self) -> dict[str, int]:
        """What all workers hold together."""
        counts: Counter[str] = Counter()
        for worker in self._workers:
            counts.update(worker.counts())
        return dict(counts)

    def _models(self) -> dict[str, dict[str, Any]]:
        """The models of this machine, then those of the upstreams, as /v1/models shows them."""
        models: dict[str, dict[str, Any]] = {}
        common = {"object": "model", "created": self._started_at}
        if self._local:
            local = common | {"owned_by": "local", "max_model_len": self._local.engine.max_seq_len}
            for name in self._local.names:
                models[name] = {"id": name} | local
        if self._remote:
            remote = common | {"owned_by": "upstream"}
            for name, model in self._remote.upstreams.models().items():
                if name not in models:
                    models[name] = {"id": name} | remote | model
        return models

    def _worker(self, model: str) -> Worker:
        """The worker that serves a model; raises BadInput."""
        if self._local and model in (*self._local.names, ALIAS):
            return self._local
        if self._remote and self._remote.serves(model, ALIAS):
            return self._remote
        names = ", ".join(map(repr, (*self._models(), ALIAS)))
        raise BadInput(f"The model '{model}' does not exist; there is {names}.", "model", "model_not_found")


# --- a response as it is made -------------------------------------------------------------------------------


class ResponseProducer:
    """A Producer of background.py: turns the outputs of a worker into the events of one response."""

    def __init__(self, builder: responses.Builder, run: Run, in_background: bool = False) -> None:
        self._builder = builder
        self._run = run
        self._in_background = in_background

    def start(self) -> list[Event]:
        return self._builder.start(queued=True)

    async def fill(self, log: EventLog) -> None:
        try:
            await self._run(lambda output: log.extend(self._events(output)))
        except BadInput as refusal:
            if not self._in_background:  # the refusal becomes the answer: nothing has been sent yet
                raise
            code = "invalid_prompt"
            if isinstance(refusal, Refused):  # by an upstream
                code = refusal.late_code
            log.extend(self._events(Finish("failed", None, refusal.message, code)))

    def end(self, reason: Reason, message: str) -> list[Event]:
        return self._events(Finish(reason, message=message))

    def _events(self, output: ResponseOutput) -> list[Event]:
        match output:
            case Accepted() if self._in_background:
                return self._builder.in_progress()
            case Accepted():
                return self._builder.start()
            case Finish():
                return self._builder.finish(output, unix_time())
            case _:
                return self._builder.feed(output)


async def run_choice(prompt: Prompt, choice: int, metrics: Metrics, emit: Emit) -> None:
    """Run one choice of a prompt, count and log it, and name its calls as the client does.

    It keeps rule 2 of worker.py even where the worker has a bug: it emits one Finish, which is the last.
    There are two ways out without one. An exception before Accepted refuses the request. If the task is
    cancelled, the worker's Finish is only counted: Registry._fill() of background.py ends the response.
    """
    watch = metrics.run()
    started_at = time.monotonic()
    restorer = tool_calls.Restorer(prompt.request.called)
    accepted = False
    finish: Finish | None = None  # emitted when the run is over

    def pass_on(output: Accepted | Output | Finish) -> None:
        nonlocal accepted, finish
        if finish:
            return
        if isinstance(output, Finish):
            rest, finish = restorer.finish(output)
            for restored in rest:
                emit(restored)
        elif isinstance(output, Accepted):
            accepted = True
            emit(output)
        else:
            watch.piece()
            for restored in restorer.feed(with_numbers(output)):
                emit(restored)

    end = Finish("cancelled")  # for metrics and log, where it is cancelled before another one is set
    try:
        await prompt.run(pass_on, choice)
        end = finish or Finish("failed", message="The worker ended without finishing.")
    except asyncio.CancelledError:
        end = finish or end
        raise
    except BadInput as refusal:
        end = Finish("failed", message=refusal.message)
        raise
    except Exception as error:
        message = f"{type(error).__name__} in the worker; the server's log has the details."
        end = Finish("failed", message=message)
        if not accepted:
            raise
        log.exception("the worker failed")
    finally:
        usage = end.usage or Usage(0, 0)
        watch.end(end.reason, usage.input_tokens, usage.cached_tokens, usage.output_tokens)
        log_finish(prompt, end.reason, usage, time.monotonic() - started_at)
    emit(end)


def with_numbers(output: Output) -> Output:
    """The output; raises ArithmeticError where a logprob is no number, which no event could say."""
    if isinstance(output, Delta) and output.logprobs and any(math.isnan(p.logprob) for p in output.logprobs):
        raise ArithmeticError("expected logprobs that are numbers, got NaN")
    return output


def compaction_object(conversation: Sequence[items.Item], events: Sequence[Event]) -> dict[str, Any]:
    """What the events of a compaction amount to at its own endpoint; an error object where it has failed."""
    response = responses.fold(events)
    if response["error"]:
        return error_body(500, response["error"]["message"], code="server_error")
    return {
        "id": response["id"],
        "object": "response.compaction",
        "created_at": response["created_at"],
        "output": [*items.retained(conversation), *response["output"]],
        "usage": response["usage"] or responses.usage_object(Usage(0, 0)),
    }


def log_finish(prompt: Prompt, reason: str, usage: Usage, seconds: float) -> None:
    n_in = prompt.n_tokens or usage.input_tokens
    n_out = usage.output_tokens
    if reason == "cancelled":
        reason = "nobody waits any longer: aborted"
    rate = n_out / max(seconds, 1e-9)
    log.info("%s: %d tokens in, %d out, %.2f s, %.1f tok/s", reason, n_in, n_out, seconds, rate)


def interrupted_event(id: str, frames: Sequence[bytes]) -> Event:
    """The last event of a response whose process has died.

    `frames` are those that it has stored; [] where they cannot be used, and all that is known is the id.
    """
    if not frames:
        head = {"id": id, "object": "response", "created_at": unix_time()}
        builder = responses.Builder(head, new_id)
        builder.start()
        return builder.finish(Finish("failed", message="What was stored of it is damaged."), unix_time())[-1]
    parser = sse.Parser(max_event_bytes=sum(map(len, frames)))
    events = [json.loads(event.data) for frame in frames for event in parser.feed(frame)]
    return responses.interrupted(events, "interrupted by a restart")


async def read_request(http: HttpRequest, read: Callable[[Any], Awaitable[T]]) -> T:
    """What is made of the body of a request while its client waits; raises BadInput, ClientDisconnect.

    The bodies of others may come first.
    """
    body = await receive(http)

    async def parse_and_read() -> T:
        async with place(body, http.scope["owner"]):
            return await read(await parse_json(body))

    return await for_client(parse_and_read(), http.receive)


def warn_of_hosted_tools(request: params.Request) -> None:
    hosted = [tool["type"] for tool in request.echo["tools"] if tool["type"] in tools.HOSTED]
    if hosted:
        names = ", ".join(hosted)
        log.warning("tools that the model is not told of, for nobody here runs them: %s", names)
