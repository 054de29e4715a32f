"""Rules that agents rely on: tools and their choice, results, reasoning, structured output, tokens counted.

    Asking --rule--> nothing, or Failed, or NotApplicable

Authority: https://platform.openai.com/docs/guides/function-calling, .../structured-outputs and .../reasoning

Not here: a call that is required (answers.py), what must be refused (refusals.py).
"""

import re

from audit.asking import CALLED, CUT, TIME, TOKYO, WEATHER, Answer, Asking, asking, request
from audit.peer import NOT_THERE, REFUSED, Reply
from audit.rules import NotApplicable, expect, presumed, rules_of
from audit.schema import Json
from audit.stream import is_object, loads

must, should, advice = rules_of("agents", "responses agents", asking)
BOTH_TOOLS: Json = {"said": TOKYO, "tools": (WEATHER, TIME)}
FORCED: Json = BOTH_TOOLS | {"tool_choice": "get_time"}

# --- which tool ---------------------------------------------------------------------------------------------


def expect_calls(answer: Answer, name: str) -> None:
    names = [call["name"] for call in answer.calls]
    answer.expect({*names} == {name}, f"a call of {name} alone, got {names}")


@must("named-call", "chat-named-call")
def named_call(ask: Asking) -> None:
    """tool_choice with a name calls that tool, and no other

    the guide on function calling: forced function
    https://platform.openai.com/docs/guides/function-calling
    the API reference on tool_choice
    https://platform.openai.com/docs/api-reference/chat/create
    """
    for answer in ask(**FORCED):
        expect_calls(answer, "get_time")


@must("no-call", "chat-no-call")
def no_call(ask: Asking) -> None:
    """tool_choice none makes no call

    the API reference: none means the model will not call any tool
    https://platform.openai.com/docs/api-reference/responses/create
    the API reference: none means the model will not call any tool
    https://platform.openai.com/docs/api-reference/chat/create
    """
    for answer in ask(**BOTH_TOOLS, tool_choice="none"):
        answer.expect(not answer.calls, "no call, for tool_choice forbids it")


