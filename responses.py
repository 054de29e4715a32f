"""Deltas to the events of the Responses API: one state machine, one table of what may follow what.

    [Delta | Call | Arguments | Close, ...], Finish --Builder--> [event, ...] --fold()--> the response object

To add a kind of item that grows: a row of KINDS, and one of GRAMMAR for each of its events. To add another
event: a row of GRAMMAR, and feed() makes it with _event(). The members of both are rows of OBJECTS in
audit/tables.py. What adds to the response is a row of FOLD in service/page.html, which a test demands.
`python tests/pictures.py` draws the picture of GRAMMAR again.

Authority: https://platform.openai.com/docs/api-reference/responses-streaming and the event types of the
`openai` package.

Rules of this file:
1. A response is the fold of its events: whoever applies all of them has the `response` of the last event,
   bit for bit (tests/helpers/laws.py checks it), so fold() need only return that one.
2. Every event passes `Builder._allowed`, where GRAMMAR decides whether it may come now; but for the last of
   a response that a bug kept from ending (jobs.py), and those of steering (websocket.py).
3. The ids and the index of an output item are fixed when it is announced.
4. `Builder._close` alone closes an item that grows: at the next, the end, a length stop, a failure, a cancel.
5. The dict of an item that stands in an event is never changed, only replaced by a new one.
6. No event has its `sequence_number` yet: it is given when the event enters the log (event_log.py).
7. Logprobs, which several events repeat, are encoded once (sse.Encoded). So the events that close an item
   only copy their bytes.

Why a table, and not the usual calls in the order of the code: in other servers done events came late, twice
or never, because each place that opened an item had to remember which one to close. Here an event that may
not come now raises, and `_close` is the one way out of an item. The price is a lookup for each event.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import sse
from channels import Accepted, Arguments, Call, Close, Compaction, Delta, Finish, Output, Usage
from sse import Object

Event = Object  # as on the wire, without its sequence_number; what is large may be Encoded

# --- theory of operation ------------------------------------------------------------------------------------

# The output of a response is a list of items: messages, reasoning, calls. At most one of them is open. It is
# announced (output_item.added), grows by deltas, and is closed by events that say all of it once more
# (output_item.done). Messages and reasoning hold their text in a content part, which is announced and closed
# in between; a call has none. Closing is a transition: the open item is closed before the next one opens.
#
# The output of a model, the events that the builder makes, and the state after each:
#
#     start()                   response.created                              created
#                               response.in_progress                          between
#     Delta("final", "Hi")      response.output_item.added message            message
#                               response.content_part.added output_text       text
#                               response.output_text.delta                    text
#     Delta("final", "!")       response.output_text.delta                    text
#     Call("f")                 response.output_text.done                     text done
#                               response.content_part.done output_text        message done
#                               response.output_item.done message             between
#                               response.output_item.added function_call      call
#     Arguments("{}")           response.function_call_arguments.delta        call
#     Finish("stop")            response.function_call_arguments.done         call done
#                               response.output_item.done function_call       between
#                               response.completed                            end

# --- the tables ---------------------------------------------------------------------------------------------

# fmt: off
#  (state,             event, and the item or part it opens or ends)                  next state
GRAMMAR = {
    ("start",          "response.created"):                                           "created",
    ("created",        "response.queued"):                                            "queued",
    ("created",        "response.in_progress"):                                       "between",
    ("queued",         "response.in_progress"):                                       "between",

    ("between",        "response.output_item.added message"):                         "message",
    ("message",        "response.content_part.added output_text"):                    "text",
    ("text",           "response.output_text.delta"):                                 "text",
    ("text",           "response.output_text.done"):                                  "text done",
    ("text done",      "response.content_part.done output_text"):                     "message done",
    ("message",        "response.content_part.added refusal"):                        "refusal",
    ("refusal",        "response.refusal.delta"):                                     "refusal",
    ("refusal",        "response.refusal.done"):                                      "refusal done",
    ("refusal done",   "response.content_part.done refusal"):                         "message done",
    ("message done",   "response.output_item.done message"):                          "between",

    ("between",        "response.output_item.added reasoning"):                       "reasoning",
    ("reasoning",      "response.content_part.added reasoning_text"):                 "thought",
    ("thought",        "response.reasoning_text.delta"):                              "thought",
    ("thought",        "response.reasoning_text.done"):                               "thought done",
    ("thought",        "response.reasoning.delta"):                                   "thought",
    ("thought",        "response.reasoning.done"):                                    "thought done",
    ("thought done",   "response.content_part.done reasoning_text"):                  "reasoning done",
    ("reasoning done", "response.output_item.done reasoning"):                        "between",

    ("between",        "response.output_item.added function_call"):                   "call",
    ("call",           "response.function_call_arguments.delta"):                     "call",
    ("call",           "response.function_call_arguments.done"):                      "call done",
    ("call done",      "response.output_item.done function_call"):                    "between",

    ("between",        "response.output_item.added custom_tool_call"):                "custom",
    ("custom",         "response.custom_tool_call_input.delta"):                      "custom",
    ("custom",         "response.custom_tool_call_input.done"):                       "custom done",
    ("custom done",    "response.output_item.done custom_tool_call"):                 "between",

    ("between",        "response.output_item.added compaction"):                      "compaction",
    ("compaction",     "response.output_item.done compaction"):                       "between",

    ("between",        "response.completed"):                                         "end",
    ("between",        "response.incomplete"):                                        "end",
    ("between",        "response.failed"):                                            "end",
    ("queued",         "response.failed"):                                            "end",
}


class ItemKind(NamedTuple):
    """How output items of one kind open, grow and close."""

    item: str    # type of the item
    prefix: str  # of its id
    part: str    # type of its one content part, "" if it has none
    events: str  # name of its text's events: "….delta" adds to the text, "….done" says all of it
    field: str   # member of the done event, the part and the item that holds the text
    members: Object  # of the item when it is announced, beside its id, type and status


MESSAGE: Object = {"role": "assistant", "content": []}
REASONING: Object = {"summary": [], "content": []}

#   open                item         id     part              events                     field
KINDS = {
    "analysis":   ItemKind("reasoning", "rs", "reasoning_text", "response.reasoning_text", "text", REASONING),
    "commentary": ItemKind("message",   "msg", "output_text",    "response.output_text",    "text", MESSAGE),
    "final":      ItemKind("message",   "msg", "output_text",    "response.output_text",    "text", MESSAGE),
    "refusal":    ItemKind("message",   "msg", "refusal",        "response.refusal",     "refusal", MESSAGE),
    "call":       ItemKind("function_call",    "fc",  "", "response.function_call_arguments",
                           "arguments", {"arguments": ""}),
    "custom":     ItemKind("custom_tool_call", "ctc", "", "response.custom_tool_call_input",
                           "input",     {"input": ""}),
}

class Ending(NamedTuple):
    """How a finish reason ends a response."""

    event: str
    status: str
    item_status: str               # of the item that is open
    incomplete_reason: str | None  # incomplete_details.reason


# Who sets a finish reason:
# stop            scheduler.py at a stop token; channels.py at a stop string, the one call, the turn's end
# length          scheduler.py at max_tokens, worker.py after MAX_LOGPROBS
# content_filter  an upstream alone; it may say stop and length, too (FINISH_REASONS of gateway/answers.py)
# steered         service/websocket.py
# failed          engine.py: a step, a mask or a stop; gateway/: an upstream; request/: a call that cannot be
#                 run, a compaction without a summary; jobs.py: an exception; background.py: a restart
# cancelled       background.py, or the client of a foreground response that has left (jobs.py)
#
#   finish_reason                event                  status        open item     incomplete reason
ENDINGS = {
    "stop":           Ending("response.completed",  "completed",  "completed",  None),
    # https://github.com/vllm-project/vllm/issues/57998
    "length":         Ending("response.incomplete", "incomplete", "incomplete", "max_output_tokens"),
    "content_filter": Ending("response.incomplete", "incomplete", "incomplete", "content_filter"),
    # The response that follows it has what its client has said meanwhile: service/websocket.py.
    "steered":        Ending("response.incomplete", "incomplete", "incomplete", "steered"),
    "failed":         Ending("response.failed",     "failed",     "incomplete", None),
    # No event is named after a cancel: the stream ends with response.failed around status "cancelled".
    "cancelled":      Ending("response.failed",     "cancelled",  "incomplete", None),
}
# fmt: on


def label(event: Object) -> str:
    """Return an event's name in GRAMMAR: its type, and the type of the item or part that it opens or ends."""
    item_or_part = event.get("item") or event.get("part")
    if item_or_part:
        return f"{event['type']} {item_or_part['type']}"
    return str(event["type"])


