"""The query of a GET: whether to stream a response and from which event, and which page of a list to show.

    query --wants_stream(), number()--> whether, and from where      items, query --page()--> a page

Authority: https://platform.openai.com/docs/api-reference/responses/get and .../input-items; if they are
silent, api-behaviour-contract.md of Azure/azure-sdk-for-net.

Rules of this file:
1. A query holds text: it is compared or matched before it is read as a number.
2. We refuse a value that we cannot read, by the name of its parameter, and never ignore it.
"""

import re
from collections.abc import Mapping, Sequence

from request.refusals import unsupported, wrong_value
from request.validation import one_of
from sse import Object

Query = Mapping[str, str]

NUMBER = re.compile("[0-9]{1,18}")  # int() raises for thousands of digits


def wants_stream(query: Query) -> bool:
    """Return whether a GET of a response asks for its events; raises BadInput."""
    return bool(one_of("true", "false")(query.get("stream", "false").lower(), "stream") == "true")


def number(query: Query, name: str, default: int, low: int = 0, high: int = 10**18) -> int:
    """Return a number of a query; raises BadInput."""
    value = query.get(name)
    if value is None:
        return default
    if not NUMBER.fullmatch(value) or not low <= int(value) <= high:
        raise wrong_value(name, f"an integer from {low} to {high}", value)
    return int(value)


def page(items: Sequence[Object], query: Query) -> Object:
    """Return the page of `items` (oldest first) that `limit`, `order`, `after` ask for; raises BadInput."""
    if "before" in query:  # of old SDKs: to ignore it would show the first page again and again
        raise unsupported("before", "Use 'after' with the other 'order'.")
    limit = number(query, "limit", 20, 1, 100)
    order = one_of("asc", "desc")(query.get("order", "desc"), "order")
    ordered = items[::-1] if order == "desc" else items
    ids = [item["id"] for item in ordered]
    start = 0
    if after := query.get("after"):
        if after not in ids:
            raise wrong_value("after", "the id of an input item", after)
        start = ids.index(after) + 1
    end = start + limit
    shown = ids[start:end] or [None]
    return {
        "object": "list",
        "data": ordered[start:end],
        "first_id": shown[0],
        "last_id": shown[-1],
        "has_more": end < len(ordered),
    }