@must("allowed-tools")
def allowed_tools(ask: Asking) -> None:
    """allowed_tools keeps calls to the tools that it names

    the guide on function calling: allowed tools
    https://platform.openai.com/docs/guides/function-calling
    """
    named = {"type": "function", "name": "get_time"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    expect_calls(ask.plain(**BOTH_TOOLS, tool_choice=choice), "get_time")


@must("one-call")
def one_call(ask: Asking) -> None:
    """parallel_tool_calls: false makes one call at most

    the guide on function calling: exactly zero or one tool is called
    https://platform.openai.com/docs/guides/function-calling
    """
    said = "What is the weather in Tokyo, in Paris and in Rome?"
    for answer in ask(**CALLED | {"said": said}, limit=200, parallel_tool_calls=False):
        answer.expect(len(answer.calls) <= 1, f"at most one call, got {len(answer.calls)}")


TOKENS_LESS = 4


@must("cut-call", "chat-cut-call")
def cut_call(ask: Asking) -> None:
    """a call that was cut is incomplete, and a completion that was cut within one ends with length

    agents run what is completed
    C16 https://github.com/vllm-project/vllm/issues/57998
    the API reference: finish_reason length if max_tokens was reached; else agents run the call
    G01 https://platform.openai.com/docs/api-reference/chat/object
    """
    # A few tokens less than a forced call takes: it is cut within its arguments.
    limit = max(CUT, ask.plain(**FORCED, limit=400).n_output - TOKENS_LESS)
    for answer in ask(**FORCED, limit=limit):
        for call in answer.calls:
            got = call.get("status", answer.end)
            is_told = is_object(call["arguments"]) or got in ("incomplete", "length")
            answer.expect(is_told, f"a call that was cut to be incomplete, got {got}")


@should("no-blank-message")
def no_blank_message(ask: Asking) -> None:
    """a call comes without a blank message

    agents take a message for the end of the turn, and show it
    https://platform.openai.com/docs/guides/function-calling
    """
    answer = ask.plain(**BOTH_TOOLS, tool_choice="required", limit=200)
    answer.expect(answer.text.strip() or not answer.items("message"), "no blank message beside a call")


# --- results given back -------------------------------------------------------------------------------------


def called(id_: str, arguments: str = '{"city": "Tokyo"}') -> Json:
    return {"type": "function_call", "call_id": id_, "name": "get_weather", "arguments": arguments}


def result(id_: str, text: str = "It rains.") -> Json:
    return {"type": "function_call_output", "call_id": id_, "output": text}


QUESTION: Json = {"role": "user", "content": "What is the weather in Tokyo and in Paris?"}
CALLS = [called("call_tokyo"), called("call_paris", '{"city": "Paris"}')]
RESULTS = [result("call_tokyo"), result("call_paris", "The sun shines.")]
ORPHAN = result("call_nobody")


def chat_results(arguments: str = "{}") -> list[Json]:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    return [QUESTION, said, {"role": "tool", "tool_call_id": "c1", "content": "It rains."}]


@must("results", "chat-results")
def results(ask: Asking) -> None:
    """the results of calls are taken back

    the guide on function calling
    https://platform.openai.com/docs/guides/function-calling
    the API reference on messages of the role tool
    https://platform.openai.com/docs/api-reference/chat/create
    """
    ask.plain(**BOTH_TOOLS)  # tools may be refused
    said = [QUESTION, *CALLS, *RESULTS] if ask.api == "responses" else chat_results()
    reply = ask.reply(**BOTH_TOOLS | {"said": said})
    expect(reply.status == 200, "expected an answer to the results of calls", reply)


def n_prompt(ask: Asking, said: list[Json]) -> int:
    return ask.plain(**BOTH_TOOLS | {"said": said}).n_prompt


@should("results-order", after="results")
def results_order(ask: Asking) -> None:
    """results may come in any order: the call_id tells whose they are

    agents run calls in parallel, and send the results as they come
    https://platform.openai.com/docs/guides/function-calling
    """
    counts = [n_prompt(ask, [QUESTION, *CALLS, *said]) for said in (RESULTS, RESULTS[::-1])]
    expect(counts[0] == counts[1], f"expected prompts of one length, got {counts} tokens", "swapped results")


@should("reused-call-ids", after="results")
def reused_call_ids(ask: Asking) -> None:
    """a call_id that comes again in a later turn is refused, or the result of each turn is read

    models that count their calls from 0 in each turn, and agents that send back what they said
    https://github.com/NousResearch/hermes-agent/pull/88324
    """
    long = "It rains, and it will rain tomorrow and the day after tomorrow. " * 4
    counts = []
    for texts in (("It rains.", "It rains."), (long, "It rains."), ("It rains.", long)):
        turns = [[QUESTION, called("call_0"), result("call_0", text)] for text in texts]
        counts.append(n_prompt(ask, turns[0] + turns[1]))
    message = f"expected a longer prompt with a longer result in either turn, got {counts} tokens"
    is_read = counts[0] < min(counts[1:])
    expect(is_read, message, "short results; a long one in the first turn; a long one in the second")


@should("broken-arguments", "chat-broken-arguments")
def broken_arguments(ask: Asking) -> None:
    """a call in the history whose arguments are no JSON is taken back too

    agents send back what a model has said; a refusal ends their session for good
    M10 https://github.com/vllm-project/vllm/issues/43995
    """
    with presumed("results"):
        results(ask)
    broken = "{'city': Tokyo"
    said = [QUESTION, called("call_0", broken), result("call_0")]
    reply = ask.reply(**BOTH_TOOLS | {"said": said if ask.api == "responses" else chat_results(broken)})
    expect(reply.status == 200, "expected an answer after a call whose arguments are no JSON", reply)


def next_turn(ask: Asking, output: list[Json], **more: object) -> Reply:
    """Ask a question after a turn that had this output."""
    return ask.reply(said=[{"role": "user", "content": "hi"}, *output, QUESTION], **more)


@must("output-as-input")
def output_as_input(ask: Asking) -> None:
    """the output of a response is taken as input

    the guide on conversation state: append the output to the next input
    https://platform.openai.com/docs/guides/conversation-state
    """
    output = ask.plain().response.get("output") or ()
    reply = next_turn(ask, [item for item in output if item.get("type") != "reasoning"])
    expect(reply.status == 200, "expected the output of a response to be taken as input", reply)


# --- custom tools and namespaces ----------------------------------------------------------------------------


def forced(ask: Asking, tool: Json) -> Answer:
    """Return an answer that must call the tool."""
    answer = ask.plain(said=TOKYO, limit=400, tools=[tool], tool_choice="required")
    if not answer.calls and answer.end == "length":
        raise NotApplicable("the response was cut before the call")
    return answer


@must("custom-tool")
def custom_tool(ask: Asking) -> None:
    """a custom tool makes a custom_tool_call with its input as text, or is refused

    the guide on function calling: custom tools
    https://platform.openai.com/docs/guides/function-calling
    """
    answer = forced(
        ask, {"type": "custom", "name": "get_weather", "description": "Get the weather of a city"}
    )
    expect_calls(answer, "get_weather")
    call = answer.calls[0]
    is_custom = call["type"] == "custom_tool_call" and isinstance(call.get("input"), str)
    answer.expect(is_custom, "a custom_tool_call with its input as text, or a refusal of the tool")


@must("namespace")
def namespace(ask: Asking) -> None:
    """a tool in a namespace is called with its own name and that of the namespace, or is refused

    the guide on function calling: namespaces; an agent finds the tool by both
    https://platform.openai.com/docs/guides/function-calling
    """
    tools = [{"type": "function", **WEATHER}]
    tool = {"type": "namespace", "name": "travel", "description": "Tools for travellers", "tools": tools}
    answer = forced(ask, tool)
    names = [(call.get("namespace"), call["name"]) for call in answer.calls]
    message = f"a call of travel, get_weather, or a refusal, got {names}"
    answer.expect({*names} == {("travel", "get_weather")}, message)


@should("not-run", "chat-not-run")
def not_run(ask: Asking) -> None:
    """what is accepted and not run is named in a Warning header, or refused

    OpenAI refuses both; else a client believes that its tool was run, and never hears of its typo
    M12 https://github.com/jundot/omlx/pull/3757
    """
    path, body = request(ask.api)
    changes: Json = {"no_such_tool": {"tools": [{"type": "no_such_tool"}]}, "temprature": {"temprature": 1}}
    for name, change in changes.items():
        reply = ask.peer.post(path, body | change)
        is_told = reply.is_refusal or name in reply.headers.get("warning", "")
        message = f"expected {name}, which is not run, to be named in a Warning header, or refused"
        expect(is_told, message, f"{reply.asked} -> {reply.headers}")


# --- structured output --------------------------------------------------------------------------------------

COLOUR: Json = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "green"]}, "n": {"type": "integer"}},
    "required": ["colour", "n"],
    "additionalProperties": False,
}
BLANKS = re.compile(r"\s{100}")
NAME_A_COLOUR: Json = {"said": "Name a colour and a number.", "limit": 400, "schema": COLOUR}


