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

Not here: what a request may say (request/), the connection (connections.py), keys and pages of other sites
(../middleware.py).
"""

import asyncio
import logging
import re
import time
from asyncio import FIRST_COMPLETED
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, NamedTuple

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
EndedRow = Callable[[Job], Awaitable[Row]]

# The first two are the guide's.
MAX_RUNNING = 16  # turns of a connection that run at once
MAX_LANES = 32  # that have a name
MAX_TURNS = 64  # that run or wait
ROW_BYTES = 2048  # what a response takes in memory besides its texts
BETWEEN_MESSAGES_S = 0.001  # of all WebSockets: a flood of them takes a part of the event loop alone

SUBPROTOCOL = "responses"  # for pages: a browser wants one of those that it has offered
CLIENT_LEFT = 499  # nginx's status: only counted
LANE = re.compile(r"[A-Za-z0-9_.-]{1,256}")

# fmt: off
#  code of a refusal that ends the connection   code of its close: RFC 6455, section 7.4.1
CLOSE_CODES = {
    "unsupported_content_type":                 1003,  # a kind of data that is not accepted
    "invalid_json":                             1007,  # data that is not what it should be
    "request_timeout":                          1008,
    "rate_limit_exceeded":                      1013,  # try again later
    "server_is_overloaded":                     1013,
}
SERVICE_RESTART = 1012
NORMAL_CLOSURE = 1000
ABNORMAL_CLOSURE = 1006

#  event of a client that is refused by its name   why
NOT_BUILT = {
    "response.cancel":  "A turn ends when its client leaves.",
    "response.append":  "Send response.create with previous_response_id.",
}
# fmt: on
IGNORED = "response.processed"  # Codex says that it has read an answer

# fmt: off
#  code of response.steer.failed  why, and what to do
CANNOT_STEER = {
    "steering_not_supported":     "Wait for its end, then send this input with response.create.",
    "response_already_completed": "The response has ended. Send this input with response.create.",
    "response_not_found":         "There is no such response on this connection.",
}
# fmt: on


class Ending(NamedTuple):
    """Why a connection takes no more turns, and is closed when none runs any longer."""

    close_code: int
    refusal: BadInput


STOP = Ending(SERVICE_RESTART, BadInput("The server is about to stop.", None, "server_is_overloaded"))


class Turn(NamedTuple):
    number: int  # from 1, of a connection
    before: "asyncio.Task[None] | None"  # the turn that it waits for
    parent_id: Any  # its previous_response_id, whatever the client has sent
    json_text: bytes  # of its message
    bodies: list[dict[str, Any]]  # the one that is parsed already; a value may take fifty times its text


class Lane:
    """Turns that run one after another."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.newest: asyncio.Task[None] | None = None  # the turn that a new one waits for
        self.job: Job | None = None  # whose events are being sent
        self.next_number = 0  # of an event, if none are being sent
        self.last: Row | None = None  # its last response: rule 3

    def forget(self, id: Any) -> None:
        if self.last and self.last.id == id:
            self.last = None


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


