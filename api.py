"""The endpoints: creating, retrieving, cancelling and deleting responses; chat completions, models, health.

    HTTP request --begin()--> Job, its Prompt --Registry.start()--> EventLog --> answer
    what fills the log: Registry._fill() --> Api._run() --> Prompt.run() --> Job.add() --> EventLog.extend()

A response is the fold of its events. All of them go to one event log, and the client chooses how it is read:

    stream: true                        as it grows                         EventStream(log)
    stream: false                       to its end: the last response       JsonAnswer
    background: true                    its first snapshot, at once         JsonAnswer, and later GET
    GET ...?stream=true                 from any event on, as it grows      EventStream(log, after=...)

Authority: https://platform.openai.com/docs/api-reference/responses and .../chat; if that is silent, the
behaviour that Azure/azure-sdk-for-net has probed, api-behaviour-contract.md (B1 to B37).

Rules of this file:
1. What can be refused is refused before a response is accepted, in the background too.
2. While it runs, a foreground response belongs to its HTTP request: no other request can retrieve it.
3. What is accepted and has no effect is named in the answer's Warning header and in the log.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.websockets import WebSocket

import completions
import sse
from background import UNFINISHED, Job, Registry, Run, Said
from channels import Accepted, Emit, Finish, Output, Usage
from completions import Chunk
from event_log import EventLog
from gateway.remote import RemoteWorker
from request import items, params, query
from request.body import Parsing, receive
from request.ids import item_ids, new_id
from request.refusals import BadInput, unsupported
from request.room import Visit
from request.tool_calls import Restorer
from responses import Builder
from service.logs import is_news
from service.metrics import Metrics, Stopwatch
from service.steps import Steps
from service.websocket import AS_BODY, Connection
from store import TERMINAL, Row
from streaming import SSE_HEADERS, EventStream, JsonAnswer, json_response, while_connected
from worker import ALIAS, LocalWorker, Prompt, Worker

log = logging.getLogger("api")

# fmt: off
#  status        why such a response cannot be cancelled; to cancel one a second time is not an error
CANNOT_CANCEL = {
    "completed":  "Cannot cancel a completed response.",
    "failed":     "Cannot cancel a failed response.",
    "incomplete": "Cannot cancel a response in terminal state.",
    "queued":     "Cannot cancel a response while the server stops: its next process will run it.",
}
# fmt: on


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
    image_texts: bool = False  # True: the model is told that there was an image; False: images are refused
    steps: Steps | None = None  # of the local worker's engine, if they are shown

    def __post_init__(self) -> None:
        self.workers: list[Worker] = [worker for worker in (self.local, self.remote) if worker]
        self._told = set[Hashable]()  # is_news() of service/logs.py
        self._done = sse.DONE if self.done_line else b""
        self._started_at = int(time.time())
        model = self.local.names[0] if self.local else "upstream"
        self.metrics = Metrics(model, lambda: self._counts() | self.registry.counts())

    def endpoints(self) -> list[tuple[str, str, Callable[..., Awaitable[Response]]]]:
        debug = [("GET", "/debug/steps", self.stream_steps)] if self.steps else []
        # fmt: off
        return [
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
            *debug,
        ]
        # fmt: on

    # --- Responses: making one ------------------------------------------------------------------------------

    async def create_response(self, http: HttpRequest, visit: Visit) -> Response:
        parsing = await receive(http, visit)
        job, _, headers = await while_connected(self.begin(parsing, visit), http.receive)
        await self.registry.start(job)
        if job.row.streamed:
            task = None if job.row.background else job.task  # in the background it outlives this request
            return EventStream(job.log, task, self._done, more_headers=headers)
        if not job.row.background:
            await while_connected(job.task, http.receive)
            if self.registry.stopping.is_set():
                self._refuse_failed(job.shown_row().response["error"])
        return JsonAnswer(job.log.shown.response_json, headers=headers)

    async def open_websocket(self, websocket: WebSocket, visit: Visit) -> None:
        visit.hold(visit.rooms.sockets, 1)
        await Connection(websocket, visit, self.registry, self.begin).run()

    async def count_input_tokens(self, http: HttpRequest, visit: Visit) -> Response:
        parsing = await receive(http, visit)
        _, prompt, _ = await while_connected(self.begin(parsing, visit, "count"), http.receive)
        n_tokens = await prompt.count_tokens()
        return json_response(200, {"object": "response.input_tokens", "input_tokens": n_tokens})

    async def compact(self, http: HttpRequest, visit: Visit) -> Response:
        """Answer with the user's messages and one sealed item for all the rest: the model's own summary."""
        parsing = await receive(http, visit)
        job, _, headers = await while_connected(self.begin(parsing, visit, "compact"), http.receive)
        await self.registry.start(job)
        await while_connected(job.task, http.receive)
        response = job.shown_row().response
        self._refuse_failed(response["error"])
        compaction = {name: response[name] for name in ("id", "created_at", "usage")}
        compaction["object"] = "response.compaction"
        retained = await visit.call(items.retained, job.row)
        compaction["output"] = [*retained, *response["output"]]
        return json_response(200, compaction, headers)

    async def begin(
        self,
        parsing: Parsing,
        visit: Visit,
        purpose: str = "respond",
        recall: Callable[..., Row | None] | None = None,
    ) -> tuple[Job, Prompt, dict[str, str]]:
        """Refuse a body, or return its job, its prompt and the headers of its answer; raises BadInput.

        `purpose`: "respond", "count" (its tokens) or "compact". `recall` is for a message of a WebSocket: it
        finds what that remembers. What the body continues or refers to is held by the visit before it is
        loaded. A large body gives its place back before the slow part, prepare().
        """
        async with parsing as body:
            if purpose == "count" and isinstance(body, dict):
                body = {"model": ALIAS} | body  # the SDK allows a body without a model
            if recall:
                body |= AS_BODY
            defaults = self._worker(params.model_name(body)).defaults
            values = await visit.call(params.read, params.RESPONSES, body, defaults, visit.owner)
            if purpose != "respond":
                values |= {"store": False, "background": False, "stream": False}
            if values["background"] and (recall or not (values["store"] or self.temporary)):
                raise unsupported("background", "It needs a POST, and under --no-temporary also store=true.")
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
            if purpose != "respond" and chain and not own:  # as if the client had sent the whole chain
                chain, own = [], chain
            request = await visit.call(params.responses_request, values, chain, own)
            conversation = [*chain, *own]
            if purpose == "compact":
                conversation.append(items.TRIGGER)
            row = await visit.call(items.new_row, request, values, conversation)
        head = {"id": row.id, "object": "response", "created_at": int(row.born_at), **request.echo}
        head["model"] = self._spoken_name(request.model)
        prompt = await self._prepare(request, conversation)
        # A background response keeps only its row while it waits: _run_row() makes the prompt again.
        run = partial(self._run_row, row) if row.background else partial(self._run, prompt)
        job = self._job(row, head, request.seal_reasoning, run)
        return job, prompt, self._warning(prompt.request)

    async def _prepare(self, request: params.Request, conversation: list[items.Item]) -> Prompt:
        """Make the prompt. For a compaction, make the one that asks for a summary."""
        worker = self._worker(request.model)
        if items.is_trigger(conversation[-1]):
            request = await asyncio.to_thread(items.summary_request, request, conversation, worker.defaults)
        return await worker.prepare(request)

    def _job(self, row: Row, head: Mapping[str, Any], seals_reasoning: bool, run: Run) -> Job:
        seal = items.sealer(self.secret, row.owner, "reasoning").dumps if seals_reasoning else None
        return Job(row, Builder(head, item_ids(row.id), seal, self.reasoning_events), run)

    async def _run_row(self, row: Row, emit: Callable[[Said], None]) -> None:
        """Run a background response. Only its row has waited: the prompt is made again from its JSON text."""
        body = await asyncio.to_thread(items.body_of, row)
        defaults = self._worker(body["model"]).defaults
        request = await asyncio.to_thread(params.from_responses, body, defaults, row.owner)
        await self._run(await self._prepare(request, body["input"]), emit)

    def revive(self, row: Row) -> Job:
        """Return the job of a background response that the last process has left unfinished in the store."""
        seals_reasoning = params.SEALED_REASONING in row.request.get("include", ())
        return self._job(row, row.response, seals_reasoning, partial(self._run_row, row))

    def _refuse_failed(self, error: Mapping[str, str] | None) -> None:
        """Raise BadInput if an answer has failed. While the server stops, the code says to try elsewhere."""
        if error:
            code = "server_is_overloaded" if self.registry.stopping.is_set() else "server_error"
            raise BadInput(error["message"], None, code)

    # --- Responses: retrieving, cancelling, deleting one ----------------------------------------------------

    async def get_response(self, http: HttpRequest, visit: Visit) -> Response:
        wants_stream = query.wants_stream(http.query_params)
        if wants_stream:
            visit.enter()
        row = await self._row(http, visit)
        if not wants_stream:
            return JsonAnswer(row.response_json)
        after = query.number(http.query_params, "starting_after", -1)  # -1: all events
        if not (row.background and row.streamed):
            lacks = "stream" if row.background else "background"
            message = f"This response cannot be streamed because it was not created with {lacks}=true."
            raise BadInput(message, "stream")
        return EventStream(await self.registry.events(row), done=self._done, after=after)

    async def cancel_response(self, http: HttpRequest, visit: Visit) -> Response:
        row = await self._row(http, visit)
        if not row.background:
            raise BadInput("Cannot cancel a synchronous response.")
        row = await self.registry.cancel(row)
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

    async def _row(self, http: HttpRequest, visit: Visit) -> Row:
        """Return the response that is asked for; raises BadInput, also if there is no room to load it."""
        id_ = http.path_params["id"]
        row = await self.registry.get(id_, visit.owner, visit.load)
        if row is None:
            raise BadInput(f"Response with id '{id_}' not found.", None, "response_not_found")
        return row

    def _warning(self, request: params.Request) -> dict[str, str]:
        """Return the header of rule 3, and log the same: each name once a minute for each key."""
        if not request.not_run:
            return {}
        if names := [name for name in request.not_run if is_news((request.owner, name), self._told)]:
            log.warning("accepted, and without any effect here: %s", ", ".join(names))
        return {"Warning": f'299 - "accepted, and without any effect here: {", ".join(request.not_run)}"'}

    # --- chat completions -----------------------------------------------------------------------------------

    async def create_completion(self, http: HttpRequest, visit: Visit) -> Response:
        parsing = await receive(http, visit)
        prompt = await while_connected(self._begin_completion(parsing, visit), http.receive)
        if isinstance(prompt, Response):  # that of an upstream
            return prompt
        headers = self._warning(prompt.request)
        if prompt.request.stream:
            event_log = EventLog()
            task = asyncio.create_task(self._run_completion(prompt, event_log.extend))
            task.add_done_callback(lambda _: event_log.close())
            return EventStream(event_log, task, sse.DONE, more_headers=headers)
        chunks: list[Chunk] = []
        await while_connected(self._run_completion(prompt, chunks.extend), http.receive)
        completion = await asyncio.to_thread(completions.fold, chunks)
        self._refuse_failed(completion.get("error"))
        return await asyncio.to_thread(json_response, 200, completion, headers)

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

    async def _run_completion(self, prompt: Prompt, append: Callable[[list[Chunk]], None]) -> None:
        """Run all choices of a prompt, and append their chunks as they come."""
        request = prompt.request
        head = {
            "id": new_id("chatcmpl", "-"),  # as openai-openapi, CreateChatCompletionResponse, has it
            "created": int(time.time()),
            "model": self._spoken_name(request.model),
            "system_fingerprint": f"fp_{self._started_at:x}",  # of "the backend configuration": this start
            "service_tier": params.SERVICE_TIER,
        }
        chunks = completions.Chunks(head, new_id, request.n, request.include_usage, request.named_call)

        def add(index: int, said: Said) -> None:
            append(chunks.feed(index, said))

        append(chunks.start())
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(request.n):
                    group.create_task(self._run(prompt, partial(add, index), index))
        except* Exception:
            log.exception("a chat completion failed")
            add(0, UNFINISHED)
        append(chunks.end())

    # --- what a model says ----------------------------------------------------------------------------------

    async def _run(self, prompt: Prompt, emit: Callable[[Said], None], choice: int = 0) -> None:
        """Run one choice of a prompt, count and log it, and emit what its client is told.

        The worker's Finish comes last; if it raises or is cancelled there is none: its caller ends the run.
        """
        request = prompt.request
        seal = items.sealer(self.secret, request.owner, "compaction").dumps if request.compacts else None
        emit_told: Emit = emit
        if seal or not request.generate:
            emit_told = items.unsaid(emit, seal)
        watch = Stopwatch(self.metrics)
        restorer = Restorer(request.called)
        end = UNFINISHED  # until the worker says another end

        def emit_restored(said: Accepted | Output | Finish) -> None:
            nonlocal end
            if isinstance(said, Accepted):
                emit_told(said)
                return
            for one in restorer.feed(said):
                if isinstance(one, Finish):
                    end = one  # emitted when the run is over
                else:
                    watch.piece()
                    emit_told(one)

        try:
            await prompt.run(emit_restored, choice)
        finally:
            usage = end.usage or Usage(0, 0)
            watch.end(end.reason, usage)
            log.info("%s: %d tokens in, %d out", end.reason, usage.input_tokens, usage.output_tokens)
        emit_told(end)

    # --- models, health -------------------------------------------------------------------------------------

    async def list_models(self, _: HttpRequest, visit: Visit) -> Response:
        return json_response(200, {"object": "list", "data": list(self._models().values())})

    async def get_model(self, http: HttpRequest, visit: Visit) -> Response:
        name = http.path_params["id"]
        self._worker(name)  # raises if there is none
        return json_response(200, self._models()[self._spoken_name(name)] | {"id": name})

    async def health(self, http: HttpRequest, visit: Visit) -> Response:
        """Tell whether requests are served: not without a worker that works, nor while the server stops."""
        is_ready = not self.registry.stopping.is_set() and any(worker.alive for worker in self.workers)
        health: dict[str, Any] = {"status": "ok" if is_ready else "not ready"}
        if visit.has_key:  # what others do is shown to those with a key
            health |= self._counts() | {"background": len(self.registry.jobs)}
        return json_response(200 if is_ready else 503, health)

    async def stream_steps(self, http: HttpRequest, visit: Visit) -> Response:
        assert self.steps
        visit.enter()
        response = StreamingResponse(self.steps.read(visit, self.registry.stopping))
        response.raw_headers = SSE_HEADERS
        return response

    async def alive(self, _: HttpRequest, visit: Visit) -> Response:
        """Tell that the process answers at all; else something should start it again."""
        return json_response(200, {"status": "ok"})

    def _counts(self) -> dict[str, Any]:
        """Return what all workers hold together."""
        counts = Counter[str]()
        for worker in self.workers:
            counts.update(worker.counts())
        return dict(counts)

    def _models(self) -> dict[str, dict[str, Any]]:
        """Return the models of this machine, then those of the upstreams, as /v1/models shows them."""
        local: dict[str, dict[str, Any]] = {}
        if self.local:
            own = {"owned_by": "local", "max_model_len": self.local.engine.max_seq_len}
            local = dict.fromkeys(self.local.names, own)
        upstream = self.remote.upstreams.models() if self.remote else {}
        models = local | upstream | local  # in this order; of one name the local one
        common = {"object": "model", "created": self._started_at, "owned_by": "upstream"}
        return {name: {"id": name} | common | members for name, members in models.items()}

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
