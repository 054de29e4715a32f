"""The Responses API over a WebSocket: its messages are turns, and the events of each turn are messages.

    message --parsed()--> body of POST /v1/responses --begin()--> Job --log.read()--> messages

A connection has lanes: one for each `stream_id` that its client has named, and one without a name. In a lane
the turns run one after the other, in the order in which they came; lanes run at the same time. Here one
without a name has two turns, and a second lane one; "<" is from the client:

    < {"type": "response.create", ...}            lane ""   it runs
    < {"type": "response.create", ...}            lane ""   it waits for the one before it
    < {..., "stream_id": "b"}                     lane "b"  it runs
    > {"type": "response.created", ...}           lane ""
    > {"type": "response.created", ..., "stream_id": "b"}
    > {"type": "response.completed", ...}         lane ""   the second one runs

Authority: https://developers.openai.com/api/docs/guides/websocket-mode;
https://www.openresponses.org/specification, WebSocket transport.

Rules of this file:
1. A turn is a request like any other, and sends the frames of its log without their SSE lines. While a turn
   waits, we keep the text of its message and parse it again later: a JSON value may take fifty times as much.
2. We report an error in a message by a message, with the status that HTTP would have, and the connection
   lives on.
3. The last response of each lane can be continued without a store, if there is room to remember it. Its
   lane forgets it if a turn fails in its run, or is refused and would have continued it.
4. A client may send input while a response runs (response.steer). An accepted steer waits for a successor of
   that response, which takes it as input, or comes back to the client: it is never lost. The response ends
   after the deltas that are in its log, and its successor begins at once; a response that has called a tool
   goes on to its end, and its successor is the turn that brings the results.
5. A client that leaves ends its turns. At a stop of the server running turns go on to their end; we refuse
   waiting turns, and read nothing more.
6. The messages of all connections are taken one after another, by turns of the owners.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

import sse
from background import Registry
from jobs import STEERED, Job
from request import params
from request.body import Parsing, parsed
from request.ids import new_id
from request.items import Item
from request.refusals import BadInput, error_body, wrong_value
from request.room import Visit
from request.validation import mapping, string
from store import Row
from streaming import cancel

log = logging.getLogger("websocket")

MAX_STEERS = 8  # that wait for one successor
MAX_LANES = 32  # with a name: the guide's limit
lane_name = string(0, 256)  # each event of the lane repeats it
AS_BODY = {"type": None, "stream_id": None, "stream": True}  # a body has these for a message's members
SUBPROTOCOL = "responses"  # for pages: a browser expects the server to select a protocol that it offered
SERVICE_RESTART = 1012  # the code of a close: RFC 6455, section 7.4.1


def stubs_of(output: list[Item]) -> list[Item]:
    """Return the results that the calls in an output wait for, without their texts."""
    return [
        {"type": f"{call['type']}_output", "call_id": call["call_id"], "name": call["name"]}
        for call in output
        if "call_id" in call
    ]


# --- a connection -------------------------------------------------------------------------------------------


@dataclass
class Lane:
    """Turns that run one after another."""

    name: str
    visit: Visit  # the room that its turn holds
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # first come, first served
    job: Job | None = None  # whose events are being sent
    next_number: int = 0  # the next sequence_number while no response is running
    last: Row | None = None  # its last response: rule 3
    response_id: str = ""  # of its newest response


@dataclass
class Connection:
    """One WebSocket, from its handshake to its close."""

    websocket: WebSocket
    visit: Visit  # holds what it remembers
    registry: Registry
    begin: Callable[..., Awaitable[tuple[Job, Any]]]  # Api.begin()

    async def run(self) -> None:
        """Serve the connection until the client leaves, or the server stops."""
        offered = self.websocket.scope["subprotocols"]
        await self.websocket.accept(SUBPROTOCOL if SUBPROTOCOL in offered else None)
        self.lanes = dict[str, Lane]()  # by name
        self.steers = dict[str, list[Item]]()  # by the response that they steer: rule 4
        try:
            async with asyncio.TaskGroup() as self.tasks:  # turns, and what reads their messages
                receiving = self.tasks.create_task(self._receive())
                await self.registry.stopping.wait()
                receiving.cancel()
            await self.websocket.close(SERVICE_RESTART)
        except* WebSocketDisconnect:
            pass  # the client has left, and all tasks have ended with it

    # --- what comes -----------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        """Take one message after another, until the client leaves."""
        while True:
            message = await self.websocket.receive()
            if message["type"] == "websocket.disconnect":
                raise WebSocketDisconnect
            try:
                await self._read(message["bytes"])
            except BadInput as refusal:
                await self._refuse(refusal)
            await self.visit.until_its_turn()

    async def _read(self, json_text: bytes) -> None:
        """Do what a message asks for; raises BadInput."""
        max_bytes = self.visit.rooms.max_body_bytes
        if len(json_text) > max_bytes:
            raise BadInput(
                f"Expected at most {max_bytes} bytes, see --max-body; got {len(json_text)}.",
                code="websocket_message_too_large",
            )
        async with parsed(json_text, self.visit) as message:
            type_ = mapping(message, "message").pop("type", None)
            name = lane_name(message.get("stream_id") or "", "stream_id")
            if len(self.lanes.keys() | {name, ""}) > 1 + MAX_LANES:
                expected = f"Expected at most {MAX_LANES} different values of 'stream_id' on a connection."
                raise BadInput(expected, param="stream_id", code="websocket_stream_limit_reached")
            lane = self.lanes.setdefault(name, Lane(name, self.visit))
        if type_ == "response.create":
            self.tasks.create_task(self._take_turn(lane, json_text, str(message.get("previous_response_id"))))
        elif type_ == "response.steer":
            await self._steer(lane, message)
        elif type_ != "response.processed":  # this one says that Codex has read an answer
            await self._refuse(wrong_value("type", "'response.create'", type_), name)

    async def _steer(self, lane: Lane, steer: Item) -> None:
        """Accept input for the response that it names, or give it back: rule 4."""
        parent_id = steer.get("previous_response_id")
        lane = next((each for each in self.lanes.values() if each.response_id == parent_id), lane)
        job = lane.job
        items = list[Item]()
        with suppress(BadInput):
            items = params.input_items(steer.get("input"), "input")
        if lane.response_id != parent_id:
            code = "response_not_found"
        elif not job:
            code = "response_already_completed"
        elif len(self.steers.get(parent_id, ())) == MAX_STEERS:
            code = "too_many_pending_steers"
        elif not items:
            code = "invalid_input"
        else:
            steer["id"] = new_id("steer")
            await self._tell(lane, "accepted", [steer])
            self.steers.setdefault(parent_id, []).append(steer)
            if not job.builder.has_called:
                job.stop(STEERED)
            return
        refusal = BadInput("Send the input with response.create.", code=code)
        await self._tell(lane, "failed", [steer], **error_body(refusal))

    async def _tell(self, lane: Lane, event: str, steers: list[Item], **members: Any) -> None:
        """Send what becomes of steers, with the next numbers of their lane. Raises BadInput: no room."""
        for steer in steers:
            told = {"type": f"response.steer.{event}", "steer": steer, **members}
            if lane.job:  # its log gives the number, and keeps the event until the turn ends
                lane.visit.add_bytes(len(sse.dumps(told)))
                lane.job.log.extend([told])
            else:
                await self._send(sse.dumps(told | {"sequence_number": lane.next_number}), lane.name)
                lane.next_number += 1

    # --- a turn ---------------------------------------------------------------------------------------------

    async def _take_turn(self, lane: Lane, json_text: bytes, previous_id: str) -> None:
        """Run a turn after those before it in its lane, then the successors that it is steered to."""
        try:
            with self.visit.rooms.visit(self.visit.owner) as visit:
                visit.add_bytes(len(json_text))
                visit.set_streams()
                async with lane.turn:
                    lane.visit = visit
                    job = await self._respond(lane, parsed(json_text, visit), previous_id)
                    while steers := self.steers.get(job.row.id):
                        stubs = stubs_of(job.builder.output)
                        if lane.last and stubs:
                            why = "waiting_for_required_input"
                            await self._tell(lane, "pending", steers, reason=why, required_input=stubs)
                            break
                        successor = job.row.request | {"previous_response_id": job.row.id}
                        with suppress(BadInput):  # what it would have taken has come back
                            job = await self._respond(lane, nullcontext(successor), job.row.id)
        except BadInput as refusal:
            if lane.last and lane.last.id == previous_id:
                lane.last = None
            await self._refuse(refusal, lane.name)

    async def _respond(self, lane: Lane, parsing: Parsing, previous_id: str) -> Job:
        """Run a response, with what has been sent to steer the one that it continues. Raises BadInput."""
        steers = self.steers.pop(previous_id, [])
        try:
            if self.registry.stopping.is_set():
                raise BadInput("The server is about to stop.", code="server_is_overloaded")
            items = [item for steer in steers for item in params.input_items(steer["input"], "input")]
            job, prompt = await self.begin(parsing, lane.visit, memory=self.memory(), before=items)
            await self._run(lane, job, prompt)
        except BadInput as refusal:
            why_not = BadInput(refusal.message, code="successor_creation_failed")
            await self._tell(lane, "failed", steers, **error_body(why_not))
            raise
        return job

    async def _run(self, lane: Lane, job: Job, prompt: Any) -> None:
        """Run a response and send its events; if the connection ends, it does not run on."""
        lane.response_id = job.row.id
        lane.job = job  # until all is sent: the log numbers an event for a client that steers meanwhile
        try:
            await job.start(nullcontext(prompt))
            async with aclosing(job.log.read()) as logged:
                async for frames in logged:
                    if job.log.ended:
                        await self._remember(lane, job)  # before its client knows of the end
                    for frame in frames:
                        await self._send(sse.data(frame), lane.name)
        finally:
            lane.job = None
            lane.next_number = len(job.log.entries) or lane.next_number  # none: it is refused
            await cancel(job.task)
        await job.task  # raises what has refused it

    # --- memory ---------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, Row]:
        """Return the responses that the lanes remember, by id."""
        return {lane.last.id: lane.last for lane in self.lanes.values() if lane.last}

    async def _remember(self, lane: Lane, job: Job) -> None:
        """Remember the last response of a lane, unless it failed or finds no room."""
        lane.last = None
        if job.log.status == "failed":
            return
        lane.last = await self.registry.to_continue(job.shown_row())
        n_bytes = sum(row.n_bytes + len(row.response_json) for row in self.memory().values())
        n_bytes += len(sse.dumps(self.steers))
        try:
            self.visit.set_held(self.visit.rooms.bytes, n_bytes)
        except BadInput:  # until the next one, more room is held than is remembered
            lane.last = None

    # --- what is sent ---------------------------------------------------------------------------------------

    async def _send(self, object_text: str, lane: str) -> None:
        """Send the text of a JSON object, with the lane that it belongs to if that has a name."""
        if self.websocket.application_state is WebSocketState.DISCONNECTED:  # another lane has met its end
            raise WebSocketDisconnect
        if lane:
            object_text = f'{object_text[:-1]},"stream_id":{sse.dumps(lane)}}}'
        await self.websocket.send_text(object_text)

    async def _refuse(self, refusal: BadInput, lane: str = "") -> None:
        """Send an error to the client."""
        log.info("%d: %s", refusal.status, refusal.message)
        body = error_body(refusal)
        await self._send(sse.dumps({"type": "error", "status": refusal.status} | body), lane)
