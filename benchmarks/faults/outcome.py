"""What came of all faults of one kind in one world, and the table of that."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["Outcome", "quantile", "table"]


@dataclass
class Outcome:
    """What came of all faults of one kind in one world.

    Attributes:
        expected: of how many ranks, processes or lines a time should have been taken.
        taken_s: from the fault until each that was told the right thing had its error, was printed, or had ended.
        signals: how many of the errors also had the signal.
        operations: how many of them also had the last operation of the rank that was lost.
        asked: how many ranks had been asked to end before they had their error.
    """

    expected: int = 0
    taken_s: list[float] = field(default_factory=list)
    signals: int = 0
    operations: int = 0
    asked: int = 0

    @staticmethod
    def complain(text: str) -> None:
        """Show what was not told right, or not at all."""
        print(text, file=sys.stderr)


def quantile(values: list[float], share: float) -> float:
    """The smallest of the values that at least this share of them does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def table(rounds: int, outcomes: Mapping[tuple[str, str], Outcome]) -> str:
    """The outcomes for people, in ms."""
    lines = [
        f"{'ms until known':<16}{'world':>12}{'faults':>8}{'told right':>14}{'+signal':>9}{'+last':>7}{'asked':>7}"
    ]
    lines[0] += f"{'median':>10}{'99 %':>10}{'longest':>10}"
    for (fault, world), outcome in outcomes.items():
        told = f"{len(outcome.taken_s)} of {outcome.expected}"
        line = (
            f"{fault:<16}{world:>12}{rounds:>8}{told:>14}{outcome.signals:>9}{outcome.operations:>7}{outcome.asked:>7}"
        )
        if outcome.taken_s:
            kinds: list[Callable[[list[float]], float]] = [statistics.median, lambda of: quantile(of, 0.99), max]
            line += "".join(f"{1e3 * kind(outcome.taken_s):10.1f}" for kind in kinds)
        lines.append(line)
    return "\n".join(lines)
