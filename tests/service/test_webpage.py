"""The page in a real browser, over the real server: what a class sees, presses and is kept safe from.

Needs Chromium and `playwright`, which drives it; where either is missing these tests are skipped and say so.
The tiny model says nothing hostile: the one test that needs it gives the page events of its own.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from helpers.asked import NO_END
from helpers.faulty_server import SLOW
from helpers.limits import PATIENCE_S
from helpers.serving import ROOT, Server, serve, until
from model import PAGE
from pictures import CHROMIUM, WATCHED
from responses import GRAMMAR
from service import webpage as page_module

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

SLOW_SECONDS = NO_END | {"seed": SLOW, "max_output_tokens": 150}
SLOW_STORY = json.dumps(SLOW_SECONDS)
ENDLESS_STORY = json.dumps(SLOW_SECONDS | {"max_output_tokens": 1900})
KEY = "sesame"
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
STORY = "Tell me a story about a cat."


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as driver:
        sandbox = [] if os.name != "posix" or os.geteuid() else ["--no-sandbox"]
        with driver.chromium.launch(executable_path=CHROMIUM, args=sandbox) as launched:
            yield launched


@contextmanager
def opened(
    browser: "Browser", server: Server, path: str = "/", may_complain: str = "", **context: Any
) -> Iterator["Page"]:
    """Open the page; in the end the browser must have complained of nothing, such as the policy."""
    with browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | context) as made:
        page, complaints = made.new_page(), list[str]()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.set_default_timeout(1000 * PATIENCE_S)
        page.goto(server.url + path)
        yield page
        assert [text for text in complaints if not (may_complain and may_complain in text)] == []


@pytest.fixture
def page(browser: "Browser", server: Server) -> Iterator["Page"]:
    with opened(browser, server, may_complain="responded with a status of 400") as page:
        page.wait_for_selector("#model option", state="attached")
        yield page


def send(page: "Page", prompt: str, background: bool = False, more: str = "") -> None:
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.get_by_label("Background").set_checked(background)
    page.locator("#options").evaluate("details => { details.open = true }")
    page.get_by_label("Other parameters").fill(more)
    page.get_by_role("button", name="Send").click()


def said(page: "Page", what: str) -> str:
    """Return the line of state, once `what` stands in it."""
    state = page.get_by_role("status").filter(has_text=re.compile(what))
    state.wait_for()
    return state.inner_text()


def numbers(page: "Page") -> list[int]:
    """Return the numbers of the events that are shown."""
    return [int(text) for text in page.locator("#events .number:first-child").all_inner_texts()]


def wait_for_events(page: "Page", n: int) -> None:
    page.locator("#events li").nth(n - 1).wait_for()


def facts(page: "Page") -> dict[str, str]:
    names, values = (page.locator(f"#facts {tag}").all_inner_texts() for tag in ("dt", "dd"))
    return dict(zip(names, values, strict=True))


def test_the_page_folds_every_event_that_adds_something() -> None:
    """Without a row in FOLD the page would silently leave out what the event adds."""
    fold = page_module.HTML.split("const FOLD = {")[1].split("};")[0]
    folded = set(re.findall(r'^ *"([\w.]+)":', fold, re.MULTILINE))
    events = {event.split()[0] for _, event in GRAMMAR}
    assert {event for event in events if event.endswith((".added", ".delta"))} <= folded


# --- what is shown ------------------------------------------------------------------------------------------


def test_a_response_is_built_before_our_eyes(page: "Page", server: Server) -> None:
    send(page, STORY)
    assert "completed" in said(page, "events in")
    shown = page.locator("#output article .said").all_inner_texts()
    again = server.post("/v1/responses", {"model": "tiny", "input": STORY}).json
    assert shown == ["".join(part["text"] for part in item["content"]) for item in again["output"]]
    assert numbers(page) == list(range(len(numbers(page))))
    assert facts(page)["Fold of the events"] == "is the final response"
    assert facts(page)["Tokens out"].startswith(str(again["usage"]["output_tokens"]))
    channels = page.locator("#events button").evaluate_all("all => all.map(b => b.dataset.channel)")
    assert [c for i, c in enumerate(channels) if c != channels[i - 1]] == ["reasoning", "text", "response"]


def test_the_answer_to_a_call_forces_no_further_call(page: "Page") -> None:
    """Bug: tool_choice was sent again, so a model that had to call had to call for ever."""
    page.locator("#options").evaluate("details => { details.open = true }")
    page.locator("#example").click()
    page.locator("#choice").select_option("required")
    page.get_by_role("button", name="Send").click()
    page.get_by_placeholder("what the tool answers").fill("sunny")
    page.get_by_role("button", name="Answer the call").click()
    asked = page.evaluate("[run.body.input[0].type, run.body.tools.length, run.body.tool_choice ?? null]")
    assert asked == ["function_call_output", 1, None]


# --- pause, resume, cancel ----------------------------------------------------------------------------------


@pytest.mark.bug("I05")
def test_a_background_response_goes_on_without_us(page: "Page", server: Server) -> None:
    send(page, STORY, background=True, more=SLOW_STORY)
    wait_for_events(page, 20)
    page.get_by_role("button", name="Pause").click()
    said(page, "Paused at event")
    n = len(numbers(page))
    path = "/v1/responses/" + facts(page)["Response"]
    until(lambda: bool(server.get(path).json["status"] == "incomplete"), "it ends while nobody reads")
    assert len(numbers(page)) == n
    page.get_by_role("button", name="Resume").click()
    assert "incomplete" in said(page, "events in")
    assert numbers(page) == list(range(len(numbers(page))))
    assert facts(page)["Fold of the events"] == "is the final response"


@pytest.mark.parametrize("way", ["foreground", "background", "WebSocket"])
def test_cancel(page: "Page", server: Server, way: str) -> None:
    if way == "WebSocket":
        page.get_by_label("Over").select_option(way)
    send(page, STORY, background=way == "background", more=ENDLESS_STORY)
    wait_for_events(page, 20)
    page.get_by_role("button", name="Cancel").click()
    said(page, "cancelled: " if way == "background" else "we have left, so the server stops")
    until(lambda: server.health()["running"] == 0, "the engine was told")


# --- what goes wrong ----------------------------------------------------------------------------------------


def test_what_a_model_says_stays_text(page: "Page") -> None:
    page.evaluate(
        """text => {
            const output = [{type: "message", status: text, content: [{type: "output_text", text}]}];
            run = newRun({});
            record({type: text, sequence_number: text, response: {id: text, status: text, output}});
            choose(null);
        }""",
        HOSTILE,
    )
    page.locator("#events li").wait_for()
    assert page.locator("#output .said").last.inner_text() == HOSTILE
    assert page.locator("#output img, #output script").count() == 0


def test_a_refusal_is_shown_in_the_servers_words(page: "Page", server: Server) -> None:
    send(page, STORY, more='{"temperature": 3}')
    alert = page.get_by_role("alert")
    alert.filter(has_text="400").wait_for()
    refusal = server.post("/v1/responses", {"model": "tiny", "input": STORY, "temperature": 3}).json["error"]
    assert alert.inner_text() == "400: " + refusal["message"]
    assert page.locator("#state").inner_text() == "No event came."  # it went on to say "Streaming."


def test_the_key_is_asked_for(browser: "Browser") -> None:
    """In both views, and it is not copied."""
    with (
        serve("--api-key", KEY, "--debug-steps") as guarded,
        opened(browser, guarded, "/#engine", may_complain="status of 401") as page,
    ):
        page.get_by_role("alert").filter(has_text="401").wait_for()
        page.keyboard.type(KEY)  # the field has the focus
        page.keyboard.press("Tab")
        page.wait_for_selector("#model option", state="attached")
        page.get_by_label("Prompt", exact=True).fill("it's")
        page.get_by_role("button", name="Copy as curl").click()
        page.locator("#shown").wait_for()
        command = page.locator("#shown").inner_text()
        assert KEY not in command
        assert """-d '{"model":"tiny","input":"it'\\''s","stream":true}'""" in command
        page.get_by_label("Over").select_option("WebSocket")
        send(page, STORY)
        said(page, "completed")
        assert facts(page)["Over"] == "WebSocket"
        page.get_by_role("link", name="Engine").click()
        page.locator("#engine-state").filter(has_text="Connected").wait_for()


