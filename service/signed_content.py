"""Text that a client keeps for us and cannot change: `encrypted_content` of reasoning and of a compaction.

    text --seal(key, owner, purpose)--> blob --unseal(key, owner, purpose)--> text

Authority: https://platform.openai.com/docs/guides/reasoning#encrypted-reasoning-items wants an opaque blob.
Here it is compressed and authenticated (HMAC-SHA256, RFC 2104), not secret: who has it has seen the text.

Rules of this file:
1. A blob is good for the owner and the purpose that it was made for, and for no other.
2. Blobs are compared in constant time, and nothing of one is unpacked before its HMAC has been checked.

Not here: where the key comes from (server.py, --secret), what is sealed (responses.py, api.py).
"""

import base64
import hashlib
import hmac
import zlib

N_MAC_BYTES = hashlib.sha256().digest_size  # at the start of what the base64 holds


class BadSeal(ValueError):
    """The blob is not one of ours, or was made with another key, or has been changed."""


def seal(key: bytes, owner: str, purpose: str, text: str) -> str:
    """A blob that is good for this owner and purpose only; neither name has a NUL in it."""
    packed = zlib.compress(text.encode())
    return base64.urlsafe_b64encode(_mac(key, owner, purpose, packed) + packed).decode()


def unseal(key: bytes, owner: str, purpose: str, blob: str) -> str:
    """The text; raises BadSeal."""
    try:
        data = base64.urlsafe_b64decode(blob.encode())
    except ValueError as error:
        raise BadSeal("expected a blob that this server has made, got no base64") from error
    mac, packed = data[:N_MAC_BYTES], data[N_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(key, owner, purpose, packed)):
        made = "that this server has made for this client, with the key that it has now"
        raise BadSeal(f"expected a blob of {purpose} {made}")
    return zlib.decompress(packed).decode()


def _mac(key: bytes, owner: str, purpose: str, data: bytes) -> bytes:
    return hmac.digest(key, b"\0".join((purpose.encode(), owner.encode(), data)), hashlib.sha256)
