"""The Responses API over a WebSocket: its messages are turns, and the events of each turn are messages.

    message --body_of()--> body of POST /v1/responses --start()--> Job --log.read()--> messages

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
https://www.openresponses.org/specification, WebSocket transport; RFC 6455, section 7.4, for codes of a close.

Rules of this file:
1. A turn is a request like any other, and what it sends are the frames of its log without their SSE lines.
   While it waits it is the text of its message: a JSON value may take fifty times as much.
2. What is wrong with one turn is told in a message, with the status that HTTP would have, and the connection
   lives on; so it does after a message that is too large. A message that is not JSON ends it: what a client
   that sends such things means is not known.
3. The last response of each lane can be continued without a store. A turn that fails makes its lane forget
   the response that it continued.
4. A response cannot be steered while it runs. A client that tries gets its input back, and the turn goes on.
5. A client that leaves ends its turns. At a stop of the server, and at an age of max_age_s, those that run go
   on to their end; those that wait are refused.
6. A message has time and room as a body has (request/body.py), and those of all connections, or the parts of
   large ones, are taken one after another, by turns of the owners.
"""

import asyncio
import logging
import re
import time
from asyncio import FIRST_COMPLETED
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

import sse
from background import Job
from request.body import arriving, parsed
from request.ids import REQUEST_ID
from request.refusals import BadInput, error_body, missing, shown, unsupported, wrong_type, wrong_value
from request.room import Visit
from store import Row
from streaming import cancel

log = logging.getLogger("websocket")

Recall = Callable[[str], Row | None]  # id of a response -> the response; None if it is not remembered
Start = Callable[[Any, Recall], Awaitable[Job]]  # body, memory of its connection -> what has started
EndedRow = Callable[[Job], Awaitable[Row]]  # a response as another one continues it
Record = Callable[[int, float], None]  # counts a turn: its status, the seconds since its message came

MAX_LANES = 32  # that have a name: the guide's
MAX_TURNS = 64  # of a connection, that run or wait
ROW_BYTES = 2048  # what a response takes in memory besides its texts
BETWEEN_MESSAGES_S = 0.001  # of all WebSockets: a flood of them takes a part of the event loop alone

SUBPROTOCOL = "responses"  # for pages: a browser wants one of those that it has offered
CLIENT_LEFT = 499  # nginx's status: only counted
ABNORMAL_CLOSURE = 1006
LANE = re.compile(r"[A-Za-z0-9_.-]{1,256}")
IGNORED = "response.processed"  # Codex says that it has read an answer
UNREADABLE = ("invalid_json", "unsupported_content_type")  # codes of refusals that end the connection

# fmt: off
#  code of a refusal that ends a connection   code of the close: RFC 6455, section 7.4.1
CLOSE_CODES = {
    "websocket_connection_limit_reached":     1000,
    "unsupported_content_type":               1003,  # a kind of data that is not accepted
    "invalid_json":                           1007,  # data that is not what it should be
    "request_timeout":                        1008,
    "rate_limit_exceeded":                    1013,  # try again later
    "server_is_overloaded":                   1013,
}
SERVICE_RESTART = 1012

#  event of a client that is refused by its name   why
NOT_BUILT = {
    "response.cancel":  "A turn ends when its client leaves.",
    "response.append":  "Send response.create with previous_response_id.",
}

#  code of response.steer.failed  why, and what to do
CANNOT_STEER = {
    "steering_not_supported":     "Wait for its end, then send this input with response.create.",
    "response_already_completed": "The response has ended. Send this input with response.create.",
    "response_not_found":         "There is no such response on this connection.",
}
# fmt: on

STOP = BadInput("The server is about to stop.", None, "server_is_overloaded")


# --- messages -----------------------------------------------------------------------------------------------


