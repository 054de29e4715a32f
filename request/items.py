"""Input items: from a body to a conversation, from a conversation to what is stored, listed and compacted.

    input, previous_response_id --resolve()--> chain, input      every item in its long form, with an id
    Request, conversation --new_row()--> Row --body_of()--> body of POST /v1/responses
    Request, conversation --summary_request()--> Request; the model's answer --OutputFilter.feed()--> one item

Authority: https://platform.openai.com/docs/guides/conversation-state for chains and references,
https://platform.openai.com/docs/guides/reasoning#encrypted-reasoning-items for `encrypted_content`,
https://developers.openai.com/api/docs/guides/compaction for the meaning of a compaction; the members of
items are those of openai.types.responses.ResponseInputItemParam.

Rules of this file:
1. resolve() looks up every reference and opens every sealed blob (signed by us, not encrypted), so no other
   module knows about references.
2. `found` and `sealer_of` belong to the owner of the request: they have nothing that others own.
3. No two items of a conversation have the same id: paging through them by id would never end.
4. The whole conversation has limits: its chain, the items of references, and the input that was sent.
   Each turn of a chain is stored with all turns before it (store.py), and the next turn reads it as a whole.
5. A row needs no other row, so a background run can start again from it. A waiting response is held as this
   row of JSON text: its prompt and tokens would take many times the room.
6. Items first get their long form, in which they are stored and listed; messages.py checks it. Unknown
   members are kept as they came, and count towards the limits.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from itsdangerous import BadData, URLSafeSerializer

import sse
from channels import Accepted, Compaction, Delta, Finish, Said, WorkerOutput
from request.body import n_values, outside_strings
from request.ids import PREFIXES, new_id, response_id_of
from request.messages import IMAGES, MAX_ITEMS
from request.params import RESPONSES, Defaults, Request, read, responses_request
from request.refusals import BadInput
from request.tool_items import IMAGE_MEMBERS, IMAGE_TEXT
from request.validation import text
from sse import Object
from store import TERMINAL, Row

Item = Object
Found = Mapping[str, Row | None]  # responses by id; None: not found
SealerOf = Callable[[str], URLSafeSerializer]  # purpose -> sealer() of this purpose and the request's owner

MAX_CONVERSATION_BYTES = 4 * 2**20  # by n_bytes(): about a million tokens, or 20,000 parts
VALUE_BYTES = 64  # Python's memory for a value, even an empty one
BYTES = f"bytes ({VALUE_BYTES} for each value of its JSON)"
MAX_REFERENCED = 256  # responses, each of which is read from the store

TRIGGER = {"type": "compaction_trigger"}  # asks for a compaction of all items before it


# --- references, chains, sealed blobs -----------------------------------------------------------------------


def named(values: Object) -> set[str]:
    """Return the ids of the responses that a request continues or refers to; raises BadInput."""
    referred = {response_id_of(str(item.get("id"))) for item in values["input"] if is_reference(item)}
    _bound(len(referred), MAX_REFERENCED, "responses in references")
    return (referred | {values["previous_response_id"]}) - {None}


def is_reference(item: Item) -> bool:
    """True for an item_reference; the SDK's shortest form has an id and no type."""
    if item.get("type") is None:
        return item.get("role") is None and item.get("id") is not None
    return bool(item["type"] == "item_reference")


def resolve(values: Object, found: Found, sealer_of: SealerOf) -> tuple[list[Item], list[Item]]:
    """Return the chain that a request continues and its own items, in their long form; raises BadInput.

    `found` has the responses that named() names. A chain that is too long can still be compacted.
    """
    own, previous_id = values["input"], values["previous_response_id"]
    chain = [] if previous_id is None else _continued(previous_id, found[previous_id], sealer_of)
    compacts = bool(own) and is_trigger(own[-1])
    counted = [] if compacts else chain
    size = sum(map(n_bytes, counted))
    _bound(len(counted) + len(own), MAX_ITEMS, "items")
    _bound(size, MAX_CONVERSATION_BYTES, BYTES)
    referable = {item["id"]: item for row in found.values() if row for item in row.response["output"]}
    ids = {item["id"] for item in chain}
    resolved = []
    for i, item in enumerate(own):
        path = f"input[{i}]"
        if is_reference(item):
            item = _referred(item, path, referable)
        if str(item.get("type")) in SEALED:
            item = _opened(item, path, sealer_of)
        item = _long_form(item, path, ids)
        if is_trigger(item) and not compacts:
            raise BadInput("The 'compaction_trigger' item must be the final input item.", param=path)
        size += n_bytes(item)
        _bound(size, MAX_CONVERSATION_BYTES, BYTES)
        resolved.append(item)
    return chain, resolved


