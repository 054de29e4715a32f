"""The pictures of the README and docs/: `python tests/pictures.py` draws the first, `--pages` makes all.

responses.GRAMMAR    --events()-->   pictures/events.svg
the server, Chromium --response()--> pictures/response.png, the page's first view
                     --engine()-->   pictures/engine.png, its second
"""

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]  # as a script, this file finds the modules beside tests/

from playwright.sync_api import Page, sync_playwright  # noqa: E402

from helpers.serving import SERVER, serve  # noqa: E402
from helpers.tables import table  # noqa: E402
from responses import GRAMMAR  # noqa: E402

PICTURE = ROOT / "pictures" / "events.svg"
DRAWN = table("pictures")

# Half of the pages that the four prompts of the page's second view need together: one of them is preempted.
WATCHED = ("--debug-steps", "--speculate", "4", "--kv-memory", "1.125M")
CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

# --- the states and arrows of responses.GRAMMAR -------------------------------------------------------------

PLACES = {
    state: (column, row) for row, states in enumerate(DRAWN["grid"]) for column, state in enumerate(states)
}
STEP_X, STEP_Y, WIDTH, HEIGHT = 250, 88, 128, 26


def at(state: str) -> tuple[int, int]:
    """Return the middle of a state's box."""
    column, row = PLACES[state]
    top = 70 if row else 30  # the arrows between the first row and "between" need room
    return 90 + column * STEP_X, top + row * STEP_Y


def events() -> str:
    edges: dict[tuple[str, str], list[str]] = {}
    for (state, event), following in GRAMMAR.items():
        edges.setdefault((state, following), []).append(event.removeprefix("response."))
    (right, _), (_, bottom) = at("message done"), at("end")
    size = f'viewBox="0 0 {right + 250} {bottom + 30}"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    title = "<title>The events of a Response: a box is a state, an arrow an event</title>"
    return "\n".join(
        [svg, title, f"<style>{DRAWN['style']}</style>", DRAWN["head"], *drawn(edges), "</svg>", ""]
    )


def drawn(edges: Mapping[tuple[str, str], list[str]]) -> Iterator[str]:
    for (state, following), labels in edges.items():
        path, x, y = route(state, following)
        yield f'<path d="{path}"/>'
        yield from lettering(x, y, labels)
    for state in filter(None, PLACES):
        x, y = at(state)
        yield f'<rect x="{x - WIDTH // 2}" y="{y - HEIGHT // 2}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
        yield f'<text class="state" x="{x}" y="{y + 4}">{state}</text>'


def route(state: str, following: str) -> tuple[str, int, int]:
    """Return an arrow's path, and the middle of the line of text above it."""
    x, y = at(state)
    to_x, to_y = at(following)
    _, row = PLACES[state]
    if state == following:  # a delta
        return f"M{x - 30},{y - 13} c0,-25 60,-25 60,0", x, y - 34
    if special := DRAWN["routes"].get(f"{state}, {following}"):
        path, right, down = special
        edges = {"top": to_y - 13, "bottom": to_y + 13, "left": to_x - 64}
        return path.format(x=x, y=y, to_x=to_x, to_y=to_y, **edges), x + right, y + down
    if following == "between":  # an item is done
        rail = x + 190 + 8 * row
        return f"M{x + 64},{y} H{rail} V{at('created')[1] + 72} H{to_x + 40} V{to_y - 13}", x + 132, y - 5
    if row != PLACES[following][1]:  # an item begins
        return f"M{x + 30},{y + 13} V{to_y} H{to_x - 64}", to_x - 132, to_y - 5
    return f"M{x + 64},{y} H{to_x - 64}", (x + to_x) // 2, to_y - 5


def lettering(x: int, y: int, labels: list[str]) -> Iterator[str]:
    """Yield the event of an arrow, above it, and the item or part that the event holds, below."""
    for i, text in enumerate(reversed(labels)):
        event, _, inner = text.partition(" ")
        yield f'<text class="edge" x="{x}" y="{y - 12 * i}">{escape(event)}</text>'
        if inner:
            yield f'<text class="edge" x="{x}" y="{y + 16}">{escape(inner)}</text>'


# --- the page's two views -----------------------------------------------------------------------------------


@contextmanager
def page_of(*flags: str) -> Iterator[Page]:
    """Yield the page of a server of its own, in Chromium, with its models listed."""
    with serve(*flags, script=SERVER) as server, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1160, "height": 900})
        page.goto(server.url)
        page.wait_for_selector("#model option", state="attached")
        yield page


def response() -> bytes:
    """Return the first view as PNG, when its prompt has been answered and one of its events is chosen."""
    with page_of() as page:
        page.fill("#prompt", "What is 2+2?")
        page.click("#send")
        page.locator("#status", has_text="completed").wait_for()
        page.locator("#events button").nth(8).click()
        return page.screenshot()


def engine() -> bytes:
    """Return the second view as PNG, when its prompts have been answered, at the step that preempts one."""
    with page_of(*WATCHED) as page:
        page.goto(page.url + "#engine")
        page.get_by_role("button", name="Send four prompts").click()
        page.locator("#story [data-kind=preempted]").first.wait_for()
        page.locator("#fill:enabled").wait_for()
        page.locator("#shares .tokens button").first.click()
        return page.screenshot(full_page=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the pictures of the README and docs/.")
    parser.add_argument("--pages", action="store_true", help="also those of the server's page: with Chromium")
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(events(), encoding="utf-8")
    if parser.parse_args().pages:
        (PICTURE.parent / "response.png").write_bytes(response())
        (PICTURE.parent / "engine.png").write_bytes(engine())
