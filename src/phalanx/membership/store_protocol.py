"""Protocol of rank 0's store: the claim with which a rank joins, the verdict, then requests.

Claim and verdict are JSON in the handshake (``wire/proof.py``). Requests and answers are frames in msgpack, of a code,
a number and fields of bytes. If the join is open, any process can prove the key, so every value is checked.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, TypeVar

import msgspec

from phalanx.system.host import this_host
from phalanx.system.processes import has_ended, own_sight, start_of, state_if_stopped
from phalanx.topology.place import Place
from phalanx.wire.framing import Malformed, frame
from phalanx.wire.proof import NoProof
from phalanx.wire.sockets import KeepAlive

__all__ = ["KEEP_ALIVE", "ROLE", "Claim", "Code", "RankProcess", "Verdict", "own_claim", "pack", "unpack"]

T = TypeVar("T")

ROLE = "store"
# A host that vanishes counts as lost after 40 s: 10 s of silence, then six probes. The kernel sends no probes while a
# request is unacknowledged, so that has a limit of its own.
KEEP_ALIVE = KeepAlive(idle_s=10, interval_s=5, probes=6, unacknowledged_s=40)
_LONGEST_HOST = 255
_LONGEST_REASON = 900  # characters, of up to four bytes each


@dataclass(frozen=True)
class RankProcess:
    """The process of a rank.

    Attributes:
        start: when it was started, as ``system/processes.py`` counts.
        sight: equal for processes that see each other (``own_sight``); empty if none can.
    """

    rank: int
    pid: int
    start: int
    sight: str
    host: str

    @property
    def name(self) -> str:
        """The process, for people."""
        return f"pid {self.pid} on {self.host}"

    @property
    def is_seen(self) -> bool:
        """Return whether this process can look at it."""
        return bool(self.sight) and self.sight == own_sight()

    def has_ended(self) -> bool:
        """Return whether this process sees that it has ended."""
        return self.is_seen and has_ended(self.pid, self.start)

    def stopped_state(self) -> str:
        """Return the kernel's letter for its state if this process sees it stopped; else nothing."""
        return state_if_stopped(self.pid, self.start) if self.is_seen else ""


def own_process(rank: int) -> RankProcess:
    """Describe this process, which is this rank."""
    pid = os.getpid()
    return RankProcess(rank, pid, start_of(pid), own_sight(), this_host().name)


@dataclass(frozen=True)
class Claim(RankProcess):
    """The facts that a process gives about itself when it joins.

    Attributes:
        world_size: how many ranks there are.
        job: a digest of the job's id, from which the port is derived; empty where the port was given.
        attempt: how often the launcher has started the job anew.
        opening: which of the process's worlds this is: 1 for the first that it opens.
        node_rank: its host's index; -1 if its launcher does not say it.
        token: a secret that this process has chosen, by which rank 0 recognises its further connections.
    """

    world_size: int
    job: str = ""
    attempt: int = 0
    opening: int = 0
    node_rank: int = -1
    token: str = ""

    def encode(self) -> bytes:
        """Return the claim as it is sent."""
        return msgspec.json.encode(self)

    @staticmethod
    def decode(data: bytes) -> Claim:
        """Read a claim, without what cannot be printed of the host's name; raise NoProof if it is none."""
        claim = _decoded(Claim, data)
        return replace(claim, host=_printable(claim.host[:_LONGEST_HOST]))


@dataclass(frozen=True)
class Verdict:
    """Rank 0's answer to a claim.

    Attributes:
        kind: ``welcome``; ``refused``; ``other``: this is rank 0 of another job, or of an earlier world of this one,
            which will end.
        reason: why the process is not welcome, for people.
        pid, host, start, sight: rank 0's process, if the caller is welcome.
    """

    kind: Literal["welcome", "refused", "other"]
    reason: str = ""
    pid: int = 0
    host: str = ""
    start: int = 0
    sight: str = ""

    @property
    def rank_0(self) -> RankProcess:
        """Rank 0's process, which the caller may look at."""
        return RankProcess(0, self.pid, self.start, self.sight, self.host)

    def encode(self) -> bytes:
        """Return the verdict as it is sent."""
        return msgspec.json.encode(replace(self, reason=self.reason[:_LONGEST_REASON]))

    @staticmethod
    def decode(data: bytes) -> Verdict:
        """Read a verdict; raise NoProof if it is none, as of another version of Phalanx."""
        verdict = _decoded(Verdict, data)
        return replace(verdict, reason=_printable(verdict.reason))


def own_claim(place: Place, job: str, opening: int) -> Claim:
    """Make the claim of this process, with a new token; see :class:`Claim`."""
    node_rank = -1 if place.node_rank is None else place.node_rank
    return Claim(
        **asdict(own_process(place.rank)),
        world_size=place.world_size,
        job=job,
        attempt=place.attempt,
        opening=opening,
        node_rank=node_rank,
        token=secrets.token_hex(16),
    )


def _decoded(kind: type[T], data: bytes) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise NoProof from None


def _printable(text: str) -> str:
    return "".join(letter for letter in text if letter.isprintable())


# -- requests ------------------------------------------------------------------------------------------


class Code:
    """Codes of requests, then of answers.

    The fields of a request are keys, or keys and values in turn. The number of ADD is the summand. MISSING describes
    the ranks that have not joined.
    """

    SET, ADD, APPEND, COMPARE_SET, DELETE, CHECK, COUNT, LIST, READ, WAIT, MISSING = range(1, 12)
    # DONE carries the result, as a number or as fields. The field of FAILED is the reason.
    DONE, FAILED = 0, 1


_decode_request = msgspec.msgpack.Decoder(tuple[int, int, list[bytes]]).decode


def pack(code: int, number: int = 0, fields: Sequence[bytes] = ()) -> bytes:
    """Return a message, ready to be sealed; raise ValueError if it is too long."""
    return frame(msgspec.msgpack.encode((code, number, fields)))


def unpack(message: bytes) -> tuple[int, int, list[bytes]]:
    """Return code, number and fields of a message, which is without its frame; raise Malformed if it is none."""
    try:
        return _decode_request(message)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Malformed(str(error)) from None
