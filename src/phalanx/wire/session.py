"""Every message of a proven connection carries a keyed digest of its number and its bytes.

So a process in between can neither add a message nor change, drop, repeat or swap one. It can still read them, unless
the session is an encrypted one (``encryption.py``).

The digest is BLAKE2b, about a microsecond for a small message. For a large one the sender may take HMAC-SHA-256, which
is twice as quick on processors that have instructions for it. Which one it is stands in the message itself.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from hashlib import blake2b

from phalanx.wire.framing import PREFIX_BYTES, Malformed, end_of_frame

TAG_BYTES = 16


class Session:
    """One side of a connection after the handshake. The messages of each direction are numbered for themselves.

    Args:
        key: 32 to 64 bytes that only the two sides know.
        is_listener: which side this is, so that a message cannot be sent back to the side that made it.

    Attributes:
        outgoing_person, incoming_person: what else BLAKE2b takes for each direction.
        sent, received: how many messages there have been.
    """

    encrypts = False  # whether others cannot read what goes by sealed()

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
        outgoing, incoming = (hmac.new(key, digestmod="sha256") for key in self._sha_keys)
        return outgoing, incoming

    def seal(self, message: bytes) -> bytes:
        """Return the next message as it is sent, with its digest behind it."""
        return message + self.digest(message)

    def digest(self, *parts: bytes | memoryview, sha: bool = False) -> bytes:
        """Return the digest of the next message, which has to say somewhere whether it is HMAC-SHA-256 (``sha``)."""
        tag = _tag(self._by_sha[0].copy() if sha else self._outgoing.copy(), self.sent, *parts)
        self.sent += 1
        return tag

    def check_parts(self, tag: bytes | bytearray | memoryview, *parts: bytes | memoryview, sha: bool = False) -> None:
        """Compare the digest of the next message, whose parts may lie in several places; raise Malformed."""
        digest = self._by_sha[1].copy() if sha else self._incoming.copy()
        if not hmac.compare_digest(_tag(digest, self.received, *parts), tag):
            raise Malformed("it is not the other side's next message")
        self.received += 1

    def check(self, data: bytearray, length: int) -> None:
        """Compare the digest behind the next message, which is the first ``length`` bytes of ``data``."""
        with memoryview(data) as view, view[:length] as message:
            self.check_parts(data[length : length + TAG_BYTES], message)

    def take_messages(self, data: bytearray) -> Iterator[bytes]:
        """Take the messages that have come whole, each in a frame, off the front of ``data``; raise Malformed."""
        while (end := end_of_frame(data)) is not None and len(data) >= end + TAG_BYTES:
            self.check(data, end)
            with memoryview(data) as view:
                message = bytes(view[PREFIX_BYTES:end])
            del data[: end + TAG_BYTES]
            yield message

    def sealed(
        self, parts: Sequence[bytes | memoryview], clear_nbytes: int, *, sha: bool = False
    ) -> list[bytes | memoryview]:
        """Return the parts of the next message as they are sent, with ``TAG_BYTES`` behind them.

        The first ``clear_nbytes`` are not encrypted.
        """
        return [*parts, self.digest(*parts, sha=sha)]

    def opened(self, message: bytes, tag: bytes, clear_nbytes: int, *, sha: bool = False) -> bytes:
        """Return the next message, of which ``message`` and ``tag`` have come; raise Malformed if it is not that."""
        self.check_parts(tag, message, sha=sha)
        return message

    def open_in_place(self, tag: bytes, clear: bytes, secret: memoryview, *, sha: bool = False) -> None:
        """Open the next message where it has come, with ``clear`` before it; raise Malformed if it is not that."""
        self.check_parts(tag, clear, secret, sha=sha)


def _tag(digest: blake2b | hmac.HMAC, number: int, *parts: bytes | memoryview) -> bytes:
    digest.update(number.to_bytes(8, "big"))
    for part in parts:
        digest.update(part)
    return digest.digest()[:TAG_BYTES]


@cache
def sha_is_quicker() -> bool:
    """Measure once whether HMAC-SHA-256 is the quicker digest of a large message in this process."""
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