def lane_of(message: Any) -> str:
    """Return the lane that a message names; raises BadInput."""
    if not isinstance(message, dict):
        raise wrong_type("message", "an object", message)
    lane = message.get("stream_id")
    if lane is None:
        return ""
    if not isinstance(lane, str) or not LANE.fullmatch(lane):
        expected = "Expected 1 to 256 letters, digits, '_', '-' and '.'"
        raise BadInput(f"{expected} as 'stream_id', got {shown(lane)}.", "stream_id", "invalid_stream_id")
    return lane


def body_of(message: dict[str, Any]) -> dict[str, Any]:
    """Return the body that POST /v1/responses would have; raises BadInput."""
    event_type = message.get("type")
    if isinstance(event_type, str) and event_type in NOT_BUILT:
        raise unsupported("type", f"There is no '{event_type}' here. {NOT_BUILT[event_type]}")
    if event_type is None:
        raise missing("type")
    if event_type != "response.create":
        raise wrong_value("type", "'response.create'", event_type)
    if message.get("background"):
        raise unsupported("background", "A turn of a WebSocket runs in the foreground; POST it instead.")
    if message.get("stream") is False:  # Codex sends true
        raise wrong_value("stream", "none, for all turns of a WebSocket are streams", False)
    body = {name: value for name, value in message.items() if name not in ("type", "stream_id")}
    return body | {"stream": True}


# --- a connection -------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Lane:
    """Turns that run one after another."""

    name: str
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # first come, first served
    job: Job | None = None  # whose events are being sent
    next_number: int = 0  # of an event, if none are being sent
    parent_id: Any = None  # the previous_response_id of the turn that runs, or ran last
    last: Row | None = None  # its last response: rule 3

    def forget_parent(self) -> None:
        if self.last and self.last.id == self.parent_id:
            self.last = None


