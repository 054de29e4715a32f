"""Which event of a Responses stream may follow which: responses.GRAMMAR, and what other servers may add.

    event --label()--> its name in ORDER        (state, label) --ORDER--> the next state

Authority: https://platform.openai.com/docs/api-reference/responses-streaming

Rules of this file:
1. What is judged does not judge: responses.py gives its GRAMMAR, and nothing that makes events.
2. What a server runs itself (web search, code, MCP) is one state, "hosted": its events are its own.

Not here: the members of an event (members.py), what they must say (rules_events.py).
"""

from typing import Any

from audit.members import Json
from responses import GRAMMAR

# fmt: off
# What servers may say and ours has no need to: more parts, refusals, annotations, summaries, hosted tools.
#  (state,                     event, and the item or part it opens or ends)             next state
MORE = {
    ("message done",            "response.content_part.added output_text"):               "text",
    ("text",                    "response.output_text.annotation.added"):                 "text",
    ("message done",            "response.content_part.added refusal"):                   "refusal",

    ("reasoning done",          "response.content_part.added reasoning_text"):            "thought",
    ("reasoning",               "response.output_item.done reasoning"):                   "between",
    ("reasoning",               "response.reasoning_summary_part.added summary_text"):    "summary",
    ("reasoning done",          "response.reasoning_summary_part.added summary_text"):    "summary",
    ("summary",                 "response.reasoning_summary_text.delta"):                 "summary",
    ("summary",                 "response.reasoning_summary_text.done"):                  "summary done",
    ("summary done",            "response.reasoning_summary_part.done summary_text"):     "reasoning done",

    ("compaction",              "response.compaction.compacting"):                        "compaction",

    ("between",                 "response.output_item.added *"):                          "hosted",
    ("hosted",                  "response.*"):                                            "hosted",
    ("hosted",                  "response.output_item.done *"):                           "between",
}
HOSTED = ("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_",
          "computer_call", "local_shell_call", "shell_call", "apply_patch_call", "tool_search")
# fmt: on

LEGAL = GRAMMAR | MORE
# Whatever is open may be left open by a failure.
FAILED = {(state, "response.failed"): "end" for state in {*LEGAL.values()} - {"end"}}
ORDER = LEGAL | FAILED
AFTER = {event: state for (_, event), state in ORDER.items()}  # where an event leads that came out of order


def label(event: Json) -> str:
    """The name of an event in ORDER: its type, and the type of the item or part that it opens or ends."""
    event_type = str(event.get("type"))
    if event_type.removeprefix("response.").startswith(HOSTED):
        return "response.*"
    inner: dict[str, Any] | None = event.get("item") or event.get("part")
    if not inner:
        return event_type
    inner_type = inner.get("type", "")
    if event_type.startswith("response.output_item.") and inner_type.startswith(HOSTED):
        inner_type = "*"
    return f"{event_type} {inner_type}"


def is_steering(event: Json) -> bool:
    """Whether it tells what became of a client's response.steer: such events come whenever they come."""
    return str(event.get("type")).startswith("response.steer.")


def expected_in(state: str) -> str:
    """The labels that may come in a state, for people."""
    return " or ".join(label for legal_state, label in LEGAL if legal_state == state)
