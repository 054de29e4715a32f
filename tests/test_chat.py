"""chat.py: what requests say, as tables; what templates make of it, with the tiny model's and small ones in the style of others."""

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat import BadInput, BadTemplate, ChatTemplate, Message, from_chat, from_responses

TINY = Path(__file__).parent / "models" / "tiny"
NOW = datetime(2026, 3, 9, 8, 7, 6)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather, <b>now</b>, in °C",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def assistant(content: str, *calls: tuple[str, str, Any], reasoning: str = "") -> Message:
    tool_calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in calls
    ]
    message: Message = {"role": "assistant", "content": content}
    message |= {"tool_calls": tool_calls} if calls else {}
    return message | ({"reasoning_content": reasoning} if reasoning else {})


def tool(call_id: str, name: str, content: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}


# --- input items ---------------------------------------------------------------------------------------------

CALL = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": '{"x": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "42"}
REASONING = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
}
ANSWER = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
}


def summary(text: str) -> dict[str, Any]:
    return {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": text}],
        "encrypted_content": "x",
    }


# fmt: off
#  why                                   input, instructions                              messages
RESPONSES = [
    ("a string is a user message",       "hi", None,                                      [user("hi")]),
    ("instructions come first",          "hi", "Be brief.",                               [system("Be brief."), user("hi")]),
    ("empty instructions are none",      "hi", "",                                        [user("hi")]),
    ("easy form, without type",          [user("hi")], None,                              [user("hi")]),
    ("type null is the easy form too",   [user("hi") | {"type": None}], None,             [user("hi")]),
    ("parts are lines",                  [{"role": "user", "content": [{"type": "input_text", "text": "a"},
                                                                       {"type": "text", "text": "b"}]}], None,
                                                                                          [user("a\nb")]),
    ("an output item comes back",        [user("hi"), ANSWER, user("more")], None,        [user("hi"), assistant("Hello"), user("more")]),
    ("a refusal is what was said",       [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}], None,
                                                                                          [assistant("No.")]),
    ("developer is system",              [{"role": "developer", "content": "d"}, user("hi")], None,
                                                                                          [system("d"), user("hi")]),
    ("leading ones are one message",     [system("s"), {"role": "developer", "content": "d"}, user("hi")], "i",
                                                                                          [system("i\n\ns\n\nd"), user("hi")]),
    ("later ones stay where they are",   [user("a"), system("s"), system("t"), user("b")], "i",
                                                                                          [system("i"), user("a"), system("s"), system("t"), user("b")]),
    ("reasoning, text, calls: one turn", [user("hi"), REASONING, ANSWER, CALL, OUTPUT], None,
                                                                                          [user("hi"), assistant("Hello", ("call_1", "f", {"x": 1}), reasoning="Hm."), tool("call_1", "f", "42")]),
    ("parallel calls are one turn",      [CALL, CALL | {"call_id": "call_2", "name": "g"}, OUTPUT | {"call_id": "call_2"}, OUTPUT], None,
                                                                                          [assistant("", ("call_1", "f", {"x": 1}), ("call_2", "g", {"x": 1})), tool("call_2", "g", "42"), tool("call_1", "f", "42")]),
    ("the next turn begins anew",        [REASONING, CALL, OUTPUT, REASONING, ANSWER], None,
                                                                                          [assistant("", ("call_1", "f", {"x": 1}), reasoning="Hm."), tool("call_1", "f", "42"), assistant("Hello", reasoning="Hm.")]),
    ("two messages of one turn",         [ANSWER, ANSWER], None,                          [assistant("Hello\n\nHello")]),
    ("reasoning that led nowhere",       [user("hi"), REASONING, user("well?")], None,    [user("hi"), assistant("", reasoning="Hm."), user("well?")]),
    ("a summary is not reasoning",       [user("hi"), summary("short"), ANSWER], None,    [user("hi"), assistant("Hello")]),
    ("output in parts",                  [CALL, OUTPUT | {"output": [{"type": "input_text", "text": "42"}]}], None,
                                                                                          [assistant("", ("call_1", "f", {"x": 1})), tool("call_1", "f", "42")]),
    ("arguments cut by a limit",         [CALL | {"arguments": '{"x": '}], None,          [assistant("", ("call_1", "f", '{"x": '))]),
    ("arguments that are no object",     [CALL | {"arguments": "[1]"}], None,             [assistant("", ("call_1", "f", "[1]"))]),
    ("arguments too deep to read",       [CALL | {"arguments": "[" * 99999}], None,       [assistant("", ("call_1", "f", "[" * 99999))]),
]

