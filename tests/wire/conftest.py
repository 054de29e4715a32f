"""Our own server on the tiny model, as the rules see it."""

import json
from collections.abc import Iterator

import pytest

from audit.peer import Peer
from helpers.serving import TINY, Server, serve

EOS = json.loads((TINY / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
KEY = "a key of the tests"


@pytest.fixture(scope="session")
def ours() -> Iterator[Server]:
    with serve("--api-key", KEY) as server:
        yield server


@pytest.fixture(scope="session")
def peer(ours: Server) -> Peer:
    return endless(ours.url + "/v1")


def endless(url: str) -> Peer:
    """A peer whose model writes as much as it may."""
    peer = Peer(url, "tiny", KEY)
    peer.long = {"logit_bias": {str(token_id): -100 for token_id in EOS}}
    return peer
