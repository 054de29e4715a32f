"""The query of a GET: whether to stream a response and from which event, and which page of a list to show.

    query --wants_stream(), starting_after()--> whether, and from where      items, query --page()--> a page

Authority: https://platform.openai.com/docs/api-reference/responses/get and .../input-items; where that is
silent, api-behaviour-contract.md of Azure/azure-sdk-for-net.

Rules of this file:
1. A query holds text: it is compared or matched before it is read as a number.
2. A value that cannot be read is refused by its name, never ignored.
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
    """Return whether a GET of a response asks for its events; raises BadInput."""
    stream = query.get("stream", "false")
    if stream not in (*STREAMED, *NOT_STREAMED):
        raise wrong_value("stream", "true or false", stream)
    return stream in STREAMED


def starting_after(query: Query) -> int:
    """Return the number of the event after which a stream starts, -1 for all of it; raises BadInput."""
    value = query.get("starting_after")
    if value is None:
        return -1
    if not NUMBER.fullmatch(value):
        raise wrong_value("starting_after", "a sequence number, 0 or more", value)
    return int(value)


def page(items: Sequence[Item], query: Query) -> dict[str, Any]:
    """Return the page of `items` (oldest first) that `limit`, `order`, `after` ask for; raises BadInput."""
    limit = query.get("limit", "20")
    if not NUMBER.fullmatch(limit) or not 1 <= int(limit) <= 100:
        raise wrong_value("limit", "an integer from 1 to 100", limit)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise wrong_value("order", "'asc' or 'desc'", order)
    following = list(items) if order == "asc" else list(reversed(items))
    ids = [item.id for item in following]
    after = query.get("after")
    if after:
        if after not in ids:
            raise wrong_value("after", "the id of an input item", after)
        following = following[ids.index(after) + 1 :]
    shown = following[: int(limit)]
    return {
        "object": "list",
        "data": [sse.Encoded(item.item_json) for item in shown],
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": len(following) > len(shown),
    }
