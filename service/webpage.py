"""The page: page.html as it lies on disk, behind headers that let it do what it does and nothing else.

    page.html --hash of its script and style--> Content-Security-Policy

Authority: https://www.w3.org/TR/CSP3/. A model writes what this page shows, and a model repeats what it read.

Rules of this file:
1. One script and one style run, those whose hashes are sent: what a model writes never does.
2. The page talks to the server that it came from, and to nobody else; no other page frames it.

Not here: what the page does (page.html).
"""

import base64
import hashlib
import re
from pathlib import Path

from starlette.responses import Response

HTML = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")


def source(tag: str) -> str:
    """The CSP source of the page's one element of this kind."""
    (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", HTML, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# fmt: off
#  directive                    what it lets through
POLICY = {
    "default-src":               "'none'",
    "script-src":                source("script"),
    "style-src":                 source("style"),
    "connect-src":               "'self'",
    "img-src":                   "data:",  # the icon, which is empty
    "base-uri":                  "'none'",
    "form-action":               "'none'",
    "frame-ancestors":           "'none'",
    "require-trusted-types-for": "'script'",  # no text becomes markup: www.w3.org/TR/trusted-types
}

HEADERS = {
    "Content-Security-Policy":    "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy":            "no-referrer",
    "X-Content-Type-Options":     "nosniff",
    "Cache-Control":              "no-cache",  # the next start may bring another page
}
# fmt: on


def response() -> Response:
    return Response(HTML, media_type="text/html", headers=HEADERS)