@dataclass(eq=False)
class Connection:
    """One WebSocket, from its handshake to its close."""

    websocket: WebSocket
    visit: Visit  # what it holds
    start: Start  # starts a turn, or raises what refuses it
    ended_row: EndedRow
    record: Record
    memory: Visit = field(init=False)  # what it holds to remember
    lanes: dict[str, Lane] = field(default_factory=lambda: {"": Lane("")})
    turns: set[asyncio.Task[None]] = field(default_factory=set)  # that run or wait
    n_turns: int = 0  # so far
    ending: BadInput | None = None  # why it takes no more turns

    async def run(self, until_stopping: Awaitable[object], max_age_s: float) -> None:
        offered = self.websocket.scope["subprotocols"]
        await self.websocket.accept(SUBPROTOCOL if SUBPROTOCOL in offered else None)
        receiving = asyncio.ensure_future(self._receive())
        stop = asyncio.ensure_future(until_stopping)
        with self.visit.rooms.visit(self.visit.owner) as self.memory, suppress(WebSocketDisconnect):
            try:
                await asyncio.wait({receiving, stop}, timeout=max_age_s, return_when=FIRST_COMPLETED)
                if not receiving.done():
                    self.ending = STOP if stop.done() else too_old(max_age_s)
                while self.turns and not receiving.done():
                    await asyncio.wait({receiving, *self.turns}, return_when=FIRST_COMPLETED)
            finally:
                await cancel(receiving, stop, *self.turns)
            code = SERVICE_RESTART
            if self.ending and self.ending is not STOP:
                await self._refuse(self.ending)
                code = CLOSE_CODES[self.ending.code]
            if self.ending and self.websocket.application_state is WebSocketState.CONNECTED:
                await self.websocket.close(code)

    # --- what comes -----------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        """Begin a turn for each message, until the client leaves or sends what cannot be read."""
        try:
            while True:
                message = await self._message()
                if message["type"] == "websocket.disconnect":
                    return
                await self._read(message.pop("bytes"), message["is_text"])
                await self._until_next_part()
        except BadInput as refusal:
            self.ending = refusal

    async def _message(self) -> Any:
        """Wait for the next message; raises BadInput for a large one that is late or has no room."""
        message = await self.websocket.receive()
        if "n_bytes" in message:
            n_bytes = 0
            async with arriving(self.visit) as note:
                while "n_bytes" in message:  # a part has come: connections.WebSocketProtocol
                    n_bytes += message["n_bytes"]
                    await note(n_bytes)
                    message = await self.websocket.receive()
        return message

    async def _until_next_part(self) -> None:
        async with self.visit.rooms.parts.turn(self.visit.owner):
            await asyncio.sleep(BETWEEN_MESSAGES_S)

    async def _read(self, json_text: bytes, is_text: bool) -> None:
        """Begin the turn that a message asks for; raises BadInput if it cannot be read."""
        max_bytes = self.visit.rooms.max_body_bytes
        lane = ""
        answer = ""
        try:
            if len(json_text) > max_bytes:
                got = f"got {len(json_text)}. It was dropped; the connection goes on."
                expected = f"Expected a message of at most {max_bytes} bytes, see --max-body, {got}"
                raise BadInput(expected, None, "websocket_message_too_large")
            if not is_text:
                expected = "Expected a text message with JSON, got a binary one."
                raise BadInput(expected, None, "unsupported_content_type")
            async with parsed(json_text, self.visit) as message:
                lane = lane_of(message)
                if message.get("type") == "response.steer":
                    lane, answer = self._steer(message, lane)
                elif message.get("type") != IGNORED:
                    self._begin_turn(lane, json_text, body_of(message))
        except BadInput as refusal:
            if refusal.code in UNREADABLE:
                raise
            await self._refuse(refusal, lane)
        self.visit.hold(self.visit.rooms.bytes, 0)  # a turn counts its message
        if answer:
            await self._send(answer, lane)

    def _begin_turn(self, name: str, json_text: bytes, body: dict[str, Any]) -> None:
        """Begin a turn of a lane; raises BadInput if there is no room for it."""
        if self.ending:
            raise self.ending
        if len(self.turns) >= MAX_TURNS:
            message = f"Expected at most {MAX_TURNS} turns that run or wait on a connection."
            raise BadInput(message, None, "rate_limit_exceeded")
        if name not in self.lanes and len(self.lanes) > MAX_LANES:
            message = (
                f"Expected at most {MAX_LANES} different values of 'stream_id' on a connection. Use one of "
                "them again, or open another connection."
            )
            raise BadInput(message, "stream_id", "websocket_stream_limit_reached")
        lane = self.lanes.setdefault(name, Lane(name))
        self.n_turns += 1
        bodies = [] if lane.turn.locked() else [body]  # rule 1
        turn = asyncio.create_task(self._take_turn(lane, self.n_turns, json_text, bodies))
        self.turns.add(turn)
        turn.add_done_callback(self.turns.discard)

    def _steer(self, message: dict[str, Any], name: str) -> tuple[str, str]:
        """Return the name of a lane, and the event that says why its response is not steered.

        The event is one of the lane's: if a response runs there, the event is put into its log instead.
        """
        id_ = message.get("previous_response_id")
        code = "response_not_found"
        lane = self.lanes.get(name) or Lane(name)
        for each in self.lanes.values():
            if each.job and each.job.row.id == id_:
                code, lane = "steering_not_supported", each
            elif each.last and each.last.id == id_:
                code, lane = "response_already_completed", each
        error = {"type": "invalid_request_error", "code": code, "message": CANNOT_STEER[code]}
        steer = {"input": message.get("input"), "previous_response_id": id_}
        event = {"type": "response.steer.failed", "error": error, "steer": steer}
        if lane.job:
            lane.job.log.extend([event])
            return lane.name, ""
        lane.next_number += 1
        return lane.name, sse.dumps({"sequence_number": lane.next_number - 1} | event)

    # --- a turn ---------------------------------------------------------------------------------------------

    async def _take_turn(
        self, lane: Lane, number: int, json_text: bytes, bodies: list[dict[str, Any]]
    ) -> None:
        """Run a turn after those before it in its lane; what goes wrong becomes a message.

        `bodies` has its body, if it is parsed already.
        """
        request_id = f"{REQUEST_ID.get()}.{number}"
        REQUEST_ID.set(request_id)
        rooms = self.visit.rooms
        started_at = time.perf_counter()
        status = CLIENT_LEFT
        try:
            with rooms.visit(self.visit.owner) as visit:
                visit.hold(rooms.bytes, len(json_text))
                visit.enter()
                async with lane.turn:
                    if self.ending:
                        raise self.ending
                    rooms.unanswered.add(request_id)
                    if not bodies:
                        async with parsed(json_text, visit) as message:
                            bodies.append(body_of(message))
                            del message
                    lane.parent_id = bodies[0].get("previous_response_id")
                    await self._send_events(lane, await self.start(bodies.pop(), self._recall))
            status = 200
        except WebSocketDisconnect:
            pass  # _receive() is told, too
        except Exception as error:
            # No variable here: the traceback holds this frame, so that both, and the body, would stay.
            lane.forget_parent()
            status = await self._refuse(as_refusal(error), lane.name)
        finally:
            rooms.unanswered.discard(request_id)
            lane.job = None
            self.record(status, time.perf_counter() - started_at)

    async def _send_events(self, lane: Lane, job: Job) -> None:
        try:
            await job.log.until_begun()
            self.visit.rooms.unanswered.discard(REQUEST_ID.get())
            if not job.log.events:
                await job.task  # raises why it has refused
            lane.job = job
            async with aclosing(job.log.read()) as logged:
                async for frames in logged:
                    if job.log.ended and lane.job:
                        lane.job = None
                        lane.next_number = len(job.log.events)
                        await self._remember(lane, job)  # before its client knows of the end
                    for frame in frames:
                        await self._send(sse.data(frame), lane.name)
            await job.task
        finally:
            await cancel(job.task)

    # --- memory ---------------------------------------------------------------------------------------------

    def _recall(self, id: str) -> Row | None:
        for lane in self.lanes.values():
            if lane.last and lane.last.id == id:
                return lane.last
        return None

    async def _remember(self, lane: Lane, job: Job) -> None:
        """Remember the last response of a lane, unless it has failed, or there is no room for it."""
        if job.log.status == "failed":
            lane.forget_parent()
            return
        lane.last = await self.ended_row(job)
        rows = [lane.last for lane in self.lanes.values() if lane.last]
        n_bytes = sum(ROW_BYTES + row.n_bytes + len(row.response_json) for row in rows)
        try:
            self.memory.hold(self.visit.rooms.bytes, n_bytes)
        except BadInput:  # then more is held than is remembered, until the next one
            lane.last = None

    # --- what is sent ---------------------------------------------------------------------------------------

    async def _send(self, object_text: str, lane: str) -> None:
        """Send the text of a JSON object, with the lane that it belongs to if that has a name."""
        if self.websocket.application_state is WebSocketState.DISCONNECTED:  # another lane has met its end
            raise WebSocketDisconnect(ABNORMAL_CLOSURE)
        if lane:
            object_text = f'{object_text[:-1]},"stream_id":"{lane}"}}'
        await self.websocket.send_text(object_text)

    async def _refuse(self, refusal: BadInput, lane: str = "") -> int:
        """Tell what is wrong; return its status."""
        log.info("%d: %s", refusal.status, refusal.message)
        body = error_body(refusal.status, refusal.message, refusal.param, refusal.code or None)
        with suppress(WebSocketDisconnect):
            await self._send(sse.dumps({"type": "error", "status": refusal.status} | body), lane)
        return refusal.status


def too_old(max_age_s: float) -> BadInput:
    message = f"This connection has reached its limit of {max_age_s / 60:g} minutes. Open a new one to go on."
    return BadInput(message, None, "websocket_connection_limit_reached")


def as_refusal(error: Exception) -> BadInput:
    """Return what a client is told of an error; one that is not a refusal is a bug, and logged."""
    if isinstance(error, BadInput):
        return error
    log.error("a turn failed", exc_info=error)
    return BadInput(f"{type(error).__name__} in the server; its log has the details.", None, "server_error")