@must("json-schema", "chat-json-schema")
def json_schema(ask: Asking) -> None:
    """a schema with strict makes what the schema describes

    the guide on structured outputs
    https://platform.openai.com/docs/guides/structured-outputs
    """
    for answer in ask(**NAME_A_COLOUR):
        value = loads(answer.text)
        fits = isinstance(value, dict) and value.keys() == {"colour", "n"}
        fits = fits and value["colour"] in ("red", "green") and isinstance(value["n"], int)
        answer.expect(fits or answer.end == "length", f"what the schema describes, got {answer.text!r}")


@should("json-blanks", "chat-json-blanks")
def json_blanks(ask: Asking) -> None:
    """a constrained answer does not spend its tokens on blanks

    whitespace is legal JSON, and a small model that may write it can do so up to its limit
    https://github.com/jundot/omlx/issues/2990
    """
    for answer in ask(**NAME_A_COLOUR):
        answer.expect(not BLANKS.search(answer.text), "no more than some blanks in JSON")


# --- reasoning ----------------------------------------------------------------------------------------------

SEALED: Json = {"include": ["reasoning.encrypted_content"], "store": False}


def reasoned(ask: Asking, **more: object) -> Answer:
    """Return an answer with a reasoning item."""
    answer = ask.plain(limit=400, **more)
    if not answer.items("reasoning"):
        raise NotApplicable("the model does not reason")
    return answer


@must("reasoning-first")
def reasoning_first(ask: Asking) -> None:
    """the reasoning item comes first

    the guide on reasoning: items are given back in their order
    https://platform.openai.com/docs/guides/reasoning
    """
    types = [item.get("type") for item in reasoned(ask).response.get("output", ())]
    is_first = types[0] == "reasoning"
    expect(is_first, f"expected the reasoning in front of what follows from it, got {types}", types)


@should("reasoning-counted")
def reasoning_counted(ask: Asking) -> None:
    """reasoning_tokens counts the reasoning

    the guide on reasoning: output_tokens_details
    G05 https://platform.openai.com/docs/guides/reasoning
    """
    answer = reasoned(ask)
    n = (answer.usage.get("output_tokens_details") or {}).get("reasoning_tokens")
    has_text = any(item.get("content") or item.get("summary") for item in answer.items("reasoning"))
    expect(n or not has_text, f"expected reasoning_tokens to count the reasoning, got {n}", answer.usage)


