"""How late a busy machine is, so that a bound on a time holds there too.

A machine that is busy with something else, as with the tests beside this one, is as late with everything. So a thread
measures meanwhile how much longer than on a quiet machine a short sleep with some work behind it takes, and the bound
is multiplied by that.
"""

from __future__ import annotations

import math
import threading
import time
from types import TracebackType

__all__ = ["Lateness", "quantile"]


class Lateness:
    """Measures, while it is entered, how many times longer than on a quiet machine things take."""

    SLEEP_S = 0.02
    ADDITIONS = 100_000  # about as much work as an error takes to be made and told

    def __init__(self) -> None:
        self._ratios: list[float] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._measure)

    def __enter__(self) -> Lateness:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        self._thread.join()

    def _measure(self) -> None:
        while not self._ends.is_set():
            began, had = time.monotonic(), time.thread_time()
            time.sleep(self.SLEEP_S)
            sum(range(self.ADDITIONS))
            # What the thread itself computes, it computes on a quiet machine too.
            self._ratios.append((time.monotonic() - began) / (self.SLEEP_S + time.thread_time() - had))

    def factor(self, share: float) -> float:
        """The ratio that this share of the measurements does not exceed; at least 1."""
        return max(1.0, quantile(self._ratios, share))


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]
