"""The endpoints: Responses and what became of them, chat completions, models, health.

    what came --read_json()--> body --params, items--> Request --Worker.prepare()--> Prompt
    Prompt --watched()--> outputs --Builder | Chunks--> EventLog --Answer--> bytes

A response is the fold of its events. All of them go to one event log, and the client chooses how it is read:

    stream: true                        as it grows                         Answer(log)
    stream: false                       to its end, folded                  Answer(log, fold=...)
    background: true                    its first snapshot, at once         JSONResponse, and later GET
    GET ...?stream=true                 from any event on, as it grows      Answer(log, after=...)

Authority: https://platform.openai.com/docs/api-reference/responses and .../chat; where that is silent, the
behaviour that Azure/azure-sdk-for-net has probed, api-behaviour-contract.md (B1 to B37).

Rules of this file:
1. There is one path from a request to its events, whoever reads them, and whenever.
2. What can be refused is refused before a response is accepted, in the background too.
3. A response that is kept is stored before its last event is shown: EricLBuehler/mistral.rs#1946
4. While it runs, a foreground response belongs to its HTTP request: no other request can retrieve it.

Not here: parameters (request/params.py), references and chains (request/items.py), how long a response lives
(background.py), HTTP itself (streaming.py), keys and admission (middleware.py).
"""

import asyncio
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, closing
from functools import partial
from typing import Any, Literal, NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

import completions
import responses
import sse
from background import Event, EventLog, QueueFull, Reason, Registry
from channels import Accepted, Delta, Finish, Output, Usage
from gateway.relay import Refused
from gateway.remote import RemoteWorker
from request import items, params, tool_calls, tools
from request.body import read_json
from request.ids import item_ids, new_id
from request.refusals import BadInput, error_body, unsupported, wrong_value
from service import signed_content
from service.metrics import Metrics
from store import TERMINAL, Row
from streaming import Answer, wants_stream
from worker import ALIAS, LocalWorker, Outputs, Prompt, Worker

log = logging.getLogger("api")

# fmt: off
#  status        why a response of it cannot be cancelled; a cancelled one is answered like the first time
CANNOT_CANCEL = {
    "completed":  "Cannot cancel a completed response.",
    "failed":     "Cannot cancel a failed response.",
    "incomplete": "Cannot cancel a response in terminal state.",
    "queued":     "Cannot cancel a response while the server stops: its next process will run it.",
}
# fmt: on

COMPACT_QUESTION = (
    "Summarise our conversation so far for yourself: facts, decisions, open questions, results of tools. "
    "Be brief and complete. Write the summary only."
)
COMPACT_PARAMETERS = {
    "max_output_tokens": 1024,
    "truncation": "auto",
    "reasoning": {"effort": "none"},
}

NUMBER = re.compile("[0-9]{1,18}")  # in a query; int() refuses a few thousand digits in a way of its own


class Endpoint(NamedTuple):
    method: str
    path: str
    handler: Callable[[HttpRequest], Awaitable[Response]]
    held_by: Literal["body", "stream", ""] = ""  # what a slow client may hold it open with


class Checked(NamedTuple):
    """A body of the Responses API, as far as it can be checked without rendering the prompt."""

    request: params.Request
    worker: Worker
    items: list[items.Item]  # the conversation, its chain included


def encode_event(number: int, event: Event) -> bytes:
    """The frame of a Responses event, which gets its number here, as it enters the log."""
    numbered = {"type": event["type"], "sequence_number": number} | event
    return sse.encode(sse.dumps(numbered), event["type"])


def encode_chunk(_: int, chunk: completions.Chunk) -> bytes:
    return sse.encode(sse.dumps(chunk))


def unix_time() -> int:
    return int(time.time())