# --- the second view: the engine at work --------------------------------------------------------------------


def slowly(route: "Route") -> None:
    """Send the page's request as one whose tokens take time: the first is answered after the last came."""
    asked = route.request.post_data_json
    assert isinstance(asked, dict)
    route.continue_(post_data=json.dumps(asked | {"seed": SLOW, "max_output_tokens": 90}))


def test_it_says_why_the_second_request_began_faster_and_which_was_preempted(browser: "Browser") -> None:
    with serve(*WATCHED) as server, opened(browser, server, "/#engine") as page:
        page.wait_for_selector("#model option", state="attached")
        page.route("**/v1/responses", slowly)
        page.get_by_role("button", name="Send four prompts").click()
        for said in ("B began to answer", "was preempted", "D repeats itself: "):
            page.locator("#story", has_text=said).wait_for()  # the steps come beside the answers, and later
        story = page.locator("#story").inner_text()
    began = re.search(
        r"B began to answer after \d+ steps? \(.*\), A after 3 steps \(.*\): (\d) pages of its prompt were "
        r"in the prefix cache that A had computed, so it computed (\d+) of its (\d+) tokens",
        story,
    )
    assert began, story
    n_found, n_computed, n_prompt = map(int, began.groups())
    assert n_computed == n_prompt - PAGE * n_found


