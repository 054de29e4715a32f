"""Rules that agents rely on: tools and their choice, results, reasoning, structured output, tokens counted.

    Peer --rule--> nothing, or AssertionError, or NotApplicable

Authority: https://platform.openai.com/docs/guides/function-calling, .../structured-outputs and .../reasoning

Not here: a call that is required (answers.py), what must be refused (refusals.py).
"""

import json
import re

from audit.http import REFUSED
from audit.peer import CALLED, CUT, TIME, TOKYO, WEATHER, Peer
from audit.rules import NotApplicable, presumed, rules_of
from audit.schema import Json, missing
from audit.stream import Answer, is_object, of_chunks, parsed

must, should, advice = rules_of("agents", "responses agents")
BOTH_TOOLS: Json = {"said": TOKYO, "tools": (WEATHER, TIME)}
FORCED: Json = BOTH_TOOLS | {"tool_choice": "get_time"}

# --- which tool ---------------------------------------------------------------------------------------------


@must
def named_call(peer: Peer) -> None:
    """named-call, chat-named-call: tool_choice with a name calls that tool, and no other

    the guide on function calling: forced function
    https://platform.openai.com/docs/guides/function-calling
    the API reference on tool_choice
    https://platform.openai.com/docs/api-reference/chat/create
    """
    for answer in peer.both(**FORCED):
        assert {*answer.names} == {"get_time"}, f"expected calls of get_time alone, got {answer.names}"


@must
def no_call(peer: Peer) -> None:
    """no-call, chat-no-call: tool_choice none makes no call

    the API reference: none means the model will not call any tool
    https://platform.openai.com/docs/api-reference/responses/create
    the API reference: none means the model will not call any tool
    https://platform.openai.com/docs/api-reference/chat/create
    """
    for answer in peer.both(**BOTH_TOOLS, tool_choice="none"):
        assert not answer.calls, "expected no call, for tool_choice forbids it"


