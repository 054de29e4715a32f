"""What openai-harmony, the parser of gpt-oss's makers, makes of random outputs: writes tests/harmony.json.

    pip install openai-harmony && python tests/harmony.py

Legal outputs as https://cookbook.openai.com/articles/openai-harmony documents them, and the same with a token
dropped, doubled, moved or added. A row is the tokens, and what their parser says at each of them: [number of
the token, channel or "call NAME", text], or at last the error that it raises. test_harmony.py compares and
needs no package. The package downloads its vocabulary, o200k_base.tiktoken, or takes it from the folder that
TIKTOKEN_ENCODINGS_BASE names.
"""

import json
import random
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "harmony.json"
N_LEGAL, N_DAMAGED, SEED = 150, 250, 20000

WORDS = ["So", " be", " it", ".", "\n", "\n\n", " 日本", " é", "{", " assistant", " final", "to=", "analysis"]
ARGUMENTS = ['{"city": "Oslo"}', "{}", '{"a": [1, "<b>"]}', '{\n  "n": 5\n}']
NAMES = ["functions.get_weather", "functions.web-browsing", "python"]
MARKERS = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"]

Row = dict[str, Any]


def legal(rng: random.Random) -> str:
    """Reasoning and preambles, then the answer or a call; the prompt has said <|start|>assistant."""
    messages = [f"{channel}<|message|>{text(rng)}<|end|>" for channel in channels(rng)]
    messages.append(call(rng) if rng.random() < 0.5 else f"<|channel|>final<|message|>{text(rng)}<|return|>")
    return "<|start|>assistant".join(messages)


def channels(rng: random.Random) -> list[str]:
    return [f"<|channel|>{rng.choice(['analysis', 'commentary'])}" for _ in range(rng.randrange(4))]


def text(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS, k=rng.randint(1, 6)))


def call(rng: random.Random) -> str:
    """The recipient in either place, the type of the content in any of three ways."""
    to, channel = f" to={rng.choice(NAMES)}", rng.choice(["commentary", "commentary", "analysis"])
    kind = rng.choice([" <|constrain|>json", "<|constrain|>json", " json", ""])
    in_role = rng.random() < 0.5
    head = f"{to}<|channel|>{channel}{kind}" if in_role else f"<|channel|>{channel}{to}{kind}"
    return f"{head}<|message|>{rng.choice(ARGUMENTS)}<|call|>"


def damaged(rng: random.Random, tokens: list[int], others: list[int]) -> list[int]:
    i, found = rng.randrange(len(tokens)), list(tokens)
    match rng.choice(["drop", "double", "move", "add"]):
        case "drop":
            del found[i]
        case "double":
            found.insert(i, tokens[i])
        case "move":
            found.insert(rng.randrange(len(tokens)), found.pop(i))
        case _:
            found.insert(i, rng.choice(others))
    return found


def said(encoding: Any, token_ids: list[int]) -> list[list[Any]]:
    """What their parser says at each token."""
    from openai_harmony import HarmonyError, Role, StreamableParser

    parser, found = StreamableParser(encoding, Role.ASSISTANT), list[list[Any]]()
    try:
        for n, token_id in enumerate(token_ids):
            parser.process(token_id)
            if parser.last_content_delta:
                to = parser.current_recipient
                is_call = to and to not in ("assistant", "all")
                who = (
                    f"call {to.removeprefix('functions.')}" if is_call else parser.current_channel or "final"
                )
                found.append([n, who, parser.last_content_delta])
        parser.process_eos()
    except HarmonyError as error:
        found.append([n, "raises", str(error)])
    return found


def main() -> None:
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding

    encoding, rng = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS), random.Random(SEED)
    others = [encoding.encode(word, allowed_special="all")[0] for word in (*MARKERS, *WORDS)]
    rows: list[Row] = []
    for n in range(N_LEGAL + N_DAMAGED):
        token_ids = encoding.encode(legal(rng), allowed_special="all")
        if n >= N_LEGAL:
            token_ids = damaged(rng, token_ids, others)
        tokens = [encoding.decode_utf8([token_id]) for token_id in token_ids]
        rows.append({"legal": n < N_LEGAL, "tokens": tokens, "said": said(encoding, token_ids)})
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
