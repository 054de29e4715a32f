"""Text that a client keeps for us and cannot change: the summary that a later request gives back.

    text --seal(key, purpose, owner)--> blob --unseal(key, purpose, owner)--> text

Authority: https://platform.openai.com/docs/guides/reasoning#encrypted-reasoning-items wants an opaque blob.
Here it is compressed and authenticated (HMAC-SHA256, RFC 2104), not secret: who has it has seen the text.

Not here: where the key comes from (server.py, --secret), what is sealed (responses.py, api.py).
"""

import base64
import hashlib
import hmac
import zlib


class BadSeal(ValueError):
    """The blob is not one of ours, or was made with another key, or has been changed."""


def seal(key: bytes, purpose: str, owner: str, text: str) -> str:
    """A blob that is good for this purpose only, and for this client; neither has a NUL in it."""
    packed = zlib.compress(text.encode())
    return base64.urlsafe_b64encode(_mac(key, purpose, owner, packed) + packed).decode()


def unseal(key: bytes, purpose: str, owner: str, blob: str) -> str:
    """The text; raises BadSeal."""
    try:
        data = base64.urlsafe_b64decode(blob.encode())
    except ValueError as error:
        raise BadSeal("expected a blob that this server has made, got no base64") from error
    mac, packed = data[:32], data[32:]
    if not hmac.compare_digest(mac, _mac(key, purpose, owner, packed)):
        made = "that this server has made for this client, with the key that it has now"
        raise BadSeal(f"expected a blob of {purpose} {made}")
    return zlib.decompress(packed).decode()


def _mac(key: bytes, purpose: str, owner: str, data: bytes) -> bytes:
    return hmac.digest(key, b"\0".join((purpose.encode(), owner.encode(), data)), hashlib.sha256)
