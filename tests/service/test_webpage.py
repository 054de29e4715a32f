"""The page in a real browser, over the real server: what a class sees, presses and is kept safe from.

Needs Chromium and `playwright`, which drives it; where either is missing these tests are skipped and say so.
The tiny model says nothing hostile: the one test that needs it gives the page events of its own.
"""

import base64
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from helpers.faulty_server import SLOW
from helpers.serving import TINY, Reply, Server, serve, until
from responses import GRAMMAR
from service import webpage as page_module

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
EOS = json.loads((TINY / "generation_config.json").read_text())["eos_token_id"]
SLOW_SECONDS = {
    "seed": SLOW,
    "logit_bias": {str(token_id): -100 for token_id in EOS},
    "max_output_tokens": 150,
}
SLOW_STORY = json.dumps(SLOW_SECONDS)
ENDLESS_STORY = json.dumps(SLOW_SECONDS | {"max_output_tokens": 1900})
FAULTY = ("-m", "tests.helpers.faulty_server")
KEY = "sesame"
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
STORY = "Tell me a story about a cat."


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(script=FAULTY) as started:
        yield started


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as driver:
        sandbox = [] if os.name != "posix" or os.geteuid() else ["--no-sandbox"]
        with driver.chromium.launch(executable_path=CHROMIUM, args=sandbox) as launched:
            yield launched


@pytest.fixture
def page(browser: "Browser", server: Server) -> Iterator["Page"]:
    """The page, opened; in the end the browser must have complained of nothing."""
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        opened, complaints = context.new_page(), list[str]()
        opened.on("console", lambda message: complaints.append(message.text))  # of the policy, above all
        opened.on("pageerror", lambda error: complaints.append(str(error)))
        opened.set_default_timeout(20_000)
        opened.goto(server.url)
        opened.wait_for_selector("#model option", state="attached")
        yield opened
        assert [text for text in complaints if "responded with a status of 400" not in text] == []


def send(page: "Page", prompt: str, background: bool = False, more: str = "", tools: Any = None) -> None:
    page.get_by_label("Prompt").fill(prompt)
    page.get_by_label("Background").set_checked(background)
    page.locator("#options").evaluate("details => { details.open = true }")
    page.get_by_label("Other parameters").fill(more)
    page.get_by_label("Tools, a JSON list").fill(json.dumps(tools) if tools else "")
    page.get_by_role("button", name="Send").click()


def said(page: "Page", what: str) -> str:
    """The line of state, once `what` stands in it."""
    state = page.get_by_role("status").filter(has_text=re.compile(what))
    state.wait_for()
    return state.inner_text()


def numbers(page: "Page") -> list[int]:
    """Of the events shown."""
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


def test_a_turn_over_a_websocket(page: "Page", server: Server) -> None:
    """The events are those of HTTP, and a response that is not stored can be continued."""
    send(page, STORY, more='{"temperature": 0, "store": false}')
    said(page, "completed")
    types = page.locator("#events .type").all_inner_texts()
    assert facts(page)["Over"] == "HTTP"
    page.get_by_label("Over").select_option("WebSocket")
    send(page, STORY, more='{"temperature": 0, "store": false}')
    said(page, "completed")
    assert facts(page)["Over"] == "WebSocket"
    assert page.locator("#events .type").all_inner_texts() == types
    assert facts(page)["Fold of the events"] == "is the final response"
    page.get_by_label("Continue the last response").check()
    send(page, "Who are you?", more='{"store": false}')
    said(page, "completed")
    assert "/v1/responses: 101" not in server.log()  # it is the same connection


def test_a_websocket_that_is_left_ends_its_turn(page: "Page", server: Server) -> None:
    page.get_by_label("Over").select_option("WebSocket")
    send(page, STORY, more=ENDLESS_STORY)
    wait_for_events(page, 10)
    page.get_by_role("button", name="Cancel").click()
    said(page, "nobody reads")
    until(lambda: server.health()["running"] == 0, "it has ended")


