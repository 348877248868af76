"""Who may join: each side proves that it knows the job's key, and says who it is, before anything else is heard.

As in the standard library's ``multiprocessing.connection``, each side answers the other's random challenge with a keyed
digest (HMAC-SHA-256); nothing is ever unpickled. The digest covers what its sender says of itself, both challenges and
the sender's role, so an answer can be neither changed, nor used again, nor sent back to whoever gave it.

    rank 0   GREETING  challenge
    a rank   GREETING  challenge  digest  length  claim
    rank 0                        digest  length  verdict

Claim and verdict are JSON, which is read only after the digest was found right. What follows is not encrypted and
carries no digests: who can change packets on the way is not kept out, nor is he by torch, MPI or NCCL.
"""

from __future__ import annotations

import hmac
import json
import os
import struct
from dataclasses import asdict, dataclass, replace

from phalanx.system.host import this_host
from phalanx.wire.key import Key

__all__ = [
    "CHALLENGE_BYTES",
    "GREETING",
    "GREETING_BYTES",
    "Claim",
    "NoProof",
    "Verdict",
    "WrongKey",
    "answer",
    "claimed",
    "greeting",
    "own_claim",
    "read_verdict",
    "verdict",
    "verdict_length",
]

GREETING = b"phalanx 1\n"
CHALLENGE_BYTES = 32
_DIGEST_BYTES = 32
_LENGTH = struct.Struct("!H")
LONGEST_WORDS = 4096
GREETING_BYTES = len(GREETING) + CHALLENGE_BYTES
_ANSWER_BYTES = GREETING_BYTES + _DIGEST_BYTES + _LENGTH.size
_VERDICT_BYTES = _DIGEST_BYTES + _LENGTH.size


class NoProof(Exception):
    """Bytes that are no attempt to prove anything: something else than a rank, or than rank 0, is at the other end."""


class WrongKey(Exception):
    """The other end follows the protocol and knows another key."""


@dataclass(frozen=True)
class Claim:
    """What a process says of itself when it joins.

    Attributes:
        rank, world_size: its place.
        pid, host: the process, for people.
        job: what names the job, where its port is derived from that; empty where the port was given.
        attempt: how often the launcher has started the job anew.
        opening: how many worlds the process has opened before.
        node_rank: its host's index, if its launcher says it.
        pass_word: what rank 0 gave this process when it joined; empty the first time.
    """

    rank: int
    world_size: int
    pid: int
    host: str
    job: str = ""
    attempt: int = 0
    opening: int = 0
    node_rank: int | None = None
    pass_word: str = ""

    @property
    def name(self) -> str:
        """The process, for people."""
        return f"pid {self.pid} on {self.host}"


@dataclass(frozen=True)
class Verdict:
    """Rank 0's answer.

    Attributes:
        word: ``welcome``; ``refused``; ``other``, this is another job's rank 0; ``earlier``, this is rank 0 of an
            earlier attempt, which will end.
        said: the pass word for further connections, or why not.
    """

    word: str
    said: str = ""


def own_claim(rank: int, world_size: int, job: str, attempt: int, opening: int, node_rank: int | None) -> Claim:
    """The claim of this process."""
    return Claim(rank, world_size, os.getpid(), this_host().name, job, attempt, opening, node_rank)


def greeting() -> bytes:
    """What rank 0 says first: its last ``CHALLENGE_BYTES`` are the challenge."""
    return GREETING + os.urandom(CHALLENGE_BYTES)


def answer(key: Key, greeted: bytes, claim: Claim) -> tuple[bytes, bytes]:
    """A rank's answer to rank 0's greeting, and the challenge in it.

    Raises:
        NoProof: no rank 0 of Phalanx says that.
    """
    if len(greeted) != GREETING_BYTES or not greeted.startswith(GREETING):
        raise NoProof
    own = os.urandom(CHALLENGE_BYTES)
    words = json.dumps(asdict(claim)).encode()
    digest = _digest(key, b"rank", greeted[-CHALLENGE_BYTES:], own, words)
    return GREETING + own + digest + _LENGTH.pack(len(words)) + words, own


def claimed(key: Key, greeted: bytes, data: bytes | bytearray) -> tuple[Claim, bytes, int] | None:
    """What a rank claims, if it has proven that it may: the claim, its challenge, and how many bytes that took.

    Args:
        key: the job's.
        greeted: the greeting that this connection was given.
        data: what has come from it so far; None is returned while that is not all.

    Raises:
        NoProof, WrongKey: it has proven nothing.
    """
    if not data.startswith(GREETING[: len(data)]):
        raise NoProof
    if len(data) < _ANSWER_BYTES:
        return None
    (length,) = _LENGTH.unpack_from(data, _ANSWER_BYTES - _LENGTH.size)
    if length > LONGEST_WORDS:
        raise NoProof
    end = _ANSWER_BYTES + length
    if len(data) < end:
        return None
    theirs = bytes(data[len(GREETING) : GREETING_BYTES])
    digest, words = bytes(data[GREETING_BYTES : GREETING_BYTES + _DIGEST_BYTES]), bytes(data[_ANSWER_BYTES:end])
    if not hmac.compare_digest(digest, _digest(key, b"rank", greeted[-CHALLENGE_BYTES:], theirs, words)):
        raise WrongKey
    return _claim(words), theirs, end


def _claim(words: bytes) -> Claim:
    """The claim in these words. With an open join anybody can prove the key, so it is not believed to be one yet."""
    try:
        claim = Claim(**json.loads(words))
    except (TypeError, ValueError, RecursionError):
        raise NoProof from None
    numbers = (claim.rank, claim.world_size, claim.pid, claim.attempt, claim.opening, claim.node_rank or 0)
    texts = (claim.host, claim.job, claim.pass_word)
    if not all(type(number) is int for number in numbers) or not all(isinstance(text, str) for text in texts):
        raise NoProof
    # It will be printed.
    return replace(claim, host="".join(letter for letter in claim.host[:255] if letter.isprintable()))


def verdict(key: Key, greeted: bytes, theirs: bytes, what: Verdict) -> bytes:
    """Rank 0's verdict, with its own proof."""
    words = json.dumps(asdict(what)).encode()[:LONGEST_WORDS]
    return _digest(key, b"rank 0", theirs, greeted[-CHALLENGE_BYTES:], words) + _LENGTH.pack(len(words)) + words


def verdict_length(data: bytes | bytearray) -> int:
    """How many bytes the verdict has in all; how many it takes to know that, while fewer are there.

    Raises:
        NoProof: no verdict begins like this.
    """
    if len(data) < _VERDICT_BYTES:
        return _VERDICT_BYTES
    (length,) = _LENGTH.unpack_from(data, _DIGEST_BYTES)
    if length > LONGEST_WORDS:
        raise NoProof
    return _VERDICT_BYTES + int(length)


def read_verdict(key: Key, greeted: bytes, own: bytes, data: bytes) -> Verdict:
    """What rank 0 says, if it has proven that it is.

    Raises:
        WrongKey: it has not.
        NoProof: it has, but speaks another version.
    """
    words = data[_VERDICT_BYTES:]
    if not hmac.compare_digest(data[:_DIGEST_BYTES], _digest(key, b"rank 0", own, greeted[-CHALLENGE_BYTES:], words)):
        raise WrongKey
    try:
        return Verdict(**json.loads(words))
    except (TypeError, ValueError):
        raise NoProof from None


def _digest(key: Key, role: bytes, first: bytes, second: bytes, words: bytes) -> bytes:
    return hmac.digest(key.secret, role + b"\n" + first + second + words, "sha256")
