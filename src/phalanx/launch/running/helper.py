"""The helper of ``phalanx top -H`` on the host of a job's launcher: it asks the launcher, for who is on another host.

- ``find`` asks for a job by its name (``name``). The answer has its launcher's process (``pid``) and its id (``id``),
  or why there is none (``refused``).
- ``watch`` asks for a look at that job (``pid``). The answer has what :func:`ask_launcher` returned (``found``), and
  when that was on the host's monotonic clock (``at_ns``).
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from phalanx.errors import LaunchError
from phalanx.launch.running.jobs import RunningJob, find_job
from phalanx.launch.running.watching import ask_launcher
from phalanx.launch.starters.helpers import serve

__all__: list[str] = []

_jobs: dict[int, RunningJob] = {}


def _find(name: str | None) -> dict[str, Any]:
    try:
        job = find_job(name)
    except LaunchError as error:
        return {"refused": str(error)}
    _jobs[job.pid] = job
    return {"pid": job.pid, "id": job.id}


def _watch(pid: int) -> dict[str, Any]:
    return {"found": ask_launcher(_jobs[pid]), "at_ns": time.monotonic_ns()}


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        os.nice(10)  # where cores are scarce they are the ranks'
    serve({"find": _find, "watch": _watch})
