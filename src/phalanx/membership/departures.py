"""Ranks that have gone, as the world's group knows: told to those who wait for them in order to make another group.

A store cannot know that a rank will never write a key. But a process that makes a further group has the world's, and
that looks after its ranks, whichever store they met in.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
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
    """The communicator of the world, which knows of its ranks' ends."""

    def gone(self, ranks: Collection[int]) -> dict[int, Gone]:
        """Those of these ranks that have gone; none if this rank has closed it. It may take a second."""
        ...


# The world's communicator, as long as it exists. Written by the thread that makes the world, and read by those that
# make further groups; it is one reference, replaced whole.
_witness: weakref.ref[Witness] | None = None


def call_witness(world: Witness) -> None:
    """Ask this one from now on. A group of some ranks knows less: one that has left it may be there for another."""
    global _witness
    _witness = weakref.ref(world)


def has_witness() -> bool:
    """Whether this process has a world that could know."""
    return _witness is not None and _witness() is not None


def gone_ranks(ranks: Collection[int]) -> dict[int, Gone]:
    """Those of these ranks of the world that have gone, as far as its group knows."""
    world = None if _witness is None else _witness()
    return {} if world is None else world.gone(ranks)
