"""Input items: what a request refers to is put in its place, and every item gets its long form.

    input, previous_response_id --resolve()--> chain, input --listed()--> [item as it is stored, ...]

Authority: https://platform.openai.com/docs/guides/conversation-state for chains and references, and
https://platform.openai.com/docs/guides/reasoning#encrypted-reasoning-items for `encrypted_content`.

Rules of this file:
1. Behind resolve() nothing has to be looked up or decrypted any more: no other module knows of references.
2. `find` and `unseal` are bound to the owner of the request: what others own does not exist.
3. An item of a stored response is taken as it was said.
4. No two items of a conversation have the same id: paging through them by id would go round in circles.

Not here: the lookup (background.py), the seal (service/signed_content.py), what an item means to the model
(messages.py).
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from request.ids import new_id, response_id_of
from request.messages import MAX_ITEMS
from request.refusals import BadInput
from request.validation import required, text
from store import TERMINAL, Row

Item = dict[str, Any]
Find = Callable[[str], Awaitable[Row | None]]  # id of a response -> the response; None where there is none
Unseal = Callable[[str, str], str]  # (purpose, blob) -> the text in it; raises ValueError

# fmt: off
#  type of an item             prefix of its id
PREFIXES = {
    "message":                 "msg",
    "reasoning":               "rs",
    "function_call":           "fc",
    "function_call_output":    "fco",
    "custom_tool_call":        "ctc",
    "custom_tool_call_output": "ctco",
    "compaction":              "cmp",
}
# fmt: on


# --- references, chains, sealed blobs -----------------------------------------------------------------------


async def resolve(
    input: Any, previous_response_id: str | None, find: Find, unseal: Unseal
) -> tuple[list[Item], Any]:
    """The items of the chain that a request continues, and its own `input` with nothing left to look up.

    `input` is not checked yet: what is no item is let through, and refused by messages.py. Raises BadInput.
    """
    chain = await _chain(previous_response_id, find)
    if not isinstance(input, list) or len(input) > MAX_ITEMS:
        return chain, input
    outputs: dict[str, list[Item]] = {}  # of the responses that have been looked up, by response id
    resolved = []
    for i, item in enumerate(input):
        path = f"input[{i}]"
        match item:
            case {"type": "compaction"}:
                item = item | {"summary": _unsealed(item, path, unseal)}
            case {"type": "reasoning", "encrypted_content": blob} if blob and not item.get("content"):
                thought = {"type": "reasoning_text", "text": _unsealed(item, path, unseal)}
                item = item | {"content": [thought]}
            case dict() if is_reference(item):
                item = await _referenced(required(item, "id", text, path), path, outputs, find)
        resolved.append(item)
    return chain, resolved


def is_reference(item: Mapping[str, Any]) -> bool:
    """An item_reference; the SDK's shortest form has an id and no type."""
    has_id_alone = item.get("type") is None and item.get("role") is None and item.get("id") is not None
    return has_id_alone or item.get("type") == "item_reference"


async def _chain(previous_response_id: str | None, find: Find) -> list[Item]:
    if previous_response_id is None:
        return []
    row = await find(previous_response_id)
    if row is None:
        message = f"Previous response with id '{previous_response_id}' not found."
        raise BadInput(message, "previous_response_id", "previous_response_not_found")
    if row.response["status"] not in TERMINAL:
        message = f"Previous response with id '{previous_response_id}' has not ended yet."
        raise BadInput(message, "previous_response_id")
    return row.context


async def _referenced(item_id: str, path: str, outputs: dict[str, list[Item]], find: Find) -> Item:
    response_id = response_id_of(item_id)
    if response_id not in outputs:
        row = await find(response_id)
        outputs[response_id] = row.response["output"] if row else []
    for item in outputs[response_id]:
        if item["id"] == item_id:
            return item
    raise BadInput(f"Item with id '{item_id}' not found.", f"{path}.id", "item_not_found")


def _unsealed(item: Item, path: str, unseal: Unseal) -> str:
    try:
        return unseal(item["type"], str(item.get("encrypted_content")))
    except ValueError as error:
        raise BadInput(str(error), f"{path}.encrypted_content") from error


# --- the long form ------------------------------------------------------------------------------------------


def listed(chain: Sequence[Item], input: str | Sequence[Item]) -> list[Item]:
    """A conversation as GET /v1/responses/{id}/input_items lists it: the chain, then the request's items."""
    own: Sequence[Item] = [{"role": "user", "content": input}] if isinstance(input, str) else input
    items = list(chain)
    ids = {item["id"] for item in items}
    for item in own:
        items.append(_long_form(item, ids))
        ids.add(items[-1]["id"])
    return items


def _long_form(item: Mapping[str, Any], taken_ids: set[str]) -> Item:
    kind = item.get("type") or "message"
    id_ = item.get("id")
    if not isinstance(id_, str) or not id_ or id_ in taken_ids:
        id_ = new_id(PREFIXES.get(kind, "item"))
    long = {**item, "id": id_, "type": kind}
    if kind == "compaction":  # openai.types.responses.ResponseCompactionItem has no status
        return long
    if kind == "message" and isinstance(item["content"], str):
        long["content"] = [_text_part(item["role"], item["content"])]
    return long | {"status": item.get("status") or "completed"}


def _text_part(role: str, content: str) -> dict[str, Any]:
    if role == "assistant":
        return {"type": "output_text", "annotations": [], "text": content}
    return {"type": "input_text", "text": content}
