"""The endpoints: creating, retrieving, cancelling and deleting responses; chat completions, models, health.

    HTTP request --begin()--> Job, its Prompt --Job.start(), or in the background Registry.queue()--> its log
    jobs.py fills the log; the answer reads it

A response is the fold of its events. All of them go to one event log, and the client chooses how to read it:

    stream: true                        as it grows                         EventStream(log)
    stream: false                       to its end: the last response       JsonAnswer
    background: true                    its first snapshot, at once         JsonAnswer, and later GET
    GET ...?stream=true                 from any event on, as it grows      EventStream(log, after=...)

Authority: https://platform.openai.com/docs/api-reference/responses and .../chat; if that is silent, the
behaviour that Azure/azure-sdk-for-net has probed, api-behaviour-contract.md (B1 to B37).

Rules of this file:
1. Every check comes before a response is accepted, in the background too.
2. While it runs, a foreground response belongs to its HTTP request: no other request can retrieve it.
3. The answer's Warning header and the log name each parameter that is accepted without an effect.

Why a table of endpoints and one class, and not a route decorator for each function: make_app() can wrap all
of them in the same way, and tests can list them. Why no framework that validates bodies by types: a body is
checked by the table of its parameters (request/params.py), which has the errors of OpenAI's API.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.websockets import WebSocket

import blocks
import completions
import sse
from background import Registry
from channels import Said
from event_log import EventLog
from gateway.remote import RemoteWorker
from jobs import Job, Log, run
from request import items, params, query
from request.body import Parsing, receive_body
from request.ids import item_ids, new_id
from request.refusals import BadInput, unsupported
from request.room import Visit
from responses import Builder, Event
from service.metrics import Metrics, Stopwatch
from service.steps import Steps
from service.websocket import AS_BODY, Connection
from sse import Object
from store import TERMINAL, Row
from streaming import KEEP_ALIVE, SSE_HEADERS, EventStream, JsonAnswer, json_response, while_connected
from worker import Prompt

log = logging.getLogger("api")

MakeEvents = Callable[[int, Said], list[Event]]  # writes what a choice says as the events of an API
# Api.begin(): returns (Job, Prompt). Api._prompt(): (None, Prompt), or (the answer of an upstream, None).
Begin = Callable[..., Awaitable[Any]]


@dataclass(eq=False)
class Api:
    """The endpoints, over the workers and the store that a registry has."""

    registry: Registry
    secret: bytes  # signs what clients keep for the server
    done_line: bool  # a stream of a response ends with [DONE]
    temporary: bool  # background responses with store=false are accepted, and kept for a while
    reasoning_events: str  # a key of responses.REASONING_EVENTS
    image_texts: bool  # True: the model is told that there was an image; False: images are refused
    steps: Steps | None  # of the local worker's engine, if they are shown

    def __post_init__(self) -> None:
        self.workers = self.registry.workers
        self._done = sse.DONE if self.done_line else b""
        self.metrics = Metrics(
            self.workers.spoken_name(params.ALIAS),
            lambda: self.workers.counts() | {"live": self.registry.counts()},
        )

    async def create_response(self, http: HttpRequest, visit: Visit) -> Response:
        """Answer with a stream, the whole response, or in the background its first snapshot."""
        job, prompt = await self._received(http, visit, self.begin)
        if job.row.background:
            await self.registry.queue(job)
            task = None  # it outlives this request
        else:
            await job.start(nullcontext(prompt))
            task = job.task
        if job.row.streamed:
            return EventStream(job.log, task, self._done, more_headers=prompt.headers)
        if task:
            await while_connected(task, http.receive)
            if self.registry.stopping.is_set():
                self._refuse_failed(job.shown_row().response["error"])
        return JsonAnswer(job.log.shown.response_json, headers=prompt.headers)

    async def _received(self, http: HttpRequest, visit: Visit, begin: Begin, *more: Any) -> Any:
        """Receive a body, and return what `begin` makes of it while the client is connected."""
        parsing = await receive_body(http, visit)
        visit.set_streams()
        return await while_connected(begin(parsing, visit, *more), http.receive)

    async def begin(
        self,
        parsing: Parsing,
        visit: Visit,
        purpose: str = "respond",
        memory: Mapping[str, Row] | None = None,
        before: Sequence[items.Item] = (),
    ) -> tuple[Job, Prompt]:
        """Check a body; return its job, and its prompt with the headers of the answer. Raises BadInput.

        `purpose`: "respond", "count" (its tokens) or "compact". `memory`: what a WebSocket remembers, by id;
        `before`: items that go before the input of its message.
        """
        in_websocket = memory is not None
        async with parsing as body:  # a large body keeps others waiting until step 5
            # 1. The values of its parameters, each checked by itself.
            if purpose == "count" and isinstance(body, dict):
                body = {"model": params.ALIAS} | body  # the SDK allows a body without a model
            if in_websocket:
                body |= AS_BODY
            defaults = self.workers.find(params.model_name(body)).defaults
            values = await visit.call(params.read, params.RESPONSES, body, defaults, visit.owner)
            values["input"] = [*before, *values["input"]]
            if purpose != "respond":
                values |= {"store": False, "background": False, "stream": False}
            if purpose == "compact":
                values["input"].append(items.TRIGGER)
            is_kept = values["store"] or self.temporary
            if values["background"] and (in_websocket or not is_kept):
                why = "Not over a WebSocket, nor with store=false under --no-temporary."
                raise unsupported("background", why)
            if self.image_texts:
                values["input"] = items.with_image_texts(values["input"])
            # 2. The ids of the responses that it continues or refers to.
            ids = items.named(values)
            # 3. Those responses; their bytes are held before they are loaded.
            found = {id_: await self._find(id_, visit, memory or {}) for id_ in ids}
            # 4. All that can be checked without the model, in one call; in a thread if it is large.
            request, row, conversation = await visit.call(self._check, values, found)
        # 5. What the worker alone can check: it renders, tokenises, and compiles the grammar.
        prompt = await self.workers.prepare(request, conversation)
        head = {"id": row.id, "object": "response", "created_at": int(row.born_at), **request.echo}
        head["model"] = self.workers.spoken_name(request.model)
        self._warn(prompt)
        return self._job(row, head, request.seal_reasoning), prompt

    def _check(self, values: Object, found: items.Found) -> tuple[params.Request, Row, list[items.Item]]:
        """Return what is asked for, the row of the response, and the conversation; raises BadInput."""
        chain, own = items.resolve(values, found, partial(items.sealer, self.secret, values["owner"]))
        request = params.responses_request(values, chain, own)
        conversation = [*chain, *own]
        return request, items.new_row(request, values, conversation), conversation

    def _job(self, row: Row, head: Object, seals_reasoning: bool) -> Job:
        seal = partial(items.sealed, self.secret, row.owner)
        builder = Builder(head, item_ids(row.id), seal, seals_reasoning, self.reasoning_events)
        return Job(row, builder, self.registry.archive, Stopwatch(self.metrics))

    def _warn(self, prompt: Prompt) -> None:
        """Add the header of rule 3 to those of the answer, and log the same."""
        if prompt.request.not_run:
            told = f"accepted, and without any effect here: {', '.join(prompt.request.not_run)}"
            log.warning(told)
            prompt.headers["Warning"] = f'299 - "{told}"'

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    def endpoints(self) -> list[tuple[str, str, Callable[..., Awaitable[Response]]]]:
        of_responses = partial(self.inspect, self.begin, "count")
        of_chat = partial(self.inspect, self._prompt, CHAT_RENDERED)
        of_messages = partial(self.inspect, self._prompt, MESSAGES_COUNTED)
        debug = [("GET", "/debug/steps", self.stream_steps)] if self.steps else []
        # fmt: off
        return [
            # method   path                             handler
            ("POST",   "/v1/responses",                  self.create_response),
            ("POST",   "/v1/responses/input_tokens",     partial(of_responses, COUNTED)),
            ("POST",   "/v1/responses/render",           partial(of_responses, None)),
            ("POST",   "/v1/responses/compact",          self.compact),
            ("GET",    "/v1/responses/{id}",             self.get_response),
            ("DELETE", "/v1/responses/{id}",             self.delete_response),
            ("POST",   "/v1/responses/{id}/cancel",      self.cancel_response),
            ("GET",    "/v1/responses/{id}/input_items", self.list_input_items),
            ("POST",   "/v1/chat/completions",           partial(self.answer, CHAT)),
            ("POST",   "/v1/chat/completions/render",    partial(of_chat, None)),
            ("POST",   "/v1/messages",                   partial(self.answer, MESSAGES)),
            ("POST",   "/v1/messages/count_tokens",      partial(of_messages, {})),
            ("POST",   "/v1/messages/render",            partial(of_messages, None)),
            ("GET",    "/v1/models",                     self.list_models),
            ("GET",    "/v1/models/{id:path}",           self.get_model),
            ("GET",    "/health",                        self.health),
            ("GET",    "/health/live",                   self.alive),
            *debug,
        ]
        # fmt: on

    # --- Responses: making one ------------------------------------------------------------------------------

    async def open_websocket(self, websocket: WebSocket, visit: Visit) -> None:
        visit.set_held(visit.rooms.sockets, 1)
        await Connection(websocket, visit, self.registry, self.begin).run()

    async def compact(self, http: HttpRequest, visit: Visit) -> Response:
        """Answer with the user's messages and one sealed item for all the rest: the model's own summary."""
        job, prompt = await self._received(http, visit, self.begin, "compact")
        await job.start(nullcontext(prompt))
        await while_connected(job.task, http.receive)
        response = job.shown_row().response
        self._refuse_failed(response["error"])
        retained = await visit.call(items.retained, job.row)
        told = {"object": "response.compaction", "output": [*retained, *response["output"]]}
        told |= {name: response[name] for name in ("id", "created_at", "usage")}
        return json_response(told, prompt.headers)

    async def _find(self, id: str, visit: Visit, memory: Mapping[str, Row]) -> Row | None:
        """Return a response that a request continues or refers to, None if there is none."""
        visit.is_small = False  # a chain may be large, also one that a WebSocket remembers
        if id in memory:
            return memory[id]
        row = await self.registry.get(id, visit.owner, visit.add_bytes)
        return await self.registry.to_continue(row) if row else None

    def revive(self, row: Row) -> Job:
        """Return the job of a background response that the last process has left unfinished in the store."""
        return self._job(row, row.response, params.SEALED_REASONING in row.request.get("include", ()))

    def _refuse_failed(self, error: Mapping[str, str] | None) -> None:
        """Raise BadInput if an answer has failed. While the server stops, the code says to try elsewhere."""
        if error:
            code = "server_is_overloaded" if self.registry.stopping.is_set() else "server_error"
            raise BadInput(error["message"], code=code)

    # --- Responses: retrieving, cancelling, deleting one ----------------------------------------------------

    async def get_response(self, http: HttpRequest, visit: Visit) -> Response:
        wants_stream = query.wants_stream(http.query_params)
        if wants_stream:
            visit.set_streams()
        row = await self._row(http, visit)
        if not wants_stream:
            return JsonAnswer(row.response_json)
        after = query.number(http.query_params, "starting_after", -1)  # -1: all events
        if not (row.background and row.streamed):
            lacks = "stream" if row.background else "background"
            message = f"This response cannot be streamed because it was not created with {lacks}=true."
            raise BadInput(message, param="stream")
        event_log = await self.registry.events(row)
        if event_log is None:
            await self._row(http, visit)  # raises if it has been deleted meanwhile
            raise BadInput(
                "This response can no longer be streamed: its events have expired.", param="stream"
            )
        return EventStream(event_log, done=self._done, after=after)

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
        return json_response({"id": row.id, "object": "response", "deleted": True})

    async def list_input_items(self, http: HttpRequest, visit: Visit) -> Response:
        row = await self._row(http, visit)
        return json_response(query.page(row.items, http.query_params))

    async def _row(self, http: HttpRequest, visit: Visit) -> Row:
        """Return the response that is asked for; raises BadInput, also if there is no room to load it."""
        id_ = http.path_params["id"]
        row = await self.registry.get(id_, visit.owner, visit.add_bytes)
        if row is None:
            raise BadInput(f"Response with id '{id_}' not found.", code="response_not_found")
        return row

    # --- chat completions, messages -------------------------------------------------------------------------

    async def answer(self, form: "Form", http: HttpRequest, visit: Visit) -> Response:
        """Answer with the events of a form as they come, or folded; an upstream's chat is relayed."""
        relayed, prompt = await self._received(http, visit, self._prompt, form)
        if isinstance(relayed, Response):
            return relayed
        feed = form.feed(self, prompt.request)
        if prompt.request.stream:
            event_log = EventLog()
            task = asyncio.create_task(self._run(prompt, feed, event_log))
            task.add_done_callback(lambda _: event_log.close())
            return EventStream(
                event_log, task, form.done, more_headers=prompt.headers, keep_alive=form.keep_alive
            )
        events: list[Event] = []
        await while_connected(self._run(prompt, feed, events), http.receive)
        answer = await asyncio.to_thread(form.fold, events)
        self._refuse_failed(answer.get("error"))
        return await asyncio.to_thread(json_response, answer, prompt.headers)

    async def _prompt(self, parsing: Parsing, visit: Visit, form: "Form") -> tuple[Response | None, Any]:
        """Check a body; return an upstream's answer or a prompt. Raises BadInput."""
        async with parsing as body:
            worker = self.workers.find(params.model_name(body))
            if isinstance(worker, RemoteWorker) and form.relays:
                relayed = await asyncio.to_thread(worker.pass_through, body)
                visit.set_streams(relayed.n_choices)
                return relayed, None
            if self.image_texts:
                body["messages"] = items.with_image_texts(body.get("messages"))
            request = await visit.call(form.read, body, worker.defaults, visit.owner)
            visit.set_streams(request.n)
        prompt = await worker.prepare(request)
        self._warn(prompt)
        return None, prompt

    async def _run(self, prompt: Prompt, make_events: MakeEvents, event_log: Log) -> None:
        """Run all choices of a prompt; their events go to the log as they come. Raises what refuses it."""
        await asyncio.gather(
            *(
                run(prompt, partial(make_events, choice), event_log, Stopwatch(self.metrics), choice)
                for choice in range(prompt.request.n)
            )
        )

    def _chunks(self, request: params.Request) -> MakeEvents:
        head = {
            "id": new_id("chatcmpl", "-"),  # as openai-openapi, CreateChatCompletionResponse, has it
            "created": int(time.time()),
            "model": self.workers.spoken_name(request.model),
            "system_fingerprint": f"fp_{self.workers.started_at:x}",  # "the backend configuration"
            "service_tier": params.SERVICE_TIER,
        }
        return completions.Chunks(head, new_id, request.n, request.include_usage, request.named_call).feed

    def _blocks(self, request: params.Request) -> MakeEvents:
        head = {"id": new_id("msg"), "model": self.workers.spoken_name(request.model)}
        seal = partial(items.sealed, self.secret, request.owner)
        return blocks.Builder(head, new_id, seal, end="end_turn" if request.generate else "max_tokens").feed

    # --- the prompt of a request ----------------------------------------------------------------------------

    async def inspect(
        self, begin: Begin, how: Any, members: Event | None, http: HttpRequest, visit: Visit
    ) -> Response:
        """Answer with the length of a prompt, and `members`; None: with all that the model reads."""
        _, prompt = await self._received(http, visit, begin, how)
        n_tokens = len(prompt.token_ids)  # raises if an upstream renders it
        told: Event = await asyncio.to_thread(prompt.rendered) if members is None else members
        return json_response(told | {"input_tokens": n_tokens})

    # --- models, health -------------------------------------------------------------------------------------

    async def list_models(self, _: HttpRequest, visit: Visit) -> Response:
        # Codex asks for `models`, its own descriptions of them: openai/codex#35758.
        return json_response({"object": "list", "data": [*self.workers.models().values()], "models": []})

    async def get_model(self, http: HttpRequest, visit: Visit) -> Response:
        name = http.path_params["id"]
        self.workers.find(name)  # raises if there is none
        return json_response(self.workers.models()[self.workers.spoken_name(name)] | {"id": name})

    async def health(self, http: HttpRequest, visit: Visit) -> Response:
        """Tell whether requests are served: not without a worker that works, nor while the server stops."""
        is_ready = not self.registry.stopping.is_set() and any(worker.alive for worker in self.workers.all)
        health: Object = {"status": "ok" if is_ready else "not ready"}
        if visit.has_key:  # what others do is shown to those with a key
            health |= self.workers.counts() | {"background": len(self.registry.jobs)}
            if degraded := self.workers.degraded():
                health["degraded"] = degraded
        return json_response(health, status=200 if is_ready else 503)

    async def stream_steps(self, http: HttpRequest, visit: Visit) -> Response:
        assert self.steps
        visit.set_streams()
        response = StreamingResponse(self.steps.read(visit, self.registry.stopping))
        response.raw_headers = SSE_HEADERS
        return response

    async def alive(self, _: HttpRequest, visit: Visit) -> Response:
        """Tell that the process answers at all; else something should start it again."""
        return json_response({"status": "ok"})


