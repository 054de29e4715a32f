"""Text that a client keeps for us and cannot change: the summary that a later request gives back.

    text --seal(key)--> blob --unseal(key)--> text

Authority: https://platform.openai.com/docs/guides/reasoning#encrypted-reasoning-items wants an opaque blob.
Here it is compressed and authenticated (HMAC-SHA256, RFC 2104), not secret: who has it has seen the text.
"""

import base64
import binascii
import hashlib
import hmac
import zlib

MAX_TEXT_BYTES = 16 * 2**20  # a small blob must not unpack to fill our memory


class BadSeal(ValueError):
    """The blob is not one of ours, or was made with another key, or has been changed."""


def seal(key: bytes, text: str) -> str:
    packed = zlib.compress(text.encode())
    return base64.urlsafe_b64encode(_mac(key, packed) + packed).decode()


def unseal(key: bytes, blob: str) -> str:
    """The text; raises BadSeal."""
    try:
        data = base64.urlsafe_b64decode(blob.encode())
    except (ValueError, binascii.Error) as error:
        raise BadSeal("expected a blob that this server has made, got no base64") from error
    mac, packed = data[:32], data[32:]
    if not hmac.compare_digest(mac, _mac(key, packed)):
        raise BadSeal("expected a blob that this server has made, with the key that it has now")
    return zlib.decompressobj().decompress(packed, MAX_TEXT_BYTES).decode()


def _mac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, hashlib.sha256)