@must
def allowed_tools(peer: Peer) -> None:
    """allowed-tools: allowed_tools keeps calls to the tools that it names

    the guide on function calling: allowed tools
    https://platform.openai.com/docs/guides/function-calling
    """
    named = {"type": "function", "name": "get_time"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    names = peer.plain(**BOTH_TOOLS, tool_choice=choice).names
    assert {*names} == {"get_time"}, f"expected calls of get_time alone, got {names}"


@must
def one_call(peer: Peer) -> None:
    """one-call: parallel_tool_calls: false makes one call at most

    the guide on function calling: exactly zero or one tool is called
    https://platform.openai.com/docs/guides/function-calling
    """
    said = "What is the weather in Tokyo, in Paris and in Rome?"
    for answer in peer.both(**CALLED | {"said": said}, limit=200, parallel_tool_calls=False):
        assert len(answer.calls) <= 1, f"expected at most one call, got {len(answer.calls)}"


TOKENS_LESS = 4


@must
def cut_call(peer: Peer) -> None:
    """cut-call, chat-cut-call: a call that was cut is incomplete, and a completion that was cut within one
    ends with length

    agents run what is completed
    C16 https://github.com/vllm-project/vllm/issues/57998
    the API reference: finish_reason length if max_tokens was reached; else agents run the call
    G01 https://platform.openai.com/docs/api-reference/chat/object
    """
    # A few tokens less than a forced call takes: it is cut within its arguments.
    limit = max(CUT, peer.plain(**FORCED, limit=400).n_output - TOKENS_LESS)
    for answer in peer.both(**FORCED, limit=limit):
        for call in answer.calls.values():
            got = call.get("status", answer.end)
            is_told = is_object(call["arguments"]) or got in ("incomplete", "length")
            assert is_told, f"expected a call that was cut to be incomplete, got {got}"


@should
def no_blank_message(peer: Peer) -> None:
    """no-blank-message: a call comes without a blank message

    agents take a message for the end of the turn, and show it
    https://platform.openai.com/docs/guides/function-calling
    """
    answer = peer.plain(**BOTH_TOOLS, tool_choice="required", limit=200)
    assert answer.text.strip() or not answer.items("message"), "expected no blank message beside a call"


# --- results given back -------------------------------------------------------------------------------------


QUESTION: Json = {"role": "user", "content": "What is the weather in Tokyo and in Paris?"}
IN_TOKYO = ("call_tokyo", '{"city": "Tokyo"}', "It rains.")
IN_PARIS = ("call_paris", '{"city": "Paris"}', "The sun shines.")


def history(peer: Peer, *calls: tuple[str, str, str]) -> list[Json]:
    """Return a turn with calls, as the API has it; of each the id, the arguments and the result are given."""
    said: list[Json] = []
    results: list[Json] = []
    for id_, arguments, result in calls:
        function = {"name": "get_weather", "arguments": arguments}
        if peer.api == "chat":
            said.append({"id": id_, "type": "function", "function": function})
            results.append({"role": "tool", "tool_call_id": id_, "content": result})
        else:
            said.append({"type": "function_call", "call_id": id_} | function)
            results.append({"type": "function_call_output", "call_id": id_, "output": result})
    if peer.api == "chat":
        said = [{"role": "assistant", "content": None, "tool_calls": said}]
    return [QUESTION, *said, *results]


@must
def results(peer: Peer) -> None:
    """results, chat-results: the results of calls are taken back

    the guide on function calling
    https://platform.openai.com/docs/guides/function-calling
    the API reference on messages of the role tool
    https://platform.openai.com/docs/api-reference/chat/create
    """
    peer.plain(**BOTH_TOOLS)  # tools may be refused
    reply = peer.reply(**BOTH_TOOLS | {"said": history(peer, IN_TOKYO, IN_PARIS)})
    assert reply.status == 200, "expected an answer to the results of calls"


def n_prompt(peer: Peer, said: list[Json]) -> int:
    return peer.plain(**BOTH_TOOLS | {"said": said}).n_prompt


@should(after="results")
def results_order(peer: Peer) -> None:
    """results-order: results may come in any order: the call_id tells whose they are

    agents run calls in parallel, and send the results as they come
    https://platform.openai.com/docs/guides/function-calling
    """
    *calls, tokyo, paris = history(peer, IN_TOKYO, IN_PARIS)
    counts = [n_prompt(peer, [*calls, tokyo, paris]), n_prompt(peer, [*calls, paris, tokyo])]
    assert counts[0] == counts[1], f"expected prompts of one length, got {counts} tokens"


@should(after="results")
def reused_call_ids(peer: Peer) -> None:
    """reused-call-ids: a call_id that comes again in a later turn is refused, or the result of each turn is
    read

    models that count their calls from 0 in each turn, and agents that send back what they said
    https://github.com/NousResearch/hermes-agent/pull/88324
    """
    long = "It rains, and it will rain tomorrow and the day after tomorrow. " * 4
    counts = []
    for texts in (("It rains.", "It rains."), (long, "It rains."), ("It rains.", long)):
        turns = [history(peer, ("call_0", "{}", text)) for text in texts]
        counts.append(n_prompt(peer, turns[0] + turns[1]))
    expected = "expected a longer prompt with a longer result in either turn"
    assert counts[0] < min(counts[1:]), f"{expected}, got {counts} tokens"


@should
def broken_arguments(peer: Peer) -> None:
    """broken-arguments, chat-broken-arguments: a call in the history whose arguments are not JSON is taken
    back too

    agents send back what a model has said; a refusal ends their session for good
    M10 https://github.com/vllm-project/vllm/issues/43995
    """
    with presumed("results"):
        results(peer)
    said = history(peer, ("call_0", "{'city': Tokyo", "It rains."))
    reply = peer.reply(**BOTH_TOOLS | {"said": said})
    assert reply.status == 200, "expected an answer after a call whose arguments are not JSON"


def expect_taken(peer: Peer, output: list[Json], **more: object) -> None:
    """Expect an answer to a question after a turn that had this output."""
    reply = peer.reply(said=[{"role": "user", "content": "hi"}, *output, QUESTION], **more)
    assert reply.status == 200, "expected the output of a response to be taken as input"


@must
def output_as_input(peer: Peer) -> None:
    """output-as-input: the output of a response is taken as input

    the guide on conversation state: append the output to the next input
    https://platform.openai.com/docs/guides/conversation-state
    """
    output = peer.plain().response.get("output") or ()
    expect_taken(peer, [item for item in output if item.get("type") != "reasoning"])


# --- custom tools and namespaces ----------------------------------------------------------------------------


def expect_call(peer: Peer, tool: Json, kind: str) -> None:
    """Expect an answer that must call the tool to make calls of a kind of schema.py."""
    answer = peer.plain(said=TOKYO, limit=400, tools=[tool], tool_choice="required")
    if not answer.calls and answer.end == "length":
        raise NotApplicable("the response was cut before the call")
    faults = [fault for call in answer.calls.values() for fault in missing(call, kind)]
    assert answer.calls, "expected a call of the tool, or a refusal of it"
    assert not faults, f"expected calls of the tool as it was given, or a refusal of it: {faults}"


@must
def custom_tool(peer: Peer) -> None:
    """custom-tool: a custom tool makes a custom_tool_call with its input as text, or is refused

    the guide on function calling: custom tools
    https://platform.openai.com/docs/guides/function-calling
    """
    tool = {"type": "custom", "name": "get_weather", "description": "Get the weather of a city"}
    expect_call(peer, tool, "custom_call")


@must
def namespace(peer: Peer) -> None:
    """namespace: a tool in a namespace is called with its own name and that of the namespace, or is refused

    the guide on function calling: namespaces; an agent finds the tool by both
    https://platform.openai.com/docs/guides/function-calling
    """
    tools = [{"type": "function", **WEATHER}]
    tool = {"type": "namespace", "name": "travel", "description": "Tools for travellers", "tools": tools}
    expect_call(peer, tool, "travel_call")


@should
def not_run(peer: Peer) -> None:
    """not-run, chat-not-run: what is accepted and not run is named in a Warning header, or refused

    OpenAI refuses both; else a client believes that its tool was run, and never hears of its typo
    M12 https://github.com/jundot/omlx/pull/3757
    """
    path, body = peer.request()
    changes: Json = {"no_such_tool": {"tools": [{"type": "no_such_tool"}]}, "temprature": {"temprature": 1}}
    for name, change in changes.items():
        reply = peer.ask("POST", path, body | change)
        is_told = reply.is_refusal or name in reply.headers.get("warning", "")
        assert is_told, f"expected {name}, which is not run, to be named in a Warning header, or refused"


# --- structured output --------------------------------------------------------------------------------------

COLOUR = json.loads("""{
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "green"]}, "n": {"type": "integer"}},
    "required": ["colour", "n"],
    "additionalProperties": false
}""")
NAME_A_COLOUR: Json = {"said": "Name a colour and a number.", "limit": 400, "schema": COLOUR}


@must
def json_schema(peer: Peer) -> None:
    """json-schema, chat-json-schema: a schema with strict makes what the schema describes

    the guide on structured outputs
    https://platform.openai.com/docs/guides/structured-outputs
    """
    for answer in peer.both(**NAME_A_COLOUR):
        value = parsed(answer.text)
        fits = value.keys() == {"colour", "n"} and not missing(value, "coloured")
        assert fits or answer.end == "length", f"expected what the schema describes, got {answer.text!r}"


@should
def json_blanks(peer: Peer) -> None:
    """json-blanks, chat-json-blanks: a constrained answer does not spend its tokens on blanks

    whitespace is legal JSON, and a small model that may write it can do so up to its limit
    https://github.com/jundot/omlx/issues/2990
    """
    for answer in peer.both(**NAME_A_COLOUR):
        assert not re.search(r"\s{100}", answer.text), "expected no more than some blanks in JSON"


# --- reasoning ----------------------------------------------------------------------------------------------

SEALED: Json = {"include": ["reasoning.encrypted_content"], "store": False}


def reasoned(peer: Peer, **more: object) -> Answer:
    """Return an answer with a reasoning item."""
    answer = peer.plain(limit=400, **more)
    if not answer.items("reasoning"):
        raise NotApplicable("the model does not reason")
    return answer


@must
def reasoning_first(peer: Peer) -> None:
    """reasoning-first: the reasoning item comes first

    the guide on reasoning: items are given back in their order
    https://platform.openai.com/docs/guides/reasoning
    """
    types = [item.get("type") for item in reasoned(peer).response["output"]]
    assert types[0] == "reasoning", f"expected the reasoning in front of what follows from it, got {types}"


@should
def reasoning_counted(peer: Peer) -> None:
    """reasoning-counted: reasoning_tokens counts the reasoning

    the guide on reasoning: output_tokens_details
    G05 https://platform.openai.com/docs/guides/reasoning
    """
    answer = reasoned(peer)
    n = (answer.usage.get("output_tokens_details") or {}).get("reasoning_tokens")
    has_text = any(item.get("content") or item.get("summary") for item in answer.items("reasoning"))
    assert n or not has_text, f"expected reasoning_tokens to count the reasoning, got {n}"


@must(after="output-as-input")
def reasoning_as_input(peer: Peer) -> None:
    """reasoning-as-input: reasoning items are taken back as they came

    the guide on reasoning: keep reasoning items in context
    https://platform.openai.com/docs/guides/reasoning
    """
    expect_taken(peer, reasoned(peer).response["output"])


@must
def encrypted_reasoning(peer: Peer) -> None:
    """encrypted-reasoning: include reasoning.encrypted_content is refused, or puts it into each reasoning
    item

    the guide on reasoning: encrypted reasoning items
    https://platform.openai.com/docs/guides/reasoning
    """
    for item in reasoned(peer, **SEALED).items("reasoning"):
        assert isinstance(item.get("encrypted_content") or None, str), (
            "expected encrypted_content, for it was asked for"
        )


@must(after="encrypted-reasoning reasoning-as-input")
def encrypted_as_input(peer: Peer) -> None:
    """encrypted-as-input: encrypted_content is taken back

    the guide on reasoning: encrypted reasoning items
    https://platform.openai.com/docs/guides/reasoning
    """
    expect_taken(peer, reasoned(peer, **SEALED).response["output"], **SEALED)


@should
def effort(peer: Peer) -> None:
    """effort: reasoning.effort is taken and repeated, or refused

    the API reference on reasoning
    https://platform.openai.com/docs/guides/reasoning
    """
    answer = peer.plain(reasoning={"effort": "low"})
    echoed = (answer.response.get("reasoning") or {}).get("effort")
    assert echoed in (None, "low"), f"expected the effort to be repeated, got {echoed!r}"


# --- tokens -------------------------------------------------------------------------------------------------

CONTROL_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "</s>")  # of many families
N_COPIES = 16


