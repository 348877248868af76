"""The handshake: each side of a connection proves that it knows the job's key before anything else is read.

Each side answers the other's random challenge with a keyed digest (HMAC-SHA-256); nothing is ever unpickled.

    listener   GREETING  challenge
    caller     GREETING  challenge  digest  dialled, claim
    listener                        digest  verdict

Claim and verdict are frames (``framing.py``) of at most ``LONGEST_UNPROVEN`` bytes, whose content the users of this
module get only after the digest was found right. A digest covers

- the role, as ``store`` or ``launcher``, so that a proof made for one kind of listener is worth nothing to another;
- the side, listener or caller, so that a digest cannot be sent back to the process that made it;
- both challenges, so that a recorded proof is worth nothing to another connection;
- the address and port that the caller has dialled, which the listener compares with its own and those under which it
  was announced. So the proof is worth nothing to a process in between that passes everything on;
- the claim or the verdict, so that neither can be changed on the way.

A listener answers a wrong key with its own digest, so the caller learns that the keys differ. Without a key both sides
use an empty one; then the handshake proves only that the other side is Phalanx. After it every message carries a digest
(``session.py``), and is encrypted if both sides agree on that by claim and verdict (``encryption.py``).
"""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Collection
from dataclasses import dataclass

from phalanx.wire.framing import LONGEST_UNPROVEN, PREFIX_BYTES, Malformed, end_of_frame, frame
from phalanx.wire.key import Key
from phalanx.wire.session import Session

Address = tuple[str, int]


GREETING = b"phalanx 3\n"
_CHALLENGE_BYTES = 32
_DIGEST_BYTES = 32
GREETING_BYTES = len(GREETING) + _CHALLENGE_BYTES
_SIGNED = GREETING_BYTES + _DIGEST_BYTES  # where the caller's claim begins
LONGEST_PROOF = _SIGNED + PREFIX_BYTES + LONGEST_UNPROVEN


class NoProof(Exception):
    """The other side did not try to prove anything: its bytes are not of this protocol."""

    def __init__(self) -> None:
        super().__init__("what answers there is not Phalanx")


class WrongKey(Exception):
    """The other side knows another key; a listener sends ``answer``, so that the caller learns that."""

    def __init__(self, answer: bytes = b"") -> None:
        super().__init__("the other side proves another key")
        self.answer = answer


class PassedOn(Exception):
    """The caller knows the key, but has dialled another listener, which passed its bytes on."""

    def __init__(self, dialled: str) -> None:
        super().__init__(f"the caller has dialled {dialled}")
        self.dialled = dialled


@dataclass(frozen=True)
class Proven:
    """A caller that knows the key, and what it claims; ``nbytes`` of the received bytes belong to its proof."""

    claim: bytes
    nbytes: int
    _key: Key
    _role: str
    _challenges: bytes

    def answer(self, verdict: bytes) -> bytes:
        """Return the verdict as it is sent, with the listener's own proof."""
        return _sign(self._key, self._role, b"listener", self._challenges, verdict)

    def session(self) -> Session:
        """Return the listener's side of what follows the handshake."""
        return Session(_session_key(self._key, self._role, self._challenges), is_listener=True)


class Challenge:
    """The listener's side of one handshake, which begins with ``greeting``; the caller must expect the same role."""

    def __init__(self, key: Key, role: str) -> None:
        self._key = key
        self._role = role
        self._own = os.urandom(_CHALLENGE_BYTES)
        self.greeting = GREETING + self._own

    def check(self, data: bytes | bytearray, here: Collection[Address]) -> Proven | None:
        """Judge all that the caller has sent so far; None while more must come.

        Args:
            data: what it has sent.
            here: the addresses and ports at which this listener may have been dialled, as numbers.

        Raises:
            NoProof, WrongKey, PassedOn: the caller has proven nothing, and never will on this connection.
        """
        if not data.startswith(GREETING[: len(data)]):
            raise NoProof
        end = _end_of_signed(data, _SIGNED)
        if end is None or len(data) < end:
            return None
        theirs = bytes(data[len(GREETING) : GREETING_BYTES])
        signed = bytes(data[GREETING_BYTES:end])
        if not _is_right(self._key, self._role, b"caller", self._own + theirs, signed):
            raise WrongKey(_sign(self._key, self._role, b"listener", theirs + self._own, b""))
        dialled, newline, claim = _content(signed).partition(b"\n")
        if not newline:
            raise NoProof
        if dialled not in map(_as_sent, here):
            raise PassedOn(dialled.decode("ascii", "replace"))
        return Proven(claim, end, self._key, self._role, theirs + self._own)


