"""The server as clients meet it: over HTTP, in a process of its own, with the tiny model.

What events and chunks must be is in laws.py; what a parameter may be is in test_params.py. NumPy computes
unless a test is about server.py itself: its start takes a second.
"""

import contextlib
import itertools
import json
import re
import signal
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import openai
import pytest

import sse
from completions import fold
from dialects.matchers import N_CHECKS
from helpers import laws
from helpers.asked import CHAT, HELLO, HI, NO_END, RESPONSES, created, error, events_in, path_of
from helpers.faulty_server import AFTER_TOKENS, RAISES, SLOW
from helpers.grammars import costly
from helpers.limits import PATIENCE_S
from helpers.serving import Json, Reply, Server, http_bytes, http_frames, run, serve, until, without
from helpers.tables import table
from service import connections
from store import TERMINAL

ERROR_KEYS = {"message", "type", "param", "code"}


@pytest.fixture(scope="module")
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with server.sdk() as client:
        yield client


# --- what is asked ------------------------------------------------------------------------------------------

TABLE = table("server")
WEATHER = TABLE["weather"]
TOKYO = "What is the weather in Tokyo?"
THOUGHT, TEXT, CALL = "reasoning", "message", "function_call"
STORY = "Tell me a story about a cat."
LOGPROBS = {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}

#  name                 text    more of the request                                   what comes
ASKED: dict[str, tuple[str, Json, list[str]]] = {
    "thought, text":   ("hi",   {},                                                    [THOUGHT, TEXT]),
    "text":            ("hi",   {"reasoning": {"effort": "none"}},                     [TEXT]),
    "no thinking":     ("hi",   {"chat_template_kwargs": {"enable_thinking": False}},  [TEXT]),
    "thought, call":   (TOKYO,  {"tools": [WEATHER]},                                  [THOUGHT, CALL]),
    "call":            (TOKYO,  {"tools": [WEATHER], "reasoning": {"effort": "none"}}, [CALL]),
    "tools not shown": (TOKYO,  {"tools": [WEATHER], "tool_choice": "none"},           [THOUGHT, TEXT]),
    "cut in thought":  ("hi",   {"max_output_tokens": 5},                              [THOUGHT]),
    "cut in text":     ("hi",   {"max_output_tokens": 18},                             [THOUGHT, TEXT]),
    "cut in a call":   (TOKYO,  {"tools": [WEATHER], "max_output_tokens": 34},         [THOUGHT, CALL]),
    "stopped":         ("hi",   {"stop": ["help"]},                                    [THOUGHT, TEXT]),
    "drawn":           ("hi",   {"temperature": 1.0, "seed": 7},                       [THOUGHT, TEXT]),
    "logprobs":        ("hi",   LOGPROBS,                                              [THOUGHT, TEXT]),
}  # fmt: skip


def says(path: str, text: str) -> Json:
    """Return a text in the words of one of the APIs."""
    return {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"input": text}


def responses_body(asked: str) -> Json:
    text, more, _ = ASKED[asked]
    tools = [{"type": "function", **tool} for tool in more.get("tools", [])]
    return {"model": "tiny", "input": text, **more, "tools": tools}


def chat_body(asked: str) -> Json:
    """Return the same request in the words of the other API."""
    text, more, _ = ASKED[asked]
    body = {"model": "tiny", **says(CHAT, text), **more}
    body["tools"] = [{"type": "function", "function": tool} for tool in more.get("tools", [])]
    if "max_output_tokens" in body:
        body["max_tokens"] = body.pop("max_output_tokens")
    if "reasoning" in body:
        body["reasoning_effort"] = body.pop("reasoning")["effort"]
    if body.pop("include", None):
        body["logprobs"] = True
    return body


def events(server: Server, path: str, body: Json) -> list[Json]:
    reply = server.post(path, body | {"stream": True})
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (reply.headers["cache-control"], reply.headers["x-accel-buffering"]) == ("no-cache", "no")
    return events_in(reply.body)


