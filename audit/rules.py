"""RULES: what a correct stream looks like from outside, whatever server it comes from.

    Capture --violations()--> [Violation(event, rule, message, link), ...]

Authority: https://github.com/openai/openai-openapi (events, items, chunks, and the members they must have),
https://platform.openai.com/docs/api-reference/responses-streaming, and the WHATWG's text on the bytes. Where
these are silent, what Azure probed: Azure/azure-sdk-for-net, api-behaviour-contract.md (B1 to B37).

Rules of this file:
1. RULES is the one list: the command line, the tests' laws and `pytest tests/wire` judge by it.
2. A rule raises for no stream, whatever it holds, and says little of what another rule forbids.
3. What is judged does not judge: of responses.py there is its GRAMMAR, and nothing that makes events.
4. An event's number is its place in the recording, 0 the first: its `sequence_number`, if that is right.

Not here: what finds the faults (rules_framing.py, rules_events.py, rules_chunks.py), the command line
(__main__.py), what takes a second request to be seen (tests/wire/), and what a text should say.
"""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from audit.members import Faults, Json
from audit.recordings import Capture, captured
from audit.rules_chunks import (
    calls,
    chunk_members,
    chunk_texts,
    error_is_last,
    one_completion,
    one_finish,
    one_role,
    usage_apart,
)
from audit.rules_events import (
    annotations_counted,
    announced_empty,
    arguments_are_objects,
    closed_items,
    counted,
    empty_until_the_end,
    in_order,
    indices,
    known_types,
    no_markup,
    no_nested_numbers,
    numbered,
    one_id_an_item,
    one_response,
    one_terminal,
    required_members,
    sums,
    true_status,
)
from audit.rules_framing import (
    done_is_last,
    named_frames,
    no_foreign_line_ends,
    no_ids,
    one_json_line,
    only_utf8,
    whole_frames,
)

# What suffers where a rule is broken. must: the specification, or an official SDK. should: some clients, and
# OpenAI's own server keeps it. advice: nobody, but people and proxies are better off with it.
Strength = Literal["must", "should", "advice"]


class Violation(NamedTuple):
    event: int  # its number
    rule: str  # key of RULES
    message: str
    link: str


class Rule(NamedTuple):
    kind: str  # of the captures that it judges; "" for both
    faults: Callable[[Capture], Faults]
    strength: Strength
    bugs: str  # ids of tests/BUGS.md
    title: str
    source: str  # who wrote that behaviour down, or who relies on it
    link: str  # the rule's authority, or a report of what happens without it


SSE = "https://html.spec.whatwg.org/multipage/server-sent-events.html"
EVENTS = "https://platform.openai.com/docs/api-reference/responses-streaming"
CHUNKS = "https://platform.openai.com/docs/api-reference/chat-streaming"
GITHUB = "https://github.com/"

