"""Rules on what streams of both APIs carry: text without markup, arguments that are JSON, usage that adds up.

    text --markup()--> the first marker in it        usage object --usage_faults()--> what is wrong with it

Authority: https://platform.openai.com/docs/api-reference/responses/object and
https://platform.openai.com/docs/api-reference/chat/object, `usage`.

Not here: where in a stream these stand (rules_events.py, rules_chunks.py).
"""

import json
import re

import sse
from audit.members import Faults, Json, shortened

MARKUP = re.compile(r"<\|\w+\|>|</?think>|</?tool_calls?>|\[TOOL_CALLS\]")


def markup(text: str) -> str:
    """The first marker of a model's own language in the text; "" where there is none."""
    match = MARKUP.search(text)
    return match[0] if match else ""


def is_object(text: str) -> bool:
    """Whether it is the JSON text of an object, as the arguments of a call are."""
    try:
        return isinstance(sse.loads(text), dict)
    except ValueError:
        return False


def usage_faults(number: int, usage: Json | None, prompt: str, output: str) -> Faults:
    """What is wrong with the usage of event `number`; the API calls its two sides `prompt` and `output`."""
    if usage is None:
        yield number, "expected usage, got null"
        return
    n_prompt = usage.get(f"{prompt}_tokens", -1)
    n_output = usage.get(f"{output}_tokens", -1)
    n_total = usage.get("total_tokens", -1)
    unknown = -1 if prompt == "input" else 0  # chat completions need no details
    n_cached = usage.get(f"{prompt}_tokens_details", {}).get("cached_tokens", unknown)
    n_reasoning = usage.get(f"{output}_tokens_details", {}).get("reasoning_tokens", unknown)
    shown = shortened(json.dumps(usage), 200)
    adds_up = n_total == n_prompt + n_output
    if min(n_prompt, n_output, n_total, n_cached, n_reasoning) < 0:
        yield number, f"expected all counts, got {shown}"
    elif not (n_cached <= n_prompt > 0 and n_reasoning <= n_output and adds_up):
        yield number, f"expected counts that agree with each other, got {shown}"