TEXT = {"type": "input_text", "text": "t"}
IMAGE = {"type": "input_image", "image_url": "data:"}
FILE = {"type": "input_file", "file_id": "file-1"}

#  input                                                         param                            code
BAD_RESPONSES = [
    ([],                                                         "input",                         "invalid_value"),
    (7,                                                          "input",                         "invalid_type"),
    (None,                                                       "input",                         "invalid_type"),
    (["hi"],                                                     "input[0]",                      "invalid_type"),
    ([{}],                                                       "input[0].role",                 "missing_required_parameter"),
    ([user("a"), {"role": "user"}],                              "input[1].content",              "missing_required_parameter"),
    ([{"role": "tool", "content": "x"}],                         "input[0].role",                 "invalid_value"),
    ([{"role": 1, "content": "x"}],                              "input[0].role",                 "invalid_type"),
    ([{"role": "user", "content": None}],                        "input[0].content",              "invalid_type"),
    ([{"role": "user", "content": ["x"]}],                       "input[0].content[0]",           "invalid_type"),
    ([{"role": "user", "content": [{"text": "x"}]}],             "input[0].content[0].type",      "missing_required_parameter"),
    ([{"role": "user", "content": [{"type": "input_text"}]}],    "input[0].content[0].text",      "missing_required_parameter"),
    ([{"role": "user", "content": [TEXT | {"text": True}]}],     "input[0].content[0].text",      "invalid_type"),
    ([{"role": "user", "content": [TEXT, IMAGE]}],               "input[0].content[1].type",      "invalid_value"),
    ([{"role": "user", "content": [FILE]}],                      "input[0].content[0].type",      "invalid_value"),
    ([{"type": "item_reference", "id": "msg_1"}],                "input[0].type",                 "unsupported_parameter"),
    ([{"type": "web_search_call"}],                              "input[0].type",                 "invalid_value"),
    ([{"type": []}],                                             "input[0].type",                 "invalid_type"),
    ([{"type": "function_call", "name": "f", "arguments": ""}],  "input[0].call_id",              "missing_required_parameter"),
    ([CALL | {"arguments": {}}],                                 "input[0].arguments",            "invalid_type"),
    ([OUTPUT, CALL],                                             "input[0].call_id",              "invalid_value"),
    ([CALL, OUTPUT | {"call_id": "call_9"}],                     "input[1].call_id",              "invalid_value"),
    ([CALL, OUTPUT | {"output": {}}],                            "input[1].output",               "invalid_type"),
    ([REASONING | {"content": [{"type": "reasoning_text"}]}],    "input[0].content[0].text",      "missing_required_parameter"),
]
# fmt: on


@pytest.mark.parametrize(
    ("why", "input", "instructions", "expected"), RESPONSES, ids=[c[0] for c in RESPONSES]
)
def test_responses_input(why: str, input: Any, instructions: str | None, expected: list[Message]) -> None:
    assert from_responses(input, instructions) == expected


@pytest.mark.parametrize(("input", "param", "code"), BAD_RESPONSES)
def test_bad_responses_input(input: Any, param: str, code: str) -> None:
    with pytest.raises(BadInput) as error:
        from_responses(input, "Be brief.")
    assert (error.value.param, error.value.code) == (param, code)
    assert error.value.message == str(error.value) != ""


# --- chat messages -------------------------------------------------------------------------------------------

