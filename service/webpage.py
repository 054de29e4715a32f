"""The web page: page.html as it lies on disk, with a Content Security Policy that allows what it needs alone.

    page.html --hashes of its script and style--> POLICY, HEADERS --response()--> Response

Authority: https://www.w3.org/TR/CSP3/. A model writes what this page shows, and a model repeats what it read.

Rules of this file:
1. One script and one style run, those whose hashes are sent: what a model writes never runs.
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
    """The CSP source of the page's one element of this kind: the hash of its text."""
    (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", HTML, re.DOTALL)
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


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
