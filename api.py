"""The endpoints: Responses and what became of them, chat completions, models, health.

    body --params--> Request --worker--> outputs --responses | completions--> EventLog --Answer--> bytes

Authority: https://platform.openai.com/docs/api-reference/responses and .../chat; where that is silent, the
behaviour that Azure/azure-sdk-for-net has probed, api-behaviour-contract.md (B1 to B37).

Rules of this file:
1. One path: a producer fills an event log, whoever reads it and whenever.
2. What can be refused is refused before a response is accepted, in the background too.
3. A response that is kept is stored before its last event is seen: EricLBuehler/mistral.rs#1946
4. While it runs, a foreground response belongs to its request: no other can look it up.

Not here: parameters (request/params.py), the life of background responses (background.py), HTTP itself
(streaming.py).
"""

import asyncio
import itertools
import json
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, closing
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import completions
import responses
import sse
from background import EventLog, Producer, QueueFull, Registry
from channels import Accepted, Delta, Finish, Output, Usage
from gateway.relay import Refused
from gateway.remote import RemoteWorker
from request import params, tool_calls, tools
from request.body import read_json
from request.messages import MAX_ITEMS
from request.refusals import BadInput, error_body, unsupported, wrong_value
from request.validation import required, text
from service import signed_content
from service.metrics import Metrics
from store import TERMINAL, Row
from streaming import Answer, Whole, error_response, new_id, now, wants_stream
from worker import ALIAS, LocalWorker

log = logging.getLogger("api")

# Of a response that has ended; a second cancel of a cancelled one is answered like the first.
CANNOT_CANCEL = {
    "completed": "Cannot cancel a completed response.",
    "failed": "Cannot cancel a failed response.",
    "incomplete": "Cannot cancel a response in terminal state.",
    "queued": "Cannot cancel a response while the server stops: its next process will run it.",
}
COMPACT = (
    "Summarise our conversation so far for yourself: facts, decisions, open questions, results of tools. "
    "Be brief and complete. Write the summary only."
)
COMPACT_TOKENS = 1024

NUMBER = re.compile("[0-9]{1,18}")  # in a query; int() refuses a few thousand digits in a way of its own


def encode_event(number: int, event: dict[str, Any]) -> bytes:
    """A Responses event gets its number here, as it enters the log."""
    numbered = {"type": event["type"], "sequence_number": number} | event
    return sse.encode(sse.dumps(numbered), event["type"])


def encode_chunk(_: int, chunk: dict[str, Any]) -> bytes:
    return sse.encode(sse.dumps(chunk))


def item_ids(response_id: str) -> Callable[[str], str]:
    """Draws the ids of a response's items: each says which response it is of, as OpenAI's do."""
    numbers = itertools.count()
    return lambda prefix: f"{prefix}_{response_id.removeprefix('resp_')}{next(numbers):08x}"


def response_of(item_id: str) -> str:
    """Where an item is, if it is of item_ids()."""
    return "resp_" + item_id.partition("_")[2][:-8]


class Prompt(Protocol):
    """A checked request, ready for its worker."""

    @property
    def request(self) -> params.Request: ...
    @property
    def n_tokens(self) -> int | None: ...  # None: the worker cannot know


class Worker(Protocol):
    """What turns a Request into what a model says: worker.py here, gateway/remote.py elsewhere.

    prepare() raises BadInput for what it refuses. run() too, before it says Accepted; then it never raises
    for the request's sake, and ends with one Finish.
    """

    def prepare(self, request: params.Request) -> Any: ...  # the Prompt that its own run() takes
    def run(self, prompt: Any, choice: int = 0) -> AsyncGenerator[Accepted | Output | Finish]: ...
    def counts(self) -> dict[str, int]: ...
    @property
    def alive(self) -> bool: ...  # not for ever unable to serve
    def busy(self) -> bool: ...
    async def close(self) -> None: ...