# --- the builder --------------------------------------------------------------------------------------------


@dataclass
class _Item:
    """The item that is open."""

    kind: ItemKind
    announced: Object  # the item in its first event: empty, and in progress
    output_index: int
    texts: list[str] = field(default_factory=list)
    logprobs: list[sse.Encoded] = field(default_factory=list)  # one a token

    def __post_init__(self) -> None:
        # The members that locate an event in the output.
        self.location: Object = {"item_id": self.announced["id"], "output_index": self.output_index}
        if self.kind.part:
            # content_index restarts at 0 in every item: https://github.com/vllm-project/vllm/issues/45742
            self.location["content_index"] = 0
        self.delta = {"type": f"{self.kind.events}.delta", **self.location}  # what all of them say

    def part(self) -> Object:
        """Return the content part with the text so far."""
        part: Object = {"type": self.kind.part, self.kind.field: self.text()}
        if self.kind.part == "output_text":
            part |= {"annotations": [], "logprobs": [*self.logprobs]}
        return part

    def text(self) -> str:
        return "".join(self.texts)

    def grow(self, text: str, logprobs: Sequence[sse.Encoded]) -> Object:
        """Add to the text; return its delta event."""
        delta = {**self.delta, "delta": text}
        if self.kind.part == "output_text":
            delta["logprobs"] = logprobs
            self.logprobs += logprobs
        self.texts.append(text)
        return delta

    def whole(self) -> Object:
        """Return the members of the event with the whole text."""
        whole = {**self.location, self.kind.field: self.text()}
        if self.kind.part == "output_text":  # it must have `logprobs`, even if empty; no other .done has them
            whole["logprobs"] = [*self.logprobs]
        if self.kind.item == "function_call":
            whole["name"] = self.announced["name"]  # required by openai-openapi, absent from the SDK's type
        return whole