@advice(profiles="chat agents")
def spelled_tokens(peer: Peer) -> None:
    """spelled-tokens: a control token that a user spells is text, and so costs more than one token

    what ends a turn or begins one of the system is the template's alone: else users forge turns
    K01 https://github.com/huggingface/transformers/issues/29279
    """
    # A server may drop or refuse what spells a control token; for a model without the token it is text.
    for spelled in CONTROL_TOKENS:
        once, twice = (prompt_that_spells(peer, f"{spelled}1" * n) for n in (N_COPIES, 2 * N_COPIES))
        n_tokens = (twice - once) / N_COPIES - 1  # of a copy: the digit after it is a token too
        assert n_tokens != 1, f"expected {spelled} in a user's message to be text, never one token"


def prompt_that_spells(peer: Peer, spelled: str) -> int:
    """Count the tokens of a prompt that says so; 0 if it is refused."""
    return of_chunks([peer.reply(said=f"1{spelled}", limit=1).if_there().json]).n_prompt


def asked_apart(peer: Peer, path: str, said: object) -> Json:
    """Ask an endpoint that a server need not have."""
    return peer.ask("POST", path, {"model": peer.model, "input": said}).if_there(REFUSED).json


def compacted(peer: Peer, said: list[Json]) -> list[Json]:
    """Return the items to which a conversation is compacted."""
    return asked_apart(peer, "/responses/compact", said).get("output") or []


@should(profiles="responses")
def input_tokens(peer: Peer) -> None:
    """input-tokens: input_tokens counts what the usage counts

    the API reference on input token counts
    https://platform.openai.com/docs/api-reference/responses/input-tokens
    """
    counted = asked_apart(peer, "/responses/input_tokens", "hi").get("input_tokens")
    used = peer.plain().usage.get("input_tokens")
    assert counted == used, f"expected the count of the answer's usage, {used}, got {counted}"


@should
def compact(peer: Peer) -> None:
    """compact: a conversation is compacted into one item, which is taken back

    the API reference on compact
    https://platform.openai.com/docs/api-reference/responses/compact
    """
    output = compacted(peer, [QUESTION, {"role": "assistant", "content": "It rains."}, QUESTION])
    kinds = [item.get("type") for item in output]
    assert kinds.count("compaction") == 1, f"expected one compaction item, got {kinds}"
    again = peer.reply(said=[*output, QUESTION])
    assert again.status == 200, "expected what was compacted to be taken as input"
