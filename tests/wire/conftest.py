"""Our own server, as the rules see it."""

import json
from collections.abc import Iterator

import pytest

from audit.peer import Peer
from helpers.serving import TINY, serve

EOS = json.loads((TINY / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
KEY = "a key of the tests"
ENDLESS = {"logit_bias": {str(token_id): -100 for token_id in EOS}}


@pytest.fixture(scope="session")
def peer() -> Iterator[Peer]:
    with serve("--api-key", KEY) as ours:
        yield Peer(ours.url + "/v1", "tiny", KEY, long=ENDLESS)