def test_an_event_shows_the_response_as_it_was_then(page: "Page") -> None:
    send(page, STORY)
    said(page, "completed")
    whole = page.locator("#output .said").last.inner_text()
    rows = page.locator("#events button")
    pieces = rows.locator(".piece").all_inner_texts()
    texts = [i for i, row in enumerate(rows.all_inner_texts()) if "output_text.delta" in row]
    rows.nth(texts[4]).click()
    assert page.locator("#output .said").last.inner_text() == "".join(
        json.loads(pieces[i]) for i in texts[:5]
    )
    assert page.locator("#status").inner_text() == "in_progress"
    assert json.loads(page.locator("#shown").inner_text())["sequence_number"] == texts[4]
    page.keyboard.press("Home")  # the keyboard goes the same ways
    assert page.locator("#output article").count() == 0
    page.keyboard.press("ArrowDown")
    assert page.locator("#title").inner_text() == "As of event 1"
    page.keyboard.press("Escape")
    assert page.locator("#output .said").last.inner_text() == whole


def test_the_class_plays_the_tool(page: "Page") -> None:
    page.locator("#options summary").click()
    page.get_by_role("button", name="Insert an example").click()
    assert page.locator("#choice option").all_inner_texts() == ["auto", "none", "required", "get_weather"]
    page.get_by_label("Tool choice").select_option("get_weather")
    page.get_by_role("button", name="Send").click()
    said(page, "completed")
    assert page.locator("article[data-channel=call] .said").inner_text().startswith('get_weather({"city"')
    page.get_by_label("Tool choice").select_option("none")
    page.get_by_label("Answer of get_weather").fill('{"temperature": 21, "condition": "sunny"}')
    page.get_by_role("button", name="Answer the call").click()
    page.locator("article[data-channel=text]").wait_for()
    assert "completed" in said(page, "events in")


def test_copy_as_curl_is_the_request(page: "Page", server: Server) -> None:
    page.get_by_label("Prompt").fill("it's")
    page.get_by_role("button", name="Copy as curl").click()
    page.locator("#shown").wait_for()
    command = page.locator("#shown").inner_text()
    assert command == (
        f"curl -N '{server.url}/v1/responses' \\\n  -H 'Content-Type: application/json' \\\n"
        """  -d '{"model":"tiny","input":"it'\\''s","stream":true}'"""
    )


# --- pause, resume, cancel ----------------------------------------------------------------------------------


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


def test_resume_from_any_event(page: "Page") -> None:
    send(page, STORY, background=True)
    said(page, "completed")
    n, whole = len(numbers(page)), page.locator("#output .said").all_inner_texts()
    page.locator("#events button").nth(7).click()
    with page.expect_request("**/v1/responses/*") as asked:
        page.get_by_role("button", name="Resume from here").click()
    assert asked.value.url.endswith("?stream=true&starting_after=7")
    said(page, "completed")
    assert numbers(page) == list(range(n))
    assert page.locator("#output .said").all_inner_texts() == whole


def test_pause_in_the_foreground_is_to_read_no_further(page: "Page") -> None:
    send(page, STORY, more=SLOW_STORY)
    wait_for_events(page, 20)
    page.get_by_role("button", name="Pause").click()
    said(page, "Paused at event")
    page.locator("#events button").nth(3).click()
    assert page.get_by_role("button", name="Resume from here").count() == 0
    page.get_by_role("button", name="Resume").click()
    assert "incomplete" in said(page, "events in")
    assert numbers(page) == list(range(len(numbers(page))))


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_cancel(page: "Page", server: Server, background: bool) -> None:
    send(page, STORY, background=background, more=ENDLESS_STORY)
    wait_for_events(page, 20)
    page.get_by_role("button", name="Cancel").click()
    said(page, "cancelled: " if background else "Left at event")
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


def test_and_the_browser_would_not_make_markup_of_it(browser: "Browser", server: Server) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(server.url)
        attempt = "text => { try { document.body.innerHTML = text } catch (error) { return error.message } }"
        assert "TrustedHTML" in page.evaluate(attempt, HOSTILE)


