"""What both sides of a proven connection know: every message carries a keyed digest of its number and its bytes.

So a process that passes a connection on, or can change its packets, can neither add a message nor change, drop, repeat
or swap one without being noticed. It can still read them: nothing is encrypted.

The digest is BLAKE2b with a key, cut to 16 bytes; about a microsecond for a small message.
"""

from __future__ import annotations

import hmac
from hashlib import blake2b

from phalanx.wire.framing import Malformed

__all__ = ["TAG_BYTES", "Session"]

TAG_BYTES = 16


class Session:
    """One side of a connection after the handshake. The messages of each direction are numbered for themselves.

    Args:
        key: 32 to 64 bytes that only the two sides know.
        is_listener: which side this is, so that a message cannot be sent back to the side that made it.
    """

    def __init__(self, key: bytes, *, is_listener: bool) -> None:
        self._key = key
        self._persons = (b"listener", b"caller") if is_listener else (b"caller", b"listener")
        self._sent = self._received = 0

    def seal(self, message: bytes) -> bytes:
        """The next message as it is sent, with its digest behind it."""
        tag = self._tag(self._persons[0], self._sent, message)
        self._sent += 1
        return message + tag

    def digest(self, *parts: bytes | memoryview) -> bytes:
        """The digest of the next message, for a sender that sends its parts as they lie, and this behind them."""
        tag = self._tag(self._persons[0], self._sent, *parts)
        self._sent += 1
        return tag

    def check_parts(self, tag: bytes | memoryview, *parts: bytes | memoryview) -> None:
        """:meth:`check` for a message whose parts lie in several places."""
        if not hmac.compare_digest(self._tag(self._persons[1], self._received, *parts), bytes(tag)):
            raise Malformed("it is not the other side's next message")
        self._received += 1

    def check(self, data: bytearray, length: int) -> None:
        """Compare the digest behind the next message, which is the first ``length`` bytes of ``data``.

        Raises:
            Malformed: the other side did not send this, or not as its next message.
        """
        with memoryview(data) as view, view[:length] as message:
            tag = self._tag(self._persons[1], self._received, message)
        if not hmac.compare_digest(tag, data[length : length + TAG_BYTES]):
            raise Malformed("it is not the other side's next message")
        self._received += 1

    def _tag(self, person: bytes, number: int, *parts: bytes | memoryview) -> bytes:
        digest = blake2b(number.to_bytes(8, "big"), digest_size=TAG_BYTES, key=self._key, person=person)
        for part in parts:
            digest.update(part)
        return digest.digest()
