"""Deltas to the events of the Messages API: one content block after another; events to the whole message.

    [Delta | Call | Arguments | Close, ...], Finish --Builder--> [event, ...] --fold()--> the message

Authority: https://platform.claude.com/docs/en/build-with-claude/streaming and the event types of the
`anthropic` package.

Why a builder of its own, and not a translation of the events of responses.py: a block has one index, no part
and no closing copy of its text, so a translator would know both grammars and hold back what only one needs.

Rules of this file:
1. The answer without `stream` is the fold of the same events.
2. Every event is made by `Builder._event`, where GRAMMAR decides whether it may come now. `Builder._stop`
   alone stops a block; a block that says nothing is not started.
3. A thinking block ends with its signature, also if a limit has cut it: clients drop those without one.
4. Counts of tokens are totals: those of message_delta replace those of message_start. What the prefix cache
   held is not among the input_tokens.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import sse
from channels import Accepted, Arguments, Call, Close, Delta, Finish, Said, Usage
from completions import grown
from responses import IllegalEvent

Event = sse.Object  # as on the wire

PING = sse.encode({"type": "ping"}, "ping")  # keeps a silent stream alive

# What a model says, the events that are made of it, and the state after each:
#
#     Accepted(usage)             message_start                               between
#     Delta("analysis", "Hm.")    content_block_start 0 thinking              thinking
#                                 content_block_delta 0 thinking_delta        thinking
#     Delta("final", "Hi")        content_block_delta 0 signature_delta       signed
#                                 content_block_stop 0                        between
#                                 content_block_start 1 text                  text
#                                 content_block_delta 1 text_delta            text
#     Finish("stop")              content_block_stop 1                        between
#                                 message_delta                               ending
#                                 message_stop                                end

# --- the tables ---------------------------------------------------------------------------------------------

# fmt: off
#  (state,      event, and the block or delta in it)       next state
GRAMMAR = {
    ("start",    "message_start"):                         "between",

    ("between",  "content_block_start thinking"):          "thinking",
    ("thinking", "content_block_delta thinking_delta"):    "thinking",
    ("thinking", "content_block_delta signature_delta"):   "signed",
    ("signed",   "content_block_stop"):                    "between",

    ("between",  "content_block_start text"):              "text",
    ("text",     "content_block_delta text_delta"):        "text",
    ("text",     "content_block_stop"):                    "between",

    ("between",  "content_block_start tool_use"):          "tool_use",
    ("tool_use", "content_block_delta input_json_delta"):  "tool_use",
    ("tool_use", "content_block_stop"):                    "between",

    ("between",  "message_delta"):                         "ending",
    ("ending",   "message_stop"):                          "end",
    ("between",  "error"):                                 "end",
}


class BlockKind(NamedTuple):
    """How the blocks of one type start and grow."""

    members: Event  # when it starts; a call's has an id and a name too
    delta: str      # type of its deltas
    member: str     # of a delta: more of the block's text


#   type of a block, and the state while it is open
BLOCKS = {
    "thinking":    BlockKind({"thinking": "", "signature": ""}, "thinking_delta",   "thinking"),
    "text":        BlockKind({"text": ""},                      "text_delta",       "text"),
    "tool_use":    BlockKind({"input": {}},                     "input_json_delta", "partial_json"),
}

#   finish reason    stop_reason; after any other it is Builder.end
STOP_REASONS = {
    "length":         "max_tokens",
    "content_filter": "refusal",
}
# fmt: on


# --- the builder --------------------------------------------------------------------------------------------


@dataclass
class Builder:
    """Builds one message."""

    head: Event  # its id and model
    new_id: Callable[[str], str]  # draws an id with this prefix
    seal: Callable[[str, str], str]  # signs a thought: type, text
    state: str = "start"
    index: int = 0  # of the open block, or the next
    thought: list[str] = field(default_factory=list)  # the open block's
    end: str = "end_turn"  # the stop_reason, unless a limit or a stop sequence ends the message

    def feed(self, _: int, said: Said) -> list[Event]:
        """Return the events of one thing that the client is shown; a message has one choice."""
        match said:
            case Accepted(n_tokens):
                message = {
                    "type": "message",
                    "role": "assistant",
                    **self.head,
                    "content": [],
                    "stop_reason": None,
                    "stop_sequence": None,
                    "usage": usage_object(Usage(n_tokens, 0)),
                }
                return [self._event("message_start", message=message)]
            case Delta(channel, text):
                if channel == "refusal":
                    self.end = "refusal"
                type_ = "thinking" if channel == "analysis" else "text"
                started = [] if not text or self.state == type_ else self._start(type_)
                return [*started, *self._grow(text)]
            case Call(name, _, _, extra):
                self.end = "tool_use"
                return self._start("tool_use", id=self.new_id("toolu"), name=name, **extra)
            case Arguments(text):
                return self._grow(text)
            case Finish("failed"):
                error = {"type": "api_error", "message": said.message}
                return [*self._stop(), self._event("error", error=error)]
            case Finish(reason, usage):
                why = STOP_REASONS.get(reason, self.end)
                if said.stop_sequence:
                    why = "stop_sequence"
                delta = {"stop_reason": why, "stop_sequence": said.stop_sequence or None}
                total = usage_object(usage or Usage(0, 0))
                return [
                    *self._stop(),
                    self._event("message_delta", delta=delta, usage=total),
                    self._event("message_stop"),
                ]
            case Close():
                return self._stop()
        return []

    def _start(self, type_: str, **call: Any) -> list[Event]:
        block = {"type": type_, **BLOCKS[type_].members, **call}
        return [*self._stop(), self._event("content_block_start", content_block=block)]

    def _grow(self, text: str) -> list[Event]:
        kind = BLOCKS.get(self.state)
        if not (text and kind):
            return []
        if self.state == "thinking":
            self.thought.append(text)
        return [self._event("content_block_delta", delta={"type": kind.delta, kind.member: text})]

    def _stop(self) -> list[Event]:
        """Stop the open block, a thought with its signature."""
        events = []
        if self.state == "thinking":
            sealed = self.seal("thinking", "".join(self.thought))
            signature = {"type": "signature_delta", "signature": sealed}
            events = [self._event("content_block_delta", delta=signature)]
            self.thought = []
        if self.state != "between":
            events.append(self._event("content_block_stop"))
            self.index += 1
        return events

    def _event(self, type_: str, **members: Any) -> Event:
        """Make an event; raises IllegalEvent (rule 2)."""
        what = members.get("content_block") or members.get("delta", {})
        label = f"{type_} {what['type']}" if "type" in what else type_
        if (self.state, label) not in GRAMMAR:
            raise IllegalEvent(f"can't send {label} in state {self.state!r}")
        self.state = GRAMMAR[self.state, label]
        place = {"index": self.index} if type_.startswith("content_block") else {}
        return {"type": type_, **place, **members}


def usage_object(usage: Usage) -> Event:
    return {
        "input_tokens": usage.input_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


# --- events to a message ------------------------------------------------------------------------------------


def fold(events: Iterable[Event]) -> Event:
    """Return the message that a stream amounts to; the error, if it ends in one."""
    message: Event = {}
    said: list[Event] = []  # the newest block: as it started, then its deltas
    for event in events:
        match event:
            case {"message": started}:
                message = started | {"content": []}
            case {"content_block": block}:
                said = [block]
            case {"index": _, "delta": delta}:
                said.append(delta | {"type": said[0]["type"]})
            case {"type": "content_block_stop"}:
                block = grown("", said)
                written = block.pop("partial_json", "")
                if sse.is_object(written):  # else a limit has cut it, and the input stays {}
                    block["input"] = sse.loads(written, "replace")
                message["content"].append(block)
            case {"delta": delta, "usage": usage}:
                message |= delta | {"usage": usage}
            case {"type": "error"}:
                return event
    return message