# --- the fold: a plain streamed request passes what stands above --------------------------------------------

COUNTED = {"object": "response.input_tokens"}

# fmt: off
#  status        why such a response cannot be cancelled; to cancel one a second time is not an error
CANNOT_CANCEL = {
    "completed":  "Cannot cancel a completed response.",
    "failed":     "Cannot cancel a failed response.",
    "incomplete": "Cannot cancel a response in terminal state.",
    "queued":     "Cannot cancel a response while the server stops: its next process will run it.",
}
# fmt: on


class Form(NamedTuple):
    """How an API reads a request, and writes the answer."""

    read: Callable[..., params.Request]
    feed: Callable[[Api, params.Request], MakeEvents]  # makes what writes the answer
    fold: Callable[[Iterable[Event]], Event]  # events -> the answer without `stream`
    done: bytes  # ends a stream
    keep_alive: bytes
    relays: bool  # an upstream's own answers


# fmt: off
#               read                  builder      fold              done      keep-alive   relays
CHAT     = Form(params.from_chat,     Api._chunks, completions.fold, sse.DONE, KEEP_ALIVE,  True)
MESSAGES = Form(params.from_messages, Api._blocks, blocks.fold,      b"",      blocks.PING, False)
# fmt: on
CHAT_RENDERED = CHAT._replace(relays=False)
MESSAGES_COUNTED = MESSAGES._replace(read=partial(params.from_messages, counts=True))
