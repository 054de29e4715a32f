"""Tool items: calls that have item types of their own, and their results, told as calls of functions.

    shell_call {call_id: "c", action: {commands: [...]}}     a call "c" of shell with {"action": {...}}
    shell_call_output {call_id: "c", output: [...]}          its result {"output": [...]}
    mcp_call {name: "x", arguments: "{}", output: "y"}       a call of mcp with all three

Agents send back what other models have called, of tools that this server does not have. No model here was
trained on those items, but each was trained on calls of functions; so they are told as those, by
messages.add_tool_item().

Authority: openai.types.responses.ResponseInputItemParam. What becomes of a session if they are refused:
https://github.com/caozhiyuan/copilot-api/issues/359

Rules of this file:
1. A new type is one name in TOOL_ITEMS, which also says what it is: `_output` and `_response` are results.
2. All members are told, as they came, but for types and ids (NOT_TOLD).
3. Images are refused, by the name of their place, unless items.py has put a text there (IMAGE_TEXT).
"""

import re

IMAGE_TEXT = "[an image, which cannot be shown here]"

TOOL_ITEMS = (
    "shell_call", "shell_call_output",
    "local_shell_call", "local_shell_call_output",
    "apply_patch_call", "apply_patch_call_output",
    "computer_call", "computer_call_output",
    "tool_search_call", "tool_search_output",
    "program", "program_output",
    "mcp_approval_request", "mcp_approval_response",
    "mcp_list_tools", "mcp_call",
    "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call",
)  # fmt: skip
SUFFIX = re.compile("_call|_request|_output|_response")  # begins after the name of the tool
RESULT_SUFFIXES = ("_output", "_response")

NOT_TOLD = ("type", "id", "call_id", "approval_request_id")

# fmt: off
#   type of an item            its member that is the id of the call; in other types it is `call_id`
CALL_IDS = {
    "local_shell_call_output": "id",
    "mcp_approval_request":    "id",
    "mcp_approval_response":   "approval_request_id",
}

#   type of an item            its member that holds an image
IMAGE_MEMBERS = {
    "computer_call_output":    "output",
    "image_generation_call":   "result",
}
# fmt: on
