"""The other side of a connection: what uvicorn's protocols write to, in this process; WebSocket frames."""

import asyncio
from typing import Any

from websockets.frames import Frame, Opcode

UPGRADE = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
UPGRADE["Sec-WebSocket-Key"] = "A" * 22 + "=="


def frame(data: bytes, opcode: Opcode = Opcode.TEXT, fin: bool = True, mask: bool = True) -> bytes:
    """Encode a frame; those of a client have a mask."""
    return Frame(opcode, data, fin).serialize(mask=mask)


class Wire(asyncio.Transport):
    """What has been written to it, whether it is read, and whether it has been closed."""

    def __init__(self) -> None:
        super().__init__({"socket": None})
        self.written = b""
        self.is_read = True
        self.is_closed = False
        self.max_size = 0  # bytes of a read

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