class Api:
    """The endpoints, over a worker here, one elsewhere or both, and one store.

    `key` seals what clients keep for us; `temporary`: background responses with store=false are taken, and
    kept for a while; `reasoning_events` is one of responses.REASONING_EVENTS.
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
        self._temporary = temporary
        self._reasoning_events = reasoning_events
        self._started_at = unix_time()
        model = local.names[0] if local else "upstream"
        self.metrics = Metrics(model, self._counts, registry.live, lambda: registry.ended)

    def endpoints(self) -> list[Endpoint]:
        # fmt: off
        return [
            #        method    path                             handler                  held by
            Endpoint("POST",   "/v1/responses",                  self.create_response,    "body"),
            Endpoint("POST",   "/v1/responses/input_tokens",     self.count_input_tokens, "body"),
            Endpoint("POST",   "/v1/responses/compact",          self.compact,            "body"),
            Endpoint("GET",    "/v1/responses/{id}",             self.get_response,       "stream"),
            Endpoint("DELETE", "/v1/responses/{id}",             self.delete_response),
            Endpoint("POST",   "/v1/responses/{id}/cancel",      self.cancel_response),
            Endpoint("GET",    "/v1/responses/{id}/input_items", self.list_input_items),
            Endpoint("POST",   "/v1/chat/completions",           self.create_completion,  "body"),
            Endpoint("GET",    "/v1/models",                     self.list_models),
            Endpoint("GET",    "/v1/models/{id:path}",           self.get_model),
            Endpoint("GET",    "/health",                        self.health),
            Endpoint("GET",    "/health/live",                   self.alive),
        ]
        # fmt: on

    # --- Responses: making one ------------------------------------------------------------------------------

    async def create_response(self, http: HttpRequest) -> Response:
        body = await read_json(http)
        owner = http.scope["owner"]
        checked = await self._checked(body, owner)
        request = checked.request
        if request.background and not (request.store or self._temporary):
            raise unsupported("background", "This server runs only what it may store: send store=true.")
        prompt = await prepared(checked.worker, request)
        warn_of_hidden_tools(request)
        row = new_row(body, checked, owner)
        try:
            job = await self._registry.start(row, self._run(prompt, row))
        except QueueFull as error:
            message = "Too many background responses wait; try again later."
            raise BadInput(message, "background", "rate_limit_exceeded") from error
        if request.background:  # it does not end with this request
            if request.stream:
                return Answer(job.log, done=self._done)
            return JSONResponse(job.log.events[0]["response"])
        if request.stream:
            return Answer(job.log, job.task, done=self._done)
        return Answer(job.log, job.task, partial(self._folded, responses.fold, 200))

    async def _checked(self, body: Any, owner: str, chain_suffices: bool = False) -> Checked:
        """What a body asks for, with all that it refers to; `chain_suffices`: it may go without `input`."""
        worker = self._worker(params.model_name(body))
        values = params.read_responses(body, worker.defaults)  # what is wrong in itself is refused first
        find = partial(self._find, owner)
        unseal = partial(signed_content.unseal, self._key, owner)
        chain, own = await items.resolve(values["input"], values["previous_response_id"], find, unseal)
        if chain_suffices and chain and not own:
            chain, own = [], chain
        request = params.responses_request(values, chain, own)
        return Checked(request, worker, items.listed(chain, own))

    def _run(self, prompt: Prompt, row: Row) -> "ResponseRun":
        seal = None
        if prompt.request.seal_reasoning:
            seal = partial(signed_content.seal, self._key, row.owner, "reasoning")
        builder = responses.Builder(row.response, item_ids(row.id), seal, self._reasoning_events)
        return ResponseRun(builder, watched(prompt, 0, self.metrics), row.background)

    def _folded(
        self, fold: Callable[[list[Event]], dict[str, Any]], status_if_failed: int, events: list[Event]
    ) -> tuple[int, dict[str, Any]]:
        """The whole answer, and its status: a failure while the server stops may be tried again elsewhere."""
        body = fold(events)
        if not body.get("error"):
            return 200, body
        if self._registry.accepts:
            return status_if_failed, body
        return 503, error_body(503, body["error"]["message"], code="server_error")

    async def take_over(self) -> None:
        """See to what the last process left in the store."""

        async def run_again(row: Row) -> ResponseRun:
            body = row.request | {"input": row.items, "previous_response_id": None}
            worker = self._worker(params.model_name(body))
            prompt = await prepared(worker, params.from_responses(body, worker.defaults))
            return self._run(prompt, row)

        await self._registry.take_over(run_again, interrupted)

    async def count_input_tokens(self, http: HttpRequest) -> Response:
        body = await read_json(http)
        if isinstance(body, dict):
            body = {"model": ALIAS} | body  # the SDK lets the model out
        checked = await self._checked(body, http.scope["owner"], chain_suffices=True)
        prompt = await prepared(checked.worker, checked.request)
        if prompt.n_tokens is None:
            raise unsupported("model", "Only the upstream that has this model could count its tokens.")
        return JSONResponse({"object": "response.input_tokens", "input_tokens": prompt.n_tokens})

    async def compact(self, http: HttpRequest) -> Response:
        """The user's messages, and one item that stands for all the rest: a summary by the model itself."""
        body = await read_json(http)
        owner = http.scope["owner"]
        checked = await self._checked(body, owner, chain_suffices=True)
        question = {"role": "user", "content": COMPACT_QUESTION}
        summarise = COMPACT_PARAMETERS | {
            "model": checked.request.model,
            "instructions": body.get("instructions"),
            "input": [*checked.items, question],
        }
        prompt = await prepared(checked.worker, params.from_responses(summarise, checked.worker.defaults))
        outputs: list[Accepted | Output | Finish] = []

        async def fill() -> None:
            async with aclosing(watched(prompt, 0, self.metrics)) as coming:
                async for output in coming:
                    outputs.append(output)

        fold = partial(self._compacted, owner, checked.items, outputs)
        return Answer(EventLog(encode_event), asyncio.create_task(fill()), fold)

    def _compacted(
        self,
        owner: str,
        conversation: list[items.Item],
        outputs: Sequence[Accepted | Output | Finish],
        _: list[Event],
    ) -> tuple[int, dict[str, Any]]:
        finals = [output for output in outputs if isinstance(output, Delta) and output.channel == "final"]
        summary = "".join(delta.text for delta in finals)
        finish = outputs[-1]
        if not isinstance(finish, Finish):
            raise AssertionError(f"expected a Finish behind what a worker says, got {finish}")
        if finish.reason not in ("stop", "length") or not summary:
            status = 500 if self._registry.accepts else 503
            message = finish.message or "The model wrote no summary."
            return status, error_body(status, message, code="server_error")
        blob = signed_content.seal(self._key, owner, "compaction", summary)
        compaction = {"id": new_id("cmp"), "type": "compaction", "encrypted_content": blob}
        users = [item for item in conversation if item["type"] == "message" and item["role"] == "user"]
        return 200, {
            "id": new_id("resp"),
            "object": "response.compaction",
            "created_at": unix_time(),
            "output": [*users, compaction],
            "usage": responses.usage_object(finish.usage or Usage(0, 0)),
        }

    # --- Responses: what became of one ----------------------------------------------------------------------

    async def get_response(self, http: HttpRequest) -> Response:
        row = await self._row(http)
        if not wants_stream(http.query_params):
            return JSONResponse(row.response)
        after = starting_after(http.query_params.get("starting_after"))
        refusal = "This response cannot be streamed because it was not created with "
        if not row.background:
            raise BadInput(refusal + "background=true.", "stream")
        if not row.streamed:
            raise BadInput(refusal + "stream=true.", "stream")
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
        status = row.response["status"]
        if status != "cancelled":
            raise BadInput(CANNOT_CANCEL[status])
        return JSONResponse(row.response)

    async def delete_response(self, http: HttpRequest) -> Response:
        row = await self._row(http)
        if row.response["status"] not in TERMINAL:
            raise BadInput("Cannot delete an in-flight response.")
        await self._registry.delete(row.id)
        return JSONResponse({"id": row.id, "object": "response", "deleted": True})

    async def list_input_items(self, http: HttpRequest) -> Response:
        row = await self._row(http)
        query = http.query_params
        limit = page_limit(query.get("limit", "20"))
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise wrong_value("order", "'asc' or 'desc'", order)
        listed = row.items if order == "asc" else row.items[::-1]
        after = query.get("after")
        if after:
            ids = [item["id"] for item in listed]
            if after not in ids:
                raise wrong_value("after", "the id of an input item", after)
            listed = listed[ids.index(after) + 1 :]
        page = listed[:limit]
        ids = [item["id"] for item in page] or [None]
        return JSONResponse(
            {
                "object": "list",
                "data": page,
                "first_id": ids[0],
                "last_id": ids[-1],
                "has_more": len(listed) > limit,
            }
        )

    async def _row(self, http: HttpRequest) -> Row:
        id_ = http.path_params["id"]
        row = await self._find(http.scope["owner"], id_)
        if row is None:
            raise BadInput(f"Response with id '{id_}' not found.", None, "response_not_found")
        return row

    async def _find(self, owner: str, id: str) -> Row | None:
        """A response, for the owner of the key that it was asked for with: to others it does not exist."""
        row = await self._registry.get(id)
        return row if row and row.owner == owner else None

    # --- chat completions -----------------------------------------------------------------------------------

    async def create_completion(self, http: HttpRequest) -> Response:
        body = await read_json(http)
        worker = self._worker(params.model_name(body))
        if isinstance(worker, RemoteWorker):
            return worker.pass_through(body)
        request = params.from_chat(body, worker.defaults)
        prompt = await prepared(worker, request)
        head = {
            "id": new_id("chatcmpl"),
            "created": unix_time(),
            "model": request.model,
            "system_fingerprint": f"fp_{self._started_at:x}",  # of "the backend configuration": this start
        }
        chunks = completions.Chunks(head, new_id, request.n, request.include_usage, request.named_call)
        events = EventLog(encode_chunk)
        filling = asyncio.create_task(self._fill_completion(events, prompt, chunks))
        if request.stream:
            return Answer(events, filling, done=sse.DONE)
        return Answer(events, filling, partial(self._folded, completions.fold, 500))

    async def _fill_completion(self, events: EventLog, prompt: Prompt, chunks: completions.Chunks) -> None:
        async def fill_choice(index: int) -> None:
            async with aclosing(watched(prompt, index, self.metrics)) as outputs:
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

    # --- models, health -------------------------------------------------------------------------------------

    async def list_models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": list(self._models().values())})

    async def get_model(self, http: HttpRequest) -> Response:
        name = http.path_params["id"]
        self._worker(name)  # raises where there is none
        models = self._models()
        model = models.get(name) or next(iter(models.values())) | {"id": name}
        return JSONResponse(model)

    async def health(self, _: HttpRequest) -> Response:
        """Whether requests are served: not without a worker that works, and not while the server stops."""
        is_ready = all(worker.alive for worker in self._workers) and self._registry.accepts
        counts = self._counts() | self._registry.counts()
        if is_ready:
            return JSONResponse({"status": "ok"} | counts)
        return JSONResponse({"status": "not ready"} | counts, 503)

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
        """The models of this machine, then those of the upstreams, as /v1/models shows them."""
        models: dict[str, dict[str, Any]] = {}
        head = {"object": "model", "created": self._started_at}
        if self._local:
            here = {"owned_by": "local", "max_model_len": self._local.engine.max_seq_len}
            for name in self._local.names:
                models[name] = {"id": name} | head | here
        if self._remote:
            for name, model in self._remote.upstreams.models().items():
                models.setdefault(name, {"id": name} | head | {"owned_by": "upstream"} | model)
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


