"""Ask what the ranks of other hosts do, for a rank that has waited for long and has no launcher that sees all ranks.

One rank of each other host answers for all ranks there: the first that is not stopped, since those beside a process
that is stopped see that. A host of which nobody answers in time is silent: all its ranks are stopped or hold the
interpreter. A host that is gone breaks the group, long before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from phalanx.diagnosis.snapshot import RankSnapshot
from phalanx.membership.liveness import Membership
from phalanx.transports.hierarchical.layout import Layout

__all__ = ["Inquiry", "snapshots_from"]

_PATIENCE_S = 3.0  # an answer may itself have to ask its neighbours for something
_RECORDS = 32  # of each rank, beside those that show which collectives it has come to


class Inquiry:
    """One rank's side of it.

    Args:
        membership: of which the ranks are.
        layout: where they are.
    """

    def __init__(self, membership: Membership, layout: Layout) -> None:
        self._membership, self._layout = membership, layout

    def answer_by(self, seen: Callable[[], Sequence[RankSnapshot]]) -> None:
        """Have those who ask told what ``seen`` returns for the ranks of this host; nothing if that is empty."""
        self._membership.snapshots = lambda: [each.to_json(_RECORDS) for each in seen()]

    def ask(self, over: Callable[[], bool]) -> list[RankSnapshot]:
        """What the ranks of the other hosts do, in some seconds at most; those of a host that is silent are, too.

        Args:
            over: whether nobody wants to know any more.

        Returns:
            Each with the name of its host. Empty if the registrar cannot be asked.
        """
        others = [ranks for number, ranks in enumerate(self._layout.hosts) if number != self._layout.host]
        answers = self._membership.ask(len(others), _PATIENCE_S, over)
        if not self._membership.connected:
            return []
        found = {rank: RankSnapshot(rank, silent=True) for ranks in others for rank in ranks}
        for answer in answers:
            with contextlib.suppress(ValueError):
                found.update({each.rank: each for each in snapshots_from(answer) if each.rank in found})
        return [self.named(each) for each in found.values()]

    def named(self, seen: RankSnapshot) -> RankSnapshot:
        """The same with the name of its host."""
        return replace(seen, host=self._layout.name(seen.rank))


def snapshots_from(answer: Sequence[Any]) -> list[RankSnapshot]:
    """What an answer says; raise ValueError if it is none."""
    try:
        return [RankSnapshot.from_json(each) for each in answer]
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is not an answer: {error}") from None