CHAT_CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "42"}
CALLED = assistant("", ("call_1", "f", {"x": 1}))

# fmt: off
#  why                                   messages                                         messages for the template
CHAT = [
    ("as they are",                      [system("s"), user("hi"), assistant("Hello")],   [system("s"), user("hi"), assistant("Hello")]),
    ("developer is system",              [{"role": "developer", "content": "d"}, user("hi")],
                                                                                          [system("d"), user("hi")]),
    ("parts are lines",                  [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
                                                                                          [user("a\nb")]),
    ("content null beside calls",        [CALLS, RESULT],                                 [CALLED, tool("call_1", "f", "42")]),
    ("content absent beside calls",      [{"role": "assistant", "tool_calls": [CHAT_CALL]}], [CALLED]),
    ("tool_calls null is none",          [assistant("Hello") | {"tool_calls": None}],     [assistant("Hello")]),
    ("reasoning as DeepSeek says it",    [assistant("Hello") | {"reasoning_content": "Hm."}], [assistant("Hello", reasoning="Hm.")]),
    ("reasoning as vLLM says it",        [assistant("Hello") | {"reasoning": "Hm."}],     [assistant("Hello", reasoning="Hm.")]),
    ("both names, once",                 [assistant("") | {"reasoning": "Hm.", "reasoning_content": "Hm."}],
                                                                                          [assistant("", reasoning="Hm.")]),
    ("result in parts",                  [CALLS, RESULT | {"content": [{"type": "text", "text": "42"}]}],
                                                                                          [CALLED, tool("call_1", "f", "42")]),
]

IMAGE_URL = {"type": "image_url", "image_url": {"url": "data:"}}

#  messages                                                      param                            code
BAD_CHAT = [
    ([],                                                         "messages",                      "invalid_value"),
    ("hi",                                                       "messages",                      "invalid_type"),
    ([None],                                                     "messages[0]",                   "invalid_type"),
    ([{"content": "hi"}],                                        "messages[0].role",              "missing_required_parameter"),
    ([{"role": "function", "name": "f", "content": "42"}],       "messages[0].role",              "invalid_value"),
    ([{"role": "user", "content": [IMAGE_URL]}],                 "messages[0].content[0].type",   "invalid_value"),
    ([{"role": "user", "content": None}],                        "messages[0].content",           "invalid_type"),
    ([{"role": "assistant"}],                                    "messages[0].content",           "missing_required_parameter"),
    ([{"role": "assistant", "content": None}],                   "messages[0].content",           "invalid_type"),
    ([assistant("") | {"reasoning": {"text": "Hm."}}],           "messages[0].reasoning",         "invalid_type"),
    ([assistant("") | {"tool_calls": {}}],                       "messages[0].content",           ""),
    ([assistant("") | {"tool_calls": "f"}],                      "messages[0].tool_calls",        "invalid_type"),
    ([CALLS | {"tool_calls": [CHAT_CALL | {"type": "custom"}]}], "messages[0].tool_calls[0].type", "invalid_value"),
    ([CALLS | {"tool_calls": [{"id": "call_1"}]}],               "messages[0].tool_calls[0].function", "missing_required_parameter"),
    ([CALLS | {"tool_calls": [{"id": "call_1", "function": {"name": "f"}}]}],
                                                                 "messages[0].tool_calls[0].function.arguments", "missing_required_parameter"),
    ([CALLS | {"tool_calls": [CHAT_CALL | {"id": None}]}],       "messages[0].tool_calls[0].id",  "invalid_type"),
    ([user("hi"), RESULT],                                       "messages[1].tool_call_id",      "invalid_value"),
    ([CALLS, {"role": "tool", "content": "42"}],                 "messages[1].tool_call_id",      "missing_required_parameter"),
    ([CALLS, RESULT | {"content": None}],                        "messages[1].content",           "invalid_type"),
]
# fmt: on
BAD_CHAT = [case for case in BAD_CHAT if case[2]]


@pytest.mark.parametrize(("why", "messages", "expected"), CHAT, ids=[case[0] for case in CHAT])
def test_chat_messages(why: str, messages: list[Any], expected: list[Message]) -> None:
    assert from_chat(messages) == expected


@pytest.mark.parametrize(("messages", "param", "code"), BAD_CHAT)
def test_bad_chat_messages(messages: Any, param: str, code: str) -> None:
    with pytest.raises(BadInput) as error:
        from_chat(messages)
    assert (error.value.param, error.value.code) == (param, code)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "role",
                    "content",
                    "text",
                    "call_id",
                    "output",
                    "tool_calls",
                    "function",
                    "reasoning",
                ]
            ),
            inner
            | st.sampled_from(
                ["user", "assistant", "tool", "message", "reasoning", "text", "function_call_output"]
            ),
            max_size=4,
        )
    ),
)


