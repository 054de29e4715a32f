"""Logging: records to lines on stderr, as text or as JSON, each with the id of the request that it is about.

    logging.getLogger(name).info(...) ----> TextLines | JsonLines --> one line

Rules of this file:
1. A record is one line of text, whatever a client wrote into it, and any number of lines of traceback, all
   without control characters; as JSON it is one line with all of it.
2. The id is the one in the reply's x-request-id header; what runs on behind a request keeps its id.

Not here: who logs what.
"""

import json
import logging
import math
import re
import time
import traceback
from collections.abc import Hashable
from typing import Any

from request.ids import REQUEST_ID

INTERVAL_S = 60  # in which Rarely tells nothing twice
MAX_REMEMBERED = 1000  # things that Rarely has told

CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # what moves a terminal's cursor, or starts a line


def escaped(text: str) -> str:
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class TextLines(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        head = f"{self.formatTime(record)} {record.levelname} {record.name}"
        request_id = REQUEST_ID.get()
        if request_id:
            head += f" [{request_id}]"
        return f"{head}: {escaped(record.message)}"

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).split("\n")
        return "\n".join(map(escaped, lines))


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
            line["exception"] = "".join(traceback.format_exception(*record.exc_info))
        fields = getattr(record, "fields", {})  # members of their own: log.info(..., extra={"fields": {...}})
        return json.dumps(line | fields)


# Libraries that log too much, and from which level on they are heard. uvicorn's warnings are of requests that
# connections.py and middleware.py refuse, and log with their ids.
LIBRARIES = {"uvicorn.error": logging.ERROR, "httpx2": logging.WARNING}

FORMATS: dict[str, type[logging.Formatter]] = {"text": TextLines, "json": JsonLines}


def start(level: str, log_format: str) -> None:
    """Send what is logged to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(FORMATS[log_format]())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for library, library_level in LIBRARIES.items():
        logging.getLogger(library).setLevel(library_level)


class Rarely:
    """Tells whether a thing is news: not told in the last INTERVAL_S seconds. Then it counts as told."""

    def __init__(self) -> None:
        self._told_at: dict[Hashable, float] = {}

    def __call__(self, thing: Hashable) -> bool:
        now = time.monotonic()
        is_news = now - self._told_at.get(thing, -math.inf) > INTERVAL_S
        if is_news:
            if len(self._told_at) >= MAX_REMEMBERED:  # then some are told again too early
                self._told_at.clear()
            self._told_at[thing] = now
        return is_news
