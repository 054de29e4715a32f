"""The endpoints: creating, retrieving, cancelling and deleting responses; chat completions, models, health.

    HTTP request --_begin()--> Job, its Prompt --Registry.start()--> EventLog --> answer

A response is the fold of its events. All of them go to one event log, and the client chooses how it is read:

    stream: true                        as it grows                         EventStream(log)
    stream: false                       to its end: the last response       JsonAnswer
    background: true                    its first snapshot, at once         JsonAnswer, and later GET
    GET ...?stream=true                 from any event on, as it grows      EventStream(log, after=...)

A new endpoint is one row of endpoints() and a handler, which returns a Response. It reads a body with
read_request() and refuses with BadInput: middleware.py makes status and error body of that.

Authority: https://platform.openai.com/docs/api-reference/responses and .../chat; where that is silent, the
behaviour that Azure/azure-sdk-for-net has probed, api-behaviour-contract.md (B1 to B37).

Rules of this file:
1. There is one path from a request to its events, for any reader at any time.
2. What can be refused is refused before a response is accepted, in the background too.
3. A response that is kept is stored before its last event is shown: EricLBuehler/mistral.rs#1946
4. While it runs, a foreground response belongs to its HTTP request: no other request can retrieve it.
5. What is accepted and has no effect is named in the answer's Warning header and in the log.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.websockets import WebSocket

import completions
import responses
import sse
from background import Job, Registry, Run, Said
from channels import Accepted, Emit, Finish, Output, Usage
from choices import run_choice
from event_log import Entry, EventLog
from gateway.remote import RemoteWorker
from request import items, params, query
from request.body import receive
from request.ids import item_ids, new_completion_id, new_id
from request.refusals import BadInput, unsupported
from request.room import Visit
from service.logs import Rarely
from service.metrics import Metrics
from service.steps import Steps
from service.websocket import Connection, Recall
from store import TERMINAL, Damaged, Row
from streaming import SSE_HEADERS, EventStream, JsonAnswer, json_response, while_connected
from worker import ALIAS, LocalWorker, Prompt, Worker

log = logging.getLogger("api")
T = TypeVar("T")

# fmt: off
#  status        why such a response cannot be cancelled; to cancel one a second time is not an error
CANNOT_CANCEL = {
    "completed":  "Cannot cancel a completed response.",
    "failed":     "Cannot cancel a failed response.",
    "incomplete": "Cannot cancel a response in terminal state.",
    "queued":     "Cannot cancel a response while the server stops: its next process will run it.",
}
# fmt: on


Handler = Callable[[HttpRequest, Visit], Awaitable[Response]]  # its visit holds what it takes
Endpoint = tuple[str, str, Handler]  # method, path, handler
Purpose = Literal["respond", "count", "compact"]
# The JSON of a body. While it is open, a large body holds its place in the queue of parses.
Parsing = AbstractAsyncContextManager[Any]


class Begun(NamedTuple):
    """A checked request. What may still refuse it, when its job starts: no room, or an upstream."""

    job: Job
    prompt: Prompt
    conversation: list[items.Item]  # the chain that it continues, then its own input
    headers: dict[str, str]  # of the answer: rule 5


def encode_chunk(_: int, chunk: completions.Chunk) -> Entry:
    return Entry(sse.encode(sse.dumps(chunk)))


@dataclass(eq=False)
class Api:
    """The endpoints, over a local worker, a remote one or both, and one store."""

    local: LocalWorker | None
    remote: RemoteWorker | None
    registry: Registry
    secret: bytes  # seals what clients keep for the server
    done_line: bool = True  # a stream of a response ends with [DONE]
    temporary: bool = True  # background responses with store=false are accepted, and kept for a while
    reasoning_events: str = "openai"  # a key of responses.REASONING_EVENTS
    image_texts: bool = False  # the model is told that there was an image; else requests with one are refused
    steps: Steps | None = None  # of the local worker's engine, if they are shown
    websocket_max_age_s: float = 3600

    def __post_init__(self) -> None:
        self._workers: list[Worker] = [worker for worker in (self.local, self.remote) if worker]
        self._is_news = Rarely()
        self._done = sse.DONE if self.done_line else b""
        self._started_at = int(time.time())
        model = self.local.names[0] if self.local else "upstream"
        registry = self.registry
        self.metrics = Metrics(model, self._counts, registry.live, lambda: registry.ended)

    def endpoints(self) -> list[Endpoint]:
        # fmt: off
        endpoints: list[Endpoint] = [
            # method   path                             handler
            ("POST",   "/v1/responses",                  self.create_response),
            ("POST",   "/v1/responses/input_tokens",     self.count_input_tokens),
            ("POST",   "/v1/responses/compact",          self.compact),
            ("GET",    "/v1/responses/{id}",             self.get_response),
            ("DELETE", "/v1/responses/{id}",             self.delete_response),
            ("POST",   "/v1/responses/{id}/cancel",      self.cancel_response),
            ("GET",    "/v1/responses/{id}/input_items", self.list_input_items),
            ("POST",   "/v1/chat/completions",           self.create_completion),
            ("GET",    "/v1/models",                     self.list_models),
            ("GET",    "/v1/models/{id:path}",           self.get_model),
            ("GET",    "/health",                        self.health),
            ("GET",    "/health/live",                   self.alive),
        ]
        if self.steps:
            endpoints.append(("GET", "/debug/steps", self.read_steps))
        # fmt: on
        return endpoints

    # --- Responses: making one ------------------------------------------------------------------------------

    async def create_response(self, http: HttpRequest, visit: Visit) -> Response:
        begun = await read_request(http, visit, self._begin)
        job = begun.job
        await self.registry.start(job)
        if job.row.streamed:
            task = None if job.row.background else job.task  # in the background it outlives this request
            return EventStream(job.log, task, self._done, more_headers=begun.headers)
        if not job.row.background:
            await while_connected(job.task, http.receive)
            if self.registry.stopping.is_set():
                self._refuse_failed(job.log.events[-1]["response"]["error"])
        return JsonAnswer(job.log.shown.response_json, headers=begun.headers)

    async def open_websocket(self, websocket: WebSocket, visit: Visit) -> None:
        visit.hold(visit.rooms.sockets, 1)

        async def start(parsing: Parsing, turn: Visit, recall: Recall) -> Job:
            begun = await self._begin(parsing, turn, "respond", recall)
            await self.registry.start(begun.job)
            return begun.job

        connection = Connection(websocket, visit, start, self.registry.to_continue)
        await connection.run(self.registry.stopping, self.websocket_max_age_s)

    async def count_input_tokens(self, http: HttpRequest, visit: Visit) -> Response:
        begun = await read_request(http, visit, partial(self._begin, purpose="count"))
        n_tokens = await begun.prompt.count_tokens()
        return json_response(200, {"object": "response.input_tokens", "input_tokens": n_tokens})

    async def compact(self, http: HttpRequest, visit: Visit) -> Response:
        """Answer with the user's messages and one sealed item for all the rest: the model's own summary."""
        begun = await read_request(http, visit, partial(self._begin, purpose="compact"))
        await self.registry.start(begun.job)
        await while_connected(begun.job.task, http.receive)
        response = begun.job.log.events[-1]["response"]
        self._refuse_failed(response["error"])
        compaction = {
            "id": response["id"],
            "object": "response.compaction",
            "created_at": response["created_at"],
            "output": [*items.retained(begun.conversation), *response["output"]],
            "usage": response["usage"] or responses.usage_object(Usage(0, 0)),
        }
        return json_response(200, compaction, begun.headers)

    async def _begin(
        self, parsing: Parsing, visit: Visit, purpose: Purpose = "respond", recall: Recall | None = None
    ) -> Begun:
        """Refuse a body, or make all that is needed to start its response; raises BadInput.

        `recall` finds what a WebSocket remembers, and later this response. What the body continues or refers
        to is held by the visit before it is loaded. A large body leaves its place before the prompt waits,
        perhaps for the check of a grammar.
        """
        async with parsing as body:
            if purpose == "count" and isinstance(body, dict):
                body = {"model": ALIAS} | body  # the SDK allows a body without a model
            defaults = self._worker(params.model_name(body)).defaults
            values = await visit.call(params.read_responses, body, defaults)
            if purpose != "respond":
                values |= {"store": False, "background": False, "stream": False}
            if values["background"] and not (values["store"] or self.temporary):
                raise unsupported("background", "This server runs only what it may store: send store=true.")
            if self.image_texts:
                values["input"] = items.with_image_texts(values["input"])

            async def find(id: str) -> Row | None:
                visit.is_small = False  # a chain may be large, also one that a WebSocket remembers
                if recall and (remembered := recall(id)):
                    return remembered
                row = await self.registry.get(id, visit.owner, visit.load)
                return await self.registry.to_continue(row) if row else None

            sealer_of = partial(items.sealer, self.secret, visit.owner)
            previous_id = values["previous_response_id"]
            chain, own = await items.resolve(values["input"], previous_id, find, sealer_of, visit.call)
            if purpose != "respond" and chain and not own:  # as if the client had sent all of it
                chain, own = [], chain
            request = await visit.call(params.responses_request, values, chain, own, visit.owner)
            conversation = [*chain, *own]
            if purpose == "compact":
                conversation.append(items.TRIGGER)
            row = await visit.call(items.new_row, request, values, conversation)
        model = self._spoken_name(request.model)
        head = {"id": row.id, "object": "response", "created_at": int(row.born_at), "model": model}
        builder = self._builder(row, head | request.echo, request.seal_reasoning)
        prompt = await self._prepare(request, conversation)
        headers = self._warning(prompt.request) if prompt.request.not_run else {}
        # A background response keeps only its row while it waits; _run_row() makes the prompt again.
        run = partial(self._run_row, row) if row.background else partial(self._run, prompt)
        return Begun(Job(row, builder, run), prompt, conversation, headers)

    async def _prepare(self, request: params.Request, conversation: list[items.Item]) -> Prompt:
        """Make the prompt. For a compaction, make the one that asks for a summary."""
        worker = self._worker(request.model)
        if items.is_trigger(conversation[-1]):
            request = await asyncio.to_thread(items.summary_request, request, conversation, worker.defaults)
        return await worker.prepare(request)

    def _builder(self, row: Row, head: Mapping[str, Any], seals_reasoning: bool) -> responses.Builder:
        seal = items.sealer(self.secret, row.owner, "reasoning").dumps if seals_reasoning else None
        return responses.Builder(head, item_ids(row.id), seal, self.reasoning_events)

    async def _run(self, prompt: Prompt, emit: Callable[[Said], None]) -> None:
        """Emit what the model says of a prompt, or what is made of that."""
        take: Emit = emit
        if prompt.request.compacts:
            take = items.unsaid(emit, items.sealer(self.secret, prompt.request.owner, "compaction").dumps)
        elif not prompt.request.generate:
            take = items.unsaid(emit)
        await run_choice(prompt, 0, self.metrics, take)

    async def _run_row(self, row: Row, emit: Callable[[Said], None]) -> None:
        """Run a background response. What waits is its row of JSON text: the prompt is made of it again."""
        body = await asyncio.to_thread(items.body_of, row)
        defaults = self._worker(params.model_name(body)).defaults
        request = await asyncio.to_thread(params.from_responses, body, defaults, row.owner)
        await self._run(await self._prepare(request, body["input"]), emit)

    async def recover(self) -> None:
        """Run again, or end, the background responses that the last process left unfinished in the store."""

        def revive(row: Row) -> tuple[responses.Builder, Run]:
            seals_reasoning = params.SEALED_REASONING in (row.request.get("include") or ())
            return self._builder(row, row.response, seals_reasoning), partial(self._run_row, row)

        await self.registry.recover(revive)

    def _refuse_failed(self, error: Mapping[str, str] | None) -> None:
        """Raise BadInput if a whole answer has failed: while the server stops, a client may try elsewhere."""
        if error:
            refusal = BadInput(error["message"], None, "server_error")
            refusal.status = 503 if self.registry.stopping.is_set() else 500
            raise refusal

    # --- Responses: retrieving, cancelling, deleting one ----------------------------------------------------

    async def get_response(self, http: HttpRequest, visit: Visit) -> Response:
        wants_stream = query.wants_stream(http.query_params)
        row = await self._row(http, visit, wants_stream)
        if not wants_stream:
            return JsonAnswer(row.response_json)
        after = query.starting_after(http.query_params)
        if not (row.background and row.streamed):
            lacks = "stream" if row.background else "background"
            message = f"This response cannot be streamed because it was not created with {lacks}=true."
            raise BadInput(message, "stream")
        try:
            events = await self.registry.events(row)
        except Damaged as error:
            raise BadInput(f"This response can no longer be streamed: {error}.", "stream") from error
        return EventStream(events, done=self._done, after=after)

    async def cancel_response(self, http: HttpRequest, visit: Visit) -> Response:
        row = await self._row(http, visit)
        if not row.background:
            raise BadInput("Cannot cancel a synchronous response.")
        await self.registry.cancel(row)
        row = await self._row(http, visit)
        if row.status != "cancelled":
            raise BadInput(CANNOT_CANCEL[row.status])
        return JsonAnswer(row.response_json)

    async def delete_response(self, http: HttpRequest, visit: Visit) -> Response:
        row = await self._row(http, visit)
        if row.status not in TERMINAL:
            raise BadInput("Cannot delete an in-flight response.")
        await self.registry.delete(row)
        return json_response(200, {"id": row.id, "object": "response", "deleted": True})

    async def list_input_items(self, http: HttpRequest, visit: Visit) -> Response:
        row = await self._row(http, visit)
        return json_response(200, query.page(row.items, http.query_params))

    async def _row(self, http: HttpRequest, visit: Visit, is_stream: bool = False) -> Row:
        """Return the response that is asked for; raises BadInput, also if there is no room to load it."""
        if is_stream:
            visit.enter()
        id_ = http.path_params["id"]
        row = await self.registry.get(id_, visit.owner, visit.load)
        if row is None:
            raise BadInput(f"Response with id '{id_}' not found.", None, "response_not_found")
        return row

    def _warning(self, request: params.Request) -> dict[str, str]:
        """Return the header that names what the request asks for and is not run here: rule 5.

        It is logged too, each name once a minute for each key.
        """
        names = [name for name in request.not_run if self._is_news((request.owner, name))]
        if names:
            log.warning("accepted, and without any effect here: %s", ", ".join(names))
        return {"Warning": f'299 - "accepted, and without any effect here: {", ".join(request.not_run)}"'}

    # --- chat completions -----------------------------------------------------------------------------------

    async def create_completion(self, http: HttpRequest, visit: Visit) -> Response:
        prompt = await read_request(http, visit, self._begin_completion)
        if isinstance(prompt, Response):  # that of an upstream
            return prompt
        request = prompt.request
        headers = self._warning(request) if request.not_run else {}
        event_log = EventLog(encode_chunk)
        task = asyncio.create_task(self._fill_completion(event_log, prompt))
        if request.stream:
            return EventStream(event_log, task, sse.DONE, more_headers=headers)
        await while_connected(task, http.receive)
        self._refuse_failed(event_log.events[-1].get("error"))
        completion = await asyncio.to_thread(completions.fold, event_log.events)
        return JsonAnswer(await asyncio.to_thread(sse.dumps, completion), headers=headers)

    async def _begin_completion(self, parsing: Parsing, visit: Visit) -> Response | Prompt:
        """Refuse a body, or make its prompt; an upstream's answer is relayed. Raises BadInput."""
        async with parsing as body:
            worker = self._worker(params.model_name(body))
            if isinstance(worker, RemoteWorker):
                relayed = await asyncio.to_thread(worker.pass_through, body)
                visit.enter(relayed.n_choices)
                return relayed
            if self.image_texts:
                body["messages"] = items.with_image_texts(body.get("messages"))
            request = await visit.call(params.from_chat, body, worker.defaults, visit.owner)
            visit.enter(request.n)
        return await worker.prepare(request)

    async def _fill_completion(self, event_log: EventLog, prompt: Prompt) -> None:
        """Run all choices of a prompt, and append their chunks as they come."""
        request = prompt.request
        head = {
            "id": new_completion_id(),
            "created": int(time.time()),
            "model": self._spoken_name(request.model),
            "system_fingerprint": f"fp_{self._started_at:x}",  # of "the backend configuration": this start
        }
        if "service_tier" in request.explicit:  # "the response body will include the service_tier value"
            head["service_tier"] = params.SERVICE_TIER
        chunks = completions.Chunks(head, new_id, request.n, request.include_usage, request.named_call)

        def add(index: int, said: Accepted | Output | Finish) -> None:
            event_log.extend(chunks.feed(index, said))

        with closing(event_log):
            event_log.extend(chunks.start())
            async with asyncio.TaskGroup() as group:
                for index in range(request.n):
                    group.create_task(run_choice(prompt, index, self.metrics, partial(add, index)))
            event_log.extend(chunks.end())

    # --- models, health -------------------------------------------------------------------------------------

    async def list_models(self, _: HttpRequest, visit: Visit) -> Response:
        return json_response(200, {"object": "list", "data": list(self._models().values())})

    async def get_model(self, http: HttpRequest, visit: Visit) -> Response:
        name = http.path_params["id"]
        self._worker(name)  # raises if there is none
        return json_response(200, self._models()[self._spoken_name(name)] | {"id": name})

    async def health(self, http: HttpRequest, visit: Visit) -> Response:
        """Tell whether requests are served: not without a worker that works, nor while the server stops."""
        counts: dict[str, int] = {}
        if visit.has_key:  # what others do is shown to those with a key
            counts = self._counts() | {"background": len(self.registry.jobs)}
        if self.registry.stopping.is_set() or not any(worker.alive for worker in self._workers):
            return json_response(503, {"status": "not ready"} | counts)
        return json_response(200, {"status": "ok"} | counts)

    async def read_steps(self, http: HttpRequest, visit: Visit) -> Response:
        assert self.steps
        visit.enter()
        response = StreamingResponse(self.steps.read(visit.owner, self.registry.stopping))
        response.raw_headers = SSE_HEADERS
        return response

    async def alive(self, _: HttpRequest, visit: Visit) -> Response:
        """Tell that the process answers at all; else something should start it again."""
        return json_response(200, {"status": "ok"})

    def _counts(self) -> dict[str, int]:
        """Return what all workers hold together."""
        counts: Counter[str] = Counter()
        for worker in self._workers:
            counts.update(worker.counts())
        return dict(counts)

    def _models(self) -> dict[str, dict[str, Any]]:
        """Return the models of this machine, then those of the upstreams, as /v1/models shows them."""
        models: dict[str, dict[str, Any]] = {}
        common = {"object": "model", "created": self._started_at}
        if self.local:
            local = common | {"owned_by": "local", "max_model_len": self.local.engine.max_seq_len}
            models = {name: {"id": name} | local for name in self.local.names}
        if self.remote:
            for name, model in self.remote.upstreams.models().items():
                models.setdefault(name, {"id": name} | common | {"owned_by": "upstream"} | model)
        return models

    def _worker(self, model: str) -> Worker:
        """Return the worker that serves a model; raises BadInput."""
        if self.local and model in (*self.local.names, ALIAS):
            return self.local
        if self.remote and self.remote.serves(model, ALIAS):
            return self.remote
        names = ", ".join(map(repr, (*self._models(), ALIAS)))
        raise BadInput(f"The model '{model}' does not exist; there is {names}.", "model", "model_not_found")

    def _spoken_name(self, model: str) -> str:
        """Return the name by which a model answers: for the alias, that of the first model there is."""
        return next(iter(self._models()), model) if model == ALIAS else model


async def read_request(http: HttpRequest, visit: Visit, read: Callable[[Parsing, Visit], Awaitable[T]]) -> T:
    """Return what `read` makes of a body while its client waits; raises BadInput and ClientDisconnect."""
    parsing = await receive(http, visit)
    return await while_connected(read(parsing, visit), http.receive)
