"""Ids that the server makes: requests, responses, completions, and the items of a response.

    "resp" --new_id()--> "resp_5d41..."
    "resp_5d41..." --item_ids()--> "rs_5d41...00000000", "msg_5d41...00000001", ...

Authority: https://platform.openai.com/docs/api-reference/responses/object: an opaque string after a prefix.

Rules of this file:
1. An id cannot be guessed.
2. The id of an item contains that of its response, as OpenAI's do: an `item_reference` has only this id.
"""

import contextvars
import itertools
import secrets
from collections.abc import Callable

N_RANDOM_BYTES = 24
N_NUMBER_DIGITS = 8  # hexadecimal, at the end of an item's id

# The id of the HTTP request that this task works for, as in its reply's x-request-id; "" without one.
REQUEST_ID = contextvars.ContextVar("REQUEST_ID", default="")


def new_id(prefix: str, separator: str = "_") -> str:
    return f"{prefix}{separator}{secrets.token_hex(N_RANDOM_BYTES)}"


def item_ids(response_id: str) -> Callable[[str], str]:
    """Return a function that draws the next item's id from its prefix."""
    numbers = itertools.count()
    random_part = response_id.removeprefix("resp_")
    return lambda prefix: f"{prefix}_{random_part}{next(numbers):0{N_NUMBER_DIGITS}x}"


# --- the fold: a plain streamed request passes what stands above --------------------------------------------

# fmt: off
#   type of an item            prefix of its id; those of tool_items.py have "item"
PREFIXES = {
    "message":                 "msg",
    "reasoning":               "rs",
    "function_call":           "fc",
    "function_call_output":    "fco",
    "custom_tool_call":        "ctc",
    "custom_tool_call_output": "ctco",
    "compaction":              "cmp",
    "compaction_trigger":      "cmpt",
    "additional_tools":        "at",
}
# fmt: on


def response_id_of(item_id: str) -> str:
    """Return the id of the response that holds the item, if the id comes from item_ids()."""
    return "resp_" + item_id.partition("_")[2][:-N_NUMBER_DIGITS]