# What differs from one request to the next: what is found in the cache too.
DRAWN = {"id", "call_id", "item_id", "created", "created_at", "completed_at", "cached_tokens"}
timeless = partial(without, names=DRAWN)


# --- answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ASKED)
def test_responses(server: Server, asked: str) -> None:
    body = responses_body(asked)
    streamed = events(server, RESPONSES, body)
    laws.check_response(streamed)
    whole = server.post(RESPONSES, body).json
    laws.check_body(whole)
    assert timeless(whole) == timeless(streamed[-1]["response"])
    assert [item["type"] for item in whole["output"]] == ASKED[asked][2]
    assert whole["status"] == ("incomplete" if asked.startswith("cut") else "completed")


@pytest.mark.parametrize("asked", ASKED)
def test_chat(server: Server, asked: str) -> None:
    """The chunks add up to the whole, and both APIs say the same.

    The linter llm-comply warns of an id with an underscore and a message without `annotations`.
    """
    body = chat_body(asked) | {"service_tier": "flex"}
    streamed = events(server, CHAT, body)
    laws.check_chunks(streamed)
    whole = server.post(CHAT, body).json
    laws.check_completion(whole)
    assert timeless(fold(streamed)) == timeless(without(whole, {"usage"}))
    (choice,), output = whole["choices"], server.post(RESPONSES, responses_body(asked)).json["output"]
    message = choice["message"]
    assert (whole["id"][:9], message["annotations"]) == ("chatcmpl-", [])
    assert {one["service_tier"] for one in (whole, *streamed)} == {"default"}
    parts = {item["type"]: item["content"][0] for item in output if "content" in item}
    assert parts.get(THOUGHT, {}).get("text") == message.get("reasoning") == message.get("reasoning_content")
    assert parts.get(TEXT, {}).get("text") == (message["content"] or None)
    assert parts.get(TEXT, {}).get("logprobs", []) == (choice["logprobs"] or {"content": []})["content"]
    calls = [{k: item[k] for k in ("name", "arguments")} for item in output if item["type"] == CALL]
    assert calls == [call["function"] for call in message.get("tool_calls", [])]