@pytest.mark.parametrize(
    "read", [lambda value: from_responses(value, None), from_chat], ids=["responses", "chat"]
)
@given(value=st.lists(JSON, max_size=4) | JSON)
def test_any_json_gives_messages_or_a_place_in_the_request(
    read: Callable[[Any], list[Message]], value: Any
) -> None:
    try:
        messages = read(value)
    except BadInput as error:
        assert error.param is not None
        assert error.param.startswith(("input", "messages"))
    else:
        assert messages
        assert all(
            isinstance(message["role"], str) and isinstance(message["content"], str) for message in messages
        )


# --- the tiny model's template (Qwen3's) ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def qwen() -> ChatTemplate:
    return ChatTemplate.load(TINY)


def test_the_prompt_ends_where_the_assistant_begins(qwen: ChatTemplate) -> None:
    """E10: whether thinking is open is read from the prompt's tail, so the tail must be the template's."""
    prompt = qwen.render([user("hi")], None, NOW)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert qwen.render([user("hi")], None, NOW, enable_thinking=True) == prompt
    assert qwen.render([user("hi")], None, NOW, enable_thinking=False) == prompt + "<think>\n\n</think>\n\n"


def test_tools_are_shown_as_the_model_saw_them(qwen: ChatTemplate) -> None:
    """Plain JSON: Jinja's own filter would write \\u003cb\\u003e, json.dumps alone \\u00b0C."""
    prompt = qwen.render([user("hi")], [WEATHER], NOW)
    assert f"<tools>\n{json.dumps(WEATHER, ensure_ascii=False)}\n</tools>" in prompt
    assert qwen.takes_tools
    assert qwen.render([user("hi")], [], NOW) == qwen.render([user("hi")], None, NOW)


WORDS = (
    st.text(st.characters(codec="utf-8", exclude_characters="<>\n"), min_size=1).map(str.strip).filter(bool)
)
ARGUMENTS = st.dictionaries(WORDS, WORDS | st.integers() | st.booleans(), max_size=3)


@given(
    reasoning=WORDS | st.just(""),
    text=WORDS | st.just(""),
    calls=st.lists(st.tuples(WORDS, ARGUMENTS), max_size=3),
)
def test_a_turn_is_rendered_with_its_reasoning_text_and_calls(
    reasoning: str, text: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    """E11: all of the turn comes back, in the order and format in which the model writes it."""
    items: list[dict[str, Any]] = [user("q")]
    items += [REASONING | {"content": [{"type": "reasoning_text", "text": reasoning}]}] if reasoning else []
    items += [{"role": "assistant", "content": text}] if text else []
    for n, (name, arguments) in enumerate(calls):
        items.append(CALL | {"call_id": f"call_{n}", "name": name, "arguments": json.dumps(arguments)})
    items += [OUTPUT | {"call_id": f"call_{n}"} for n in range(len(calls))]
    prompt = ChatTemplate.load(TINY).render(from_responses(items, None), None, NOW)
    wrote = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'
        for name, arguments in calls
    ]
    turn = "\n".join([*([text] if text else []), *wrote])
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    results = "".join("\n<tool_response>\n42\n</tool_response>" for _ in calls)
    expected = "<|im_start|>user\nq<|im_end|>\n"
    if len(items) > 1:
        last = (
            "" if thought or calls else "<think>\n\n</think>\n\n"
        )  # Qwen3 marks a last turn without thoughts so
        expected += f"<|im_start|>assistant\n{thought or last}{turn}<|im_end|>\n"
    expected += f"<|im_start|>user{results}<|im_end|>\n" if calls else ""
    assert prompt == expected + "<|im_start|>assistant\n"


