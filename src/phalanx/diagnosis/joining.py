"""That this process waits for others to join the world, or a group, where its launcher can see it.

A rank that does not come to ``phalanx.init()`` or ``init_process_group`` keeps the others there, in the job's store or
in a library that says nothing. So the wait is an operation in the flight recorder while it lasts, and the lines and
reports of ``phalanx run`` about a job that does not go on cover it. It is taken back when all have come; if it fails,
it is the rank's last operation.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from types import TracebackType

from phalanx.diagnosis import call_site, recorder
from phalanx.diagnosis.records import KINDS

__all__ = ["Joining"]

_KIND = next(number for number, kind in KINDS.items() if kind == "init")


class Joining:
    """As a context: while its body runs, this process waits for all of these ranks. Only ``phalanx run`` looks at that.

    Args:
        name: torch's name of the group; empty for the world.
        backend: the backend's name.
        ranks: the members' ranks in the world.
        own: this process's rank in the group.
    """

    def __init__(self, name: str, backend: str, ranks: Sequence[int], own: int) -> None:
        self._about = name, backend, ranks, own
        self._ticket = 0

    def __enter__(self) -> None:
        if recorder.is_kept() and len(self._about[2]) > 1:
            with contextlib.suppress(Exception):  # a job runs as well without
                self._ticket = self._begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            recorder.drop(self._ticket)
        else:
            recorder.end(self._ticket, True)

    def _begin(self) -> int:
        group = recorder.group(*self._about) if recorder.open_recorder() else None
        if group is None:
            return 0
        line = call_site.text_of(call_site.capture())
        return recorder.begin_at(group, _KIND, 0, line=line, entered_ns=time.monotonic_ns())
