"""Rules that agents rely on: tools and their choice, results, reasoning, structured output, tokens counted.

    Peer --rule--> nothing, or AssertionError, or NotApplicable

Authority: https://platform.openai.com/docs/guides/function-calling, .../structured-outputs and .../reasoning

Not here: a call that is required (answers.py), what must be refused (refusals.py).
"""

import json

from audit.http import REFUSED
from audit.peer import CALLED, CUT, TIME, TOKYO, WEATHER, Peer
from audit.rules import NotApplicable, rules_of
from audit.schema import Json, Typed, expect_members, object_in
from audit.stream import Answer, is_object, of_chunks, parsed

must, should, advice = rules_of("agents", "responses agents")
TOOLS: Json = {"tools": (WEATHER, TIME)}
BOTH_TOOLS: Json = TOOLS | {"said": TOKYO}
FORCED: Json = BOTH_TOOLS | {"tool_choice": "get_time"}
# Rule, or an API and a rule -> what is asked
ASKED = json.loads("""{
    "allowed-tools":    {"tool_choice": {"type": "allowed_tools", "mode": "required",
                                         "tools": [{"type": "function", "name": "get_time"}]}},
    "custom-tool":      {"type": "custom", "name": "get_weather", "description": "Get the weather of a city"},
    "namespace":        {"type": "namespace", "name": "travel", "description": "Tools for travellers"},
    "not-run":          {"no_such_tool": {"tools": [{"type": "no_such_tool"}]},
                         "temprature": {"temprature": 1}},
    "orphan-result":    {"type": "function_call_output", "call_id": "call_nobody", "output": "It rains."},
    "input-items":      {"role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]},
    "responses json-object": {"text": {"format": {"type": "json_object"}}},
    "chat json-object":      {"response_format": {"type": "json_object"}}
}""")

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
        assert answer.names == {"get_time"}


@must
def no_call(peer: Peer) -> None:
    """no-call, chat-no-call: tool_choice none makes no call

    the API reference: none means the model will not call any tool
    https://platform.openai.com/docs/api-reference/responses/create
    the API reference: none means the model will not call any tool
    https://platform.openai.com/docs/api-reference/chat/create
    """
    for answer in peer.both(**BOTH_TOOLS, tool_choice="none"):
        assert not answer.calls


@must
def allowed_tools(peer: Peer) -> None:
    """allowed-tools: allowed_tools keeps calls to the tools that it names

    the guide on function calling: allowed tools
    https://platform.openai.com/docs/guides/function-calling
    """
    assert peer.plain(**BOTH_TOOLS, **ASKED["allowed-tools"]).names == {"get_time"}


@must
def one_call(peer: Peer) -> None:
    """one-call: parallel_tool_calls: false makes one call at most

    the guide on function calling: exactly zero or one tool is called
    https://platform.openai.com/docs/guides/function-calling
    """
    said = "What is the weather in Tokyo, in Paris and in Rome?"
    for answer in peer.both(**CALLED | {"said": said}, limit=200, parallel_tool_calls=False):
        assert len(answer.calls) <= 1


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
    limit = max(CUT, peer.plain(**FORCED, limit=400).n_output - 4)
    for answer in peer.both(**FORCED, limit=limit):
        for call in answer.calls.values():
            status = call.get("status", answer.end)
            assert status in ("incomplete", "length") or is_object(call["arguments"])


@should
def no_blank_message(peer: Peer) -> None:
    """no-blank-message: a call comes without a blank message

    agents take a message for the end of the turn, and show it
    https://platform.openai.com/docs/guides/function-calling
    """
    answer = peer.plain(**BOTH_TOOLS, tool_choice="required", limit=200)
    assert answer.text.strip() or not answer.items("message")


# --- results given back -------------------------------------------------------------------------------------


QUESTION: Json = {"role": "user", "content": "What is the weather in Tokyo and in Paris?"}
IN_TOKYO = ("call_tokyo", '{"city": "Tokyo"}', "It rains.")
IN_PARIS = ("call_paris", '{"city": "Paris"}', "The sun shines.")


def history(peer: Peer, *calls: tuple[str, str, str]) -> list[Json]:
    """Return a turn with calls, as the API has it; each given as id, arguments and result."""
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


def expect_taken(peer: Peer, said: list[Json], **more: object) -> None:
    assert peer.reply(said=said, **more).status == 200


@must
def results(peer: Peer) -> None:
    """results, chat-results: the results of calls are taken back

    the guide on function calling
    https://platform.openai.com/docs/guides/function-calling
    the API reference on messages of the role tool
    https://platform.openai.com/docs/api-reference/chat/create
    """
    peer.plain(**BOTH_TOOLS)  # tools may be refused
    expect_taken(peer, history(peer, IN_TOKYO, IN_PARIS), **TOOLS)


