"""The query of a GET: whether to stream a response and from which event, and which page of a list to show.

    query --wants_stream(), starting_after()--> whether, and from where      items, query --page()--> a page

Authority: https://platform.openai.com/docs/api-reference/responses/get and .../input-items; where that is
silent, api-behaviour-contract.md of Azure/azure-sdk-for-net.

Rules of this file:
1. What stands in a query is text: it is compared or matched before it is read as a number.
2. What cannot be read is refused by its name, never ignored.

Not here: which responses can be streamed (../api.py), bodies (body.py).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import sse
from request.refusals import wrong_value
from store import Item

Query = Mapping[str, str]

STREAMED = ("true", "True", "1")  # of `stream`
NOT_STREAMED = ("false", "False", "0")
NUMBER = re.compile("[0-9]{1,18}")  # int() raises for thousands of digits


def wants_stream(query: Query) -> bool:
    """Whether a GET of a response asks for its events; raises BadInput."""
    stream = query.get("stream", "false")
    if stream not in (*STREAMED, *NOT_STREAMED):
        raise wrong_value("stream", "true or false", stream)
    return stream in STREAMED


def starting_after(query: Query) -> int:
    """The number of the event after which a stream starts, -1 for all of it; raises BadInput."""
    value = query.get("starting_after")
    if value is None:
        return -1
    if not NUMBER.fullmatch(value):
        raise wrong_value("starting_after", "a sequence number, 0 or more", value)
    return int(value)


def page(items: Sequence[Item], query: Query) -> dict[str, Any]:
    """The page that `limit`, `order` and `after` ask for; raises BadInput. `items` have the oldest first."""
    limit = _limit(query.get("limit", "20"))
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise wrong_value("order", "'asc' or 'desc'", order)
    following = [*items]
    if order == "desc":
        following.reverse()
    after = query.get("after")
    if after:
        ids = [item.id for item in following]
        if after not in ids:
            raise wrong_value("after", "the id of an input item", after)
        following = following[ids.index(after) + 1 :]
    shown = following[:limit]
    first_id = None
    last_id = None
    if shown:
        first_id = shown[0].id
        last_id = shown[-1].id
    return {
        "object": "list",
        "data": [sse.Encoded(item.item_json) for item in shown],
        "first_id": first_id,
        "last_id": last_id,
        "has_more": len(following) > limit,
    }


def _limit(value: str) -> int:
    if not NUMBER.fullmatch(value) or not 1 <= int(value) <= 100:
        raise wrong_value("limit", "an integer from 1 to 100", value)
    return int(value)