def _bound(n: int, limit: int, things: str) -> None:
    """Raise BadInput for a conversation with more than `limit` of these things."""
    if n > limit:
        raise BadInput(
            f"The conversation is too long: expected at most {limit} {things}, got more. Compact it (POST "
            "/v1/responses/compact), or begin a new one without previous_response_id.",
            param="input",
            code="context_length_exceeded",
        )


# --- the long form ------------------------------------------------------------------------------------------


def _long_form(item: Item, path: str, ids: set[str]) -> Item:
    """Return an item as GET /v1/responses/{id}/input_items lists it, with an id that is not in `ids` yet.

    messages.py refuses what is not a part. Raises BadInput for a type that is no text.
    """
    given = {name: member for name, member in item.items() if member is not None}
    kind = text(given.get("type", "message"), f"{path}.type")
    long: Item = _whole({"type": kind, "status": "completed"} | given)
    if not isinstance(item.get("id"), str) or item["id"] in ids:
        long["id"] = new_id(PREFIXES.get(kind, "item"))
    ids.add(long["id"])
    content = long.get("content")
    if isinstance(content, str):
        part_type = TEXT_TYPES.get(str(long.get("role", kind)), "input_text")
        content = [{"type": part_type, "text": content}]
    if isinstance(content, list):
        long["content"] = [_whole(part) for part in content]
    return long


def _whole(value: Any) -> Any:
    """Return an item or a part with the members that clients leave out."""
    if isinstance(value, dict):
        value = LEFT_OUT.get(str(value.get("type")), {}) | value
    return value


def is_trigger(item: Item) -> bool:
    return item.get("type") == TRIGGER["type"]


def n_bytes(item: Item) -> int:
    """Return about how much memory an item takes."""
    json_text = sse.dumps(item).encode()
    return len(json_text) + VALUE_BYTES * n_values(outside_strings(json_text))


# --- rows ---------------------------------------------------------------------------------------------------


def new_row(request: Request, values: Object, conversation: Sequence[Item]) -> Row:
    """Return the row of a response that is about to start; `values` are those that read() has read.

    The row keeps the parameters that the client set, as the response object repeats them, so the request can
    run again. The items are encoded one by one, so that another thread can get Python's lock in between.
    """
    names = sorted(request.explicit - {"input"})
    return Row(
        id=new_id("resp"),
        born_at=time.time(),
        ended_at=None,
        kept=request.store,
        background=request.background,
        streamed=request.stream,
        request_json=sse.dumps({name: request.echo.get(name, values[name]) for name in names}),
        items_json="[" + ",".join(map(sse.dumps, conversation)) + "]",
        owner=request.owner,
    )


# --- compactions and warm-ups -------------------------------------------------------------------------------


@dataclass
class OutputFilter:
    """The part of a model's output that the client sees: all, except for a compaction or a warm-up.

    A compaction is one sealed item, the summary, and nothing else: https://github.com/Soju06/codex-lb/issues/971
    Without a summary the response has failed.

    A warm-up (`generate: false`, or `prompt_cache_options: {"prewarm": true}`) puts a prompt into the prefix
    cache. The one token that params.py asks for does not count:
    https://github.com/router-for-me/CLIProxyAPI/issues/1901

    A run that was cancelled shows no Finish: the canceller decides how its answer ends.
    """

    request: Request

    def feed(self, said: WorkerOutput) -> list[Said]:
        match said:
            case Finish("cancelled"):
                return []
            case _ if self.request.generate and not self.request.compacts:
                return [said]
        return self._at_end(said)

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    texts: list[str] = field(default_factory=list)  # of the summary

    def _at_end(self, said: WorkerOutput) -> list[Said]:
        """Return what replaces the model's words when they have ended."""
        match said:
            case Accepted() | Finish("failed" | "content_filter"):
                return [said]
            case Delta("final", text):
                self.texts.append(text)
            case Finish(_, usage) if not self.request.compacts:
                return [Finish("stop", usage and replace(usage, output_tokens=0, reasoning_tokens=0))]
            case Finish(_, usage):
                if summary := "".join(self.texts):
                    return [Compaction(summary), Finish("stop", usage)]
                return [Finish("failed", usage, "The model wrote no summary.")]
        return []


# --- the fold: a plain streamed request passes what stands above --------------------------------------------


# --- references, chains, sealed blobs -----------------------------------------------------------------------

SEALED = {"reasoning": "content", "compaction": "summary"}  # the member that a blob becomes, by type of item


