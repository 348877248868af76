"""The statistics of a handful of samples."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Summary", "ratio"]


@dataclass(frozen=True)
class Summary:
    """Median, quartiles and extremes.

    The quartiles are those of the samples themselves (the method R calls 7, numpy's default), so one sample is
    its own median, quartile and extreme.
    """

    median: float
    q1: float
    q3: float
    min: float
    max: float

    @staticmethod
    def of(samples: Sequence[float]) -> Summary:
        """Summarise at least one sample."""
        if len(samples) == 1:
            return Summary(*[samples[0]] * 5)
        q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
        return Summary(median, q1, q3, min(samples), max(samples))


def ratio(other: Summary, own: Summary) -> float:
    """How many times as long ``other`` takes, by the medians."""
    return other.median / own.median