# --- templates in the style of others -------------------------------------------------------------------------

CHATML = """
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA_2 = """
{%- if messages[0].role == 'system' %}
    {%- set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- bos_token + '[INST] ' + (system if loop.first else '') + message.content + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}"""

LLAMA_3 = """
{{- bos_token + 'Today: ' + strftime_now('%d %b %Y') + '\n' }}
{%- if tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) + '\n' }}{% endfor %}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'hidden' %}{% continue %}{% endif %}
    {{- '<|' + message.role + '|>' }}
    {%- generation %}
    {%- for call in message.tool_calls %}
        {{- '{"name": "' + call.function.name + '", "parameters": ' }}
        {%- for key, value in call.function.arguments.items() %}{{ key + '=' + value | tojson }}{% endfor %}
        {{- '}' }}
    {%- else %}
        {{- message.content }}
    {%- endfor %}
    {%- endgeneration %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{{- '<|assistant|>' }}"""

GEMMA = """
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {{- '<start_of_turn>' + message.role + '\n' + message.content + '<end_of_turn>\n' }}
{%- endfor %}
{{- '<start_of_turn>model\n' }}"""

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def test_llama_2_has_its_system_message_and_tokens() -> None:
    messages = [system("s"), user("a"), assistant("b"), user("c")]
    prompt = ChatTemplate(LLAMA_2, TOKENS).render(messages, None, NOW)
    assert prompt == "<s>[INST] <<SYS>>\ns\n<</SYS>>\n\na [/INST] b </s><s>[INST] c [/INST]"


def test_llama_3_has_the_date_and_calls_as_objects() -> None:
    template = ChatTemplate(LLAMA_3, TOKENS)
    calls = from_responses([user("q"), CALL, OUTPUT], None)
    prompt = template.render(calls, None, NOW)
    assert prompt == (
        "<s>Today: 09 Mar 2026\n<|user|>q<|eot_id|>"
        '<|assistant|>{"name": "f", "parameters": x=1}<|eot_id|><|tool|>42<|eot_id|><|assistant|>'
    )
    assert json.dumps(WEATHER, ensure_ascii=False, indent=4) in template.render(calls, [WEATHER], NOW)


# fmt: off
#  what the template raises      template, messages                                           its words in the 400
REFUSED = [
    ("raise_exception",          LLAMA_2, [user("a"), user("b")],                             "must alternate"),
    ("UndefinedError",           "{{ messages[0].name.first }}", [user("a")],                 "no attribute 'name'"),
    ("TypeError",                "{{ messages[0].content + 1 }}", [user("a")],                "can only concatenate str"),
    ("ZeroDivisionError",        "{{ 1 // (1 - messages | length) }}", [user("a")],           "division"),
    ("SecurityError",            "{{ messages.append(1) }}", [user("a")],                     "not safely callable"),
    ("no method of a string",    LLAMA_3, from_responses([CALL | {"arguments": "{"}], None),  "no attribute 'items'"),
]
# fmt: on


@pytest.mark.parametrize(("why", "source", "messages", "words"), REFUSED, ids=[case[0] for case in REFUSED])
def test_what_a_template_raises_is_the_requests_fault(
    why: str, source: str, messages: list[Message], words: str
) -> None:
    with pytest.raises(BadInput, match=words) as error:
        ChatTemplate(source, TOKENS).render(messages, None, NOW)
    assert (error.value.param, error.value.code) == (None, "invalid_prompt")


def test_a_template_that_ignores_tools_has_them_as_text() -> None:
    template = ChatTemplate(CHATML, {})
    talk = [
        user("q"),
        REASONING,
        ANSWER,
        CALL,
        CALL | {"call_id": "call_2"},
        OUTPUT,
        OUTPUT | {"call_id": "call_2"},
    ]
    prompt = template.render(from_responses(talk, "Be brief."), [WEATHER], NOW)
    assert not template.takes_tools
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert f"<tools>\n{json.dumps(WEATHER, ensure_ascii=False)}\n</tools>" in prompt
    assert '<tool_call>\n{"name": <name of the function>, "arguments": <object' in prompt
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    result = "<tool_response>\n42\n</tool_response>"
    assert prompt.endswith(
        f"<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nHello\n{call}\n{call}<|im_end|>\n"
        f"<|im_start|>user\n{result}\n{result}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "# Tools" not in template.render([user("q")], None, NOW)


def test_a_template_that_refuses_system_messages_has_them_in_the_users() -> None:
    template = ChatTemplate(GEMMA, {})
    messages = [system("s"), user("a"), assistant("b"), system("t")]
    assert not template.takes_system
    assert template.render(messages, None, NOW) == (
        "<start_of_turn>user\ns\n\na<end_of_turn>\n<start_of_turn>assistant\nb<end_of_turn>\n"
        "<start_of_turn>user\nt<end_of_turn>\n<start_of_turn>model\n"
    )
    assert "user\n# Tools" in template.render([user("a")], [WEATHER], NOW)


def test_rendering_changes_no_message() -> None:
    messages = from_responses([system("s"), user("q"), REASONING, ANSWER, CALL, OUTPUT], None)
    before = json.dumps(messages)
    for source in (CHATML, LLAMA_3, GEMMA):
        ChatTemplate(source, TOKENS).render(messages, [WEATHER], NOW)
    assert json.dumps(messages) == before


# --- files ---------------------------------------------------------------------------------------------------


def write(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_the_jinja_file_goes_before_the_config(tmp_path: Path) -> None:
    write(tmp_path, {"chat_template": "old", "bos_token": "<s>"})
    assert ChatTemplate.load(tmp_path).render([user("a")], None, NOW) == "old"
    (tmp_path / "chat_template.jinja").write_text("new {{ bos_token }}")
    assert ChatTemplate.load(tmp_path).render([user("a")], None, NOW) == "new <s>"


def test_named_templates_are_picked_by_tools(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | tojson }}"},
    ]
    template = ChatTemplate.load(write(tmp_path, {"chat_template": named}))
    assert template.render([user("a")], None, NOW) == "plain"
    assert template.render([user("a")], [WEATHER], NOW) == json.dumps([WEATHER], ensure_ascii=False)


def test_tokens_are_strings_objects_or_absent(tmp_path: Path) -> None:
    config = {
        "bos_token": None,
        "eos_token": {"content": "</s>"},
        "unk_token": "<unk>",
        "add_bos_token": True,
    }
    source = "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ add_bos_token is defined }}"
    template = ChatTemplate.load(write(tmp_path, config | {"chat_template": source}))
    assert template.render([user("a")], None, NOW, eos_token="mine") == "|mine|<unk>|False"


# fmt: off
#  what tokenizer_config.json holds                    what the message says
NO_TEMPLATE = [
    (None,                                             "chat_template.jinja and for chat_template in"),
    ("{}",                                             "chat_template.jinja and for chat_template in"),
    ('{"chat_template": [{"name": "rag", "template": "x"}]}', "no chat template"),
    ("{",                                              "tokenizer_config.json is no JSON"),
    ('{"chat_template": "{% if %}"}',                  "no Jinja template: Expected an expression"),
]
# fmt: on


@pytest.mark.parametrize(("config", "words"), NO_TEMPLATE)
def test_a_model_without_template_is_refused_at_once(tmp_path: Path, config: str | None, words: str) -> None:
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(BadTemplate) as error:
        ChatTemplate.load(tmp_path)
    assert words in str(error.value)
