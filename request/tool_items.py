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
1. The name of a type says what it is: `_output` and `_response` are results. So are types of tomorrow read.
2. All members are told, as they came, but for types and ids (NOT_TOLD).
3. Images are refused, by the name of their place, unless items.py has put a text there (IMAGE_TEXT).
"""

import re

IMAGE_TEXT = "[an image, which cannot be shown here]"

# The types of these items, with the name of the tool where something follows it.
TOOL_ITEM = re.compile("(.+?)_(call|request|call_output|output|response)|program|mcp_list_tools")
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
