"""Which ranks are exchanging what they need of each other, and why one is lost that goes meanwhile.

Rank 0's store keeps this, under its lock. A rank that gives up because of another one says so before it leaves: else
the others, whose own timeouts end a moment later, would take the first that gave up for the cause.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.store.claim import Claim

__all__ = ["BEGINS", "GIVES_UP", "HAS_ALL", "Gathering"]

#: The number of a request MEETING: the rank has all that it needs; begins to exchange it; gives up, with the reason.
HAS_ALL, BEGINS, GIVES_UP = range(3)


class Gathering:
    """The ranks between the beginning and the end of their exchange."""

    def __init__(self) -> None:
        self._in: set[int] = set()
        self._through: set[int] = set()
        self._reasons: dict[int, Sequence[bytes]] = {}

    def hear(self, rank: int, number: int, fields: Sequence[bytes]) -> None:
        """A rank says how far it is.

        Args:
            rank: the one that says it.
            number: which of the three above.
            fields: if it gives up, the reason: a text, and the rank, pid and host that it is about.
        """
        if number == GIVES_UP:
            self._reasons[rank] = fields
            return
        (self._in.add if number == BEGINS else self._in.discard)(rank)
        (self._through.discard if number == BEGINS else self._through.add)(rank)

    def is_in(self, rank: int) -> bool:
        """Whether the others wait in vain if this rank goes."""
        return rank in self._in

    def is_through(self, rank: int) -> bool:
        """Whether this rank waits for nobody."""
        return rank in self._through

    def reason(self, claim: Claim) -> Sequence[bytes]:
        """Why a rank is lost that has gone: a text, and perhaps the rank, pid and host that it is about."""
        if claim.rank in self._reasons:
            return self._reasons[claim.rank]
        text = f"rank {claim.rank} ({claim.name}) has ended, or given up, while the ranks were meeting"
        return [text.encode()]
