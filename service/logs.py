"""Logging: records to lines on stderr, as text or as JSON, each with the id of the request that it is about.

    logging.getLogger(name).info(...) --Lines--> one line

Rules of this file:
1. A record is one line of text, even if a client put line ends into it; the lines of a traceback follow. As
   JSON, record and traceback are one line. Both are ASCII without control characters: we escape the rest.
2. The id is the one in the reply's x-request-id header. A run that outlives the reply keeps its id.
3. No line holds a prompt or an answer. An error line may quote the beginning of a wrong value, or the message
   of an upstream.
"""

import json
import logging
import time

from request.ids import REQUEST_ID

FORMATS = ("text", "json")
TEXT = "{time} {level} {logger} [{request_id}]: {message}"


class Lines(logging.Formatter):
    """Records in one of FORMATS, their times in UTC: RFC 3339."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self, log_format: str) -> None:
        super().__init__()
        self._log_format = log_format

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "request_id": REQUEST_ID.get() or "-",
            "message": record.getMessage(),
            "exception": self.formatException(record.exc_info) if record.exc_info else "",
        }
        if self._log_format == "json":
            # Its fields are more members: log.info(..., extra={"fields": {...}}).
            return json.dumps(line | getattr(record, "fields", {}))
        lines = [TEXT.format_map(line), *line["exception"].splitlines()]
        return "\n".join(each.encode("unicode_escape").decode() for each in lines)


def start(level: str, log_format: str) -> None:
    """Send what is logged to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(Lines(log_format))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs each request to an upstream
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of each write to a client that has left