class ResponseRun:
    """A Run of background.py: what a worker says, as the events of one response."""

    def __init__(self, builder: responses.Builder, outputs: Outputs, in_background: bool) -> None:
        self._builder = builder
        self._outputs = outputs
        self._in_background = in_background

    def start(self) -> list[Event]:
        return self._builder.start(queued=True)

    async def fill(self, log: EventLog) -> None:
        try:
            async with aclosing(self._outputs) as outputs:
                async for output in outputs:
                    log.extend(self._events(output))
        except BadInput as refusal:
            if not self._in_background:  # nothing has been sent: the refusal becomes the answer
                raise
            code = refusal.late_code if isinstance(refusal, Refused) else "invalid_prompt"
            log.extend(self._events(Finish("failed", None, refusal.message, code)))

    def end(self, reason: Reason, message: str) -> list[Event]:
        return self._events(Finish(reason, message=message))

    def _events(self, output: Accepted | Output | Finish) -> list[Event]:
        match output:
            case Accepted() if self._in_background:
                return self._builder.in_progress()
            case Accepted():
                return self._builder.start()
            case Finish():
                return self._builder.finish(output, unix_time())
            case _:
                return self._builder.feed(output)


async def prepared(worker: Worker, request: params.Request) -> Prompt:
    """The prompt of a request, made in a thread: a long one must not stop the streams. Raises BadInput."""
    return await asyncio.to_thread(worker.prepare, request)


