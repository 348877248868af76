"""The stacks of a job's ranks, as they come: from this host's trace, and in messages from other hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.launch.output.stacks import format_stacks
from phalanx.launch.rank.trace import Trace
from phalanx.words import format_named

__all__ = ["Places"]


class Places:
    """Where ranks were when they were asked.

    Args:
        trace: where the ranks of this host write.
        ranks: how many there are.
    """

    def __init__(self, trace: Trace, ranks: int) -> None:
        self._trace, self._ranks = trace, ranks
        self._elsewhere: dict[int, str] = {}

    def add(self, stacks: Mapping[str, str] | None) -> None:
        """Take those that ranks of other hosts have written, by rank."""
        self._elsewhere |= {int(rank): stack for rank, stack in (stacks or {}).items()}

    def take(self) -> dict[int, str]:
        """The stacks that ranks have written since the last call, here or on their hosts."""
        taken = {**self._elsewhere, **self._trace.take(range(self._ranks))}
        self._elsewhere = {}
        return dict(sorted(taken.items()))

    def text(self, late: Sequence[int]) -> str:
        """Those stacks for people; ``late`` are the ranks that were asked and have not written."""
        lines = format_stacks(self.take())
        if late:
            lines.append(f"{format_named('rank', late)} did not say where: stopped, or waiting for a core")
        return "\n".join(lines) or "no rank runs Python code, so there are no stacks"
