"""Nonsense of all kinds, a bounded amount of it: what it meets refuses it in its own words, and goes on.

The other tests say what is right of what they know; these look for what nobody has thought of. The inputs are
derived from the code and the same in each run. To search longer: --hypothesis-seed, and EXAMPLES=1000.
"""

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sse
from helpers.serving import Server
from helpers.tables import table
from request import params

N_EXAMPLES = settings().max_examples
STATUSES = {200, 400, 401, 403, 404, 405, 408, 413, 415, 429}  # no 503: there is room

# --- what is sent -------------------------------------------------------------------------------------------

TABLE = table("fuzz")
LONG = "a" * 2000
texts = st.sampled_from([*TABLE["words"], "\ud800", LONG]) | st.text(max_size=8)
floats = st.floats(allow_nan=False, allow_infinity=False)
numbers = st.integers() | floats | st.sampled_from([0, -1, 2**63, 10**30, 1e308])
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
RESPONSE = {"model": "tiny", "input": "hi", "max_output_tokens": 3}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


def bodies(valid: dict[str, Any], table: dict[str, params.Parameter]) -> st.SearchStrategy[Any]:
    """Anything; what is served; and what would be but for a parameter or two."""
    odd = st.dictionaries(st.sampled_from(sorted(table)), values, max_size=2)
    known = st.lists(st.sampled_from(TABLE["served"]), max_size=4)
    changes = st.tuples(known, st.just({}) | odd).map(lambda pair: [*pair[0], pair[1]])
    return values | changes.map(lambda parts: {k: v for part in [valid, *parts] for k, v in part.items()})


both = bodies(RESPONSE, params.RESPONSES) | bodies(CHAT, params.CHAT)
encoded = both.map(lambda body: json.dumps(body).encode())
cut = encoded.flatmap(lambda body: st.integers(0, len(body)).map(lambda n: body[:n]))
raw = encoded | cut | st.binary(max_size=40)
ids = st.sampled_from([*TABLE["ids"], LONG]) | st.text("abc%/&=.", max_size=8)
queries = st.sampled_from([*TABLE["queries"], "?limit=" + "9" * 500])
contents = st.sampled_from([*TABLE["values"], LONG])
headers = st.dictionaries(st.sampled_from(TABLE["headers"]), contents, max_size=2)
FLAGS = ("--max-model-len", "128")


JSON = {"Content-Type": "application/json"}
methods = st.sampled_from(["GET", "POST", "POST", "POST", "DELETE", "PUT", "OPTIONS", "HEAD", "BREW"])
paths = st.builds(str.format, st.sampled_from(TABLE["paths"]), ids)
anything = st.tuples(methods, paths, queries, headers, raw)
takers = st.sampled_from(["/v1/responses", "/v1/responses/input_tokens", "/v1/chat/completions"])
bodies_alone = st.tuples(st.just("POST"), takers, st.just(""), st.just(JSON), encoded)


@settings(max_examples=2 * N_EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
@given(anything | bodies_alone)
def test_any_request_gets_an_answer(server: Server, asked: tuple[str, str, str, Any, bytes]) -> None:
    method, path, query, headers, body = asked
    reply = server.request(method, path + query, body, **headers)
    assert reply.status in STATUSES, reply
    assert reply.headers["x-request-id"]
    if reply.status >= 400 and reply.body:  # HEAD has none
        assert reply.json["error"].keys() == {"message", "type", "param", "code"}
        assert "Traceback" not in reply.json["error"]["message"]
    if reply.body and reply.headers.get("content-type", "").startswith("text/event-stream"):
        parser = sse.Parser()
        assert parser.feed(reply.body)
        parser.close()
