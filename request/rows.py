"""A request to the row of the store that keeps it, and the row to a body that can be run again.

    Request, parameters, conversation --new_row()--> Row --body_of()--> body of POST /v1/responses

What waits in the background is this row, as JSON text: a prompt and its tokens take many times the room.

Authority: store.Row and SCHEMA, which say what a row holds.

Rules of this file:
1. A row needs no other: it holds the conversation with all that its items referred to.
2. A response that is neither kept, nor run in the background, nor remembered by the connection that it is
   made for, is never read again, so its texts are empty.

Not here: which parameters mean something (params.py), which items are in the conversation (items.py), SQL
(../store.py).
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import sse
from request.ids import new_id
from request.items import Item
from request.params import Request
from store import Row


def new_row(
    request: Request, parameters: Mapping[str, Any], conversation: Sequence[Item], is_remembered: bool = False
) -> Row:
    """A response that is about to start.

    The items are encoded one by one: between two of them another thread gets Python's lock.
    """
    request_json = ""
    items_json = ""
    if request.store or request.background or is_remembered:
        request_json = sse.dumps(parameters)
        items_json = "[" + ",".join(map(sse.dumps, conversation)) + "]"
    return Row(
        id=new_id("resp"),
        born_at=time.time(),
        ended_at=None,
        kept=request.store,
        background=request.background,
        streamed=request.stream,
        request_json=request_json,
        items_json=items_json,
        owner=request.owner,
    )


def body_of(row: Row) -> dict[str, Any]:
    """The body of a response, with nothing left to look up."""
    return row.request | {"input": row.items, "previous_response_id": None}