def _opened(item: Item, path: str, sealer_of: SealerOf) -> Item:
    """Return reasoning or a compaction with the text of its blob, if it has no other; raises BadInput."""
    kind, blob = item["type"], item.get("encrypted_content")
    if kind == "reasoning" and (item.get("content") or not blob):
        return item
    try:
        opened = sealer_of(kind).loads(str(blob))
    except (BadData, UnicodeError) as error:
        if kind == "reasoning":  # messages.py leaves it out; else each later request would be refused too
            return item
        raise BadInput(
            f"Expected a blob of {kind} that this server has made for this client, with the secret that it "
            "has now.",
            param=f"{path}.encrypted_content",
            code="invalid_encrypted_content",  # clients know it by its code: openai/codex/issues/8145
        ) from error
    return item | {SEALED[kind]: opened}


def _referred(item: Item, path: str, referable: Mapping[str, Item]) -> Item:
    """Return the item that a reference names; raises BadInput."""
    item_id = text(item.get("id"), f"{path}.id")
    if item_id not in referable:
        raise BadInput(f"Item with id '{item_id}' not found.", param=f"{path}.id", code="item_not_found")
    return referable[item_id]


def _continued(id: str, row: Row | None, sealer_of: SealerOf) -> list[Item]:
    """Return the first items of a response that continues the one with this id; raises BadInput.

    A compaction replaces everything before it, except for the messages of the user.
    """
    if row is None:
        raise BadInput(
            f"Previous response with id '{id}' not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    if row.status not in TERMINAL:
        raise BadInput(
            f"Previous response with id '{row.id}' has not ended yet.", param="previous_response_id"
        )
    output = row.response["output"]
    if output and output[-1]["type"] == "compaction":
        return [*retained(row), _opened(output[-1], "previous_response_id", sealer_of)]
    return [*row.items, *output]


def sealer(secret: bytes, owner: str, purpose: str) -> URLSafeSerializer:
    """Return what makes `encrypted_content` for one owner and purpose.

    It signs and does not encrypt: the client can read the text, and cannot change it.
    """
    return URLSafeSerializer(secret, f"{purpose}\0{owner}", signer_kwargs={"digest_method": hashlib.sha256})


def sealed(secret: bytes, owner: str, purpose: str, text: str) -> Any:
    return sealer(secret, owner, purpose).dumps(text)


# --- images -------------------------------------------------------------------------------------------------


def with_image_texts(value: Any) -> Any:
    """Return the items of a request, or messages of chat, with a text in the place of each image.

    What a tool was called with stays as it is, even if it looks like an image.
    """
    if isinstance(value, list):
        return [with_image_texts(element) for element in value]
    if not isinstance(value, dict):
        return value
    type_ = str(value.get("type"))
    if type_ in IMAGES:
        return {"type": "input_text", "text": IMAGE_TEXT}
    texts = {name: with_image_texts(value[name]) for name in ("content", "output") if name in value}
    if type_ in IMAGE_MEMBERS:
        texts[IMAGE_MEMBERS[type_]] = IMAGE_TEXT
    return value | texts


# --- the long form ------------------------------------------------------------------------------------------

# type of an item, or of a part -> its members that clients leave out
LEFT_OUT: dict[str, Object] = {
    "reasoning": {"summary": [], "content": []},
    "output_text": {"annotations": [], "logprobs": []},
}

# role of a message, or type of an item -> type of the part that a string in place of the parts becomes
TEXT_TYPES = {"assistant": "output_text", "reasoning": "reasoning_text"}  # for all others "input_text"


def retained(row: Row) -> list[Item]:
    """Return the items that stay beside a compaction: the messages of the user."""
    return [item for item in row.items if item["type"] == "message" and item["role"] == "user"]


# --- rows ---------------------------------------------------------------------------------------------------


def body_of(row: Row) -> Object:
    """Return the body of a response, with nothing left to look up."""
    return row.request | {"input": row.items, "previous_response_id": None}


# --- compactions and warm-ups -------------------------------------------------------------------------------

QUESTION = {
    "role": "user",
    "content": "Summarise our conversation so far for yourself: facts, decisions, open questions, results of "
    "tools. Be brief and complete. Write the summary only.",
}
SUMMARY_PARAMETERS = {
    "tool_choice": "none",  # a call of a tool that the conversation brings with it would not be a summary
    "max_output_tokens": 1024,
    "truncation": "auto",
    "reasoning": {"effort": "none"},
}


def summary_request(request: Request, conversation: Sequence[Item], defaults: Defaults) -> Request:
    """Return the question for a summary, after the conversation that `request` wants compacted.

    `defaults` are those of its worker. Raises BadInput.
    """
    body = SUMMARY_PARAMETERS | {"model": request.model, "instructions": request.echo["instructions"]}
    asked = responses_request(read(RESPONSES, body, defaults, request.owner), [*conversation], [QUESTION])
    return replace(
        asked, compacts=True, stream=request.stream, background=request.background, not_run=request.not_run
    )
