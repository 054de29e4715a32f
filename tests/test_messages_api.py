"""POST /v1/messages over the wire: the `anthropic` SDK, by itself and through a front, refusals, counts."""

import importlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

import blocks
import sse
import streaming
from helpers.limits import PATIENCE_S
from helpers.serving import ROOT, Json, Server, http_bytes, http_frames, serve, until
from helpers.tables import table
from helpers.upstream import STREAM, head, json_answer, says, says_and_hangs, upstream
from request import params
from request.refusals import BadInput

if TYPE_CHECKING:
    from anthropic import Anthropic

TABLE = table("messages_api")
TWO: Json = TABLE["two"]
CALLS: Json = TABLE["calls"]
FLAGS = ("--api-key", "key", "--api-key", "other")


@pytest.fixture(scope="module")
def front(server: Server) -> Iterator[Server]:
    """The same model behind a front, which is asked for the same."""
    with serve("--upstream", f"{server.url}/v1", "--upstream-api-key", "key", model=None) as started:
        yield started


GREEDY: Json = {"extra_body": {"temperature": 0}}  # a parameter that the SDK has no more


@pytest.fixture(scope="module")
def sdk() -> ModuleType:
    """The official package, whose import takes two seconds, which other tests need not."""
    return importlib.import_module("anthropic")


@pytest.fixture(scope="module")
def client(sdk: ModuleType, server: Server) -> Iterator["Anthropic"]:
    with sdk.Anthropic(base_url=server.url, api_key="key", max_retries=0, timeout=PATIENCE_S) as opened:
        yield opened


@pytest.mark.bug("S13", "S24")
def test_an_agent_goes_on(client: "Anthropic", sdk: ModuleType) -> None:
    """A call, its result, an answer; thoughts come back. The SDK's loop does without the thread it wants."""
    called = client.messages.create(**CALLS, **GREEDY)
    (call,) = [block for block in called.content if block.type == "tool_use"]
    assert (called.stop_reason, call.name) == ("tool_use", "get_weather")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "no such city", "is_error": True}
    messages = [*CALLS["messages"], {"role": "assistant", "content": called.to_dict()["content"]}]
    messages.append({"role": "user", "content": [result]})
    body = CALLS | {"messages": messages, "tool_choice": {"type": "auto"}}
    answer = client.messages.create(**body, **GREEDY)
    assert answer.stop_reason in ("end_turn", "max_tokens", "tool_use")
    counted = client.messages.count_tokens(messages=messages, model="tiny", tools=CALLS["tools"])
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    tool = sdk.beta_tool(lambda city: city, **CALLS["tools"][0])
    runner = client.beta.messages.tool_runner(**CALLS | GREEDY | {"tools": [tool], "max_iterations": 2})
    assert [turn.stop_reason for turn in runner] == ["tool_use"] * 2
    assert client.messages.create(**CALLS | {"max_tokens": 0}).stop_reason == "max_tokens"


@pytest.mark.sweep
def test_the_ai_sdk_reads_it(server: Server, tmp_path: Path) -> None:
    """Vercel's, with its anthropic provider: npm fetches both."""
    if not (shutil.which("npm") and shutil.which("node")):
        pytest.skip("needs Node.js")
    packages = ["ai@6.0.326", "@ai-sdk/anthropic@3.0.140"]
    npm = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(tmp_path)]
    subprocess.run([*npm, *packages], check=True, capture_output=True, timeout=PATIENCE_S)
    script = shutil.copy(ROOT / "tests/helpers/ai_sdk.mjs", tmp_path)  # it finds the packages beside itself
    asked = ["node", script, server.url]
    done = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=PATIENCE_S)
    said = json.loads(done.stdout.splitlines()[-1])
    for plain, streamed in (said["text"], said["call"]):
        assert plain == streamed
        assert plain["reasoning"]
    assert (said["text"][0]["text"], said["text"][0]["finish"]) == ("4", "stop")
    call, answer = said["agent"]
    assert call == said["call"][0]
    assert call["finish"] == "tool-calls"
    assert call["calls"] == [{"toolName": "get_weather", "input": {"city": "Tokyo"}}]
    assert (answer["finish"], answer["calls"]) == ("stop", [])
    assert said["refused"]["status"] == 404


LONG = {"messages": [{"role": "user", "content": "long " * 20_000}]}
REFUSED = [*TABLE["refused"], [LONG, 400, "invalid_request_error", "prompt is"]]


@pytest.mark.bug("S11", "S15", "S17", "S26")
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row[3])
def test_a_refusal_has_its_status(server: Server, row: list[Any], is_stream: bool) -> None:
    """And Anthropic's form, before the first event."""
    change, status, kind, words = row
    body = {name: value for name, value in (TWO | change).items() if value != ""}
    key = "wrong" if status == 401 else "key"
    reply = server.post("/v1/messages?beta=true", body | {"stream": is_stream}, x_api_key=key)
    assert (reply.status, reply.json["type"], reply.json["error"]["type"]) == (status, "error", kind)
    assert words in reply.json["error"]["message"]
    assert reply.json["request_id"] == reply.headers["request-id"]


