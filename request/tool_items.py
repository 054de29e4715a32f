"""Tool items: calls that have item types of their own, and their results, told as calls of functions.

    shell_call {call_id: "c", action: {commands: [...]}}     a call "c" of shell with {"commands": [...]}
    shell_call_output {call_id: "c", output: [...]}          its result {"output": [...]}
    web_search_call {id: "ws_1", action: {query: "x"}}       a call and its result: it has run elsewhere

Agents send back what other models have called, of tools that this server does not have. No model here was
trained on those items, but each was trained on calls of functions; so they are told as those, by
messages.add_tool_item().

Authority: openai.types.responses.ResponseInputItemParam. What becomes of a session if they are refused:
https://github.com/caozhiyuan/copilot-api/issues/359

Rules of this file:
1. A new type is one row of TOOL_ITEMS, and nothing else.
2. The members that the row names are told, as they came; other members mean nothing to a model.
3. Images are refused, by the name of their place, unless items.py has put a text there (IMAGE_TEXT).
"""

import re

IMAGE_TEXT = "[an image, which cannot be shown here]"

# fmt: off
# What is told of an item of one type: its members, with blanks between their names.
#   arguments  an object is the arguments, anything else is one of them; "": the item is not a call
#   result     "": the result is another item
#   type of an item             arguments                      result
TOOL_ITEMS: dict[str, tuple[str, str]] = {
    "shell_call":              ("action",                      ""),
    "shell_call_output":       ("",                            "output"),
    "local_shell_call":        ("action",                      ""),
    "local_shell_call_output": ("",                            "output"),
    "apply_patch_call":        ("operation",                   ""),
    "apply_patch_call_output": ("",                            "status output"),
    "computer_call":           ("action actions",              ""),
    "computer_call_output":    ("",                            "output"),
    "tool_search_call":        ("arguments",                   ""),
    "tool_search_output":      ("",                            "tools"),
    "program":                 ("code",                        ""),
    "program_output":          ("",                            "result"),
    "mcp_approval_request":    ("server_label name arguments", ""),
    "mcp_approval_response":   ("",                            "approve reason"),
    "mcp_list_tools":          ("server_label",                "tools error"),
    "mcp_call":                ("server_label name arguments", "output error"),
    "web_search_call":         ("action",                      "status"),
    "file_search_call":        ("queries",                     "results status"),
    "code_interpreter_call":   ("code",                        "outputs status"),
    "image_generation_call":   ("revised_prompt",              "result status"),
}

#   type of an item            its member that is the id of the call, or another one if that is not given; in
CALL_IDS = {                 # other types it is `call_id`, or `id` if call and result are one item
    "local_shell_call_output": "call_id id",
    "mcp_approval_request":    "id",
    "mcp_approval_response":   "approval_request_id",
}

#   type of an item            its member that holds an image
IMAGE_MEMBERS = {
    "computer_call_output":    "output",
    "image_generation_call":   "result",
}
# fmt: on
MAY_LACK_RESULT = ("mcp_approval_request",)  # the user may go on without an answer to it
TYPE_SUFFIX = re.compile("_call|_output|_request|_response")  # begins after the name of the tool
