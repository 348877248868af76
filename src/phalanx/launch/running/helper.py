"""The helper of ``phalanx top`` on a host: it looks at the ranks there, for who asks from another host.

Its question is ``look``: of which job (``run_id``), and at which ranks (``ranks``: of each its number, its process and
its part of the host's trace). It answers with when it looked (``at_ns``, on the host's monotonic clock), with what it
has found (``looks``), and with the ranks that it does not see (``unseen``).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any

from phalanx.launch.remote.helping import serve
from phalanx.launch.running.jobs import RankProcess
from phalanx.launch.running.looking import RanksHere
from phalanx.system.host import machine_name
from phalanx.system.process_use import start_of

__all__: list[str] = []

_watched: dict[str, RanksHere] = {}
_starts: dict[tuple[str, int], int] = {}  # of the processes that have been seen, so that one that ends is known


def _look(run_id: str, ranks: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    here = _watched.setdefault(run_id, RanksHere(run_id))
    host = machine_name()
    for _, pid, _ in ranks:
        if _starts.get((run_id, pid), 0) == 0:
            _starts[run_id, pid] = start_of(pid)
    processes = [RankProcess(rank, pid, _starts[run_id, pid], host, part) for rank, pid, part in ranks]
    looks, unseen = here.look(processes)
    return {
        "at_ns": time.monotonic_ns(),
        "looks": [look.to_json() for look in looks],
        "unseen": [process.rank for process in unseen],
    }


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        os.nice(10)  # where cores are scarce they are the ranks'
    serve({"look": _look})