@pytest.mark.bug("S09", "S10", "S12", "S18", "S27")
def test_what_a_request_says_is_read() -> None:
    """A result that is an error says so; words that change with each request do not stand before the prompt.

    https://github.com/anthropics/claude-code/issues/68900: they emptied the prefix cache.
    """
    use = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "gone", "is_error": True}
    turns = [*TWO["messages"], {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    body = TWO | {"system": "x-anthropic-billing-header: cch=1;\nBe brief.", "messages": turns}
    request = params.from_messages(body, {})
    assert [request.messages[0]["content"], request.messages[-1]["content"]] == ["Be brief.", "Error: gone"]
    late = [*TWO["messages"], {"role": "system", "content": "In French."}, {"role": "user", "content": ""}]
    assert params.from_messages(TWO | {"messages": late}, {}).messages == late
    quiet = params.from_messages(TWO | {"thinking": {"type": "disabled"}}, {})
    assert quiet.template_kwargs["enable_thinking"] is False
    warm_up = params.from_messages(TWO | {"max_tokens": 0}, {})
    assert (warm_up.generate, warm_up.max_tokens) == (False, 1)
    older = TWO | {"output_format": {"type": "json_schema", "schema": {}}}
    assert (params.from_messages(older, {}).structured_output or ())[3:5] == ({}, True)  # it is strict


@pytest.mark.parametrize(("more", "param", "why"), TABLE["said_otherwise"])
def test_what_would_change_the_answer_is_refused(more: Json, param: str, why: str) -> None:
    """Bug: a format without its schema enforced nothing, and the others were only warned of."""
    with pytest.raises(BadInput, match=why) as refusal:
        params.from_messages(TWO | more, {})
    assert refusal.value.param == param


@pytest.mark.bug("S14")
def test_what_is_not_run_is_named(server: Server) -> None:
    """Hosted tools (vllm-project/vllm#46790), budgets and what only Anthropic can read."""
    thoughts = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "4"}]
    found = {"type": "web_search_tool_result", "content": [{"type": "web_search_result", "text": "2+2 is 4"}]}
    answered = {"role": "assistant", "content": [*thoughts, found]}
    messages = [*TWO["messages"], answered, *TWO["messages"]]
    more: Json = {"tools": [{"type": "web_search_20250305", "name": "web_search"}], "context_management": {}}
    more["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    reply = server.post("/v1/messages", TWO | more | {"messages": messages}, x_api_key="key")
    assert reply.status == 200
    names = "web_search_20250305 thinking.budget_tokens context_management redacted_thinking"
    for name in (*names.split(), "web_search_tool_result"):
        assert name in reply.headers["warning"]


def test_a_prompt_is_shown(server: Server, front: Server) -> None:
    """The three APIs make the same of the same question; an upstream's prompt only the upstream can show."""
    question = "Is <|im_end|> a token?"
    messages = [{"role": "user", "content": question}]
    shown = []
    for path in ("responses", "chat/completions", "messages"):
        body: Json = {"model": "tiny", "input" if path == "responses" else "messages": messages}
        reply = server.post(f"/v1/{path}/render", body, x_api_key="key")
        assert reply.json["input_tokens"] == len(reply.json["token_ids"]) > 0
        shown.append(reply.json)
        assert front.post(f"/v1/{path}/render", body, x_api_key="key").status == 404
    assert shown[0] == shown[1] == shown[2]
    special = [token for _, token in shown[0]["prompt"] if token]
    text = "".join(text or token for text, token in shown[0]["prompt"])
    assert (text.count("<|im_end|>"), special.count("<|im_end|>")) == (2, 1)  # the user's own is text
    assert "messages" in shown[0]["template"]


# The server, but a stream is silent for a moment only.
SOON = ("-c", "import sys, streaming, server; streaming.KEEP_ALIVE_S = 0.1; sys.exit(server.main())")


@pytest.mark.bug("S20", "S22")
def test_a_failure_after_the_first_event_is_the_last_event(sdk: ModuleType) -> None:
    """And one before it has its status. A ping comes in a silence; a client that leaves ends the run."""
    assert 2 * streaming.KEEP_ALIVE_S < 20  # Claude Code's patience
    half = head() + STREAM[: len(STREAM) // 2]
    with upstream(says(half)) as broken, serve("--upstream", broken.url, model=None, script=SOON) as server:
        body = TWO | {"model": "m", "stream": True}
        *_, last = sse.Parser().feed(server.post("/v1/messages", body).body)
        assert json.loads(last.data)["error"]["type"] == "api_error"
        assert server.post("/v1/messages", body | {"stream": False}).status >= 500
        broken.answer = says(json_answer({"error": {"message": "no"}}, "400 Bad Request"))
        refused = server.post("/v1/messages", body)
        assert (refused.status, refused.json["error"]["type"]) == (400, "invalid_request_error")
        broken.answer = says_and_hangs(half)
        with server.connect(http_bytes("/v1/messages", body, Content_Type="application/json")) as silent:
            said = (b"event: message_start", b"event: content_block")
            assert next(frame for frame in http_frames(silent) if not frame.startswith(said)) == blocks.PING
        client = sdk.Anthropic(base_url=server.url, api_key="any")
        with client, client.messages.stream(**(TWO | {"model": "m"})) as stream:
            next(iter(stream))
            assert server.health()["running"] == 1
        until(lambda: server.health()["running"] == 0, "nothing runs")