def test_choices_are_drawn_apart(server: Server) -> None:
    body = {"model": "tiny", **says(CHAT, STORY), "n": 3, "temperature": 2, "seed": 1, "max_tokens": 60}
    streamed = events(server, CHAT, body)
    whole = server.post(CHAT, body).json
    assert fold(streamed)["choices"] == whole["choices"]
    assert len({str(choice["message"]) for choice in whole["choices"]}) == 3
    alone = server.post(CHAT, body | {"n": 1}).json
    assert alone["choices"] == whole["choices"][:1]
    assert whole["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]


@pytest.mark.bug("P21")
def test_models(server: Server) -> None:
    listed = server.get("/v1/models").json
    assert [model["id"] for model in listed["data"]] == ["tiny"]
    assert listed["models"] == []  # Codex fails without it
    assert server.get("/v1/models/default").json["owned_by"] == "local"


# --- refusals -----------------------------------------------------------------------------------------------

REFUSED = [(api, *row) for api, rows in TABLE["refused"].items() for row in rows]
LONG_TEXT = "one two three four five six seven " * 400
REFUSED.append(("responses", "", "context_length_exceeded", {"input": LONG_TEXT}))
REFUSED.append(("chat", "", "context_length_exceeded", says(CHAT, LONG_TEXT)))


def check_refusal(reply: Reply, status: int, code: str, type_: str = "invalid_request_error") -> Json:
    """Return the error object of a reply that must have one."""
    found = error(reply, status)
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"].startswith("req_")
    assert reply.json.keys() == {"error"}
    assert found.keys() == ERROR_KEYS
    assert (found["type"], found["code"]) == (type_, code)
    assert isinstance(found["message"], str)
    assert "\n" not in found["message"]
    return found


@pytest.mark.bug("F08")
@pytest.mark.parametrize(("api", "param", "code", "change"), REFUSED)
def test_refused(server: Server, api: str, param: str, code: str, change: Json) -> None:
    """Before the first byte of a stream an error is as it is without one. In the background the request was
    parsed after the 200, and failed then (mistral.rs at 9e92262): here every mode refuses alike, and nothing
    is left of it.
    """
    n_steps = server.health()["steps"]
    path, body = (RESPONSES, responses_body("text")) if api == "responses" else (CHAT, chat_body("text"))
    body = {name: value for name, value in (body | change).items() if value != ""}
    status = 404 if code == "model_not_found" else 400
    for stream in (False, True):
        for more in [{}, {"background": True}][: 1 + (path == RESPONSES)]:
            reply = server.post(path, {"stream": stream} | more | body)
            assert check_refusal(reply, status, code)["param"] == (param or None)
    health = server.health()
    assert (health["steps"], health["waiting"], health["background"]) == (n_steps, 0, 0)


def test_no_json_object(server: Server) -> None:
    for code, body in (("invalid_type", b"[]"), ("invalid_json", b'{"seed": %s}' % (b"9" * 641))):
        for path in (RESPONSES, CHAT):
            assert check_refusal(server.post(path, body), 400, code)["param"] is None


@pytest.mark.parametrize(("method", "path", "status", "code", "allow"), TABLE["elsewhere"])
def test_elsewhere(server: Server, method: str, path: str, status: int, code: str, allow: str) -> None:
    reply = server.request(method, path, None)
    refused = check_refusal(reply, status, code)
    assert {*reply.headers.get("allow", "").split(", ")} == {*allow.split(", ")}
    assert code != "unknown_url" or "/v1/responses, " in refused["message"]  # what there is


# --- responses that outlive their request -------------------------------------------------------------------
# Rules of audit/stored.py, which tests/wire asks, and simulate.py have the rest: here a client and a kill.

LONG: Json = HI | NO_END | {"max_output_tokens": 1900}  # seconds
BACKGROUND: Json = {"background": True}


def check_message(reply: Reply, message: str, param: str | None = None) -> None:
    refused = check_refusal(reply, 400, "invalid_value")
    assert (refused["message"], refused["param"]) == (message, param)


@pytest.mark.bug("F09")
def test_starting_after_is_a_number(server: Server) -> None:
    """%D9%A3 is a three that Python's int() takes. Without stream it is not looked at."""
    id_ = created(server, HI)["id"]
    for after in ("-1", "", "1.0", "%2B1", "%D9%A3", "9" * 5000):
        refused = server.get(path_of(id_) + f"?stream=true&starting_after={after}")
        assert (refused.status, refused.json["error"]["param"]) == (400, "starting_after")
        assert server.get(path_of(id_) + f"?starting_after={after}").json["id"] == id_
    for word in ("maybe", "", "x" * 5000):  # bug: it meant no, and the client waited for events
        refused = server.get(path_of(id_) + f"?stream={word}")
        assert (refused.status, refused.json["error"]["param"]) == (400, "stream")
        assert len(refused.body) < 300
    assert server.get(path_of(id_) + "?stream=False").json["id"] == id_


def ended(server: Server, id: str) -> Json:
    """Return a response when it is terminal."""
    until(lambda: server.get(path_of(id)).json["status"] in TERMINAL, f"{id} is terminal")
    return dict(server.get(path_of(id)).json)


#   how it is made                             why it cannot be cancelled when it has ended
NOT_CANCELLED = [
    (BACKGROUND,                               "Cannot cancel a completed response."),
    (BACKGROUND | {"max_output_tokens": 5},    "Cannot cancel a response in terminal state."),
    (BACKGROUND | NO_END | {"seed": RAISES},   "Cannot cancel a failed response."),
    ({},                                       "Cannot cancel a synchronous response."),
]  # fmt: skip


@pytest.mark.bug("F06", "F07")
def test_what_is_not_cancelled_deleted_or_streamed(server: Server) -> None:
    """Of a finished one, cancel said "Cannot cancel a synchronous response." (vllm-project/vllm#57999), 409
    (ogx-ai/ogx#5180) or 404; one that was deleted while it ran was stored again at its end (mistral.rs).
    """
    running = created(server, LONG | BACKGROUND)["id"]
    check_message(server.request("DELETE", path_of(running), None), "Cannot delete an in-flight response.")
    assert server.post(path_of(running, "cancel"), {}).json["status"] == "cancelled"
    for more, why in NOT_CANCELLED:
        id_ = created(server, HI | more)["id"]
        before = ended(server, id_)
        check_message(server.post(path_of(id_, "cancel"), {}), why)
        assert server.get(path_of(id_)).json == before
    why = "This response cannot be streamed because it was not created with background=true."
    check_message(server.get(path_of(id_) + "?stream=true"), why, "stream")


@pytest.mark.bug("H02")
def test_the_official_client_resumes(sdk: openai.OpenAI) -> None:
    """By a plain stream; by a helper that asks for all, and shows a part: openai-node#1984.

    Of an answer that is cut its helper has no final response (openai/openai-python#3538); the event has.
    """
    with sdk.responses.create(model="tiny", input="hi", background=True, stream=True) as stream:
        seen = list(stream)
    assert seen[0].type == "response.created"
    id_ = seen[0].response.id
    for after in (0, 17, len(seen) - 2, len(seen) - 1):
        with sdk.responses.retrieve(id_, stream=True, starting_after=after) as rest:
            assert list(rest) == seen[after + 1 :]
        with sdk.responses.stream(response_id=id_, starting_after=after) as helper:
            assert [e.sequence_number for e in helper] == [e.sequence_number for e in seen[after + 1 :]]
            assert helper.get_final_response().output_text == HELLO
    with pytest.raises(openai.BadRequestError, match=r"Cannot cancel a completed response\."):
        sdk.responses.cancel(id_)
    sdk.responses.delete(id_)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(id_)
    with sdk.responses.stream(model="tiny", input="hi", max_output_tokens=5) as cut:
        last = list(cut)[-1]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details
    assert last.response.incomplete_details.reason == "max_output_tokens"


AS_IT_IS = '{ "output": [ ] }'
LISTED = '[{"id":  "msg_1"}]' + " " * 1000


@pytest.mark.bug("F11")
def test_kill_loses_nothing_and_what_is_stored_is_sent_as_it_is(tmp_path: Path) -> None:
    """kill -9 amid the work: what was seen stays seen, and the file is whole; simulate.py has other moments.

    All of a row of 62 MB was parsed, to write one member of it again: no client was served for 2.5 s.
    Ten minutes after its end a stream is gone, and so is all of a background response with store: false;
    what is stored can still be got: github.com/openai/openai-python/issues/2828.
    """
    file, temporary = tmp_path / "store.db", BACKGROUND | {"store": False}
    with serve("--store", str(file)) as server:
        streams = [events(server, RESPONSES, HI | more) for more in (BACKGROUND, temporary)]
        with server.connect(http_bytes(RESPONSES, LONG | BACKGROUND | {"stream": True})) as connection:
            frames = [*itertools.islice(http_frames(connection), 20)]
            server.process.kill()
    kept, forgotten = (stream[0]["response"]["id"] for stream in streams)
    running = json.loads(sse.data(frames[0]))["response"]["id"]
    with contextlib.closing(sqlite3.connect(file)) as db, db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        db.execute("UPDATE responses SET ended_at = ended_at - 610")
        stored = "UPDATE texts SET response = ?, items = ?, request = '{}' WHERE id = ?"
        db.execute(stored, (AS_IT_IS, LISTED, kept))
    with serve("--store", str(file), "--no-temporary") as server:
        interrupted = {"code": "server_error", "message": "interrupted by a restart"}
        assert ended(server, running)["error"] == interrupted
        replayed = server.get(path_of(running) + "?stream=true").body
        assert replayed.startswith(b"".join(frames))
        laws.check_response(events_in(replayed))
        assert server.get(path_of(kept)).body == AS_IT_IS.encode()
        assert server.get(path_of(kept, "input_items")).json["data"] == [{"id": "msg_1"}]
        why = "This response can no longer be streamed: its events have expired."
        check_message(server.get(path_of(kept) + "?stream=true"), why, "stream")
        assert server.get(path_of(forgotten)).status == 404
        strict = server.post(RESPONSES, HI | temporary).json["error"]  # as OpenAI answered at first
        assert (strict["code"], strict["param"]) == ("unsupported_parameter", "background")
        assert "with store=false under --no-temporary" in strict["message"]  # and not "It needs a POST"


# --- flags --------------------------------------------------------------------------------------------------

KEY = {"Authorization": "Bearer key"}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    names = "--served-model-name one --served-model-name org/two"
    flags = f"--api-key key --no-done-line --reasoning-events open-responses {names}"
    with serve(*flags.split()) as started:
        yield started


def test_a_name_that_the_server_was_given_is_echoed_as_asked(guarded: Server) -> None:
    """PROTOCOL.md D12; our own alias is answered with the model's name."""
    for asked, answered in (("one", "one"), ("org/two", "org/two"), ("default", "one")):
        for path in (RESPONSES, CHAT):
            body = {"model": asked} | says(path, "hi")
            assert guarded.post(path, body, **KEY).json["model"] == answered
            stream = guarded.post(path, body | {"stream": True}, **KEY).body
            assert f'"model":"{answered}"'.encode() in stream


def test_flags_of_streams(guarded: Server, server: Server) -> None:
    """Without a done line, which is OpenAI's own in chat; events of reasoning have one name or the other."""
    body = {"model": "default", "stream": True, "max_output_tokens": 20}
    for by, name, last in ((guarded, b"reasoning.", b"}\n\n"), (server, b"reasoning_text.", sse.DONE)):
        stream = by.post(RESPONSES, body | says(RESPONSES, "hi"), **KEY).body
        assert {*re.findall(rb"event: response\.(reasoning\S*)", stream)} == {name + b"delta", name + b"done"}
        assert stream.endswith(last)
        assert by.post(CHAT, body | says(CHAT, "hi"), **KEY).body.endswith(sse.DONE)


COUNTED = """
import atexit, gc, runpy, sys
atexit.register(lambda: print("never looked at:", gc.get_freeze_count(), file=sys.stderr))
runpy.run_module("tests.helpers.faulty_server", run_name="__main__", alter_sys=True)
"""


@pytest.mark.bug("L01")
def test_what_the_start_has_made_is_no_garbage() -> None:
    """Bug: a thousand connections, or one large answer, had the collector look at all objects of the process,
    again and again, and every stream waited 0.1 s for it.
    """
    with serve(script=("-c", COUNTED)) as server:
        server.interrupt()
        assert server.exit_status() == 0
        n_objects = int(server.log().rpartition(":")[2])
    assert n_objects > 40_000


# --- an engine that fails, and the end ----------------------------------------------------------------------


@pytest.mark.bug("C19", "C20")
def test_engine_fails(server: Server) -> None:
    """Bug: the stream breaks off, or ends without its last event, and clients take the half for the whole."""
    body = responses_body("text") | {"seed": RAISES}
    streamed = events(server, RESPONSES, body)
    laws.check_response(streamed)
    assert streamed[-1]["response"]["error"]["code"] == "server_error"
    n_deltas = sum(event["type"] == "response.output_text.delta" for event in streamed)
    assert 0 < n_deltas <= AFTER_TOKENS
    whole = server.post(RESPONSES, body)
    assert (whole.status, whole.json["status"]) == (200, "failed")
    laws.check_body(whole.json)
    body = chat_body("text") | {"seed": RAISES}
    *chunks, last = events(server, CHAT, body)
    assert all("error" not in chunk for chunk in chunks)
    assert last["error"].keys() == ERROR_KEYS
    assert last["error"] == check_refusal(server.post(CHAT, body), 500, "server_error", "server_error")
    assert server.post(CHAT, chat_body("text")).json["choices"][0]["message"]["content"] == HELLO


ENDLESS = {"model": "tiny", **NO_END, "temperature": 1.0, "seed": 1}  # 2 s of work


def test_a_stop_says_what_it_waits_for_and_a_second_one_ends_it() -> None:
    """Bugs: five to eight silent seconds; the requests of clients that do not read were cancelled, and each
    left a traceback in the log.
    """
    unread = ENDLESS | says(CHAT, STORY) | {"stream": True, "n": 8, "logprobs": True, "top_logprobs": 20}
    body = ENDLESS | says(RESPONSES, STORY) | {"stream": True, "seed": SLOW}
    with (
        serve("--shutdown-grace", "60", "--reader-timeout", "600") as server,
        server.connect(http_bytes(CHAT, unread)),
        server.connect(http_bytes(RESPONSES, body)) as connection,
        contextlib.closing(http_frames(connection)) as stream,
    ):
        said = "stopping: requests have 60 s to end; a second signal ends them"
        next(stream)
        until(lambda: server.health()["steps"] > 90, "there is more than the system holds for a client")
        server.interrupt()
        until(lambda: said in server.log(), "it is said")
        next(stream)
        for _ in range(5):
            server.interrupt()
        assert sse.DONE in stream
        assert server.exit_status() == 0
        assert "Traceback" not in server.log()
        assert "Cancel" not in server.log()


def test_stop_waits_for_what_is_prepared() -> None:
    """Bug: a request whose grammar was being compiled, of which no engine knows yet, had no grace."""
    schemas = [costly(99_999_989 + 2 * i) for i in range(N_CHECKS + 2)]  # the last ones wait
    bodies = [HI | {"text": {"format": {"type": "json_schema", "name": "n", "schema": s}}} for s in schemas]
    flags = ("--shutdown-grace", str(PATIENCE_S))
    with serve(*flags) as server, ThreadPoolExecutor(len(bodies)) as pool:
        replies = [pool.submit(server.post, RESPONSES, body) for body in bodies]
        until(lambda: server.health()["grammars_waiting"] >= 1, "one waits")
        server.interrupt()
        for reply in replies:
            assert reply.result().json["error"]["code"] == "invalid_json_schema"
        assert server.exit_status() == 0


# --- the command line ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flags", "complaint"), TABLE["complaints"])
def test_what_cannot_work_is_said_in_a_line(flags: str, complaint: str) -> None:
    """Exit status 2, and one line that says what is wrong; argparse writes its usage above."""
    with contextlib.closing(connections.bind("127.0.0.1", 0)) as listener:
        taken = flags.replace("TAKEN", str(listener.getsockname()[1])).split()
        with pytest.raises(AssertionError, match="ended with 2") as ended, serve(*taken, model=None):
            pass
    _, _, said = str(ended.value).partition("\n")
    line = said.splitlines()[-1]
    assert "error: " in line
    assert complaint in line
    assert said.startswith("usage: ") or said.count("\n") == 1


def test_ctrl_c_while_modules_are_imported(tmp_path: Path) -> None:
    """Bug: a traceback, in the first second of each start."""
    (tmp_path / "threadpoolctl.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    run_it = f"sys.path[:0] = ['', {str(tmp_path)!r}]; runpy.run_path('server.py', run_name='__main__')"
    ended = run("-c", f"import runpy, sys; {run_it}")
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + signal.SIGINT, "", "")
