"""The output syntax of each model family: its markers, the states that they lead to, and its form of a call.

    chat template, vocabulary --find()--> Dialect        prompt --opening()--> where the answer begins

Authority: the chat templates that the models come with; for harmony
https://cookbook.openai.com/articles/openai-harmony and its parser, https://github.com/openai/harmony

Rules of this file:
1. A dialect is data: a table of transitions, a reader of calls (calls.py), and the forms by which a grammar
   demands what the parser finds. Harmony alone has messages with a header, and a reader of it.
2. The chat template identifies the dialect, because it shows the model what to write; the vocabulary shows
   which markers are tokens.

Not here: following the tables (channels.py), writing grammars (structured_output.py).
"""

import logging
from collections.abc import Collection

from channels import CallReader, Dialect, Forms, State, Transitions
from dialects.calls import FUNCTION, AsWritten, JsonCalls, NamedCalls, XmlCalls

log = logging.getLogger("dialects")

# fmt: off
#  (state now,    marker)              next state
THINK: Transitions = {
    ("any",       "<think>"):          "analysis",
    ("any",       "</think>"):         "final",     # a stray one is markup all the same
}
HERMES: Transitions = {**THINK,  # Qwen, SmolLM3, DeepSeek-R1
    ("any",       "<tool_call>"):      "call",      # it ends the reasoning: vllm-project/vllm#43221
    ("call",      "</tool_call>"):     "final",
}
LLAMA: Transitions = {
    ("any",       "<think>"):          "analysis",
    ("any",       "</think>"):         "call",      # the answer begins, which may be a bare call
    ("any",       "<|python_tag|>"):   "call",
    ("any",       "<|eom_id|>"):       "end",       # after a call: the model waits for its result
    ("any",       "<|eot_id|>"):       "end",
}
MISTRAL: Transitions = {
    ("any",       "[THINK]"):          "analysis",
    ("any",       "[/THINK]"):         "final",
    ("any",       "[TOOL_CALLS]"):     "call",      # [CALL_ID] and [ARGS] are the call's own
    ("final",     "[CALL_ID]"):        "final",     # elsewhere they are markup all the same
    ("final",     "[ARGS]"):           "final",
}
GRANITE: Transitions = {**THINK,  # Granite 3, Phi-4-mini
    ("any",       "<|tool_call|>"):    "call",      # Granite's array ends with the turn
    ("call",      "<|/tool_call|>"):   "final",
}
HARMONY: Transitions = {
    ("any",       "<|start|>"):        "role",
    ("any",       "<|channel|>"):      "header",
    ("between",   "<|constrain|>"):    "header",
    ("role",      "<|constrain|>"):    "header",
    ("header",    "<|constrain|>"):    "header",
    ("between",   "<|message|>"):      "content",
    ("role",      "<|message|>"):      "content",
    ("header",    "<|message|>"):      "content",
    ("any",       "<|end|>"):          "between",
    ("any",       "<|call|>"):         "end",
    ("any",       "<|return|>"):       "end",
}
# fmt: on

# word of a header -> the state that follows
CHANNELS: dict[str, State] = {"analysis": "analysis", "commentary": "commentary", "final": "final"}


def harmony_header(header: str) -> tuple[State, CallReader | None]:
    """Return what a message with this header is: a call if it has a recipient anywhere, else its channel.

        <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
                 role               header                                  content: a call     end

    The header is read in three states. `between` two messages words may be stray text. In `role` <|start|>
    has begun a message, in `header` another marker has. <|message|> ends the header (`content`).

    A message on an unknown channel, or on none, is the answer. We ignore every other word, such as the type
    of the content: https://github.com/openai/harmony/issues/38
    """
    words = header.split()
    recipients = [word.removeprefix("to=") for word in words if word.startswith("to=")]
    names = [name.removeprefix("functions.") for name in recipients if name not in ("assistant", "all")]
    if names and names[0]:
        return "call", AsWritten(names[0])
    for word in words:
        if word in CHANNELS:
            return CHANNELS[word], None
    return "final", None


HERMES_CALLS = ("<tool_call>", "</tool_call>")
MISTRAL_THINKING = ("[THINK]", "[/THINK]")
MISTRAL_CALLS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
OBJECT = '{"name": "NAME", "arguments": ARGUMENTS}'