class Response:
    """The caller's side of one handshake; ``message`` is what is sent in answer to the greeting.

    Args:
        key: the job's key.
        role: what kind of listener the caller expects.
        greeting: what the listener has sent, ``GREETING_BYTES`` of it.
        dialled: the address and port to which the caller is connected, as numbers.
        claim: what the caller says of itself.

    Raises:
        NoProof: the greeting is not Phalanx's.
    """

    def __init__(self, key: Key, role: str, greeting: bytes, dialled: Address, claim: bytes) -> None:
        if len(greeting) != GREETING_BYTES or not greeting.startswith(GREETING):
            raise NoProof
        own, theirs = os.urandom(_CHALLENGE_BYTES), greeting[len(GREETING) :]
        self._key = key
        self._role = role
        self._challenges = own + theirs
        self.message = GREETING + own + _sign(key, role, b"caller", theirs + own, _as_sent(dialled) + b"\n" + claim)

    def missing(self, data: bytes | bytearray) -> int:
        """Return how many bytes of the answer are certainly missing; 0 once ``data`` is all of it."""
        end = _end_of_signed(data, _DIGEST_BYTES)
        return (_DIGEST_BYTES + PREFIX_BYTES if end is None else end) - len(data)

    def check(self, data: bytes) -> bytes:
        """Return the verdict in the listener's answer; raise WrongKey if it has not proven that it knows the key."""
        if not _is_right(self._key, self._role, b"listener", self._challenges, data):
            raise WrongKey
        return _content(data)

    def session(self) -> Session:
        """Return the caller's side of what follows the handshake."""
        return Session(_session_key(self._key, self._role, self._challenges), is_listener=False)


def _sign(key: Key, role: str, side: bytes, challenges: bytes, content: bytes) -> bytes:
    return _digest(key, role, side, challenges, content) + frame(content, longest=LONGEST_UNPROVEN)


def _is_right(key: Key, role: str, side: bytes, challenges: bytes, signed: bytes) -> bool:
    expected = _digest(key, role, side, challenges, _content(signed))
    return hmac.compare_digest(signed[:_DIGEST_BYTES], expected)


def _content(signed: bytes) -> bytes:
    return signed[_DIGEST_BYTES + PREFIX_BYTES :]


def _end_of_signed(data: bytes | bytearray, start: int) -> int | None:
    try:
        return end_of_frame(data, start, longest=LONGEST_UNPROVEN)
    except Malformed:
        raise NoProof from None


def _digest(key: Key, role: str, side: bytes, challenges: bytes, content: bytes) -> bytes:
    return hmac.digest(key.secret, role.encode() + b"\n" + side + b"\n" + challenges + content, "sha256")


def _session_key(key: Key, role: str, challenges: bytes) -> bytes:
    return _digest(key, role, b"session", challenges, b"")


def _as_sent(address: Address) -> bytes:
    """Spell an address and a port in one way: without a zone, and IPv4 as such also in a socket for IPv6."""
    number = ipaddress.ip_address(address[0].partition("%")[0])
    if isinstance(number, ipaddress.IPv6Address) and number.ipv4_mapped is not None:
        number = number.ipv4_mapped
    return f"{number} port {address[1]}".encode()