@must("reasoning-as-input", after="output-as-input")
def reasoning_as_input(ask: Asking) -> None:
    """reasoning items are taken back as they came

    the guide on reasoning: keep reasoning items in context
    https://platform.openai.com/docs/guides/reasoning
    """
    reply = next_turn(ask, reasoned(ask).response["output"])
    expect(reply.status == 200, "expected reasoning items to be taken back as they came", reply)


@must("encrypted-reasoning")
def encrypted_reasoning(ask: Asking) -> None:
    """include reasoning.encrypted_content is refused, or puts it into each reasoning item

    the guide on reasoning: encrypted reasoning items
    https://platform.openai.com/docs/guides/reasoning
    """
    for item in reasoned(ask, **SEALED).items("reasoning"):
        blob = item.get("encrypted_content")
        expect(isinstance(blob, str) and blob, "expected encrypted_content, for it was asked for", item)


@must("encrypted-as-input", after="encrypted-reasoning reasoning-as-input")
def encrypted_as_input(ask: Asking) -> None:
    """encrypted_content is taken back

    the guide on reasoning: encrypted reasoning items
    https://platform.openai.com/docs/guides/reasoning
    """
    reply = next_turn(ask, reasoned(ask, **SEALED).response["output"], **SEALED)
    expect(reply.status == 200, "expected encrypted_content to be taken back", reply)


@should("effort")
def effort(ask: Asking) -> None:
    """reasoning.effort is taken and repeated, or refused

    the API reference on reasoning
    https://platform.openai.com/docs/guides/reasoning
    """
    answer = ask.plain(reasoning={"effort": "low"})
    echoed = (answer.response.get("reasoning") or {}).get("effort")
    answer.expect(echoed in (None, "low"), f"the effort to be repeated, got {echoed!r}")


# --- tokens -------------------------------------------------------------------------------------------------

CONTROL_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "</s>")  # of many families
N_COPIES = 16


@advice("spelled-tokens", profiles="chat agents")
def spelled_tokens(ask: Asking) -> None:
    """a control token that a user spells is text, and so costs more than one token

    what ends a turn or begins one of the system is the template's alone: else users forge turns
    K01 https://github.com/huggingface/transformers/issues/29279
    """
    # A server may drop or refuse what spells a control token; for a model without the token it is text.
    for spelled in CONTROL_TOKENS:
        once, twice = (spelled_prompt(ask, spelled, n) for n in (N_COPIES, 2 * N_COPIES))
        n_tokens = (twice - once) / N_COPIES - 1  # of a copy: the digit after it is a token too
        counts = f"prompt_tokens with {N_COPIES} and {2 * N_COPIES} of {spelled}1: {once} and {twice}"
        expect(n_tokens != 1, f"expected {spelled} in a user's message to be text, never one token", counts)


def spelled_prompt(ask: Asking, spelled: str, n_copies: int) -> int:
    """Count the tokens of a prompt that says so; 0 if it is refused."""
    reply = ask.reply(said="1" + f"{spelled}1" * n_copies, limit=1)
    if reply.status in NOT_THERE:
        raise NotApplicable(f"refused: {reply.refusal}")
    n_tokens: int = (reply.json.get("usage") or {}).get("prompt_tokens", 0)
    return n_tokens


def asked_apart(ask: Asking, path: str, said: object) -> Reply:
    """Ask an endpoint that a server need not have."""
    reply = ask.peer.ask("POST", path, {"model": ask.peer.model, "input": said})
    if reply.status in REFUSED:
        raise NotApplicable(f"no {path}: {reply.refusal}")
    return reply


@should("input-tokens", profiles="responses")
def input_tokens(ask: Asking) -> None:
    """input_tokens counts what the usage counts

    the API reference on input token counts
    https://platform.openai.com/docs/api-reference/responses/input-tokens
    """
    reply = asked_apart(ask, "/responses/input_tokens", "hi")
    counted = reply.json.get("input_tokens")
    used = ask.plain().usage.get("input_tokens")
    expect(counted == used, f"expected the count of the answer's usage, {used}, got {counted}", reply)


@should("compact")
def compact(ask: Asking) -> None:
    """a conversation is compacted into one item, which is taken back

    the API reference on compact
    https://platform.openai.com/docs/api-reference/responses/compact
    """
    said = [QUESTION, {"role": "assistant", "content": "It rains."}, QUESTION]
    reply = asked_apart(ask, "/responses/compact", said)
    output = reply.json.get("output") or []
    kinds = [item.get("type") for item in output]
    expect(kinds.count("compaction") == 1, f"expected one compaction item, got {kinds}", reply)
    again = ask.reply(said=[*output, QUESTION])
    expect(again.status == 200, "expected what was compacted to be taken as input", again)
