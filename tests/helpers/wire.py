"""The other side of a connection, in this process: what uvicorn's protocols write to, and pause."""

import asyncio
from typing import Any


class Wire(asyncio.Transport):
    """What has been written to it, whether it is read, and whether it has been closed."""

    def __init__(self) -> None:
        super().__init__({"socket": None})
        self.written = b""
        self.is_read = True
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        pass  # whoever sends the bytes chooses who gets them

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = write_eof = close