STEP = (  # of one sequence
    'data: {"step": %d, "running": [%d], "waiting": [], "cached": [], "n_pages": 1, "page_size": 64, '
    '"time_s": 1, "duration_s": 0, "n_free_pages": 0, "sequences": [{"sequence": %d, "ended": "%s", '
    '"phase": "decode", "n_prompt": 3, "page_table": [0], "request_id": "", "n_tokens": 0}]}\n\n'
)


def test_the_lanes_are_those_of_the_steps_in_sight(browser: "Browser", server: Server) -> None:
    """Bugs: of more than eight sequences an early step had empty lanes, and so had those that had ended."""
    frames = "".join(STEP % (n, n // 100, n // 100, "stop" * (n % 100 == 99)) for n in range(1000))
    with opened(browser, server, "/") as page:
        page.route("**/debug/steps", lambda route: route.fulfill(body=frames))
        page.get_by_role("link", name="Engine").click()
        page.locator("#step-said").filter(has_text="Step 999").wait_for()
        for number, lanes in (("150", "B"), ("310", "CD"), ("950", "J")):
            page.locator("#scrub").fill(number)
            assert page.locator("#names .chip").all_inner_texts() == [*lanes]


def test_where_steps_are_not_shown_it_says_how_to_have_them(browser: "Browser", server: Server) -> None:
    with opened(browser, server, "/#engine", may_complain="status of 404") as page:
        page.locator("#engine-state").filter(has_text="start it with --debug-steps").wait_for()
        assert page.get_by_role("button", name="Send four prompts").is_disabled()
        command = page.locator("#command").inner_text()
        assert command == f"python server.py --model tests/models/tiny {' '.join(WATCHED)}"
        assert f"    {command}\n" in (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
        page.locator(
            "#story", has_text="B was preempted in step 6"
        ).wait_for()  # as in chapter 4 of the course


# --- the headers, which need no browser ---------------------------------------------------------------------


def test_headers(server: Server) -> None:
    reply = server.get("/")
    assert (reply.status, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    for name, value in page_module.HEADERS.items():
        assert reply.headers[name.lower()] == value
    policy = page_module.HEADERS["Content-Security-Policy"]
    assert re.findall(r"script-src (.*?);", policy)[0].count("'sha256-") == 2
    assert "unsafe" not in policy
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page_module.HTML)


def test_an_answer_is_interrupted_with_a_sentence(page: "Page") -> None:
    """Over a WebSocket: the answer ends there, another one follows, and both stay on the page."""
    page.get_by_label("Over").select_option("WebSocket")
    send(page, STORY, more=SLOW_STORY)
    page.get_by_label("Prompt", exact=True).fill("Stop now.")
    page.get_by_role("button", name="Interrupt").click()
    reasons = "run.records.map(({ event }) => event.response?.incomplete_details?.reason).filter(Boolean)"
    until(lambda: page.evaluate(reasons) == ["steered", "max_output_tokens"], "both have ended")
    outputs = "run.records.filter(({ event }) => event.type === 'response.output_item.done').length"
    assert page.locator("#output > *").count() == page.evaluate(outputs)
