"""The shapes of events, items and chunks, as tables: the members they must have, and what may follow what.

Authority: https://github.com/openai/openai-openapi (events, items, chunks, and the members they must have).

Rules of this file:
1. What is judged does not judge: of responses.py there is its GRAMMAR, and nothing that makes events.

Not here: the rules that hold a recording against these tables (framing.py, events.py, chunks.py).
"""

import re
from collections.abc import Iterator

from responses import GRAMMAR

Found = Iterator[tuple[int, str]]  # (number of an event, what is wrong with it)


# --- the shapes ---------------------------------------------------------------------------------------------

# fmt: off
#  event                                        what it holds besides type and sequence_number
FIELDS = {
    "response.created":                         "response",
    "response.queued":                          "response",
    "response.in_progress":                     "response",
    "response.completed":                       "response",
    "response.incomplete":                      "response",
    "response.failed":                          "response",
    "response.output_item.added":               "output_index item",
    "response.output_item.done":                "output_index item",
    "response.content_part.added":              "item_id output_index content_index part",
    "response.content_part.done":               "item_id output_index content_index part",
    "response.output_text.delta":               "item_id output_index content_index delta logprobs",
    "response.output_text.done":                "item_id output_index content_index text logprobs",
    "response.output_text.annotation.added":    "item_id output_index content_index annotation_index",
    "response.refusal.delta":                   "item_id output_index content_index delta",
    "response.refusal.done":                    "item_id output_index content_index refusal",
    "response.reasoning_text.delta":            "item_id output_index content_index delta",
    "response.reasoning_text.done":             "item_id output_index content_index text",
    "response.reasoning.delta":                 "item_id output_index content_index delta",
    "response.reasoning.done":                  "item_id output_index content_index text",
    "response.reasoning_summary_part.added":    "item_id output_index summary_index part",
    "response.reasoning_summary_part.done":     "item_id output_index summary_index part",
    "response.reasoning_summary_text.delta":    "item_id output_index summary_index delta",
    "response.reasoning_summary_text.done":     "item_id output_index summary_index text",
    "response.function_call_arguments.delta":   "item_id output_index delta",
    "response.function_call_arguments.done":    "item_id output_index name arguments",
    "response.custom_tool_call_input.delta":    "item_id output_index delta",
    "response.custom_tool_call_input.done":     "item_id output_index input",
    "error":                                    "code message param",
}

#  item or part          what it holds besides type
MEMBERS = {
    "message":           "id status role content",
    "reasoning":         "id summary",
    "function_call":     "id status call_id name arguments",
    "custom_tool_call":  "id call_id name input",
    "output_text":       "text annotations logprobs",
    "refusal":           "refusal",
    "reasoning_text":    "text",
    "summary_text":      "text",
}

# Of a response object, null where there is nothing to say: "required" in openai-openapi, `Response`.
RESPONSE = (
    "id object created_at status error incomplete_details instructions model tools output tool_choice "
    "parallel_tool_calls metadata temperature top_p"
)
CHUNK = "id object created model choices"
CHOICE = "index delta finish_reason"
ERROR = "message type param code"

# What servers may say and ours has no need to: more parts, refusals, annotations, summaries.
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

    ("between",                 "response.output_item.added *"):                          "hosted",
    ("hosted",                  "response.*"):                                            "hosted",
    ("hosted",                  "response.output_item.done *"):                           "between",
}
HOSTED = ("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_",
          "computer_call", "local_shell_call", "shell_call", "apply_patch_call", "tool_search")

# Whatever is open may be left open by a failure.
FAILED = dict.fromkeys([(s, "response.failed") for s in {*(GRAMMAR | MORE).values()} - {"end"}], "end")
ORDER = GRAMMAR | MORE | FAILED
AFTER = {event: state for (_, event), state in ORDER.items()}  # where an event leads, if it may not come

#  event                    the statuses that its response may have; no event is named after a cancel
STATUSES = {
    "response.created":     {"in_progress"},  # in the background: or queued
    "response.queued":      {"queued"},
    "response.in_progress": {"in_progress"},
    "response.completed":   {"completed"},
    "response.incomplete":  {"incomplete"},
    "response.failed":      {"failed", "cancelled"},
}
TERMINAL = {"response.completed", "response.incomplete", "response.failed"}

#  member                   the one status that it is not null with
ONLY_WITH = {
    "error":                "failed",
    "incomplete_details":   "incomplete",
    "completed_at":         "completed",
}

#  what a done event says once more, and where
WHOLE = {
    "response.output_text.done":              "text",
    "response.refusal.done":                  "refusal",
    "response.reasoning_text.done":           "text",
    "response.reasoning.done":                "text",
    "response.reasoning_summary_text.done":   "text",
    "response.function_call_arguments.done":  "arguments",
    "response.custom_tool_call_input.done":   "input",
    "response.content_part.done":             "part",
    "response.reasoning_summary_part.done":   "part",
}
# fmt: on

CONTENT = ("content", "summary", "text", "refusal", "arguments", "input")  # of an item or a part
# Members of a response that change with it, and the tier, of which it may be told only in the end.
CHANGING = {"status", "output", "usage", "error", "incomplete_details", "completed_at", "service_tier"}
FINISH_REASONS = {"stop", "length", "tool_calls", "content_filter"}  # and "function_call", long deprecated
MARKUP = re.compile(r"<\|\w+\|>|</?think>|</?tool_calls?>|\[TOOL_CALLS\]")
OUR_LINE_ENDS = re.compile("[\u0085\u2028\u2029]")


def shortened(text: str, length: int = 80) -> str:
    return text if len(text) <= length else f"{text[: length // 2]}...{text[-length // 2 :]}"
