"""When processes end, whosever children they are."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterator, Mapping

__all__ = ["Ends", "watched"]


class Ends:
    """The ends of some processes.

    Args:
        names: what each process is called, by a descriptor of it.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = dict(names)

    @property
    def left(self) -> list[str]:
        """The processes that have not ended, as far as it has been looked."""
        return sorted(self._names.values())

    def each(self, until: float) -> Iterator[float]:
        """When each process ends, as it does, until a time on the monotonic clock."""
        while self._names and (left_s := until - time.monotonic()) > 0:
            ended = select.select(list(self._names), [], [], left_s)[0]
            at = time.monotonic()
            for descriptor in ended:
                del self._names[descriptor]
                yield at


@contextlib.contextmanager
def watched(processes: Mapping[str, int]) -> Iterator[Ends]:
    """Watch these processes, by their names, before something happens to them."""
    with contextlib.ExitStack() as stack:
        names: dict[int, str] = {}
        for name, pid in processes.items():
            descriptor = os.pidfd_open(pid)
            stack.callback(os.close, descriptor)
            names[descriptor] = name
        yield Ends(names)
