"""Log records to lines on stderr, as text or as JSON, each with the id of the request that it is about.

    logging.getLogger(name).info(...) ----> TextLines | JsonLines --> one line

Rules of this file:
1. A record is one line of text, whatever a client wrote into it, and any number of lines of traceback, all
   without control characters; as JSON it is one line with all of it.
2. The id is the one in the reply's x-request-id header; what runs on behind a request keeps its id.

Not here: who logs what.
"""

import contextvars
import json
import logging
import re
import traceback
from typing import Any

REQUEST_ID = contextvars.ContextVar("REQUEST_ID", default="")  # "": not about a request


CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # what moves a terminal's cursor, or starts a line


def escaped(text: str) -> str:
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class TextLines(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        about = f" [{id_}]" if (id_ := REQUEST_ID.get()) else ""
        return f"{self.formatTime(record)} {record.levelname} {record.name}{about}: {escaped(record.message)}"

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(escaped, super().formatException(ei).split("\n")))


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
        return json.dumps(line | getattr(record, "fields", {}))


# What uvicorn warns of are requests that server.py and middleware.py refuse, and log with their ids.
CHATTY = {"uvicorn.error": logging.ERROR, "httpx2": logging.WARNING}

FORMATS: dict[str, type[logging.Formatter]] = {"text": TextLines, "json": JsonLines}


def start(level: str, form: str) -> None:
    """Send what is logged to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(FORMATS[form]())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for chatty, enough in CHATTY.items():
        logging.getLogger(chatty).setLevel(enough)
