"""Tool items: calls that have item types of their own, and their results, as calls of functions.

    shell_call {call_id: "c", action: {commands: [...]}}     a call "c" of shell with {"action": {...}}
    shell_call_output {call_id: "c", output: [...]}          its result {"output": [...]}
    mcp_call {name: "x", arguments: "{}", output: "y"}       a call of mcp with all three

Agents send back the calls of other models, to tools that this server does not have. No model here was trained
on those items, but each was trained on calls of functions; so messages.add_tool_item() shows them as calls of
functions.

Authority: openai.types.responses.ResponseInputItemParam. The fate of a session if we refused them:
https://github.com/caozhiyuan/copilot-api/issues/359

Rules of this file:
1. The name of a type gives its kind: `_output` and `_response` are results. So we can read future types too.
2. The model sees all members, as they came, but for types and ids (NOT_TOLD).
3. We refuse images, by the name of their place, unless items.py has put a text there (IMAGE_TEXT).
"""

import re

IMAGE_TEXT = "[an image, which cannot be shown here]"

# The types of these items, with the name of the tool, if something follows it.
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
