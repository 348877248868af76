"""The calls of the ranks of a group over several hosts, as far as a break concerns them."""

from __future__ import annotations

from typing import Protocol

from phalanx.transports.shm.explanation import MessageEnd

__all__ = ["Crossed", "Differs", "EndsDiffer", "History", "LeftOut"]


class History(Protocol):
    """The last collectives of this rank."""

    def text(self) -> str:
        """The present call, with its line."""
        ...

    def last_but(self, calls: int) -> str:
        """The last call (0) or the last but one (1), with its line; empty if there was none."""
        ...

    def is_late(self) -> bool:
        """Whether the calls that are found to differ are those before the present one."""
        ...


class Crossed(Exception):
    """Two ranks have called two lines in different orders, and the user wants that to be an error; says which."""


class Differs(Exception):
    """The ranks' calls do not match."""


class EndsDiffer(Differs):
    """A message is not of the size or the dtype of the tensor that it is received into.

    Attributes:
        ends: what was sent, and what was to be received.
    """

    def __init__(self, sent: MessageEnd, received: MessageEnd) -> None:
        super().__init__("the two ends of a message differ")
        self.ends = sent, received


class LeftOut(Exception):
    """A rank has left the group in order, without the last call that this one has made.

    Attributes:
        group_rank: that rank.
    """

    def __init__(self, group_rank: int) -> None:
        super().__init__(f"rank {group_rank} has left without the last call")
        self.group_rank = group_rank
