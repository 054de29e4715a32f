"""Deltas to Responses events: one state machine, one place where events are made.

    [Delta | Call | Arguments | Close, ...], Finish --Builder--> [event, ...] --fold()--> the response object

Authority: https://platform.openai.com/docs/api-reference/responses-streaming and the event types of the
`openai` package.

Rules of this file:
1. A response is the fold of its events: the last one's `response` holds what the others said, bit for bit.
2. Every event passes `Builder._event`, and GRAMMAR decides there whether it may come now.
3. Ids and indices are drawn once, when an item is announced, and never again.
4. `Builder._close` alone closes an item: for the next one, the end, a length stop, a failure, a cancel.
5. An event shares nothing with the builder: what happens later cannot change it.
6. No event has its `sequence_number` yet: it is given where the event enters the log (background.py).

Not here: time and randomness (arguments), JSON and SSE (sse.py), what the request may say
(request/params.py).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from channels import Arguments, Call, Close, Delta, Finish, Output, TokenLogprob, Usage

Event = dict[str, Any]  # as on the wire, without its sequence_number

# --- the two tables -----------------------------------------------------------------------------------------

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

    ("between",        "response.completed"):                                         "end",
    ("between",        "response.incomplete"):                                        "end",
    ("between",        "response.failed"):                                            "end",
    ("queued",         "response.failed"):                                            "end",
}


class Kind(NamedTuple):
    """How an item of this kind opens, grows and closes."""

    item: str    # its type
    prefix: str  # of its id
    part: str    # type of its one content part, "" if it has none
    events: str  # its content: "….delta" adds to it, "….done" says it all once more
    field: str   # where the latter holds it, the part and the item


#   open            item                id     part              events                        field
KINDS = {
    "analysis":   Kind("reasoning",        "rs",  "reasoning_text", "response.reasoning_text",    "text"),
    "commentary": Kind("message",          "msg", "output_text",    "response.output_text",       "text"),
    "final":      Kind("message",          "msg", "output_text",    "response.output_text",       "text"),
    "refusal":    Kind("message",          "msg", "refusal",        "response.refusal",           "refusal"),
    "call":       Kind("function_call",    "fc",  "", "response.function_call_arguments", "arguments"),
    "custom":     Kind("custom_tool_call", "ctc", "", "response.custom_tool_call_input",  "input"),
}

#   --reasoning-events   two authorities, two names: github.com/openresponses/openresponses/pull/42
REASONING_EVENTS = {
    "openai":            "response.reasoning_text",
    "open-responses":    "response.reasoning",
}

#   finish           status         closing status of the open item
ENDINGS = {
    "stop":         ("completed",  "completed"),
    "length":       ("incomplete", "incomplete"),  # https://github.com/vllm-project/vllm/issues/57998
    "content_filter": ("incomplete", "incomplete"),
    "failed":       ("failed",     "incomplete"),
    "cancelled":    ("cancelled",  "incomplete"),
}
# fmt: on

# No event is named after a cancel: the stream of a cancelled response ends with response.failed around
# status "cancelled".
TERMINAL = {"completed": "response.completed", "incomplete": "response.incomplete"}
INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


def label(event: Mapping[str, Any]) -> str:
    """The name under which GRAMMAR knows an event: its type, and the type of the item or part that it opens
    or ends.
    """
    inner = event.get("item") or event.get("part")
    return f"{event['type']} {inner['type']}" if inner else str(event["type"])


def fold(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The response object that a stream amounts to: the one in its newest event that holds one."""
    return dict([event["response"] for event in events if "response" in event][-1])


def interrupted(events: Iterable[Mapping[str, Any]], message: str) -> Event:
    """The last event of a stream whose builder is gone: finished items stay, the open one is left out."""
    seen = list(events)
    output = [event["item"] for event in seen if event["type"] == "response.output_item.done"]
    end = {"status": "failed", "error": {"code": "server_error", "message": message}, "output": output}
    return {"type": "response.failed", "response": fold(seen) | end}


# --- the builder --------------------------------------------------------------------------------------------


@dataclass
class _Item:
    """The item that is open."""

    channel: str  # key of KINDS
    kind: Kind
    id: str
    call: dict[str, str]  # of a call: its id, name and namespace
    seal: Callable[[str], str] | None
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def part(self, text: str, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self.kind.part, self.kind.field: text}
        if self.kind.part == "output_text":
            part |= {"annotations": [], "logprobs": [_logprob(p, True) for p in logprobs]}
        return part

    def snapshot(self, status: str) -> dict[str, Any]:
        """The item as it stands; in_progress means announced and still empty."""
        item: dict[str, Any] = {"id": self.id, "type": self.kind.item, "status": status}
        text = "".join(self.text)
        content = [] if status == "in_progress" else [self.part(text, self.logprobs)]
        match self.kind.item:
            case "message":
                return item | {"role": "assistant", "content": content}
            case "reasoning":
                sealed = {"encrypted_content": self.seal(text)} if self.seal and content else {}
                return item | {"summary": [], "content": content} | sealed
            case _:
                return item | self.call | {self.kind.field: text}