def expect_one_length(peer: Peer, *histories: list[Json]) -> None:
    counts = {peer.plain(said=said, **TOOLS).n_prompt for said in histories}
    assert len(counts) == 1, f"expected prompts of one length, got {counts} tokens"


@should(after="results")
def results_order(peer: Peer) -> None:
    """results-order: results may come in any order: the call_id tells whose they are

    agents run calls in parallel, and send the results as they come
    https://platform.openai.com/docs/guides/function-calling
    """
    *calls, tokyo, paris = history(peer, IN_TOKYO, IN_PARIS)
    expect_one_length(peer, [*calls, tokyo, paris], [*calls, paris, tokyo])


@should(after="results")
def reused_call_ids(peer: Peer) -> None:
    """reused-call-ids: a call_id that comes again in a later turn is refused, or the result of each turn is
    read

    models that count their calls from 0 in each turn, and agents that send back what they said
    https://github.com/NousResearch/hermes-agent/pull/88324
    """
    long = "It rains, and it will rain tomorrow and the day after tomorrow. " * 4
    one, other = (history(peer, ("call_0", "{}", text)) for text in ("It rains.", long))
    expect_one_length(peer, one + other, other + one)  # if both are read, both prompts are as long


@should(after="results")
def broken_arguments(peer: Peer) -> None:
    """broken-arguments, chat-broken-arguments: a call in the history whose arguments are not JSON is taken
    back too

    agents send back what a model has said; a refusal ends their session for good
    M10 https://github.com/vllm-project/vllm/issues/43995
    """
    expect_taken(peer, history(peer, ("call_0", "{'city': Tokyo", "It rains.")), **TOOLS)


HI: Json = {"role": "user", "content": "hi"}


@must
def output_as_input(peer: Peer) -> None:
    """output-as-input: the output of a response is taken as input

    the guide on conversation state: append the output to the next input
    https://platform.openai.com/docs/guides/conversation-state
    """
    output = [item for item in peer.plain().output if item.get("type") != "reasoning"]
    expect_taken(peer, [HI, *output, QUESTION])


# --- custom tools and namespaces ----------------------------------------------------------------------------


def expect_call(peer: Peer, tool: Json, kind: str) -> None:
    """Expect an answer that must call the tool to make calls of a kind of schema.py."""
    answer = peer.plain(said=TOKYO, limit=400, tools=[tool], tool_choice="required")
    if not answer.calls and answer.end == "length":
        raise NotApplicable("the response was cut before the call")
    assert answer.calls, "expected a call of the tool, or a refusal of it"
    for call in answer.calls.values():
        expect_members(call, kind)


@must
def custom_tool(peer: Peer) -> None:
    """custom-tool: a custom tool makes a custom_tool_call with its input as text, or is refused

    the guide on function calling: custom tools
    https://platform.openai.com/docs/guides/function-calling
    """
    expect_call(peer, ASKED["custom-tool"], "custom_call")


@must
def namespace(peer: Peer) -> None:
    """namespace: a tool in a namespace is called with its own name and that of the namespace, or is refused

    the guide on function calling: namespaces; an agent finds the tool by both
    https://platform.openai.com/docs/guides/function-calling
    """
    expect_call(peer, ASKED["namespace"] | {"tools": [{"type": "function", **WEATHER}]}, "travel_call")


@should
def not_run(peer: Peer) -> None:
    """not-run, chat-not-run: what is accepted and not run is named in a Warning header, or refused

    OpenAI refuses both; else a client believes that its tool was run, and never hears of its typo
    M12 https://github.com/jundot/omlx/pull/3757
    """
    path, body = peer.request()
    for name, change in ASKED["not-run"].items():
        reply = peer.ask("POST", path, body | change)
        assert reply.is_refusal or name in reply.headers.get("warning", "")


# --- structured output --------------------------------------------------------------------------------------

COLOUR = json.loads("""{
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "green"]}, "n": {"type": "integer"}},
    "required": ["colour", "n"],
    "additionalProperties": false
}""")


@must
def json_schema(peer: Peer) -> None:
    """json-schema, chat-json-schema: a schema with strict makes what the schema describes

    the guide on structured outputs
    https://platform.openai.com/docs/guides/structured-outputs
    """
    for answer in peer.both(said="Name a colour and a number.", limit=400, schema=COLOUR):
        value = parsed(answer.text)
        fits = value.keys() == {"colour", "n"} and not Typed(value, "coloured").faults
        assert fits or answer.end == "length"