async def watched(prompt: Prompt, choice: int, metrics: Metrics) -> Outputs:
    """What a prompt's worker says, counted and logged, its calls in the client's words.

    One Finish is the last whatever the worker does: rule 2 of worker.py, kept for it where it has a bug.
    """
    watch = metrics.run()
    started_at = time.monotonic()
    restorer = tool_calls.Restorer(prompt.request.called)
    is_accepted = False
    finish = Finish("cancelled")  # unless something else comes, the reader has left
    try:
        async with aclosing(prompt.run(choice)) as outputs:
            async for output in outputs:
                if isinstance(output, Finish):
                    finish = output
                    break
                if isinstance(output, Accepted):
                    is_accepted = True
                    yield output
                    continue
                watch.piece()
                for restored in restorer.feed(output):
                    yield restored
            else:
                finish = Finish("failed", message="The worker ended without finishing.")
    except BadInput as refusal:  # before it has accepted
        finish = Finish("failed", message=refusal.message)
        raise
    except Exception as error:
        message = f"{type(error).__name__} in the worker; the server's log has the details."
        finish = Finish("failed", message=message)
        if not is_accepted:
            raise
        log.exception("the worker failed")
    finally:
        usage = finish.usage or Usage(0, 0)
        watch.end(finish.reason, usage.input_tokens, usage.cached_tokens, usage.output_tokens)
        log_finish(prompt, finish, time.monotonic() - started_at)
    yield finish


