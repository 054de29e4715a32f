"""Rules on the events of a Responses stream: members, order, ids, indices and sums.

    Capture --rule--> (number of an event, its fault), ...

Authority: https://platform.openai.com/docs/api-reference/responses-streaming. If it is silent, what Azure
probed: Azure/azure-sdk-for-net, api-behaviour-contract.md (B1 to B37).

Rules of this file:
1. A rule is one pass over the events, and remembers no more than it needs to judge the next.

Not here: bytes (frames.py), chat completions (chunks.py).
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from audit.rules import rules_of
from audit.schema import (
    AFTER,
    BESIDE,
    EVENTS,
    GRAMMAR,
    ROWS,
    Faults,
    Json,
    Typed,
    label,
    shortened,
    unfit,
    without,
)
from audit.stream import MARKUP, Capture, agreed, changes, is_object, usage_faults

TERMINAL = {"response.completed", "response.incomplete", "response.failed"}
# Types of items that the model writes; members: how the event ends that begins the next one of an index, in
# which deltas are said once more, that are sealed anew each time, that change with the response: its tier may
# be chosen as late as the end, and whether it is stored is known when it is, or could not be.
WRITTEN, BEGINS, TEXTS, SEALED, CHANGING = (
    ROWS[kind]["*"] for kind in ("written", "begins", "summed", "sealed", "changing")
)
HOSTED = {*BESIDE.values()} - {"between"}  # states of an item of a hosted tool

must, should, _ = rules_of("events", "responses")


# --- what events hold ---------------------------------------------------------------------------------------


@must
def event_types(capture: Capture) -> Faults:
    """event-types: the types of the events are those of the API

    the API's schema is a closed union, of which SDKs in typed languages are made
    A15 C05 https://github.com/router-for-me/CLIProxyAPI/pull/4691
    """
    for number, event in capture.events:
        if event and event.type not in EVENTS:
            yield number, f"expected a type of event that the API has, got {event.type}"


@must
def fields(capture: Capture) -> Faults:
    """fields, chunk-fields: events, items, parts and the response have the members they must have, and chunks
    id, object, created, model and choices

    openai/openai-openapi calls these members required
    C09 C22 H06 H07 https://github.com/lemonade-sdk/lemonade/issues/3607
    openai/openai-openapi calls these members required
    G01 G07 https://github.com/vllm-project/vllm/pull/19662
    """
    for number, event in capture.events:
        if capture.kind == "responses" or (event and "error" not in event):
            for fault in event.faults:
                yield number, fault


@must
def numbers(capture: Capture) -> Faults:
    """numbers: sequence_number counts 0, 1, 2, ...

    the guide on background mode: the number is the cursor of starting_after
    C17 https://github.com/BerriAI/litellm/pull/28899
    """
    expected = 0
    for number, event in capture.events:
        got = event.get("sequence_number")
        if got is None and event.type not in EVENTS:
            continue
        yield from agreed(number, "sequence_number", expected, got)
        expected = (got or expected) + 1


@should
def nested_numbers(capture: Capture) -> Faults:
    """nested-numbers: nothing inside an event has a sequence_number

    openai/openai-openapi has the number in the event alone
    C02 https://github.com/vllm-project/vllm/pull/37071
    """
    for number, event in capture.events:
        if json.dumps(event).count('"sequence_number":') > ("sequence_number" in event):
            yield number, "expected no sequence_number but that of the event"


# --- their order --------------------------------------------------------------------------------------------


def of_the_response(capture: Capture) -> Iterator[tuple[int, Typed]]:
    """Yield (number, event) but for those that may come anywhere: of response.steer, and keepalive."""
    for number, event in capture.events:
        if not event.type.startswith(("response.steer.", "keepalive")):
            yield number, event


@must
def order(capture: Capture) -> Faults:
    """order: events come in the order of the API's grammar

    the API reference, and the state machine with which SDKs accumulate a response
    C01 C05 C08 C13 C14 E01 https://platform.openai.com/docs/api-reference/responses-streaming
    """
    state = "start"
    beside: dict[int, str] = {}  # output_index -> state of an item of a hosted tool that is open
    for number, event in of_the_response(capture):
        if state == "end" or event.type not in EVENTS:
            continue
        place, name = event.output_index, label(event)
        # Of several lists of tools OpenAI's streams may leave out the done of some.
        before = beside.get(
            place, "beside" if len(beside) == 1 or {*beside.values()} - {"tools ended"} else state
        )
        usual = AFTER.get(name, before)
        then = GRAMMAR.get((before, name)) or (state != "start" and GRAMMAR.get(("open", name)))
        # A hosted tool may be left before it has ended: its item is done, and not completed.
        is_left = (
            place in beside and usual == "between" and event.item.get("status", "completed") != "completed"
        )
        if not then and not is_left:
            expected = " or ".join(name for earlier, name in GRAMMAR if earlier == before)
            yield number, f"expected {expected}, got {name}"
        then = then or usual
        if then in HOSTED:
            beside[place] = then
        elif not beside.pop(place, ""):
            state = then


@must
def terminal(capture: Capture) -> Faults:
    """terminal: the last event is terminal, and no other is

    SDKs end a stream, and agents a turn, at the one terminal event
    C18 C19 C20 https://github.com/EricLBuehler/mistral.rs/pull/1943
    """
    has_ended = False
    for number, event in of_the_response(capture):
        if has_ended:
            yield number, "expected nothing after the terminal event"
            return
        has_ended = event.type in TERMINAL
    if not has_ended:
        yield len(capture.events) - 1, f"expected {' or '.join(sorted(TERMINAL))}, got the end of the stream"


def snapshots(capture: Capture) -> Iterator[tuple[int, str, Typed]]:
    """Yield (number of the event, its type, its response)."""
    for number, event in capture.events:
        if "response" in event and event.type in ROWS["told"]:
            yield number, event.type, event.response


@must
def status(capture: Capture) -> Faults:
    """status: an event tells of the status that its response has; error, incomplete_details, completed_at too

    the API reference: which status each event tells of
    C15 C23 https://github.com/vllm-project/agentic-api/issues/273
    """
    for number, event_type, response in snapshots(capture):
        if event_type == "response.created" and response.background is True:
            event_type = "in the background"
        row = ROWS["told"][event_type] | ROWS["status"].get(response.status, {})
        for fault in unfit(response, row):
            yield number, f"{event_type}: {fault}"
        created_at = response.created_at or 0
        if (response.completed_at or created_at) < created_at:
            yield number, "expected completed_at not to be before created_at"


@should
def item_status(capture: Capture) -> Faults:
    """item-status: in the end items are completed, but for the last one of a response that was cut

    the API reference: an item is in_progress, completed or incomplete
    C16 https://github.com/vllm-project/vllm/issues/57998
    """
    for number, event_type, response in snapshots(capture):
        statuses = [
            item.get("status", "completed")
            for item in response.output
            if item.type in WRITTEN and item.caller.type != "program"  # that call is the program's
        ]
        if response.status != "completed" and statuses[-1:] == ["incomplete"]:
            statuses.pop()  # the item that was cut
        if event_type in TERMINAL and {*statuses} - {"completed"}:
            yield number, f"expected completed items, but for one cut, got {', '.join(statuses)}"


@should
def empty_until_the_end(capture: Capture) -> Faults:
    """snapshots: output is [] and usage null until the terminal event

    OpenAI's streams: a snapshot has no output before the end
    C04 https://platform.openai.com/docs/api-reference/responses-streaming
    """
    for number, event_type, response in snapshots(capture):
        if event_type not in TERMINAL and unfit(response, ROWS["unfinished"]["*"]):
            yield number, "expected output [] and usage null before the terminal event"


@must
def one_response(capture: Capture) -> Faults:
    """one-response: id, model and parameters of the response never change

    the API reference: the events of a stream tell of one response
    C06 C07 https://github.com/BerriAI/litellm/issues/19125
    """
    yield from changes(without(event.response, *CHANGING) for _, event in capture.events)


# --- ids, indices, sums -------------------------------------------------------------------------------------


@must
def ids(capture: Capture) -> Faults:
    """ids: an item has one id, and a call one call_id, in all its events and in the final output

    SDKs find an item by its id, and answer a call by its call_id
    C04 C06 C07 H04 https://github.com/BerriAI/litellm/issues/30071
    """
    announced: dict[str, dict[int, str]] = {"id": {}, "call_id": {}}  # by output_index
    for number, event in capture.events:
        said = {event.output_index: event.item or Typed({"id": event.get("item_id")}, "item")}
        if event.type in TERMINAL:
            said = dict(enumerate(event.response.output))
        for place, item in said.items():
            for member, known in announced.items():
                got = item.get(member)
                if got is None:
                    continue
                is_new = event.type == "response.output_item.added"
                # An output has the call_id of its call; a tool search may get one as late as its done.
                if is_new and got in known.values() and not item.type.endswith("_output"):
                    yield number, f"expected {member} to be that of one item, got {got} again"
                if is_new or (item.type, member) == ("tool_search_call", "call_id"):
                    known[place] = got
                yield from agreed(number, member, known.get(place, got), got)


@must
def indices(capture: Capture) -> Faults:
    """indices: output_index counts items, content_index the parts of an item: 0, 1, 2, ...

    SDKs put what comes at output[output_index].content[content_index]
    C03 C10 C11 H01 https://github.com/vllm-project/vllm/issues/45742
    """
    n_items = 0
    begun: dict[int, Counter[str]] = {}  # output_index of each item that is open -> how many parts it has
    for number, event in capture.events:
        expected = [*begun] or [n_items - 1]
        if event.type == "response.output_item.added":
            expected = [n_items]
            begun[n_items] = Counter()
            n_items += 1
        place = event.get("output_index", expected[-1])
        if n_items and place not in expected:
            yield number, f"expected output_index {' or '.join(map(str, expected))}, got {place}"
        counts = begun.get(place, Counter())
        for index in BEGINS.keys() & event.keys():
            counts[index] += event.type.endswith(BEGINS[index])
            if counts[index]:
                yield from agreed(number, index, counts[index] - 1, event[index])
        if event.type == "response.output_item.done":
            begun.pop(place, None)


@should
def announced(capture: Capture) -> Faults:
    """announced: an item or part is announced empty and in_progress

    OpenAI's streams, and SDKs that append deltas to what was announced
    C12 https://platform.openai.com/docs/api-reference/responses-streaming
    """
    for number, event in capture.events:
        if event.type.endswith(".added"):
            new = event.item or event.part or event
            for fault in unfit(new, ROWS["announced"]["*"] | ROWS["announced"].get(new.type, {})):
                yield number, fault


@should
def annotations(capture: Capture) -> Faults:
    """annotations: annotation_index counts the annotations of a part, which holds those that were announced,
    each after its text

    openai/openai-openapi: the index of the annotation within the content part
    https://platform.openai.com/docs/api-reference/responses-streaming/response/output_text/annotation/added
    """
    announced: list[Any] = []  # annotations of the part that is open
    n_bytes = 0  # of its text: an index is smaller, in any unit
    for number, event in capture.events:
        n_bytes += len(str(event.delta).encode(errors="replace"))
        if event.type == "response.content_part.added":
            announced = []
            n_bytes = 0
        elif event.type == "response.output_text.annotation.added":
            index = event.get("annotation_index", len(announced))
            yield from agreed(number, "annotation_index", len(announced), index)
            announced.append(event.annotation)
            if (event.annotation.end_index or event.annotation.index or 0) > n_bytes:
                yield number, f"expected text before its annotation, got {shortened(event.annotation)}"
        elif label(event) == "response.content_part.done output_text":
            yield from agreed(number, "annotations", announced, event.part.annotations)


@must
def sums(capture: Capture) -> Faults:
    """sums: deltas add up to what the done events say, and these to the final output

    the API reference: a done event repeats what its deltas said
    C01 C06 D01 D02 D06 D11 D12 E06 G06 https://github.com/vllm-project/vllm/pull/30437
    """
    # The deltas of each open text, added up, by output_index and command_index.
    texts: dict[tuple[int, int | None], str] = {}
    logprobs: defaultdict[int, list[Any]] = defaultdict(list)  # by output_index
    parts: defaultdict[int, list[Json]] = defaultdict(list)  # of an item, as they were done
    items: dict[int, Json] = {}  # of the response, as they were done
    for number, event in capture.events:
        event_type, place, item = event.type, event.output_index, event.item
        key = (place, event.command_index)
        said = item or event.part or event
        if event_type.endswith(".delta"):
            delta = event.delta if isinstance(event.delta, str) else event.delta.stdout
            texts[key] = texts.get(key, "") + delta
            logprobs[place] += event.logprobs
        elif event_type.endswith("_part.added"):
            texts[key] = ""
            logprobs[place] = []
        elif event_type in TERMINAL:
            done = [items[place] for place in sorted(items)]
            # The list of tools whose done was left out is known from here alone: see the rule order.
            output = [
                item
                for place, item in enumerate(event.response.output)
                if place in items or item.type != "mcp_list_tools"
            ]
            yield from agreed(number, "output", without(done, *SEALED), without(output, *SEALED))
        elif event_type.endswith(".done") and event_type in EVENTS:
            if not item or key in texts:  # else the item came whole
                text = texts.setdefault(key, "")
                printed = "".join(output.stdout for output in event.output) or text
                got = next((said[member] for member in TEXTS if member in said), printed)
                yield from agreed(number, "the sum of the deltas,", text, got)
            # Parts list the bytes of each token, events do not (openai.types.responses), and may have none.
            expected = without(logprobs[place], "bytes")
            got = without(said.get("logprobs", expected), "bytes")
            if got or not event.part:
                yield from agreed(number, "the logprobs of the deltas,", expected, got)
        if event_type.endswith("_part.done"):
            parts[place].append(said)
        if event_type == "response.output_item.done":
            items[place] = item
            if done := parts[place]:  # without them the rule order is broken
                left_out = ["logprobs"] if [] in [part.get("logprobs") for part in done] else []
                got = sorted(without(item.content + item.summary, *left_out), key=str)
                yield from agreed(
                    number, "parts", sorted(without(done, *left_out), key=str), got
                )  # in any order


# --- usage, texts, arguments --------------------------------------------------------------------------------


@must
def usage(capture: Capture) -> Faults:
    """usage: the final usage has all its counts, and they agree

    openai/openai-openapi requires the counts; bills are made of them
    D09 G04 G05 https://github.com/openai/openai-agents-python/issues/1179
    """
    for number, event_type, response in snapshots(capture):
        if event_type in ("response.completed", "response.incomplete"):
            yield from usage_faults(number, response.usage, "input", "output")


@must
def no_markup(capture: Capture) -> Faults:
    """markup: none of the model's own markup in texts, names and arguments

    the API has channels and calls as members; markup in a text is shown to people
    E01 E09 E16 D18 https://github.com/vllm-project/vllm/issues/36435
    """
    for number, event in capture.events:
        if marker := MARKUP.search(event.text + event.arguments + event.name + event.refusal):
            yield number, f"expected text without markup of the model's, got {marker[0]}"


@must
def arguments(capture: Capture) -> Faults:
    """arguments: the arguments of a completed call are a JSON object

    the API reference: arguments are the JSON text of an object; clients parse them unasked
    C12 E05 E06 https://github.com/vllm-project/vllm/issues/51697
    """
    for number, event in capture.events:
        item = event.item
        if (item.type, item.status) == ("function_call", "completed") and not is_object(item.arguments):
            yield number, f"expected arguments that are a JSON object, got {shortened(item)}"