@must
def json_object(peer: Peer) -> None:
    """json-object, chat-json-object: the format json_object makes a JSON object, or is refused

    the guide on structured outputs: JSON mode
    https://platform.openai.com/docs/guides/structured-outputs
    the guide on structured outputs: JSON mode
    https://platform.openai.com/docs/guides/structured-outputs
    """
    for answer in peer.both(said="Say hello in JSON.", limit=400, **ASKED[f"{peer.api} json-object"]):
        assert is_object(answer.text) or answer.end == "length"


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
    assert reasoned(peer).output[0].get("type") == "reasoning"


@should
def reasoning_counted(peer: Peer) -> None:
    """reasoning-counted: reasoning_tokens counts the reasoning

    the guide on reasoning: output_tokens_details
    G05 https://platform.openai.com/docs/guides/reasoning
    """
    answer = reasoned(peer)
    has_text = any(item.get("content") or item.get("summary") for item in answer.items("reasoning"))
    assert answer.usage.output_tokens_details.reasoning_tokens or not has_text


@must(after="output-as-input")
def reasoning_as_input(peer: Peer) -> None:
    """reasoning-as-input: reasoning items are taken back as they came

    the guide on reasoning: keep reasoning items in context
    https://platform.openai.com/docs/guides/reasoning
    """
    expect_taken(peer, [HI, *reasoned(peer).output, QUESTION])


@must
def encrypted_reasoning(peer: Peer) -> None:
    """encrypted-reasoning: include reasoning.encrypted_content is refused, or puts it into each reasoning
    item

    the guide on reasoning: encrypted reasoning items
    https://platform.openai.com/docs/guides/reasoning
    """
    for item in reasoned(peer, **SEALED).items("reasoning"):
        assert item.get("encrypted_content")


@must(after="encrypted-reasoning reasoning-as-input")
def encrypted_as_input(peer: Peer) -> None:
    """encrypted-as-input: encrypted_content is taken back

    the guide on reasoning: encrypted reasoning items
    https://platform.openai.com/docs/guides/reasoning
    """
    expect_taken(peer, [HI, *reasoned(peer, **SEALED).output, QUESTION], **SEALED)


@should
def effort(peer: Peer) -> None:
    """effort: reasoning.effort is taken and repeated, or refused

    the API reference on reasoning
    https://platform.openai.com/docs/guides/reasoning
    """
    response = peer.plain(reasoning={"effort": "low"}).response
    assert object_in(response, "reasoning").get("effort") in (None, "low")


# --- tokens -------------------------------------------------------------------------------------------------

CONTROL_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "</s>")  # of many families
N_COPIES = 16


@advice(profiles="chat agents")
def spelled_tokens(peer: Peer) -> None:
    """spelled-tokens: a control token that a user spells is text, and so costs more than one token

    what ends a turn or begins one of the system is the template's alone: else users forge turns
    K01 https://github.com/huggingface/transformers/issues/29279
    """
    # A server may drop or refuse text that spells a control token; to a model without the token it is text.
    for spelled in CONTROL_TOKENS:
        prompts = (peer.reply(said="1" + f"{spelled}1" * n, limit=1) for n in (N_COPIES, 2 * N_COPIES))
        once, twice = (of_chunks([reply.if_there().json]).n_prompt for reply in prompts)
        n_tokens = (twice - once) / N_COPIES - 1  # of a copy: the digit after it is a token too
        assert n_tokens != 1


def asked_apart(peer: Peer, path: str, said: object) -> Json:
    """Ask an endpoint that a server need not have."""
    return peer.ask("POST", path, {"model": peer.model, "input": said}).if_there(REFUSED).json


def compacted(peer: Peer) -> list[Json]:
    """Return the items to which a conversation is compacted."""
    said = [HI, {"role": "assistant", "content": "It rains."}, QUESTION]
    return asked_apart(peer, "/responses/compact", said).get("output") or []


@should(profiles="responses")
def input_tokens(peer: Peer) -> None:
    """input-tokens: input_tokens counts what the usage counts

    the API reference on input token counts
    https://platform.openai.com/docs/api-reference/responses/input-tokens
    """
    counted = asked_apart(peer, "/responses/input_tokens", "hi").get("input_tokens")
    assert counted == peer.plain().n_prompt, f"expected the count of the answer's usage, got {counted}"


@should
def compact(peer: Peer) -> None:
    """compact: a conversation is compacted into one item, which is taken back

    the API reference on compact
    https://platform.openai.com/docs/api-reference/responses/compact
    """
    output = compacted(peer)
    assert [item.get("type") for item in output].count("compaction") == 1
    expect_taken(peer, [*output, QUESTION])
