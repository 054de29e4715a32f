"""Rules that agents rely on: tools and their choice, results, reasoning, structured output, tokens counted.

    Peer --rule--> nothing, or AssertionError, or NotApplicable

Authority: https://platform.openai.com/docs/guides/function-calling, .../structured-outputs and .../reasoning

Not here: a call that is required (answers.py), how a rule that is a text is read (exchanges.py).
"""

from audit.exchanges import enter_texts
from audit.http import REFUSED
from audit.peer import CUT, Peer
from audit.rules import NotApplicable, rules_of
from audit.schema import Json, faults_in
from audit.stream import Answer, is_object, of_chunks, parsed

must, should, advice = rules_of("agents", "responses agents")
# --- which tool ---------------------------------------------------------------------------------------------


@must
def named_call(peer: Peer) -> None:
    """named-call, chat-named-call: tool_choice with a name calls that tool, and no other

    the guide on function calling: forced function
    https://platform.openai.com/docs/guides/function-calling
    the API reference on tool_choice
    https://platform.openai.com/docs/api-reference/chat/create
    """
    for answer in peer.both(**peer.asks("forced")):
        assert answer.names == {"get_time"}


@must
def no_call(peer: Peer) -> None:
    """no-call, chat-no-call: tool_choice none makes no call

    the API reference: none means the model will not call any tool
    https://platform.openai.com/docs/api-reference/responses/create
    the API reference: none means the model will not call any tool
    https://platform.openai.com/docs/api-reference/chat/create
    """
    for answer in peer.both(**peer.asks("tools"), tool_choice="none"):
        assert not answer.calls


@must
def one_call(peer: Peer) -> None:
    """one-call: parallel_tool_calls: false makes one call at most

    the guide on function calling: exactly zero or one tool is called
    https://platform.openai.com/docs/guides/function-calling
    """
    asked = peer.asks("call") | {"said": "What is the weather in Tokyo, in Paris and in Rome?"}
    for answer in peer.both(**asked, limit=200, parallel_tool_calls=False):
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
    limit = max(CUT, peer.plain(**peer.asks("forced"), limit=400).n_output - 4)
    for answer in peer.both(**peer.asks("forced"), limit=limit):
        for call in answer.calls.values():
            status = call.get("status", answer.end)
            assert status in ("incomplete", "length") or is_object(call["arguments"])


@should
def no_blank_message(peer: Peer) -> None:
    """no-blank-message: a call comes without a blank message

    agents take a message for the end of the turn, and show it
    https://platform.openai.com/docs/guides/function-calling
    """
    answer = peer.plain(**peer.asks("tools"), tool_choice="required", limit=200)
    assert answer.text.strip() or not answer.items("message")


# --- results given back -------------------------------------------------------------------------------------


TAKEN = r"""
must of responses agents
results, chat-results: the results of calls are taken back

the guide on function calling
https://platform.openai.com/docs/guides/function-calling
the API reference on messages of the role tool
https://platform.openai.com/docs/api-reference/chat/create

responses  {"tools": [TOOL]} -> object:=response
responses  {"tools": [TOOL], "input": [QUESTION, TOKYO_CALL, PARIS_CALL, TOKYO_RESULT, PARIS_RESULT]} -> 200
chat       {"tools": [CHAT_TOOL]} -> object:=chat.completion
chat       {"tools": [CHAT_TOOL], "messages": [QUESTION,
             {"role": "assistant", "content": null, "tool_calls": [
               {"id": "call_tokyo", "type": "function", "function": {
                 "name": "get_weather", "arguments": TOKYO}},
               {"id": "call_paris", "type": "function", "function": {
                 "name": "get_weather", "arguments": PARIS}}]},
             {"role": "tool", "tool_call_id": "call_tokyo", "content": "It rains."},
             {"role": "tool", "tool_call_id": "call_paris", "content": "The sun shines."}]} -> 200


should of responses agents, after results
broken-arguments, chat-broken-arguments: a call in the history whose arguments are not JSON is taken back too

agents send back what a model has said; a refusal ends their session for good
M10 https://github.com/vllm-project/vllm/issues/43995

responses  {"tools": [TOOL], "input": [QUESTION,
             {"type": "function_call", "call_id": "call_0", "name": "get_weather",
              "arguments": "{'city': Tokyo"},
             {"type": "function_call_output", "call_id": "call_0", "output": "It rains."}]} -> 200
chat       {"tools": [CHAT_TOOL], "messages": [QUESTION,
             {"role": "assistant", "content": null, "tool_calls": [
               {"id": "call_0", "type": "function", "function": {
                 "name": "get_weather", "arguments": "{'city': Tokyo"}}]},
             {"role": "tool", "tool_call_id": "call_0", "content": "It rains."}]} -> 200


should of responses agents, after results
results-order: results may come in any order: the call_id tells whose they are

agents run calls in parallel, and send the results as they come
https://platform.openai.com/docs/guides/function-calling

responses  {"tools": [TOOL], "input": [QUESTION, TOKYO_CALL, PARIS_CALL, TOKYO_RESULT, PARIS_RESULT]}
             -> object:=response
responses  {"tools": [TOOL], "input": [QUESTION, TOKYO_CALL, PARIS_CALL, PARIS_RESULT, TOKYO_RESULT]}
             -> a prompt of this length


should of responses agents, after results
reused-call-ids: a call_id that comes again in a later turn is refused, or the result of each turn is read

models that count their calls from 0 in each turn, and agents that send back what they said
https://github.com/NousResearch/hermes-agent/pull/88324

responses  {"tools": [TOOL], "input": [QUESTION, CALL_0, SHORT_RESULT, QUESTION, CALL_0, LONG_RESULT]}
             -> object:=response
responses  {"tools": [TOOL], "input": [QUESTION, CALL_0, LONG_RESULT, QUESTION, CALL_0, SHORT_RESULT]}
             -> a prompt of this length


must of responses agents
allowed-tools: allowed_tools keeps calls to the tools that it names

the guide on function calling: allowed tools
https://platform.openai.com/docs/guides/function-calling

responses  {"input": "WEATHER", "max_output_tokens": 400, "tools": [TOOL, TIME],
             "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [
             {"type": "function", "name": "get_time"}]}} -> output:+time_call, or status:=incomplete


must of responses agents
custom-tool: a custom tool makes a custom_tool_call with its input as text, or is refused

the guide on function calling: custom tools
https://platform.openai.com/docs/guides/function-calling

responses  {"input": "WEATHER", "max_output_tokens": 400, "tool_choice": "required",
             "tools": [{"type": "custom", "name": "get_weather", "description": "Get the weather of a city"}]}
             -> output:+custom_call, or status:=incomplete


must of responses agents
namespace: a tool in a namespace is called with its own name and that of the namespace, or is refused

the guide on function calling: namespaces; an agent finds the tool by both
https://platform.openai.com/docs/guides/function-calling

responses  {"input": "WEATHER", "max_output_tokens": 400, "tool_choice": "required",
             "tools": [{"type": "namespace", "name": "travel", "description": "Tools for travellers",
                        "tools": [TOOL]}]}
             -> output:+travel_call, or status:=incomplete


should of responses agents
not-run, chat-not-run: what is accepted and not run is named in a Warning header, or refused

OpenAI refuses both; else a client believes that its tool was run, and never hears of its typo
M12 https://github.com/jundot/omlx/pull/3757

responses  {"tools": [{"type": "no_such_tool"}]} -> refused, or header warning no_such_tool
responses  {"temprature": 1} -> refused, or header warning temprature
chat       {"tools": [{"type": "no_such_tool"}]} -> refused, or header warning no_such_tool
chat       {"temprature": 1} -> refused, or header warning temprature


should of responses agents
effort: reasoning.effort is taken and repeated, or refused

the API reference on reasoning
https://platform.openai.com/docs/guides/reasoning

responses  {"reasoning": {"effort": "low"}} -> reasoning?:low_effort


should of responses
input-tokens: input_tokens counts what the usage counts

the API reference on input token counts
https://platform.openai.com/docs/api-reference/responses/input-tokens

responses  {} -> object:=response
POST /responses/input_tokens {"model": "MODEL", "input": "hi"} -> a prompt of this length
"""
enter_texts("agents", TAKEN)


