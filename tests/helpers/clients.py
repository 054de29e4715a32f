"""Clients by their own rules, as far as our stream could break them.

    [event, ...] --codex() | ai_sdk() | openai_sdk()--> what the client has at the end, or what it raises

Authority: openai/codex, codex-rs/codex-api/src/sse/responses.rs; vercel/ai, packages/openai (parts by id);
the `openai` package itself. Nothing here knows how the events were made.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import pydantic
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseOutputItem, ResponseStreamEvent

Json = dict[str, Any]

ITEM: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseOutputItem)
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
COUNTS = ("input_tokens", "output_tokens", "total_tokens")


class StreamError(Exception):
    """What the client's user is told instead of an answer."""


def codex(events: Iterable[Json]) -> Iterator[Any]:
    """Yield the items of output_item.done: one that cannot be read is dropped without a word.

    The turn ends with response.completed, which must have an id, and counts of tokens if it has a usage.
    """
    completed = None
    for event in events:
        match event["type"]:
            case "response.output_item.done":
                try:
                    ITEM.validate_python(event["item"], strict=True)
                except pydantic.ValidationError:
                    continue
                yield [event["item"]["type"], said(event["item"])]
            case "response.failed":
                raise StreamError(event["response"]["error"]["message"])
            case "response.completed":
                completed = event["response"]
            case "response.reasoning_text.delta":
                if not isinstance(event.get("content_index"), int):
                    raise StreamError("no content_index")
    if completed is None:
        raise StreamError("stream closed before response.completed")
    if usage := completed.get("usage"):
        yield ["usage", *(int(usage[name]) for name in COUNTS)]
    yield ["completed", str(completed["id"])]


def said(item: Json) -> str:
    for name in ("arguments", "input"):
        if name in item:
            return str(item[name])
    return "".join(part.get("text") or part["refusal"] for part in item["content"])


def ai_sdk(events: Iterable[Json]) -> Iterator[Any]:
    """Register parts by the id of their item; a delta for another id is an error."""
    parts: dict[str, str] = {}
    for event in events:
        item = event.get("item", {})
        id_ = event.get("item_id", item.get("id"))
        if event["type"] == "response.output_item.added":
            parts[id_] = ""
        elif event["type"].endswith(".delta") or event["type"] == "response.output_item.done":
            if id_ not in parts:
                raise StreamError(f"text part {id_} not found")
            parts[id_] += event.get("delta", "")
            if item:
                yield [item["type"], parts.pop(id_)]
    if parts:
        raise StreamError("parts that never ended")


def openai_sdk(events: Iterable[Json]) -> Iterator[Any]:
    """Yield the newest snapshot of each item, as the package's own accumulator adds it up."""
    state: ResponseStreamState[None] = ResponseStreamState(text_format=omit, input_tools=omit)
    snapshots: dict[int, str] = {}
    for event in events:
        for seen in state.handle_event(EVENT.validate_python(event, strict=True)):
            if seen.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
                snapshots[seen.output_index] = seen.snapshot
    yield from snapshots.values()