# fmt: off
RULES = {
    #  rule                kind         its faults             strength  bugs
    #      title
    #      source
    #      link
    "whole-frames":   Rule("",          whole_frames,          "must",   "A16 A17",
        "the bytes end with the end of a frame",
        "the HTML standard: what stands behind the last blank line is thrown away",
        GITHUB + "NousResearch/hermes-agent/pull/42314"),
    "json-line":      Rule("",          one_json_line,         "must",   "A11 A14 B14",
        "the data of a frame is one line: a JSON object, or [DONE]",
        "the SDKs parse the data of a frame as one JSON value",
        GITHUB + "caozhiyuan/copilot-api/pull/88"),
    "utf-8":          Rule("",          only_utf8,             "must",   "A08 A09",
        "the bytes are UTF-8",
        "the HTML standard: an event stream is UTF-8",
        SSE + "#parsing-an-event-stream"),
    "line-ends":      Rule("",          no_foreign_line_ends,  "advice", "A01 A02",
        "what clients take for a line end is escaped",
        "some clients split lines where Python's str.splitlines() does",
        GITHUB + "modelcontextprotocol/typescript-sdk/pull/1926"),
    "event-name":     Rule("",          named_frames,          "should", "B17",
        "the event field is the type of the event; chat completion chunks have none",
        "OpenAI's streams name each Responses event, and listeners are registered by that name",
        EVENTS),
    "no-id":          Rule("",          no_ids,                "advice", "A12",
        "no id: and no retry: lines",
        "an id makes a browser's EventSource ask again with Last-Event-ID, which nobody answers",
        GITHUB + "theopenco/llmgateway/pull/2334"),
    "done-line":      Rule("",          done_is_last,          "must",   "A21 C19",
        "[DONE] is the last frame, and there is one; a Responses stream may have none",
        "the API reference: a chat stream is ended by data: [DONE]; SDKs read nothing behind it",
        GITHUB + "vllm-project/vllm/pull/378"),

    "event-types":    Rule("responses", known_types,           "must",   "A15 C05",
        "the types of the events are those of the API",
        "the API's schema is a closed union, of which SDKs in typed languages are made",
        GITHUB + "router-for-me/CLIProxyAPI/pull/4691"),
    "fields":         Rule("responses", required_members,      "must",   "C09 C22 H06 H07",
        "events, items, parts and the response have the members they must have",
        "openai/openai-openapi calls these members required",
        GITHUB + "lemonade-sdk/lemonade/issues/3607"),
    "numbers":        Rule("responses", numbered,              "must",   "C17",
        "sequence_number counts 0, 1, 2, ...",
        "the guide on background mode: the number is the cursor of starting_after",
        GITHUB + "BerriAI/litellm/pull/28899"),
    "nested-numbers": Rule("responses", no_nested_numbers,     "should", "C02",
        "nothing inside an event has a sequence_number",
        "openai/openai-openapi has the number in the event alone",
        GITHUB + "vllm-project/vllm/pull/37071"),
    "order":          Rule("responses", in_order,              "must",   "C01 C05 C08 C13 C14 E01",
        "events come in the order of responses.GRAMMAR",
        "the API reference, and the state machine with which SDKs accumulate a response",
        EVENTS),
    "terminal":       Rule("responses", one_terminal,          "must",   "C18 C19 C20",
        "the last event is terminal, and no other is",
        "SDKs end a stream, and agents a turn, at the one terminal event",
        GITHUB + "EricLBuehler/mistral.rs/pull/1943"),
    "status":         Rule("responses", true_status,           "must",   "C15 C23",
        "an event tells of the status that its response has; error, incomplete_details, completed_at too",
        "the API reference: which status each event tells of",
        GITHUB + "vllm-project/agentic-api/issues/273"),
    "item-status":    Rule("responses", closed_items,          "should", "C16",
        "in the end items are completed, but for the last one of a response that was cut",
        "the API reference: an item is in_progress, completed or incomplete",
        GITHUB + "vllm-project/vllm/issues/57998"),
    "snapshots":      Rule("responses", empty_until_the_end,   "should", "C04",
        "output is [] and usage null until the terminal event",
        "OpenAI's streams: a snapshot has no output before the end",
        EVENTS),
    "one-response":   Rule("responses", one_response,          "must",   "C06 C07",
        "id, model and parameters of the response never change",
        "the API reference: the events of a stream tell of one response",
        GITHUB + "BerriAI/litellm/issues/19125"),
    "ids":            Rule("responses", one_id_an_item,        "must",   "C04 C06 C07 H04",
        "an item has one id, and a call one call_id, in all its events and in the final output",
        "SDKs find an item by its id, and answer a call by its call_id",
        GITHUB + "BerriAI/litellm/issues/30071"),
    "indices":        Rule("responses", indices,               "must",   "C03 C10 C11 H01",
        "output_index counts items, content_index the parts of an item: 0, 1, 2, ...",
        "SDKs put what comes at output[output_index].content[content_index]",
        GITHUB + "vllm-project/vllm/issues/45742"),
    "announced":      Rule("responses", announced_empty,       "should", "C12",
        "an item or part is announced empty and in_progress",
        "OpenAI's streams, and SDKs that append deltas to what was announced",
        EVENTS),
    "annotations":    Rule("responses", annotations_counted,   "should", "",
        "annotation_index counts the annotations of a part, which holds those that were announced",
        "openai/openai-openapi: the index of the annotation within the content part",
        EVENTS + "/response/output_text/annotation/added"),
    "sums":           Rule("responses", sums,                  "must",
        "C01 C06 D01 D02 D06 D11 D12 E06 G06",
        "deltas add up to what the done events say, and these to the final output",
        "the API reference: a done event repeats what its deltas said",
        GITHUB + "vllm-project/vllm/pull/30437"),
    "usage":          Rule("responses", counted,               "must",   "D09 G04 G05",
        "the final usage has all its counts, and they agree",
        "openai/openai-openapi requires the counts; bills are made of them",
        GITHUB + "openai/openai-agents-python/issues/1179"),
    "markup":         Rule("responses", no_markup,             "must",   "E01 E09 E16 D18",
        "no markup of the model's in texts, names and arguments",
        "the API has channels and calls as members; markup in a text is shown to people",
        GITHUB + "vllm-project/vllm/issues/36435"),
    "arguments":      Rule("responses", arguments_are_objects,    "must",   "C12 E05 E06",
        "the arguments of a completed call are a JSON object",
        "the API reference: arguments are the JSON text of an object; clients parse them unasked",
        GITHUB + "vllm-project/vllm/issues/51697"),

    "chunk-fields":   Rule("chat",      chunk_members,         "must",   "G01 G07",
        "chunks have id, object, created, model and choices; choices index, delta and finish_reason",
        "openai/openai-openapi calls these members required",
        GITHUB + "vllm-project/vllm/pull/19662"),
    "one-completion": Rule("chat",      one_completion,        "must",   "C07",
        "id, created and model are the same in all chunks",
        "the API reference: each chunk has the same id and the same timestamp",
        CHUNKS),
    "role":           Rule("chat",      one_role,              "should", "H05",
        "the first delta of a choice has the role, later ones have none",
        "OpenAI's streams; clients that concatenate the members of deltas make 'assistantassistant'",
        GITHUB + "sgl-project/sglang/issues/18335"),
    "finish-reason":  Rule("chat",      one_finish,            "must",   "G01 C18",
        "finish_reason is null until the last chunk of a choice, and then one of the API's",
        "openai/openai-openapi lists the reasons; agents decide by them",
        GITHUB + "ollama/ollama/issues/4357"),
    "call-deltas":    Rule("chat",      calls,                 "must",   "E02 E04 G02",
        "a call begins with index, id, type and name; then come index and arguments",
        "SDKs add up the deltas of a call by its index, and concatenate what is repeated",
        GITHUB + "ggml-org/llama.cpp/pull/13800"),
    "chunk-texts":    Rule("chat",      chunk_texts,           "must",   "E01 E05 E06 E09 E16",
        "no markup of the model's in the content; the arguments of a call are JSON",
        "the API reference: the arguments are JSON text; markup in a text is shown to people",
        GITHUB + "vllm-project/vllm/issues/10395"),
    "usage-chunk":    Rule("chat",      usage_apart,           "should", "B10 B11 G05 G07",
        "usage comes once, last, without choices; before it usage is null",
        "the API reference: one more chunk with empty choices, and null in all others",
        GITHUB + "BerriAI/litellm/issues/28735"),
    "error-frame":    Rule("chat",      error_is_last,         "should", "B13 C20",
        "an error has message, type, param and code, and is the last chunk",
        "the SDKs raise what stands in the member error, and read no further",
        GITHUB + "open-webui/open-webui/issues/29628"),
}
# fmt: on


def violations(stream: Capture | Iterable[Json], rule_names: Iterable[str] = RULES) -> list[Violation]:
    """What is wrong with a stream, in its order."""
    capture = stream if isinstance(stream, Capture) else captured(stream)
    found: list[Violation] = []
    for name in rule_names:
        rule = RULES[name]
        if rule.kind in ("", capture.kind):
            found += [Violation(number, name, message, rule.link) for number, message in rule.faults(capture)]
    return sorted(found)