DIALECTS = {
    "harmony": Dialect(
        known_by=("<|channel|>", "<|message|>"),
        transitions=HARMONY,
        call_reader=lambda _: AsWritten(),  # the header names the function
        header=harmony_header,
        start="between",
        trims=False,
        forms=Forms(
            thought=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
            text="<|channel|>final<|message|>TEXT",
            before="<|channel|>commentary<|message|>TEXT<|end|><|start|>assistant",
            call="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS",
            separator=None,  # the turn ends with the call
        ),
    ),
    "mistral": Dialect(
        known_by=("[TOOL_CALLS]", "[ARGS]"),
        transitions=MISTRAL,
        call_reader=lambda _: NamedCalls(),
        call_markers=MISTRAL_CALLS,
        forms=Forms(
            thought=MISTRAL_THINKING,
            call="[TOOL_CALLS]NAME[ARGS]ARGUMENTS",
            separator="",
        ),
    ),
    "mistral-v3": Dialect(
        known_by=("[TOOL_CALLS]",),
        transitions=MISTRAL,
        call_reader=lambda _: JsonCalls(),
        call_markers=MISTRAL_CALLS,
        forms=Forms(
            thought=MISTRAL_THINKING,
            call=OBJECT,
            separator=", ",
            calls=("[TOOL_CALLS][", "]"),
        ),
    ),
    "qwen3-coder": Dialect(
        known_by=("<tool_call>", "<function="),
        # The model forgets <tool_call>: https://github.com/ollama/ollama/issues/18530
        transitions={**HERMES, ("any", FUNCTION): "bare"},
        call_reader=XmlCalls,
        call_markers=(*HERMES_CALLS, FUNCTION),
        forms=Forms(
            call="<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
            separator="\n",
            arguments="xml",
        ),
    ),
    "granite": Dialect(
        known_by=("<|tool_call|>",),
        transitions=GRANITE,
        call_reader=lambda _: JsonCalls(),
        call_markers=("<|tool_call|>", "<|/tool_call|>"),
        forms=Forms(
            call=OBJECT,
            separator=", ",
            calls=("<|tool_call|>[", "]"),
        ),
    ),
    "llama": Dialect(
        known_by=("<|start_header_id|>", '"parameters": '),
        transitions=LLAMA,
        call_reader=JsonCalls,  # it gets the names on offer: a call may be bare JSON, like an answer
        start="call",
        call_markers=("<|python_tag|>",),
        forms=Forms(
            before=None,
            call='{"name": "NAME", "parameters": ARGUMENTS}',
            separator=None,
        ),
    ),
    "hermes": Dialect(
        known_by=(),
        transitions=HERMES,
        call_reader=lambda _: JsonCalls(),
        call_markers=HERMES_CALLS,
        forms=Forms(
            call=f"<tool_call>\n{OBJECT}\n</tool_call>",
            separator="\n",
        ),
    ),
}


def teaches_calls(template: str, name: str) -> bool:
    """Return whether a template with tools teaches the calls of this dialect: the last row has no signs."""
    return name != "hermes" or HERMES_CALLS[0] in template


def recognised(template: str, takes_tools: bool) -> str:
    """Return the name of the first dialect whose signs are all in the chat template.

    A template that teaches another form of calls is named in the log: its model answers, but its calls are
    not found, which worker.py tells the client too.
    """
    name = next(name for name, each in DIALECTS.items() if all(sign in template for sign in each.known_by))
    if takes_tools and not teaches_calls(template, name):
        log.warning(
            "the chat template teaches calls in a form that no dialect here reads: calls will be text"
        )
    return name


def find(dialect: Dialect, added: Collection[str], template: str, tools: bool) -> Dialect:
    """Return the dialect as this model may write it in this response.

    It has no markers of reasoning that neither the vocabulary (its `added` tokens) nor the template has, and
    no markers of calls unless tools are offered.
    """
    unused = {marker for marker in dialect.forms.thought if marker not in added and marker not in template}
    if not tools:
        unused |= {*dialect.call_markers}
    dialect = dialect._replace(
        transitions={key: state for key, state in dialect.transitions.items() if key[1] not in unused}
    )
    return dialect._replace(tokens=dialect.markers & set(added))


def opening(prompt: str, dialect: Dialect) -> tuple[State, bool]:
    """Return the state in which generation begins, and whether the prompt ends with a marker.

    Some templates open the reasoning themselves, or end it. The prompt's tail decides, never text further up:
    https://github.com/vllm-project/vllm/pull/34779
    """
    tail = prompt.rstrip()
    for marker in dialect.markers:
        state = dialect.next("final", marker)
        if tail.endswith(marker) and state in ("analysis", "final", "call"):
            return state, True
    return dialect.start, False
