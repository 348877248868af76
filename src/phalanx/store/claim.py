"""The claim of a process that joins the store, by which it says what it is, and rank 0's verdict; both are JSON.

The handshake (``wire/proof.py``) carries both, and hands them out only after the key was proven. If the join is open,
any process can prove the key, so each field of a claim is checked before the claim is used.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass, replace
from typing import Literal

from phalanx.system.host import this_host
from phalanx.system.processes import own_sight, start_of
from phalanx.topology.place import Place
from phalanx.wire.proof import NoProof
from phalanx.wire.sockets import KeepAlive

__all__ = ["KEEP_ALIVE", "ROLE", "Claim", "Verdict", "own_claim"]

ROLE = "store"
# A host that vanishes counts as lost after 40 s: 10 s of silence, then six probes. The kernel sends no probes while a
# request is unacknowledged, so that has a limit of its own.
KEEP_ALIVE = KeepAlive(idle_s=10, interval_s=5, probes=6, unacknowledged_s=40)
_LONGEST_HOST = 255
_LONGEST_REASON = 900  # characters, of up to four bytes each


@dataclass(frozen=True)
class Claim:
    """The facts that a process gives about itself when it joins.

    Attributes:
        rank, world_size: its place in the world.
        pid, host: the process, for people.
        job: a digest of the job's id, from which the port is derived; empty where the port was given.
        attempt: how often the launcher has started the job anew.
        opening: which of the process's worlds this is: 1 for the first that it opens.
        node_rank: its host's index, if its launcher says it.
        start: when the process was started, as ``system/processes.py`` counts.
        sight: equal for processes that see each other (``system/processes.py``).
        local_rank, local_world_size: its place among the ranks of its host, if its launcher says it.
        token: a secret of this process, by which rank 0 recognises its further connections. The process chooses it,
            so rank 0 recognises it even if the first answer came too late and the process has connected anew.
    """

    rank: int
    world_size: int
    pid: int
    host: str
    job: str = ""
    attempt: int = 0
    opening: int = 0
    node_rank: int | None = None
    token: str = ""
    start: int = 0
    sight: str = ""
    local_rank: int | None = None
    local_world_size: int | None = None

    @property
    def name(self) -> str:
        """The process, for people."""
        return f"pid {self.pid} on {self.host}"

    @property
    def _texts(self) -> tuple[str, ...]:
        return self.host, self.job, self.token, self.sight

    def without_token(self) -> Claim:
        """What another rank may know of it."""
        return replace(self, token="")

    def encode(self) -> bytes:
        """The claim as it is sent."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> Claim:
        """The claim in these bytes, without the characters of the host's name that cannot be printed.

        Raises:
            NoProof: they are not a claim.
        """
        try:
            claim = Claim(**json.loads(data))
        except (TypeError, ValueError, RecursionError):
            raise NoProof from None
        numbers = [claim.rank, claim.world_size, claim.pid, claim.attempt, claim.opening, claim.start]
        numbers += [
            number for number in (claim.node_rank, claim.local_rank, claim.local_world_size) if number is not None
        ]
        if not all(type(number) is int and abs(number) < 1 << 63 for number in numbers):
            raise NoProof
        if not all(isinstance(text, str) and _is_unicode(text) for text in claim._texts):
            raise NoProof
        return replace(claim, host="".join(letter for letter in claim.host[:_LONGEST_HOST] if letter.isprintable()))


@dataclass(frozen=True)
class Verdict:
    """Rank 0's answer to a claim.

    Attributes:
        kind: ``welcome``; ``refused``; ``other``: this is rank 0 of another job; ``earlier``: this is rank 0 of an
            earlier attempt, which will end.
        reason: why the process is not welcome, for people.
        rank_0: rank 0's own claim, without its token, if the process is welcome and may look at rank 0.
    """

    kind: Literal["welcome", "refused", "other", "earlier"]
    reason: str = ""
    rank_0: Claim | None = None

    def encode(self) -> bytes:
        """The verdict as it is sent."""
        short = replace(self, reason=self.reason[:_LONGEST_REASON])
        return json.dumps(asdict(short), ensure_ascii=False).encode()

    @staticmethod
    def decode(data: bytes) -> Verdict:
        """The verdict in these bytes.

        Raises:
            NoProof: they are not a verdict; rank 0 knows the key but is another version of Phalanx.
        """
        try:
            verdict = Verdict(**json.loads(data))
            if verdict.rank_0 is not None:
                verdict = replace(verdict, rank_0=Claim.decode(json.dumps(verdict.rank_0).encode()))
        except (TypeError, ValueError, RecursionError):
            raise NoProof from None
        if verdict.kind not in ("welcome", "refused", "other", "earlier") or not isinstance(verdict.reason, str):
            raise NoProof
        return replace(verdict, reason="".join(letter for letter in verdict.reason if letter.isprintable()))


def own_claim(place: Place, job: str, opening: int) -> Claim:
    """The claim of this process, with a new token.

    Args:
        place: this process, as its launcher says.
        job: a digest of the job's id; empty if the port does not follow from it.
        opening: which of the process's worlds this is.
    """
    token = secrets.token_hex(16)
    pid, host = os.getpid(), this_host().name
    return Claim(
        place.rank,
        place.world_size,
        pid,
        host,
        job,
        place.attempt,
        opening,
        place.node_rank,
        token,
        start_of(pid),
        own_sight(),
        place.local_rank,
        place.local_world_size,
    )


def _is_unicode(text: str) -> bool:
    """Whether the text can be encoded: JSON can spell halves of characters (surrogates)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