def usage_object(usage: Usage) -> Object:
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }


@dataclass
class Builder:
    """Builds one response. The event loop alone calls a builder."""

    # The members of the response object that do not change: id, created_at, model, parameters of the request.
    head: Object
    new_id: Callable[[str], str]  # draws an id with this prefix
    seal: Callable[[str, str], str]  # makes the encrypted_content of a compaction: type, text
    # Reasoning items have it too; else it is left out: Open Responses' schema does not allow null there.
    seals_reasoning: bool = False
    reasoning_events: str = "openai"  # a key of REASONING_EVENTS

    def __post_init__(self) -> None:
        self.state = "start"
        self.output: list[Object] = []  # closed items
        self.has_called = False  # a tool: it is not steered before its end
        self._item: _Item | None = None  # the open one
        reasoning = KINDS["analysis"]._replace(events=REASONING_EVENTS[self.reasoning_events])
        self._kinds = KINDS | {"analysis": reasoning}

    def feed(self, output: Accepted | Output | Compaction) -> list[Event]:
        """Return the events of one output of the worker: none, one or several."""
        match output:
            case Delta():
                # What cannot be encoded raises before anything has changed.
                encoded = [sse.encoded(token.entry()) for token in output.logprobs]
                if self._item and self._item.kind is self._kinds[output.channel]:
                    return self._grow(output.text, encoded)
                return [*self._open(output.channel, {}), *self._grow(output.text, encoded)]
            case Accepted():
                return self.start()
            case Compaction(summary):
                return [*self._close("completed"), *self._compaction(self.seal("compaction", summary))]
            case Call(name, custom, namespace, extra):
                self.has_called = True
                call: Event = {"call_id": self.new_id("call"), "name": name, **extra}
                if namespace:
                    call["namespace"] = namespace
                return self._open("custom" if custom else "call", call)
            case Arguments(text):
                return self._grow(text)
            case Close(is_cut):
                return self._close("incomplete" if is_cut else "completed")

    def start(self) -> list[Event]:
        """Return the events that need no token, at once: clients time out on long prompts."""
        created = []
        if self.state == "start":  # else it was queued
            created = [self._envelope("response.created", "in_progress")]
        return [*created, self._envelope("response.in_progress", "in_progress")]

    def _envelope(self, type_: str, status: str, **members: Any) -> Event:
        """Make an event with the response object so far; `members` are set at its end."""
        response = self.head | {
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": [*self.output],
            "usage": None,
            **members,
        }
        return self._event(type_, response=response)

    def _event(self, type_: str, **members: Any) -> Event:
        return self._allowed({"type": type_, **members})

    def _allowed(self, event: Event) -> Event:
        """Return an event that may come now; raises IllegalEvent (rule 2)."""
        next_state = GRAMMAR.get((self.state, label(event)))
        if next_state is None:
            raise IllegalEvent(f"can't send {label(event)} in state {self.state!r}")
        self.state = next_state
        return event

    def _open(self, key: str, call: dict[str, str]) -> list[Event]:
        """Close the open item; announce another one, and its content part if it has one."""
        events = self._close("completed")
        kind = self._kinds[key]
        fields = {"id": self.new_id(kind.prefix), "type": kind.item, "status": "in_progress"}
        announced = {**fields, **call, **kind.members}
        # The output_index of an item, fixed here: rule 3.
        index = len(self.output)
        item = _Item(kind, announced, index)
        events.append(self._event("response.output_item.added", output_index=index, item=announced))
        if kind.part:
            events.append(self._event("response.content_part.added", **item.location, part=item.part()))
        self._item = item
        return events

    def _close(self, status: str) -> list[Event]:
        """End the open item with the events that repeat it as a whole."""
        item = self._item
        if item is None:
            return []
        events = [self._event(f"{item.kind.events}.done", **item.whole())]
        closed = item.announced | {"status": status}
        if item.kind.part:
            closed["content"] = [item.part()]
            events.append(self._event("response.content_part.done", **item.location, part=item.part()))
        else:
            closed[item.kind.field] = item.text()
        if self.seals_reasoning and item.kind.item == "reasoning":
            closed["encrypted_content"] = self.seal("reasoning", item.text())
        events.append(self._event("response.output_item.done", output_index=item.output_index, item=closed))
        self.output.append(closed)
        self._item = None
        return events

    def _grow(self, text: str, logprobs: Sequence[sse.Encoded] = ()) -> list[Event]:
        """Add text to the open item."""
        item = self._item
        if item is None or not (text or logprobs):
            return []
        return [self._allowed(item.grow(text, logprobs))]

    def finish(self, finish: Finish, now: int) -> list[Event]:
        """Return the events that end the response; `now` is the time in Unix seconds."""
        ending = ENDINGS[finish.reason]
        closing = self._close(ending.item_status)
        members: Object = {}
        if ending.status == "completed":
            members["completed_at"] = max(now, self.head["created_at"])  # a clock may be set back
        if ending.status == "failed":
            members["error"] = {"code": finish.code, "message": finish.message}
        if ending.incomplete_reason:
            members["incomplete_details"] = {"reason": ending.incomplete_reason}
        if finish.usage and ending.status != "cancelled":
            members["usage"] = usage_object(finish.usage)
        return [*closing, self._envelope(ending.event, ending.status, **members)]

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    def queue(self) -> list[Event]:
        """Return the events of a response that waits for its turn."""
        return [self._envelope(type_, "queued") for type_ in ("response.created", "response.queued")]

    def resume(self, events: Iterable[Event]) -> None:
        """Continue a response after these events of another builder, read from JSON."""
        newest: list[Event] = []  # of the newest item: how it was announced, and its deltas
        for event in events:
            self.state = GRAMMAR[self.state, label(event)]
            if event["type"] == "response.output_item.added":
                newest = [event]
            elif "delta" in event:
                newest.append(event)
            elif event["type"] == "response.output_item.done":
                self.output.append(event["item"])
        for kind in self._kinds.values():
            if (self.state, kind.events + ".delta") in GRAMMAR:  # one is open
                added, *deltas = newest
                self._item = _Item(kind, added["item"], added["output_index"])
                for delta in deltas:
                    self._item.grow(delta["delta"], [*map(sse.encoded, delta.get("logprobs", ()))])

    def _compaction(self, encrypted_content: str) -> list[Event]:
        """Announce and close an item that does not grow; it has no status."""
        item = {"id": self.new_id("cmp"), "type": "compaction", "encrypted_content": encrypted_content}
        index = len(self.output)
        self.output.append(item)
        announced = item | {"encrypted_content": ""}
        return [
            self._event("response.output_item.added", output_index=index, item=announced),
            self._event("response.output_item.done", output_index=index, item=item),
        ]


# --- the fold: a plain streamed request passes what stands above --------------------------------------------


class IllegalEvent(RuntimeError):
    """GRAMMAR has no row for this state and event: the caller has a bug, or the response has ended."""


# --- the tables ---------------------------------------------------------------------------------------------

# fmt: off
#   --reasoning-events   two authorities, two names: github.com/openresponses/openresponses/pull/42
REASONING_EVENTS = {
    "openai":            "response.reasoning_text",
    "open-responses":    "response.reasoning",
}
# fmt: on


def fold(events: Iterable[Object]) -> Object:
    """Return the response object of a stream: that of the newest event with one."""
    snapshots = [event["response"] for event in events if "response" in event]
    return dict(snapshots[-1])