class Api:
    """The endpoints, over a worker here, one elsewhere or both, and one store.

    `key` seals what clients keep for us.
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
    ) -> None:
        self._local = local
        self._remote = remote
        self._workers: list[Worker] = [worker for worker in (local, remote) if worker]
        self._registry = registry
        self._key = key
        self._done = sse.DONE if done_line else b""
        self._reasoning_events = reasoning_events  # one of responses.REASONING_EVENTS
        self._temporary = temporary  # background responses that are not to be stored: kept for a while
        self._created = now()
        self.metrics = Metrics(
            local.names[0] if local else "upstream", self._counts, registry.live, lambda: registry.ended
        )

    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses", self.create_response, methods=["POST"]),
            Route("/v1/responses/input_tokens", self.count_input_tokens, methods=["POST"]),
            Route("/v1/responses/compact", self.compact, methods=["POST"]),
            Route("/v1/responses/{id}", self.get_response, methods=["GET"]),
            Route("/v1/responses/{id}", self.delete_response, methods=["DELETE"]),
            Route("/v1/responses/{id}/cancel", self.cancel_response, methods=["POST"]),
            Route("/v1/responses/{id}/input_items", self.list_input_items, methods=["GET"]),
            Route("/v1/chat/completions", self.create_completion, methods=["POST"]),
            Route("/v1/models", self.list_models, methods=["GET"]),
            Route("/v1/models/{id:path}", self.get_model, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/health/live", self.alive, methods=["GET"]),
        ]

    # --- Responses: making one -----------------------------------------------------------------------------

    async def create_response(self, http: HttpRequest) -> Response:
        body = await self._read(http)
        request, items = await self._ask(http, body)
        if request.background and not (request.store or self._temporary):
            raise unsupported("background", "This server runs only what it may store: send store=true.")
        prompt = await self._prepare(request)
        types = [tool["type"] for tool in request.echo["tools"]]
        if hidden := [name for name in types if name not in tools.TOOL_TYPES]:
            log.warning(
                "tools that the model is not told of, for nobody here runs them: %s", ", ".join(hidden)
            )
        id_ = new_id("resp")
        head = {"id": id_, "object": "response", "created_at": now(), "model": request.model}
        row = Row(
            id=id_,
            born_at=time.time(),
            ended_at=None,
            kept=request.store,
            background=request.background,
            streamed=request.stream,
            request={k: v for k, v in body.items() if k != "input"},
            items=items,
            response=head | request.echo,
            owner=http.scope["owner"],
        )
        producer = self._producer(prompt, row, request.background)
        if request.background:
            return await self._in_background(row, producer, request.stream)
        events = self._registry.foreground_log(row if request.store else None)
        whole = None if request.stream else self._whole(responses.fold, 200)
        return Answer(events, self._in_foreground(events, producer), whole, self._done)

    async def _in_background(self, row: Row, producer: Producer, stream: bool) -> Response:
        try:
            events = await self._registry.submit(row, producer)
        except QueueFull:
            full = "Too many background responses wait; try again later."
            return error_response(429, full, "background", "rate_limit_exceeded")
        return Answer(events, done=self._done) if stream else JSONResponse(events.events[0]["response"])

    async def _in_foreground(self, events: EventLog, producer: Producer) -> None:
        """When its client leaves it is cancelled, and what it has said can be retrieved (B17)."""
        with closing(events):
            try:
                await producer.fill(events)
            except asyncio.CancelledError:
                if events.status and not events.ended:
                    events.extend(producer.end("cancelled", ""))
                await events.written()
                raise

    def _producer(self, prompt: Prompt, row: Row, queued: bool) -> Producer:
        """What makes the events of one response, in the foreground or, `queued`, in its turn."""
        seal = partial(signed_content.seal, self._key, "reasoning", row.owner)
        seals = prompt.request.seal_reasoning
        builder = responses.Builder(
            row.response, item_ids(row.id), seal if seals else None, self._reasoning_events
        )

        async def fill(events: EventLog) -> None:
            try:
                async with aclosing(self._outputs(prompt, 0)) as outputs:
                    async for output in outputs:
                        match output:
                            case Accepted():
                                events.extend(builder.run() if queued else builder.start())
                            case Finish():
                                events.extend(builder.finish(output, now()))
                            case _:
                                events.extend(builder.feed(output))
            except BadInput as refusal:
                if not queued:
                    raise
                code = refusal.late_code if isinstance(refusal, Refused) else "invalid_prompt"
                events.extend(builder.finish(Finish("failed", None, refusal.message, code), now()))

        def end(reason: Any, message: str) -> list[responses.Event]:
            return builder.finish(Finish(reason, message=message), now())

        return Producer(lambda: builder.start(queued), fill, end)

    async def take_over(self) -> None:
        """See to what the last process left in the store."""

        async def producer(row: Row) -> Producer:
            body = row.request | {"input": row.items, "previous_response_id": None}
            prompt = await self._prepare(params.from_responses(body, self._defaults_for(body)))
            return self._producer(prompt, row, queued=True)

        def interrupted(frames: list[bytes]) -> responses.Event:
            events = [json.loads(event.data) for event in sse.Parser().feed(b"".join(frames))]
            return responses.interrupted(events, "interrupted by a restart")

        await self._registry.take_over(producer, interrupted)

    async def count_input_tokens(self, http: HttpRequest) -> Response:
        body = await self._read(http)
        named = {"model": ALIAS} | body if isinstance(body, dict) else body  # the SDK lets the model out
        asked, _ = await self._ask(http, named, chain_suffices=True)
        prompt = await self._prepare(asked)
        if prompt.n_tokens is None:
            raise unsupported("model", "Only the upstream that has this model could count its tokens.")
        return JSONResponse({"object": "response.input_tokens", "input_tokens": prompt.n_tokens})

    async def compact(self, http: HttpRequest) -> Response:
        """The user's messages, and one item that stands for all the rest: a summary by the model itself."""
        body = await self._read(http)
        asked, items = await self._ask(http, body, chain_suffices=True)
        question = {"role": "user", "content": COMPACT}
        ask = {"model": asked.model, "instructions": body.get("instructions"), "input": [*items, question]}
        limits = {"max_output_tokens": COMPACT_TOKENS, "truncation": "auto", "reasoning": {"effort": "none"}}
        prompt = await self._prepare(params.from_responses(ask | limits, self._defaults_for(ask)))
        said: list[Accepted | Output | Finish] = []

        async def fill() -> None:
            async with aclosing(self._outputs(prompt, 0)) as outputs:
                said.extend([output async for output in outputs])

        owner = http.scope["owner"]
        return Answer(EventLog(encode_event), fill(), lambda _: self._compacted(owner, items, said))

    def _compacted(
        self, owner: str, items: list[dict[str, Any]], said: Sequence[Accepted | Output | Finish]
    ) -> tuple[int, dict[str, Any]]:
        summary = "".join(o.text for o in said if isinstance(o, Delta) and o.channel == "final")
        finish = said[-1]
        if not isinstance(finish, Finish) or finish.reason not in ("stop", "length") or not summary:
            failure = finish.message if isinstance(finish, Finish) else ""
            status = 500 if self._registry.accepts else 503
            return status, error_body(status, failure or "The model wrote no summary.", code="server_error")
        blob = signed_content.seal(self._key, "compaction", owner, summary)
        users = [item for item in items if item["type"] == "message" and item["role"] == "user"]
        return 200, {
            "id": new_id("resp"),
            "object": "response.compaction",
            "created_at": now(),
            "output": [*users, {"id": new_id("cmp"), "type": "compaction", "encrypted_content": blob}],
            "usage": responses.usage_object(finish.usage or Usage(0, 0)),
        }

    async def _read(self, http: HttpRequest) -> Any:
        """The body, with the items that we keep, and those that clients keep for us opened."""
        body, owner = await read_json(http), http.scope["owner"]
        found = body.get("input") if isinstance(body, dict) else None
        items: list[Any] = found if isinstance(found, list) else []
        kept: dict[str, list[dict[str, Any]]] = {}
        for i, item in enumerate(items[:MAX_ITEMS]):  # with more it is refused
            match item:
                case {"type": "compaction"}:
                    item["summary"] = self._opened(owner, item, i)
                case {"type": "reasoning", "encrypted_content": blob} if blob and not item.get("content"):
                    item["content"] = [{"type": "reasoning_text", "text": self._opened(owner, item, i)}]
                case dict() if _is_reference(item):
                    items[i] = await self._referred(http, required(item, "id", text, f"input[{i}]"), kept, i)
        return body

    async def _referred(
        self, http: HttpRequest, id: str, kept: dict[str, list[dict[str, Any]]], i: int
    ) -> dict[str, Any]:
        """An item that a stored response has said; `kept`: of the responses that have been looked up."""
        home = response_of(id)
        if home not in kept:
            row = await self._find(http, home)
            kept[home] = row.response["output"] if row else []
        if found := [item for item in kept[home] if item["id"] == id]:
            return found[0]
        raise BadInput(f"Item with id '{id}' not found.", f"input[{i}].id", "item_not_found")

    def _opened(self, owner: str, item: Mapping[str, Any], i: int) -> str:
        try:
            return signed_content.unseal(self._key, item["type"], owner, str(item.get("encrypted_content")))
        except signed_content.BadSeal as error:
            raise BadInput(str(error), f"input[{i}].encrypted_content") from error

    async def _context(self, http: HttpRequest, id_: str | None) -> list[dict[str, Any]]:
        """The items of the chain that a request continues."""
        if id_ is None:
            return []
        row = await self._find(http, id_)
        if row is None:
            message = f"Previous response with id '{id_}' not found."
            raise BadInput(message, "previous_response_id", "previous_response_not_found")
        if row.response["status"] not in TERMINAL:
            raise BadInput(f"Previous response with id '{id_}' has not ended yet.", "previous_response_id")
        return row.context

    async def _ask(
        self, http: HttpRequest, body: Any, chain_suffices: bool = False
    ) -> tuple[params.Request, list[dict[str, Any]]]:
        """What is asked, and all items of the conversation; `chain_suffices`: `input` may be left out."""
        values = params.read_responses(
            body, self._defaults_for(body)
        )  # what is wrong in itself is told first
        context = await self._context(http, values["previous_response_id"])
        if chain_suffices and context and not values["input"]:
            values["input"], context = context, []
        request = params.continued(values, context)
        return request, responses.input_items(values["input"], context, new_id)

    async def _prepare(self, request: params.Request) -> Prompt:
        # In a thread: a long prompt must not stop the streams.
        prompt: Prompt = await asyncio.to_thread(self._worker(request.model).prepare, request)
        return prompt

    def _worker(self, model: str) -> Worker:
        """The one that serves a model; raises BadInput."""
        if self._local and self._is_here(model):
            return self._local
        if self._remote and self._remote.serves(model, ALIAS):
            return self._remote
        there = ", ".join(map(repr, (*self._models(), ALIAS)))
        raise BadInput(f"The model '{model}' does not exist; there is {there}.", "model", "model_not_found")

    def _is_here(self, model: Any) -> bool:
        return self._local is not None and model in (*self._local.names, ALIAS)

    def _defaults_for(self, body: Any) -> Mapping[str, Any]:
        """Presets of parameters, of the model here; what one elsewhere presets nobody knows here."""
        named = body.get("model") if isinstance(body, dict) else None
        return self._local.defaults if self._local and self._is_here(named) else {}

    # --- Responses: what became of one --------------------------------------------------------------------

    async def get_response(self, http: HttpRequest) -> Response:
        row = await self._row(http)
        if not wants_stream(http.query_params):
            return JSONResponse(row.response)
        after = _starting_after(http.query_params.get("starting_after"))
        refused = "This response cannot be streamed because it was not created with "
        if not row.background:
            raise BadInput(refused + "background=true.", "stream")
        if not row.streamed:
            raise BadInput(refused + "stream=true.", "stream")
        events = await self._registry.events(row.id)
        if events is None:
            raise BadInput("This response can no longer be streamed: its events have expired.", "stream")
        return Answer(events, done=self._done, after=after)

    async def cancel_response(self, http: HttpRequest) -> Response:
        row = await self._row(http)
        if not row.background:
            raise BadInput("Cannot cancel a synchronous response.")
        await self._registry.cancel(row.id)
        row = await self._row(http)
        if row.response["status"] != "cancelled":
            raise BadInput(CANNOT_CANCEL[row.response["status"]])
        return JSONResponse(row.response)

    async def delete_response(self, http: HttpRequest) -> Response:
        row = await self._row(http)
        if row.response["status"] not in TERMINAL:
            raise BadInput("Cannot delete an in-flight response.")
        await self._registry.delete(row.id)
        return JSONResponse({"id": row.id, "object": "response", "deleted": True})

    async def list_input_items(self, http: HttpRequest) -> Response:
        row, query = await self._row(http), http.query_params
        limit = _limit(query.get("limit", "20"))
        if (order := query.get("order", "desc")) not in ("asc", "desc"):
            raise wrong_value("order", "'asc' or 'desc'", order)
        items = row.items if order == "asc" else row.items[::-1]
        if after := query.get("after"):
            ids = [item["id"] for item in items]
            if after not in ids:
                raise wrong_value("after", "the id of an input item", after)
            items = items[ids.index(after) + 1 :]
        page = items[:limit]
        ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        return JSONResponse({"object": "list", "data": page, **ends, "has_more": len(items) > limit})

    async def _row(self, http: HttpRequest) -> Row:
        id_ = http.path_params["id"]
        row = await self._find(http, id_)
        if row is None:
            raise BadInput(f"Response with id '{id_}' not found.", None, "response_not_found")
        return row

    async def _find(self, http: HttpRequest, id: str) -> Row | None:
        """A response, for the key that it was asked for with: to any other it does not exist."""
        row = await self._registry.get(id)
        return row if row and row.owner == http.scope["owner"] else None

    # --- chat completions ----------------------------------------------------------------------------------

    async def create_completion(self, http: HttpRequest) -> Response:
        body = await read_json(http)
        name = body.get("model") if isinstance(body, dict) else None
        if self._remote and isinstance(name, str) and self._worker(name) is self._remote:
            return self._remote.pass_through(body)
        request = params.from_chat(body, self._defaults_for(body))
        prompt = await self._prepare(request)
        head = {
            "id": new_id("chatcmpl"),
            "created": now(),
            "model": request.model,
            "system_fingerprint": f"fp_{self._created:x}",  # of "the backend configuration": this start
        }
        events = EventLog(encode_chunk)
        chunks = completions.Chunks(head, new_id, request.n, request.include_usage, request.named_call)
        whole = None if request.stream else self._whole(completions.fold, 500)
        return Answer(events, self._fill_completion(events, prompt, chunks), whole, sse.DONE)

    async def _fill_completion(self, events: EventLog, prompt: Prompt, chunks: completions.Chunks) -> None:
        async def fill_choice(index: int) -> None:
            async with aclosing(self._outputs(prompt, index)) as outputs:
                async for output in outputs:
                    match output:
                        case Accepted():
                            pass
                        case Finish():
                            events.extend(chunks.finish(index, output))
                        case _:
                            events.extend(chunks.feed(index, output))

        with closing(events):
            events.extend(chunks.start())
            async with asyncio.TaskGroup() as group:
                for index in range(prompt.request.n):
                    group.create_task(fill_choice(index))
            events.extend(chunks.end())

    def _whole(self, fold: Callable[[list[dict[str, Any]]], dict[str, Any]], failed: int) -> Whole:
        """What the events amount to; `failed`: its status then, but at a stop, when it may be tried again."""

        def whole(events: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
            body = fold(events)
            if not body.get("error"):
                return 200, body
            if self._registry.accepts:
                return failed, body
            return 503, error_body(503, body["error"]["message"], code="server_error")

        return whole

    # --- models, health ------------------------------------------------------------------------------------

    async def list_models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": list(self._models().values())})

    async def get_model(self, http: HttpRequest) -> Response:
        name = http.path_params["id"]
        self._worker(name)
        models = self._models()
        return JSONResponse(models.get(name) or next(iter(models.values())) | {"id": name})

    async def health(self, _: HttpRequest) -> Response:
        """Whether requests are served: not without a worker that works, and not while the server stops."""
        ready = all(worker.alive for worker in self._workers) and self._registry.accepts
        counts = self._counts() | self._registry.counts()
        return JSONResponse({"status": "ok" if ready else "not ready"} | counts, 200 if ready else 503)

    async def alive(self, _: HttpRequest) -> Response:
        """Whether the process answers at all; else somebody should start it again."""
        return JSONResponse({"status": "ok"})

    def _counts(self) -> dict[str, int]:
        """What all workers hold together."""
        counts: Counter[str] = Counter()
        for worker in self._workers:
            counts.update(worker.counts())
        return dict(counts)

    def _models(self) -> dict[str, dict[str, Any]]:
        """Those here, then those of the upstreams, as /v1/models shows them."""
        head = {"object": "model", "created": self._created}
        found = {}
        if self._local:
            length = self._local.engine.max_seq_len
            found = {n: head | {"owned_by": "local", "max_model_len": length} for n in self._local.names}
        elsewhere = self._remote.upstreams.models() if self._remote else {}
        others = {
            n: head | {"owned_by": "upstream"} | model for n, model in elsewhere.items() if n not in found
        }
        return {name: {"id": name} | model for name, model in (found | others).items()}

    # --- the worker -----------------------------------------------------------------------------------------

    async def _outputs(self, prompt: Prompt, choice: int) -> AsyncGenerator[Accepted | Output | Finish]:
        """What the worker says, with exactly one Finish at the end, whatever happens to it."""
        started, finish, watch = time.monotonic(), Finish("cancelled"), self.metrics.run()
        restorer, accepted = tool_calls.Restorer(prompt.request.called), False
        try:
            async with aclosing(self._worker(prompt.request.model).run(prompt, choice)) as outputs:
                async for output in outputs:
                    if isinstance(output, Finish):
                        finish = output
                        break
                    if isinstance(output, Accepted):
                        accepted = True
                        yield output
                        continue
                    watch.piece()
                    for restored in restorer.feed(output):
                        yield restored
            if finish.reason == "cancelled":
                finish = Finish("failed", message="The worker ended without finishing.")
        except BadInput as refusal:  # before it has accepted
            finish = Finish("failed", message=refusal.message)
            raise
        except Exception as error:
            message = f"{type(error).__name__} in the worker; the server's log has the details."
            finish = Finish("failed", message=message)
            if not accepted:
                raise
            log.exception("the worker failed")
        finally:
            usage = finish.usage or Usage(0, 0)
            watch.end(finish.reason, usage.input_tokens, usage.cached_tokens, usage.output_tokens)
            _log_finish(prompt, finish, time.monotonic() - started)
        yield finish


def _is_reference(item: Mapping[str, Any]) -> bool:
    """The SDK's type of one may be null."""
    nameless = item.get("type") is None and item.get("role") is None and item.get("id") is not None
    return nameless or item.get("type") == "item_reference"


def _log_finish(prompt: Prompt, finish: Finish, seconds: float) -> None:
    n_in = prompt.n_tokens or (finish.usage.input_tokens if finish.usage else 0)
    n_out = finish.usage.output_tokens if finish.usage else 0
    if finish.reason == "cancelled":
        log.info("nobody waits any longer: aborted after %.2f s, %d tokens in", seconds, n_in)
    else:
        rate = n_out / max(seconds, 1e-9)
        log.info("%s: %d tokens in, %d out, %.2f s, %.1f tok/s", finish.reason, n_in, n_out, seconds, rate)


def _starting_after(value: str | None) -> int:
    """-1: from the first event on."""
    if value is not None and not NUMBER.fullmatch(value):
        raise wrong_value("starting_after", "a sequence number, 0 or more", value)
    return -1 if value is None else int(value)


def _limit(value: str) -> int:
    if not (NUMBER.fullmatch(value) and 1 <= int(value) <= 100):
        raise wrong_value("limit", "an integer from 1 to 100", value)
    return int(value)
