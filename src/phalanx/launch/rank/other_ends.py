"""How other ranks have ended, as the launcher notes it in the trace, for this rank's errors about them."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from phalanx.diagnosis.ends import Ending
from phalanx.launch.output.failure import signal_name
from phalanx.launch.rank.trace import look_up_end, read_elsewhere

__all__ = ["ended_elsewhere", "how_ended"]


def how_ended(run_id: str, pid: int) -> Ending | None:
    """How a rank of this host has ended; None if it runs.

    Args:
        run_id: the job's name.
        pid: the rank's process.
    """
    status = look_up_end(run_id, pid)
    return None if status is None else _ending(status)


def ended_elsewhere(run_id: str, host: str, pid: int) -> dict[str, Any] | None:
    """How a rank of another host has failed, and what it did last; None if nothing is known of that.

    Args:
        run_id: the job's name.
        host: the name of its host.
        pid: its process there.
    """
    for line in read_elsewhere(run_id):
        with contextlib.suppress(ValueError):  # it is not whole yet
            known: dict[str, Any] = json.loads(line)
            if (known.pop("host"), known.pop("pid")) == (host, pid):
                ending = _ending(known.pop("status"))
                return {**known, "how": ending.text, "signal": ending.signal}
    return None


def _ending(status: int) -> Ending:
    if status < 0:
        return Ending(f"by signal {-status} ({signal_name(-status)})", -status)
    return Ending(f"with exit code {status}")
