"""What both sides of a proven connection know: every message carries a keyed digest of its number and its bytes.

So a process that passes a connection on, or can change its packets, can neither add a message nor change, drop, repeat
or swap one without being noticed. It can still read them, unless the session is an encrypted one (``encryption.py``).

The digest is BLAKE2b with a key, cut to 16 bytes; about a microsecond for a small message. For a large one the sender
may take HMAC-SHA-256 instead, also cut to 16 bytes, which is twice as quick on processors that have instructions for
it, and slower on others. It has keys of its own, derived from the session's. Which digest it is stands in the message
itself, so nobody on the way can exchange it for the other one.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Sequence
from functools import cache, cached_property
from hashlib import blake2b

from phalanx.wire.framing import Malformed

__all__ = ["TAG_BYTES", "Session", "sha_is_quicker"]

TAG_BYTES = 16


class Session:
    """One side of a connection after the handshake. The messages of each direction are numbered for themselves.

    Args:
        key: 32 to 64 bytes that only the two sides know.
        is_listener: which side this is, so that a message cannot be sent back to the side that made it.

    Attributes:
        encrypts: whether others cannot read what goes by :meth:`sealed`.
        key: the same.
        outgoing_person, incoming_person: what else BLAKE2b takes for each direction.
        sent, received: how many messages there have been; whoever computes a digest elsewhere counts its message here.
    """

    encrypts = False

    def __init__(self, key: bytes, *, is_listener: bool) -> None:
        persons = (b"listener", b"caller") if is_listener else (b"caller", b"listener")
        # A copy of a digest that has the key costs less than another one with the same key.
        self._outgoing, self._incoming = (blake2b(digest_size=TAG_BYTES, key=key, person=person) for person in persons)
        self._sha_keys = [blake2b(key=key, person=person + b" sha").digest() for person in persons]
        self.key = key
        self.outgoing_person, self.incoming_person = persons
        self.sent = self.received = 0

    @cached_property
    def _by_sha(self) -> tuple[hmac.HMAC, hmac.HMAC]:
        """The outgoing and the incoming one."""
        outgoing, incoming = (hmac.new(key, digestmod="sha256") for key in self._sha_keys)
        return outgoing, incoming

    def seal(self, message: bytes) -> bytes:
        """The next message as it is sent, with its digest behind it."""
        return message + self.digest(message)

    def digest(self, *parts: bytes | memoryview, sha: bool = False) -> bytes:
        """The digest of the next message, for a sender that sends its parts as they lie, and this behind them.

        Args:
            parts: the message, which has to say somewhere which digest it has.
            sha: take HMAC-SHA-256.
        """
        tag = _tag(self._by_sha[0].copy() if sha else self._outgoing.copy(), self.sent, *parts)
        self.sent += 1
        return tag

    def check_parts(self, tag: bytes | bytearray | memoryview, *parts: bytes | memoryview, sha: bool = False) -> None:
        """:meth:`check` for a message whose parts lie in several places, and which says which digest it has."""
        digest = self._by_sha[1].copy() if sha else self._incoming.copy()
        if not hmac.compare_digest(_tag(digest, self.received, *parts), tag):
            raise Malformed("it is not the other side's next message")
        self.received += 1

    def check(self, data: bytearray, length: int) -> None:
        """Compare the digest behind the next message, which is the first ``length`` bytes of ``data``.

        Raises:
            Malformed: the other side did not send this, or not as its next message.
        """
        with memoryview(data) as view, view[:length] as message:
            self.check_parts(data[length : length + TAG_BYTES], message)

    def sealed(
        self, parts: Sequence[bytes | memoryview], clear_nbytes: int, *, sha: bool = False
    ) -> list[bytes | memoryview]:
        """The next message as it is sent, with ``TAG_BYTES`` behind it: the same parts, or if it is encrypted, others.

        Args:
            parts: the message, which has to say somewhere which digest it has.
            clear_nbytes: how many bytes at its beginning are not encrypted.
            sha: take HMAC-SHA-256.
        """
        return [*parts, self.digest(*parts, sha=sha)]

    def opened(self, message: memoryview, tag: memoryview, clear_nbytes: int, *, sha: bool = False) -> memoryview:
        """The next message, of which ``message`` and ``tag`` have come.

        Raises:
            Malformed: the other side did not send this, or not as its next message.
        """
        self.check_parts(tag, message, sha=sha)
        return message

    def open_in_place(self, tag: bytes, clear: bytes, secret: memoryview, *, sha: bool = False) -> None:
        """:meth:`opened` for a message that stays where it has come, with ``clear`` before it.

        Raises:
            Malformed: the other side did not send this, or not as its next message.
        """
        self.check_parts(tag, clear, secret, sha=sha)


def _tag(digest: blake2b | hmac.HMAC, number: int, *parts: bytes | memoryview) -> bytes:
    digest.update(number.to_bytes(8, "big"))
    for part in parts:
        digest.update(part)
    return digest.digest()[:TAG_BYTES]


@cache
def sha_is_quicker() -> bool:
    """Whether HMAC-SHA-256 is the quicker digest of a large message in this process; measured once."""
    session, message = Session(bytes(32), is_listener=True), bytes(1 << 15)
    best = []
    for sha in (False, True):
        times = []
        for _ in range(4):
            began = time.perf_counter()
            session.digest(message, sha=sha)
            times.append(time.perf_counter() - began)
        best.append(min(times))
    return best[1] < best[0]
