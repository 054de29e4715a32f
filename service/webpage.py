"""The web page: page.html and engine.html, with a Content Security Policy that allows what they need alone.

    page.html, engine.html --hashes of their scripts and styles--> POLICY, HEADERS --> RESPONSE

Authority: https://www.w3.org/TR/CSP3/. A model writes what this page shows, and a model repeats what it read.

Rules of this file:
1. Only the scripts and styles whose hashes are sent run, one of each file: a model's output never runs.
2. The page talks only to the server that it came from, and no other page can frame it.

Not here: the page itself (page.html; its second view, which shows the engine at work: engine.html).
"""

import base64
import hashlib
import re
from pathlib import Path

from starlette.responses import Response

FOLDER = Path(__file__).parent
ENGINE = (FOLDER / "engine.html").read_text(encoding="utf-8")
HTML = (FOLDER / "page.html").read_text(encoding="utf-8").replace("<!-- engine.html -->\n", ENGINE)


def sources(tag: str) -> str:
    """Return the CSP sources of the page's elements of this kind: the hash of each one's text."""
    texts = re.findall(f"<{tag}>(.*?)</{tag}>", HTML, re.DOTALL)
    digests = [hashlib.sha256(text.encode()).digest() for text in texts]
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


# fmt: off
#  directive                    what it lets through
POLICY = {
    "default-src":               "'none'",
    "script-src":                sources("script"),
    "style-src":                 sources("style"),
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

RESPONSE = Response(HTML, media_type="text/html", headers=HEADERS)
