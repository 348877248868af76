"""How people are told: numbers as text, and the line in which Phalanx speaks to whoever started the job."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["format_spans", "tell"]


def format_spans(numbers: Sequence[int]) -> str:
    """``0-3, 8`` for 0, 1, 2, 3, 8."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def tell(text: str) -> None:
    """Write one line to standard error, under Phalanx's name."""
    print(f"phalanx: {text}", file=sys.stderr, flush=True)
