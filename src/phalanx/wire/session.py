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
        persons = (b"listener", b"caller") if is_listener else (b"caller", b"listener")
        # A copy of a digest that has the key costs less than another one with the same key.
        self._outgoing, self._incoming = (blake2b(digest_size=TAG_BYTES, key=key, person=person) for person in persons)
        self._sent = self._received = 0

    def seal(self, message: bytes) -> bytes:
        """The next message as it is sent, with its digest behind it."""
        return message + self.digest(message)

    def digest(self, *parts: bytes | memoryview) -> bytes:
        """The digest of the next message, for a sender that sends its parts as they lie, and this behind them."""
        tag = _tag(self._outgoing.copy(), self._sent, *parts)
        self._sent += 1
        return tag

    def check_parts(self, tag: bytes | bytearray | memoryview, *parts: bytes | memoryview) -> None:
        """:meth:`check` for a message whose parts lie in several places."""
        if not hmac.compare_digest(_tag(self._incoming.copy(), self._received, *parts), tag):
            raise Malformed("it is not the other side's next message")
        self._received += 1

    def check(self, data: bytearray, length: int) -> None:
        """Compare the digest behind the next message, which is the first ``length`` bytes of ``data``.

        Raises:
            Malformed: the other side did not send this, or not as its next message.
        """
        with memoryview(data) as view, view[:length] as message:
            self.check_parts(data[length : length + TAG_BYTES], message)


def _tag(digest: blake2b, number: int, *parts: bytes | memoryview) -> bytes:
    digest.update(number.to_bytes(8, "big"))
    for part in parts:
        digest.update(part)
    return digest.digest()
