"""The helper of ``phalanx top`` on a host: it looks there, for who asks from another host.

- ``look`` asks for ranks of a job whose launcher is elsewhere: which job (``run_id``), and which ranks (``ranks``: of
  each its number, its process and its part of the host's trace). It is answered with what was found (``looks``).
- ``find`` asks for a job whose launcher is here, by its name (``name``). If there is one, the answer has the launcher's
  process (``pid``) and the job's id (``id``). If not, the answer says why (``refused``).
- ``watch`` asks for a look at that job (``pid``), with its ranks on other hosts unless ``here`` says otherwise. It is
  answered with the look (``look``), which is null if the job has ended.

An answer to ``look`` and ``watch`` says when that was, on the host's monotonic clock (``at_ns``), and how long to wait
before the next one (``pause_s``), so that looking takes little of the host's time.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any

from phalanx.errors import LaunchError
from phalanx.launch.running.jobs import RankProcess, RunningJob, find_job
from phalanx.launch.running.looking import RanksHere, pause_after_s
from phalanx.launch.running.watching import Watcher
from phalanx.launch.starters.helping import serve
from phalanx.system.host import machine_name
from phalanx.system.processes import start_of

__all__: list[str] = []

_watched: dict[str, RanksHere] = {}
_found: dict[int, RunningJob] = {}
_watchers: dict[int, Watcher] = {}
_starts: dict[tuple[str, int], int] = {}  # of the processes that have been seen, so that one that ends is known


def _look(run_id: str, ranks: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    began_s = time.process_time()
    here = _watched.setdefault(run_id, RanksHere(run_id))
    host = machine_name()
    for _, pid, _ in ranks:
        if _starts.get((run_id, pid), 0) == 0:
            _starts[run_id, pid] = start_of(pid)
    processes = [RankProcess(rank, pid, _starts[run_id, pid], host, part) for rank, pid, part in ranks]
    looks, _ = here.look(processes)
    values = [look.to_json() for look in looks]
    pause_s = pause_after_s(time.process_time() - began_s)
    return {"at_ns": time.monotonic_ns(), "pause_s": pause_s, "looks": values}


def _find(name: str | None) -> dict[str, Any]:
    try:
        job = find_job(name)
        _found[job.pid] = job
        return {"pid": job.pid, "id": job.id}
    except LaunchError as error:
        return {"refused": str(error)}


def _watch(pid: int, here: bool, patience_s: float) -> dict[str, Any]:
    if pid not in _watchers:
        _watchers[pid] = Watcher(_found[pid], here=here)
    watcher, began_s = _watchers[pid], time.process_time()
    look = watcher.look(patience_s)
    values = None if look is None else look.to_json()
    pause_s = max(watcher.pause_s, pause_after_s(time.process_time() - began_s))
    return {"at_ns": time.monotonic_ns(), "pause_s": pause_s, "look": values}


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        os.nice(10)  # where cores are scarce they are the ranks'
    try:
        serve({"look": _look, "find": _find, "watch": _watch})
    finally:
        for watcher in _watchers.values():
            watcher.close()
