"""Encryption of a proven connection: a key that its two ends agree on, and messages that nobody else can read.

The ends exchange public keys (X25519) made for this connection alone, in the claim and the verdict of the handshake
(``proof.py``), which its digests cover. The keys of the messages are derived from what both ends compute of these, and
from the session's key. So a recorded connection cannot be read later by somebody who learns the job's key, or who only
breaks X25519.

Each direction has its own keys, and each message is sealed by AES-256-GCM with its number as the nonce. A key serves
for ``MESSAGES_PER_KEY`` messages, far from what AES-GCM allows (RFC 8446, 5.5). What stays readable: the handshake, the
sizes of the messages, and the first bytes of each, which its user needs to find its end; they are authenticated too.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from phalanx.errors import InitializationError
from phalanx.wire.framing import Malformed
from phalanx.wire.session import Session

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
except ImportError as _missing:
    raise InitializationError(
        f"encryption needs the package cryptography, which cannot be imported here ({_missing}): "
        'pip install ".[encryption]" in a checkout of Phalanx, on every host'
    ) from _missing

MESSAGES_PER_KEY = 1 << 20
_NONCE_BYTES = 12


class Exchange:
    """One end's half of the key exchange, for one connection; the other end needs ``public``."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self._public = self._private.public_key().public_bytes_raw()
        self.public = self._public.hex()

    def session(self, proven: Session, theirs: object, *, is_listener: bool) -> EncryptedSession:
        """Return what follows the handshake ``proven``; raise Malformed if ``theirs`` is not a public key."""
        try:
            public = bytes.fromhex(str(theirs))
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:  # also for keys with which everybody could compute what is shared
            raise Malformed(f"a public key that cannot be used: {error}") from error
        of_caller, of_listener = (public, self._public) if is_listener else (self._public, public)
        secret = blake2b(shared + of_caller + of_listener, key=proven.key, person=b"encryption").digest()
        return EncryptedSession(secret, is_listener=is_listener)


class EncryptedSession(Session):
    """A session whose messages only the other end can read, if they go by :meth:`sealed`.

    A message by :meth:`seal` still has a digest only. Messages have the same sizes either way.
    """

    encrypts = True

    def __init__(self, key: bytes, *, is_listener: bool) -> None:
        super().__init__(key, is_listener=is_listener)
        self._sealing = _Direction(key, self.outgoing_person)
        self._opening = _Direction(key, self.incoming_person)

    def sealed(
        self, parts: Sequence[bytes | memoryview], clear_nbytes: int, *, sha: bool = False
    ) -> list[bytes | memoryview]:
        if len(parts) == 2 and len(parts[0]) == clear_nbytes:
            clear, secret = bytes(parts[0]), parts[1]
        else:
            whole = b"".join(parts)
            clear, secret = whole[:clear_nbytes], memoryview(whole)[clear_nbytes:]
        number = self.sent
        self.sent += 1  # first, so that no signal can have another message sealed with the same nonce
        cipher, nonce = self._sealing.at(number)
        return [clear, cipher.encrypt(nonce, secret, clear)]

    def opened(self, message: bytes, tag: bytes, clear_nbytes: int, *, sha: bool = False) -> bytes:
        clear = message[:clear_nbytes]
        return clear + self._open(clear, message[clear_nbytes:], tag)

    def open_in_place(self, tag: bytes, clear: bytes, secret: memoryview, *, sha: bool = False) -> None:
        secret[:] = self._open(clear, secret, tag)

    def _open(self, clear: bytes, secret: bytes | memoryview, tag: bytes) -> bytes:
        cipher, nonce = self._opening.at(self.received)
        try:
            opened = cipher.decrypt(nonce, b"".join((secret, tag)), clear)
        except InvalidTag:
            raise Malformed("it is not the other side's next message") from None
        self.received += 1
        return opened


class _Direction:
    """The keys of one direction, one after the other; for one thread at a time."""

    def __init__(self, key: bytes, person: bytes) -> None:
        self._secret = blake2b(key=key, person=person + b" aes").digest()
        self._number = -1  # of the key
        self._cipher: AESGCM

    def at(self, message: int) -> tuple[AESGCM, bytes]:
        """Return the cipher and the nonce of a message."""
        number = message // MESSAGES_PER_KEY
        if number != self._number:
            self._cipher = AESGCM(blake2b(number.to_bytes(8, "big"), key=self._secret, digest_size=32).digest())
            self._number = number
        return self._cipher, message.to_bytes(_NONCE_BYTES, "big")