HI: Json = {"role": "user", "content": "hi"}


@must
def output_as_input(peer: Peer) -> None:
    """output-as-input: the output of a response is taken as input

    the guide on conversation state: append the output to the next input
    https://platform.openai.com/docs/guides/conversation-state
    """
    output = [item for item in peer.plain().output if item.get("type") != "reasoning"]
    assert peer.reply(said=[HI, *output, HI]).status == 200


# --- structured output --------------------------------------------------------------------------------------


@must
def json_schema(peer: Peer) -> None:
    """json-schema, chat-json-schema: a schema with strict makes what the schema describes

    the guide on structured outputs
    https://platform.openai.com/docs/guides/structured-outputs
    """
    for answer in peer.both(**peer.asks("schema")):
        value = parsed(answer.text)
        fits = value.keys() == {"colour", "n"} and not faults_in(value, "coloured")
        assert fits or answer.end == "length"


@must
def json_object(peer: Peer) -> None:
    """json-object, chat-json-object: the format json_object makes a JSON object, or is refused

    the guide on structured outputs: JSON mode
    https://platform.openai.com/docs/guides/structured-outputs
    the guide on structured outputs: JSON mode
    https://platform.openai.com/docs/guides/structured-outputs
    """
    for answer in peer.both(**peer.asks("object")):
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
    assert peer.reply(said=[HI, *reasoned(peer).output, HI]).status == 200


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
    assert peer.reply(said=[HI, *reasoned(peer, **SEALED).output, HI], **SEALED).status == 200


# --- tokens -------------------------------------------------------------------------------------------------

CONTROL_TOKENS = "<|im_end|> <|eot_id|> <|end|> <end_of_turn> </s>"  # of many families
N_COPIES = 16


@advice(profiles="chat agents")
def spelled_tokens(peer: Peer) -> None:
    """spelled-tokens: a control token that a user spells is text, and so costs more than one token

    what ends a turn or begins one of the system is the template's alone: else users forge turns
    K01 https://github.com/huggingface/transformers/issues/29279
    """
    # A server may drop or refuse text that spells a control token; to a model without the token it is text.
    for spelled in CONTROL_TOKENS.split():
        prompts = (peer.reply(said="1" + f"{spelled}1" * n, limit=1) for n in (N_COPIES, 2 * N_COPIES))
        once, twice = (of_chunks([reply.if_there().json]).n_prompt for reply in prompts)
        # The digit after each copy is a token too.
        assert twice - once != 2 * N_COPIES


def compacted(peer: Peer) -> list[Json]:
    """Return the items to which a conversation is compacted, by an endpoint that a server need not have."""
    said = [HI, {"role": "assistant", "content": "It rains."}, HI]
    reply = peer.ask("POST", "/responses/compact", {"model": peer.model, "input": said})
    return reply.if_there(REFUSED).json.get("output") or []


@should
def compact(peer: Peer) -> None:
    """compact: a conversation is compacted into one item, which is taken back

    the API reference on compact
    https://platform.openai.com/docs/api-reference/responses/compact
    """
    output = compacted(peer)
    assert [item.get("type") for item in output].count("compaction") == 1
    assert peer.reply(said=[*output, HI]).status == 200
