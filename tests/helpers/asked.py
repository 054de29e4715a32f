"""What most tests of a whole server ask, of the tiny model."""

import json

from helpers.serving import NUMPY, TINY, Json

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
FAULTY = NUMPY  # a script for serve(): it fails on demand
HI: Json = {"model": "tiny", "input": "hi"}
HELLO = "Hello! How can I help you today?"
EOS = json.loads((TINY / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
NO_END: Json = {"logit_bias": {str(token_id): -100 for token_id in EOS}}  # until 1,900 tokens


def large(n_bytes: int) -> Json:
    """Return parameters that make a response so large, for it repeats its schema."""
    schema = {"type": "object", "properties": {}, "additionalProperties": False, "description": "x" * n_bytes}
    return {"text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}}