def test_a_refusal_is_shown_in_the_servers_words(page: "Page", server: Server) -> None:
    send(page, STORY, more='{"temperature": 3}')
    alert = page.get_by_role("alert")
    alert.filter(has_text="400").wait_for()
    refusal = server.post("/v1/responses", {"model": "tiny", "input": STORY, "temperature": 3}).json["error"]
    assert alert.inner_text() == "400: " + refusal["message"]


@pytest.mark.parametrize("tools", ["{", "[1]", '{"type": "function"}'])
def test_tools_that_are_no_tools_are_not_sent(page: "Page", tools: str) -> None:
    page.locator("#options summary").click()
    page.get_by_label("Tools, a JSON list").fill(tools)
    page.get_by_role("button", name="Send").click()
    assert (
        page.locator("#tools").evaluate("field => field.validationMessage")
        == "Expected a JSON list of objects."
    )
    assert page.locator("#events li").count() == 0


def test_the_key_is_asked_for(browser: "Browser") -> None:
    with serve("--api-key", KEY) as guarded, browser.new_context() as context:
        page = context.new_page()
        page.goto(guarded.url)
        page.get_by_role("alert").filter(has_text="401").wait_for()
        page.keyboard.type(KEY)  # the field has the focus
        page.keyboard.press("Tab")
        page.wait_for_selector("#model option", state="attached")
        page.get_by_role("button", name="Send").click()
        assert "completed" in said(page, "events in")
        page.get_by_role("button", name="Copy as curl").click()
        assert KEY not in page.locator("#shown").inner_text()
        page.get_by_label("Over").select_option("WebSocket")
        send(page, "hi")
        said(page, "completed")
        assert facts(page)["Over"] == "WebSocket"


# --- for everybody ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "scheme"), [(320, "light"), (320, "dark"), (768, "light"), (1280, "dark")])
def test_nothing_is_cut_off_or_faint(browser: "Browser", server: Server, width: int, scheme: Any) -> None:
    """No sideways scrolling, and contrast of at least 4.5 to 1: https://www.w3.org/TR/WCAG22/#contrast-minimum"""
    with browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme) as context:
        page = context.new_page()
        page.goto(server.url)
        page.wait_for_selector("#model option", state="attached")
        send(page, STORY)
        said(page, "completed")
        page.locator("#events button").nth(5).click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        faint = page.evaluate(FAINT)
        assert faint == []


# Every text that is seen, with the contrast of its colour to the nearest background; those under the limit.
FAINT = """() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => channels(colour).slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
  const behind = (node) => { for (; node; node = node.parentElement) {
    const colour = getComputedStyle(node).backgroundColor;
    if ((channels(colour)[3] ?? 1) > 0) return colour;
  } };
  return [...document.querySelectorAll("body *")]
    .filter((node) => [...node.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
    .filter((node) => node.checkVisibility() && !node.disabled && node.tagName !== "OPTION")
    .map((node) => [node.textContent.slice(0, 30), light(getComputedStyle(node).color), light(behind(node))])
    .map(([text, a, b]) => [text, (Math.max(a, b) + .05) / (Math.min(a, b) + .05)])
    .filter(([, ratio]) => ratio < 4.5);
}"""


def test_every_control_has_a_name(page: "Page") -> None:
    page.locator("#options summary").click()
    for role in ("textbox", "checkbox", "combobox", "spinbutton", "button"):
        controls = page.get_by_role(role).all()
        assert controls
        for control in controls:
            named = control.evaluate("c => c.labels?.[0]?.innerText || c.ariaLabel || c.innerText")
            assert named.strip(), control


# --- the headers, which need no browser ---------------------------------------------------------------------


def test_headers(server: Server) -> None:
    reply: Reply = server.get("/")
    html = reply.body.decode()
    assert (reply.status, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in reply.headers["content-security-policy"]
    assert "unsafe" not in reply.headers["content-security-policy"]
    for name, value in page_module.HEADERS.items():
        assert reply.headers[name.lower()] == value


def test_nothing_is_fetched_from_elsewhere() -> None:
    assert re.findall(r"(?:src|href)\s*=\s*[\"'](?!data:)|@import|\burl\([\"'\w]+:", page_module.HTML) == []
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page_module.HTML)
