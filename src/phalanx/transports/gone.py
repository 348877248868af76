"""Ranks that have gone, as the groups know that this process has: told to those who wait for them elsewhere.

A store cannot know that a rank will never write a key. But whoever makes a further group has a group already, the
world's at least, and that looks after its ranks, whichever store they met in.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = [
    "ENDED",
    "FAILED",
    "LEFT",
    "REPLACED",
    "WAYS",
    "Gone",
    "Witness",
    "call_witness",
    "gone_ranks",
    "has_witness",
]

# The ways to go. One whose script fails often does so for another one that has ended, and one that leaves for another
# one that has failed; so of several ranks the first of these tells the cause.
ENDED, REPLACED, FAILED, LEFT = WAYS = ("ended", "replaced", "failed", "left")


@dataclass(frozen=True)
class Gone:
    """A rank that has gone.

    Attributes:
        pid: its process id.
        host: the name of its host.
        way: ``ended``: its process is gone; ``replaced``: that runs another program; ``failed``: an exception, or an
            exit with a code other than 0, ended its script; ``left``: it closed its groups, or its script is over.
        text: what else is known: of one that has ended, how, as ``by signal 9 (SIGKILL)``; of one that failed, why.
    """

    pid: int
    host: str
    way: str
    text: str = ""

    @property
    def words(self) -> str:
        """What it has done, for people."""
        if self.way == LEFT:
            return "has left in order (it destroyed its groups, or its script has come to its end)"
        if self.way == REPLACED:
            return "has replaced itself by another program (exec)"
        if self.way == FAILED:
            return f"has failed ({self.text})" if self.text else "has failed"
        return f"has ended {self.text}" if self.text else "has ended"

    @property
    def remedy(self) -> str:
        """The next step."""
        if self.way == LEFT:
            return "Every rank must make the same groups before it leaves"
        if self.way == REPLACED:
            return "Let it start the program as a child process"
        return "Look at that rank's own output for the cause"


class Witness(Protocol):
    """A communicator that knows of its ranks' ends."""

    def gone(self, ranks: Collection[int]) -> dict[int, Gone]:
        """Those of these ranks of the group that have gone. It may take a second, and waits for no rank."""
        ...


# By identity: unlike a WeakSet it can be listed in one step, while other threads make groups. The thread that makes a
# group adds to both; an entry of the second one without the first is not read.
_witnesses: weakref.WeakValueDictionary[int, Witness] = weakref.WeakValueDictionary()
_ranks_of: dict[int, dict[int, int]] = {}


def call_witness(witness: Witness, ranks: Sequence[int]) -> None:
    """Ask this one as well from now on, as long as it exists; ``ranks`` are its ranks in the world."""
    for gone in _ranks_of.keys() - _witnesses.keys():
        _ranks_of.pop(gone, None)
    _ranks_of[id(witness)] = {rank: place for place, rank in enumerate(ranks)}
    _witnesses[id(witness)] = witness


def has_witness() -> bool:
    """Whether this process has a group that could know."""
    return bool(_witnesses)


def gone_ranks(ranks: Collection[int]) -> dict[int, Gone]:
    """Those of these ranks of the world that have gone, as far as any group of this process knows."""
    found: dict[int, Gone] = {}
    for reference in _witnesses.valuerefs():
        if (witness := reference()) is None:
            continue
        place_of = _ranks_of.get(id(witness), {})
        wanted = {place_of[rank]: rank for rank in ranks if rank in place_of and rank not in found}
        if wanted:
            found |= {wanted[place]: gone for place, gone in witness.gone(wanted).items()}
    return found
