"""Logging: records to lines on stderr, as text or as JSON, each with the id of the request that it is about.

    logging.getLogger(name).info(...) ----> TextLines | JsonLines --> one line

Rules of this file:
1. A record is one line of text, whatever a client wrote into it, and any number of lines of traceback, all
   without control characters. As JSON it is one line with all of it.
2. The id is the one in the reply's x-request-id header. What goes on running after the reply keeps its id.

Not here: who logs what.
"""

import json
import logging
import math
import time
from collections.abc import Hashable
from typing import Any

from request.ids import REQUEST_ID

INTERVAL_S = 60  # in which Rarely tells nothing twice
MAX_REMEMBERED = 1000  # things that Rarely has told

# The escapes of what moves a terminal's cursor, or starts a line: "\n" becomes a backslash and an n.
CONTROLS = [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029]
ESCAPES = {code: repr(chr(code))[1:-1] for code in CONTROLS}


class TextLines(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        request_id = REQUEST_ID.get()
        about = f" [{request_id}]" if request_id else ""
        head = f"{self.formatTime(record)} {record.levelname} {record.name}{about}"
        return f"{head}: {record.message}".translate(ESCAPES)

    def formatException(self, ei: Any) -> str:
        return super().formatException(ei).translate(ESCAPES | {ord("\n"): "\n"})


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "request_id": REQUEST_ID.get() or None,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        fields = getattr(record, "fields", {})  # members of their own: log.info(..., extra={"fields": {...}})
        return json.dumps(line | fields)


FORMATS = {"text": TextLines, "json": JsonLines}


def start(level: str, log_format: str) -> None:
    """Send what is logged to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(FORMATS[log_format]())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # Its warnings are of requests that connections.py and middleware.py refuse, and log with their ids.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs each request to an upstream


class Rarely:
    """Tells whether a thing is news: not told in the last INTERVAL_S seconds. Then it counts as told."""

    def __init__(self) -> None:
        self._told_at: dict[Hashable, float] = {}

    def __call__(self, thing: Hashable) -> bool:
        now = time.monotonic()
        if now - self._told_at.get(thing, -math.inf) <= INTERVAL_S:
            return False
        if len(self._told_at) >= MAX_REMEMBERED:
            self._told_at.clear()  # then some are told again too early
        self._told_at[thing] = now
        return True
