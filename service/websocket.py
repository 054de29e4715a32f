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
   lives on; so it does after a message that is too large, which is dropped as it comes (connections.py). A
   message that is not JSON ends it: what a client that sends such things means is not known.
3. A response can be continued from the connection's memory, without a store. A turn that fails makes its
   connection forget the response that it continued, if it was of the same lane.
4. A response cannot be steered while it runs. A client that tries gets its input back, and the turn goes on.
5. A client that leaves ends its turns. At a stop of the server, and at an age of max_age_s, those that run go
   on to their end; those that wait are refused.

Not here: what a request may say (request/), the connection (connections.py), keys and pages of other sites
(../middleware.py), how much all connections hold together (admission.py).
"""

import asyncio
import logging
import re
import time
from asyncio import FIRST_COMPLETED
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing, closing, suppress
from typing import Any, NamedTuple

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

import sse
from background import Job
from request import room
from request.body import Body, parse_json
from request.ids import REQUEST_ID
from request.items import MAX_CONVERSATION_BYTES
from request.refusals import BadInput, error_body, missing, shown, unsupported, wrong_type, wrong_value
from service.admission import Room
from store import Row
from streaming import cancel

log = logging.getLogger("websocket")

Recall = Callable[[str], Row | None]  # id of a response -> the response; None where it is not remembered
Start = Callable[[Any, Recall], Awaitable[Job]]  # body, memory of its connection -> what has started
EndedRow = Callable[[Job], Awaitable[Row]]

# The first two are the guide's.
MAX_RUNNING = 16  # turns of a connection that run at once
MAX_LANES = 32  # that have a name
MAX_TURNS = 64  # that run or wait
MAX_REMEMBERED_BYTES = 2 * MAX_CONVERSATION_BYTES  # of a connection
ROW_BYTES = 2048  # what a response takes in memory besides its texts

SUBPROTOCOL = "responses"  # for pages: a browser wants one of those that it has offered
CLIENT_LEFT = 499  # nginx's status: only counted

LANE = re.compile(r"[A-Za-z0-9_.-]{1,256}")
DEFAULT_LANE = ""

# fmt: off
#  code of a refusal that ends the connection   code of its close
CLOSE_CODES = {
    "unsupported_content_type":                 1003,  # a kind of data that is not accepted
    "invalid_json":                             1007,  # data that is not what it should be
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
    message: str
    error_code: str

    def refusal(self) -> BadInput:
        return BadInput(self.message, None, self.error_code)


STOP = Ending(SERVICE_RESTART, "The server is about to stop.", "server_is_overloaded")


def too_old(max_age_s: float) -> Ending:
    message = f"This connection has reached its limit of {max_age_s / 60:g} minutes. Open a new one to go on."
    return Ending(NORMAL_CLOSURE, message, "websocket_connection_limit_reached")


def unreadable(refusal: BadInput) -> Ending:
    return Ending(CLOSE_CODES[refusal.code], refusal.message, refusal.code)


# --- memory -------------------------------------------------------------------------------------------------


class Remembered(NamedTuple):
    row: Row
    lane: str
    n_bytes: int


class Memory:
    """The newest responses of one connection, as far as there is room; they need no store to be continued.

    `shares` is what the memories of all connections may hold together.
    """

    def __init__(self, owner: str, shares: room.Room) -> None:
        self._owner = owner
        self._shares = shares
        self._responses: dict[str, Remembered] = {}  # by id, the oldest first
        self._n_bytes = 0

    def recall(self, id: str) -> Row | None:
        remembered = self._responses.get(id)
        return remembered.row if remembered else None

    def lane(self, id: Any) -> str | None:
        """Return the lane of a response; None if it is not remembered."""
        remembered = self._responses.get(id) if isinstance(id, str) else None
        return remembered.lane if remembered else None

    def remember(self, row: Row, lane: str) -> None:
        n_bytes = ROW_BYTES + row.n_bytes + len(row.response_json)
        if n_bytes > MAX_REMEMBERED_BYTES:
            return
        while self._responses and not self._has_room(n_bytes):
            self._forget(next(iter(self._responses)))
        if self._has_room(n_bytes):
            self._shares.take(self._owner, n_bytes)
            self._n_bytes += n_bytes
            self._responses[row.id] = Remembered(row, lane, n_bytes)

    def forget(self, id: Any, lane: str) -> None:
        """Forget a response that cannot be continued, unless other lanes may still do so."""
        if isinstance(id, str) and id in self._responses and self._responses[id].lane == lane:
            self._forget(id)

    def close(self) -> None:
        for id_ in [*self._responses]:
            self._forget(id_)

    def _has_room(self, n_bytes: int) -> bool:
        is_small = self._n_bytes + n_bytes <= MAX_REMEMBERED_BYTES
        return is_small and self._shares.has_room(self._owner, n_bytes)

    def _forget(self, id: str) -> None:
        n_bytes = self._responses.pop(id).n_bytes
        self._n_bytes -= n_bytes
        self._shares.give_back(self._owner, n_bytes)


# --- messages -----------------------------------------------------------------------------------------------


def lane_of(message: Any) -> str:
    """The lane that a message names; raises BadInput."""
    if not isinstance(message, dict):
        raise wrong_type("message", "an object", message)
    lane = message.get("stream_id")
    if lane is None:
        return DEFAULT_LANE
    if not isinstance(lane, str) or not LANE.fullmatch(lane):
        expected = "Expected 1 to 256 letters, digits, '_', '-' and '.'"
        raise BadInput(f"{expected} as 'stream_id', got {shown(lane)}.", "stream_id", "invalid_stream_id")
    return lane


def body_of(message: dict[str, Any]) -> dict[str, Any]:
    """The body that POST /v1/responses would have; raises BadInput."""
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


class Turn(NamedTuple):
    number: int  # from 1, of a connection
    lane: str
    parent_id: Any  # its previous_response_id, whatever the client has sent
    json_text: bytes  # of its message: its values may take fifty times as much


class Connection:
    """One WebSocket, from its handshake to its close.

    `start` starts a turn, or raises what refuses it; `ended_row` is a response as another one continues it.
    `record` counts a turn that has ended: with its status, and the seconds since its message came.
    """

    def __init__(
        self, websocket: WebSocket, start: Start, ended_row: EndedRow, record: Callable[[int, float], None]
    ) -> None:
        self._websocket = websocket
        self._start = start
        self._ended_row = ended_row
        self._record = record
        self._owner: str = websocket.scope["owner"]
        self._room: Room = websocket.scope["room"]
        self._memory = Memory(self._owner, self._room.remembered)
        self._places = asyncio.Semaphore(MAX_RUNNING)
        self._n_turns = 0
        self._turns: set[asyncio.Task[None]] = set()  # that run or wait
        self._newest: dict[str, asyncio.Task[None]] = {}  # by lane: the turn that a new one waits for
        self._bodies: dict[int, dict[str, Any]] = {}  # of the turns that start now, by their number
        self._ending: Ending | None = None
        # By lane: the response whose events are being sent, and the number of the lane's next event else.
        self._running: dict[str, Job] = {}
        self._next_number: Counter[str] = Counter()

    async def run(self, until_stopping: Awaitable[object], max_age_s: float) -> None:
        subprotocol = None
        if SUBPROTOCOL in self._websocket.scope["subprotocols"]:
            subprotocol = SUBPROTOCOL
        await self._websocket.accept(subprotocol)
        receiving = asyncio.ensure_future(self._receive())
        stop = asyncio.ensure_future(until_stopping)
        with closing(self._memory), suppress(WebSocketDisconnect):
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
                await self._close(self._ending)

    async def _close(self, ending: Ending) -> None:
        if ending is not STOP:
            await self._send(error_message(ending.refusal()), DEFAULT_LANE)
        await self._websocket.close(ending.close_code)

    # --- what comes -----------------------------------------------------------------------------------------

    async def _receive(self) -> Ending | None:
        """Begin a turn for each message, until the client leaves (None) or sends what cannot be read."""
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return None
            if "n_bytes" in message:  # it was too large
                await self._send(error_message(self._too_large(message["n_bytes"])), DEFAULT_LANE)
                continue
            ending = await self._read(message.pop("text", None))
            if ending:
                return ending
            await self._room.until_next_message(self._owner)

    async def _read(self, text: str | None) -> Ending | None:
        """Begin the turn that a message asks for; return how the connection ends if it cannot be read.

        While this waits, for the parser or for a client that reads slowly, it holds one copy of the message.
        """
        if text is None:
            expected = "Expected a text message with JSON, got a binary one."
            return unreadable(BadInput(expected, None, "unsupported_content_type"))
        json_text = text.encode()
        del text
        try:
            message = await parse_json(Body(json_text, self._room.max_body_bytes))
            lane, error = self._begin_turn(message, json_text)
        except BadInput as refusal:
            if refusal.code in CLOSE_CODES:
                return unreadable(refusal)
            lane, error = DEFAULT_LANE, error_message(refusal)
        if error:
            await self._send(error, lane)
        return None

    def _too_large(self, n_bytes: int) -> BadInput:
        limit = f"at most {self._room.max_body_bytes} bytes, see --max-body"
        message = f"Expected a message of {limit}, got {n_bytes}. It was dropped; the connection goes on."
        return BadInput(message, None, "websocket_message_too_large")

    def _begin_turn(self, message: Any, json_text: bytes) -> tuple[str, str]:
        """The lane of a turn, and the error message that refuses it, "" for none."""
        lane = DEFAULT_LANE
        try:
            lane = lane_of(message)
            if message.get("type") == IGNORED:
                return lane, ""
            if message.get("type") == "response.steer":
                return self._steer(message, lane)
            body = body_of(message)
            self._check_room(lane)
        except BadInput as refusal:
            return lane, error_message(refusal)
        self._n_turns += 1
        turn = Turn(self._n_turns, lane, body.get("previous_response_id"), json_text)
        before = self._newest.get(lane)
        if (before is None or before.done()) and not self._places.locked():
            self._bodies[turn.number] = body
        self._websocket.scope["hold_message"](0, None)  # the turn counts it
        task = asyncio.create_task(self._take_turn(turn, before))
        self._newest[lane] = task
        self._turns.add(task)
        task.add_done_callback(self._turns.discard)
        return lane, ""

    def _steer(self, message: dict[str, Any], lane: str) -> tuple[str, str]:
        """Return the lane of a response, and the event that says why it is not steered.

        The event is one of the lane's: if a response runs there, the event is put into its log instead.
        """
        id_ = message.get("previous_response_id")
        running = {job.row.id: name for name, job in self._running.items()}
        ended_in = self._memory.lane(id_)
        code = "response_not_found"
        if isinstance(id_, str) and id_ in running:
            code, lane = "steering_not_supported", running[id_]
        elif ended_in is not None:
            code, lane = "response_already_completed", ended_in
        error = {"type": "invalid_request_error", "code": code, "message": CANNOT_STEER[code]}
        steer = {"input": message.get("input"), "previous_response_id": id_}
        event = {"type": "response.steer.failed", "error": error, "steer": steer}
        if lane in self._running:
            self._running[lane].log.extend([event])
            return lane, ""
        number = self._next_number[lane]
        self._next_number[lane] += 1
        return lane, sse.dumps({"type": event["type"], "sequence_number": number} | event)

    def _check_room(self, lane: str) -> None:
        """Raise what refuses a new turn of a lane before it waits."""
        if self._ending:
            raise self._ending.refusal()
        if len(self._turns) >= MAX_TURNS:
            message = f"Expected at most {MAX_TURNS} turns that run or wait on a connection."
            raise BadInput(message, None, "rate_limit_exceeded")
        n_lanes = len({*self._newest, lane} - {DEFAULT_LANE})
        if n_lanes > MAX_LANES:
            message = (
                f"Expected at most {MAX_LANES} different values of 'stream_id' on a connection. Use one of "
                "them again, or open another connection."
            )
            raise BadInput(message, "stream_id", "websocket_stream_limit_reached")

    # --- a turn ---------------------------------------------------------------------------------------------

    async def _take_turn(self, turn: Turn, before: asyncio.Task[None] | None) -> None:
        """Run a turn after the one before it in its lane; what goes wrong becomes a message."""
        REQUEST_ID.set(f"{REQUEST_ID.get()}.{turn.number}")
        started_at = time.perf_counter()
        status = CLIENT_LEFT
        try:
            with self._room.turn(self._owner, len(turn.json_text)):
                if before:
                    await asyncio.wait({before})
                async with self._places:
                    await self._run_turn(turn)
            status = 200
        except WebSocketDisconnect:
            pass  # _receive() is told, too
        except Exception as error:
            # No variable here: the traceback holds this frame, so that both, and the body, would stay.
            status = await self._refuse(turn, as_refusal(error))
        finally:
            self._running.pop(turn.lane, None)
            self._bodies.pop(turn.number, None)
            self._record(status, time.perf_counter() - started_at)

    async def _refuse(self, turn: Turn, refusal: BadInput) -> int:
        """Tell why a turn has failed, or never began; returns its status."""
        self._memory.forget(turn.parent_id, turn.lane)
        with suppress(WebSocketDisconnect):
            await self._send(error_message(refusal), turn.lane)
        return refusal.status

    async def _run_turn(self, turn: Turn) -> None:
        if self._ending:
            raise self._ending.refusal()
        request_id = REQUEST_ID.get()
        self._room.unanswered.add(request_id)
        try:
            job = await self._start_turn(turn)
            try:
                await job.log.until_begun()
                self._room.unanswered.discard(request_id)
                await self._send_events(job, turn)
            finally:
                await cancel(job.task)
        finally:
            self._room.unanswered.discard(request_id)

    async def _start_turn(self, turn: Turn) -> Job:
        if turn.number not in self._bodies:
            message = await parse_json(Body(turn.json_text, self._room.max_body_bytes))
            self._bodies[turn.number] = body_of(message)
            del message
        return await self._start(self._bodies.pop(turn.number), self._memory.recall)

    async def _send_events(self, job: Job, turn: Turn) -> None:
        if not job.log.events:
            await job.task  # raises why it has refused
        self._running[turn.lane] = job
        has_ended = False
        async with aclosing(job.log.read()) as logged:
            async for frames in logged:
                if job.log.ended and not has_ended:
                    has_ended = True
                    del self._running[turn.lane]
                    self._next_number[turn.lane] = len(job.log.events)
                    await self._remember(job, turn)  # before its client knows of the end
                for frame in frames:
                    await self._send(sse.data(frame), turn.lane)
        await job.task

    async def _remember(self, job: Job, turn: Turn) -> None:
        if job.log.status == "failed":
            self._memory.forget(turn.parent_id, turn.lane)
        else:
            self._memory.remember(await self._ended_row(job), turn.lane)

    # --- what is sent ---------------------------------------------------------------------------------------

    async def _send(self, object_text: str, lane: str) -> None:
        """Send the text of a JSON object, with the lane that it belongs to if that has a name."""
        if self._websocket.application_state is WebSocketState.DISCONNECTED:  # another lane has met its end
            raise WebSocketDisconnect(ABNORMAL_CLOSURE)
        if lane:
            object_text = f'{object_text[:-1]},"stream_id":"{lane}"}}'
        await self._websocket.send_text(object_text)


def error_message(refusal: BadInput) -> str:
    """What a client is told of a refusal, which is logged."""
    log.info("%d: %s", refusal.status, refusal.message)
    body = error_body(refusal.status, refusal.message, refusal.param, refusal.code or None)
    return sse.dumps({"type": "error", "status": refusal.status} | body)


def as_refusal(error: Exception) -> BadInput:
    """What a client is told of an error; one that is no refusal is a bug, and logged."""
    if isinstance(error, BadInput):
        return error
    log.error("a turn failed", exc_info=error)
    return BadInput(f"{type(error).__name__} in the server; its log has the details.", None, "server_error")