class Connection:
    """One WebSocket, from its handshake to its close.

    `visit` is what it holds; what it remembers is another one. `start` starts a turn, or raises what refuses
    it; `ended_row` is a response as another one continues it. `record` counts a turn that has ended: with its
    status, and the seconds since its message came.
    """

    def __init__(
        self,
        websocket: WebSocket,
        visit: Visit,
        start: Start,
        ended_row: EndedRow,
        record: Callable[[int, float], None],
    ) -> None:
        self._websocket = websocket
        self._visit = visit
        self._start = start
        self._ended_row = ended_row
        self._record = record
        self._places = asyncio.Semaphore(MAX_RUNNING)
        self._n_turns = 0
        self._turns: set[asyncio.Task[None]] = set()  # that run or wait
        self._lanes = {"": Lane("")}
        self._ending: Ending | None = None

    async def run(self, until_stopping: Awaitable[object], max_age_s: float) -> None:
        offered = self._websocket.scope["subprotocols"]
        await self._websocket.accept(SUBPROTOCOL if SUBPROTOCOL in offered else None)
        receiving = asyncio.ensure_future(self._receive())
        stop = asyncio.ensure_future(until_stopping)
        rooms = self._visit.rooms
        with rooms.visit(self._visit.owner) as self._memory, suppress(WebSocketDisconnect):
            try:
                await asyncio.wait({receiving, stop}, timeout=max_age_s, return_when=FIRST_COMPLETED)
                if not receiving.done():
                    self._ending = STOP if stop.done() else too_old(max_age_s)
                while self._turns and not receiving.done():
                    await asyncio.wait({receiving, *self._turns}, return_when=FIRST_COMPLETED)
                if receiving.done():
                    self._ending = receiving.result()
            finally:
                await cancel(receiving, stop, *self._turns)
            if self._ending:
                if self._ending is not STOP:
                    await self._refuse(self._ending.refusal)
                await self._websocket.close(self._ending.close_code)

    # --- what comes -----------------------------------------------------------------------------------------

    async def _receive(self) -> Ending | None:
        """Begin a turn for each message, until the client leaves (None) or sends what cannot be read."""
        try:
            while True:
                message = await self._message()
                if message["type"] == "websocket.disconnect":
                    return None
                await self._read(message.pop("bytes"), message["is_text"])
                await self._until_next_message()
        except BadInput as refusal:
            return Ending(CLOSE_CODES[refusal.code], refusal)

    async def _message(self) -> Any:
        """Wait for the next message; raises BadInput for a large one that is late or has no room."""
        message = await self._websocket.receive()
        if "n_bytes" in message:
            async with arriving(self._visit) as note:
                while "n_bytes" in message:  # a part has come: connections.WebSocketProtocol
                    note(message["n_bytes"])
                    await self._until_next_message()
                    message = await self._websocket.receive()
        return message

    async def _until_next_message(self) -> None:
        async with self._visit.rooms.messages.turn(self._visit.owner):
            await asyncio.sleep(BETWEEN_MESSAGES_S)

    async def _read(self, json_text: bytes, is_text: bool) -> None:
        """Begin the turn that a message asks for; raises BadInput if it cannot be read."""
        max_bytes = self._visit.rooms.max_body_bytes
        if len(json_text) > max_bytes:
            got = f"got {len(json_text)}. It was dropped; the connection goes on."
            expected = f"Expected a message of at most {max_bytes} bytes, see --max-body, {got}"
            await self._refuse(BadInput(expected, None, "websocket_message_too_large"))
            return
        if not is_text:
            expected = "Expected a text message with JSON, got a binary one."
            raise BadInput(expected, None, "unsupported_content_type")
        name = ""
        error = ""
        try:
            async with parsed(json_text, self._visit) as message:
                name = lane_of(message)
                if message.get("type") == "response.steer":
                    name, error = self._steer(message, name)
                elif message.get("type") != IGNORED:
                    self._begin_turn(self._lane(name), body_of(message), json_text)
        except BadInput as refusal:
            if refusal.code in ("invalid_json", "unsupported_content_type"):
                raise
            error = error_message(refusal)
        self._visit.hold(self._visit.rooms.bytes, 0)  # a turn counts its message
        if error:
            await self._send(error, name)

    def _lane(self, name: str) -> Lane:
        """Return a lane that has room for another turn; raises BadInput."""
        if self._ending:
            raise self._ending.refusal
        if len(self._turns) >= MAX_TURNS:
            message = f"Expected at most {MAX_TURNS} turns that run or wait on a connection."
            raise BadInput(message, None, "rate_limit_exceeded")
        if name not in self._lanes and len(self._lanes) > MAX_LANES:
            message = (
                f"Expected at most {MAX_LANES} different values of 'stream_id' on a connection. Use one of "
                "them again, or open another connection."
            )
            raise BadInput(message, "stream_id", "websocket_stream_limit_reached")
        return self._lanes.setdefault(name, Lane(name))

    def _begin_turn(self, lane: Lane, body: dict[str, Any], json_text: bytes) -> None:
        self._n_turns += 1
        before = lane.newest
        waits = bool(before and not before.done()) or self._places.locked()
        parent_id = body.get("previous_response_id")
        turn = Turn(self._n_turns, before, parent_id, json_text, [] if waits else [body])
        lane.newest = asyncio.create_task(self._take_turn(lane, turn))
        self._turns.add(lane.newest)
        lane.newest.add_done_callback(self._turns.discard)

    def _steer(self, message: dict[str, Any], name: str) -> tuple[str, str]:
        """Return the name of a lane, and the event that says why its response is not steered.

        The event is one of the lane's: if a response runs there, the event is put into its log instead.
        """
        id_ = message.get("previous_response_id")
        code = "response_not_found"
        for lane in self._lanes.values():
            if lane.job and lane.job.row.id == id_:
                code, name = "steering_not_supported", lane.name
            elif lane.last and lane.last.id == id_:
                code, name = "response_already_completed", lane.name
        error = {"type": "invalid_request_error", "code": code, "message": CANNOT_STEER[code]}
        steer = {"input": message.get("input"), "previous_response_id": id_}
        event = {"type": "response.steer.failed", "error": error, "steer": steer}
        lane = self._lanes.get(name) or Lane(name)
        if lane.job:
            lane.job.log.extend([event])
            return name, ""
        lane.next_number += 1
        return name, sse.dumps({"type": event["type"], "sequence_number": lane.next_number - 1} | event)

    # --- a turn ---------------------------------------------------------------------------------------------

    async def _take_turn(self, lane: Lane, turn: Turn) -> None:
        """Run a turn after the one before it in its lane; what goes wrong becomes a message."""
        request_id = f"{REQUEST_ID.get()}.{turn.number}"
        REQUEST_ID.set(request_id)
        rooms = self._visit.rooms
        started_at = time.perf_counter()
        status = CLIENT_LEFT
        try:
            with rooms.visit(self._visit.owner) as visit:
                visit.hold(rooms.bytes, len(turn.json_text))
                visit.enter()
                if turn.before:
                    await asyncio.wait({turn.before})
                async with self._places:
                    if self._ending:
                        raise self._ending.refusal
                    rooms.unanswered.add(request_id)
                    if not turn.bodies:
                        async with parsed(turn.json_text, visit) as message:
                            turn.bodies.append(body_of(message))
                            del message
                    job = await self._start(turn.bodies.pop(), self._recall)
                    await self._run_turn(lane, job, turn.parent_id)
            status = 200
        except WebSocketDisconnect:
            pass  # _receive() is told, too
        except Exception as error:
            # No variable here: the traceback holds this frame, so that both, and the body, would stay.
            lane.forget(turn.parent_id)
            status = await self._refuse(as_refusal(error), lane.name)
        finally:
            rooms.unanswered.discard(request_id)
            lane.job = None
            self._record(status, time.perf_counter() - started_at)

    async def _run_turn(self, lane: Lane, job: Job, parent_id: Any) -> None:
        try:
            await job.log.until_begun()
            self._visit.rooms.unanswered.discard(REQUEST_ID.get())
            if not job.log.events:
                await job.task  # raises why it has refused
            lane.job = job
            async with aclosing(job.log.read()) as logged:
                async for frames in logged:
                    if job.log.ended and lane.job:
                        lane.job = None
                        lane.next_number = len(job.log.events)
                        if job.log.status == "failed":
                            lane.forget(parent_id)
                        else:
                            await self._remember(lane, job)  # before its client knows of the end
                    for frame in frames:
                        await self._send(sse.data(frame), lane.name)
            await job.task
        finally:
            await cancel(job.task)

    # --- memory ---------------------------------------------------------------------------------------------

    def _recall(self, id: str) -> Row | None:
        found = [lane.last for lane in self._lanes.values() if lane.last and lane.last.id == id]
        return found[0] if found else None

    async def _remember(self, lane: Lane, job: Job) -> None:
        """Remember the last response of a lane, if there is room for it."""
        lane.last = await self._ended_row(job)
        try:
            self._hold_memory()
        except BadInput:
            lane.last = None
            self._hold_memory()

    def _hold_memory(self) -> None:
        rows = [lane.last for lane in self._lanes.values() if lane.last]
        n_bytes = sum(ROW_BYTES + row.n_bytes + len(row.response_json) for row in rows)
        self._memory.hold(self._visit.rooms.bytes, n_bytes)

    # --- what is sent ---------------------------------------------------------------------------------------

    async def _send(self, object_text: str, lane: str) -> None:
        """Send the text of a JSON object, with the lane that it belongs to if that has a name."""
        if self._websocket.application_state is WebSocketState.DISCONNECTED:  # another lane has met its end
            raise WebSocketDisconnect(ABNORMAL_CLOSURE)
        if lane:
            object_text = f'{object_text[:-1]},"stream_id":"{lane}"}}'
        await self._websocket.send_text(object_text)

    async def _refuse(self, refusal: BadInput, lane: str = "") -> int:
        """Tell what is wrong; return its status."""
        with suppress(WebSocketDisconnect):
            await self._send(error_message(refusal), lane)
        return refusal.status


def too_old(max_age_s: float) -> Ending:
    message = f"This connection has reached its limit of {max_age_s / 60:g} minutes. Open a new one to go on."
    return Ending(NORMAL_CLOSURE, BadInput(message, None, "websocket_connection_limit_reached"))


def error_message(refusal: BadInput) -> str:
    """Return what a client is told of a refusal, which is logged."""
    log.info("%d: %s", refusal.status, refusal.message)
    body = error_body(refusal.status, refusal.message, refusal.param, refusal.code or None)
    return sse.dumps({"type": "error", "status": refusal.status} | body)


def as_refusal(error: Exception) -> BadInput:
    """Return what a client is told of an error; one that is not a refusal is a bug, and logged."""
    if isinstance(error, BadInput):
        return error
    log.error("a turn failed", exc_info=error)
    return BadInput(f"{type(error).__name__} in the server; its log has the details.", None, "server_error")