class Builder:
    """Builds one response.

    `head` holds the members of the response object that do not change: id, created_at, model and what the
    request's parameters resolved to. `new_id(prefix)` draws an id. `seal(text)` makes the blob that a
    reasoning item carries of itself; None: it carries none, for a null one is not in Open Responses' schema.
    `reasoning_events` is a name in REASONING_EVENTS.
    """

    def __init__(
        self,
        head: Mapping[str, Any],
        new_id: Callable[[str], str],
        seal: Callable[[str], str] | None = None,
        reasoning_events: str = "openai",
    ) -> None:
        self.state = "start"
        self.output: list[dict[str, Any]] = []  # closed items
        self._head = dict(head)
        self._new_id = new_id
        self._seal = seal
        thoughts = KINDS["analysis"]._replace(events=REASONING_EVENTS[reasoning_events])
        self._kinds = KINDS | {"analysis": thoughts}
        self._item: _Item | None = None

    def start(self, queued: bool = False) -> list[Event]:
        """What can be said before the first token: clients time out on long prompts."""
        if queued:
            return [self._envelope(type_, "queued") for type_ in ("response.created", "response.queued")]
        return [self._envelope("response.created", "in_progress"), *self.run()]

    def run(self) -> list[Event]:
        """It is its turn."""
        return [self._envelope("response.in_progress", "in_progress")]

    def feed(self, output: Output) -> list[Event]:
        match output:
            case Close():
                return self._close("completed")
            case Call(name, custom, namespace):
                call = {"call_id": self._new_id("call"), "name": name}
                call |= {"namespace": namespace} if namespace else {}
                return [*self._close("completed"), *self._open("custom" if custom else "call", call)]
            case Arguments(text):
                return self._grow(text)
            case Delta(channel, text, logprobs):
                same = self._item is not None and self._item.channel == channel
                opening = [] if same else [*self._close("completed"), *self._open(channel, {})]
                return [*opening, *self._grow(text, logprobs)]

    def finish(self, finish: Finish, now: int) -> list[Event]:
        """The end, of whatever kind; `now` is when (Unix seconds)."""
        status, item_status = ENDINGS[finish.reason]
        closing = self._close(item_status)
        return [*closing, self._envelope(TERMINAL.get(status, "response.failed"), status, finish, now)]

    # The one place where an event is made.
    def _event(self, type_: str, **fields: Any) -> Event:
        event = {"type": type_, **fields}
        self.state = GRAMMAR[self.state, label(event)]
        return event

    def _open(self, channel: str, call: dict[str, str]) -> list[Event]:
        kind = self._kinds[channel]
        self._item = item = _Item(channel, kind, self._new_id(kind.prefix), call, self._seal)
        index = len(self.output)
        events = [
            self._event("response.output_item.added", output_index=index, item=item.snapshot("in_progress"))
        ]
        if item.kind.part:
            # content_index restarts at 0 in every item: https://github.com/vllm-project/vllm/issues/45742
            place = {"item_id": item.id, "output_index": index, "content_index": 0}
            events.append(self._event("response.content_part.added", **place, part=item.part("", [])))
        return events

    def _grow(self, text: str, logprobs: tuple[TokenLogprob, ...] = ()) -> list[Event]:
        if self._item is None or not text:
            return []
        self._item.text.append(text)
        self._item.logprobs.extend(logprobs)
        return [
            self._event(
                self._item.kind.events + ".delta",
                **self._place(),
                delta=text,
                **self._event_logprobs(list(logprobs)),
            )
        ]

    def _close(self, status: str) -> list[Event]:
        """Say the open item once more as a whole, and end it."""
        if self._item is None:
            return []
        item, place, index = self._item, self._place(), len(self.output)
        said: dict[str, Any] = {item.kind.field: "".join(item.text), **self._event_logprobs(item.logprobs)}
        if item.kind.item == "function_call":
            said["name"] = item.call["name"]  # required by openai-openapi, absent from the SDK's type
        events = [self._event(item.kind.events + ".done", **place, **said)]
        if item.kind.part:
            part = item.part("".join(item.text), item.logprobs)
            events.append(self._event("response.content_part.done", **place, part=part))
        events.append(
            self._event("response.output_item.done", output_index=index, item=item.snapshot(status))
        )
        self.output.append(item.snapshot(status))
        self._item = None
        return events

    def _place(self) -> dict[str, Any]:
        assert self._item is not None
        place: dict[str, Any] = {"item_id": self._item.id, "output_index": len(self.output)}
        return place | {"content_index": 0} if self._item.kind.part else place

    def _event_logprobs(self, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        """output_text events must carry `logprobs`, be it empty; no other event has them."""
        is_text = self._item is not None and self._item.kind.part == "output_text"
        return {"logprobs": [_logprob(p, False) for p in logprobs]} if is_text else {}

    def _envelope(
        self, type_: str, status: str, finish: Finish | None = None, now: int | None = None
    ) -> Event:
        return self._event(type_, response=self._response(status, finish, now))

    def _response(self, status: str, finish: Finish | None, now: int | None) -> dict[str, Any]:
        """The response object as it stands."""
        error = {"code": finish.code, "message": finish.message} if finish and status == "failed" else None
        why = INCOMPLETE.get(finish.reason) if finish else None
        return self._head | {
            "status": status,
            "completed_at": now if status == "completed" else None,
            "error": error,
            "incomplete_details": {"reason": why} if why else None,
            "output": [dict(item) for item in self.output],
            "usage": usage_object(finish.usage)
            if finish and finish.usage and status != "cancelled"
            else None,
        }


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }


def _logprob(p: TokenLogprob, with_bytes: bool) -> dict[str, Any]:
    """Parts list a token's bytes, events do not: openai.types.responses.ResponseTextDeltaEvent."""
    return _without_top(p, with_bytes) | {"top_logprobs": [_without_top(t, with_bytes) for t in p.top]}


def _without_top(p: TokenLogprob, with_bytes: bool) -> dict[str, Any]:
    return {"token": p.token, "logprob": p.logprob} | ({"bytes": list(p.bytes)} if with_bytes else {})