def log_finish(prompt: Prompt, finish: Finish, seconds: float) -> None:
    usage = finish.usage or Usage(0, 0)
    n_in, n_out = prompt.n_tokens or usage.input_tokens, usage.output_tokens
    if finish.reason == "cancelled":
        log.info("nobody waits any longer: aborted after %.2f s, %d tokens in", seconds, n_in)
    else:
        rate = n_out / max(seconds, 1e-9)
        log.info("%s: %d tokens in, %d out, %.2f s, %.1f tok/s", finish.reason, n_in, n_out, seconds, rate)


def new_row(body: Mapping[str, Any], checked: Checked, owner: str) -> Row:
    """A response that is about to start, as it will be stored."""
    request = checked.request
    id_ = new_id("resp")
    head = {"id": id_, "object": "response", "created_at": unix_time(), "model": request.model}
    return Row(
        id=id_,
        born_at=time.time(),
        ended_at=None,
        kept=request.store,
        background=request.background,
        streamed=request.stream,
        request={name: value for name, value in body.items() if name != "input"},
        items=checked.items,
        response=head | request.echo,
        owner=owner,
    )


def interrupted(frames: Sequence[bytes]) -> Event:
    """The last event of a response whose process has died, behind those that it has stored."""
    events = [json.loads(event.data) for event in sse.Parser().feed(b"".join(frames))]
    return responses.interrupted(events, "interrupted by a restart")


def warn_of_hidden_tools(request: params.Request) -> None:
    types = [tool["type"] for tool in request.echo["tools"]]
    hidden = [type_ for type_ in types if type_ not in tools.TOOL_TYPES]
    if hidden:
        names = ", ".join(hidden)
        log.warning("tools that the model is not told of, for nobody here runs them: %s", names)


# --- numbers in a query -------------------------------------------------------------------------------------


def starting_after(value: str | None) -> int:
    """The number of the event behind which to start; -1: before the first."""
    if value is None:
        return -1
    if not NUMBER.fullmatch(value):
        raise wrong_value("starting_after", "a sequence number, 0 or more", value)
    return int(value)


def page_limit(value: str) -> int:
    if not NUMBER.fullmatch(value) or not 1 <= int(value) <= 100:
        raise wrong_value("limit", "an integer from 1 to 100", value)
    return int(value)
