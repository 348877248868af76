"""Read when a job is to stop in step: the signals of ``--stop-on``, and the end of Slurm's job."""

from __future__ import annotations

import signal
from collections.abc import Mapping

from phalanx.errors import LaunchError

__all__ = ["read_stop_signals", "slurm_end_time"]

# SIGINT always ends the job, and SIGQUIT asks where its ranks are.
_CHOICE = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def read_stop_signals(given: str) -> tuple[int, ...]:
    """Read the signals of ``--stop-on``: ``USR1,TERM``, with or without SIG.

    Raises:
        LaunchError: one cannot ask for a stop.
    """
    known = {signum.name.removeprefix("SIG"): signum for signum in _CHOICE}
    names = [name.strip().upper().removeprefix("SIG") for name in given.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise LaunchError(f"--stop-on {given}: {unknown[0]!r} is none of {', '.join(known)}")
    return tuple(known[name] for name in names)


def slurm_end_time(environment: Mapping[str, str]) -> float:
    """Return when Slurm's job ends, in seconds since 1970.

    Raises:
        LaunchError: it does not say.
    """
    given = environment.get("SLURM_JOB_END_TIME", "")
    if not given.isdigit():
        raise LaunchError(
            "--stop-before: Slurm says the end of a job in SLURM_JOB_END_TIME, which is not set here; give the time "
            'by --max-hours, or: export SLURM_JOB_END_TIME=$(date -d "$(squeue -h -j $SLURM_JOB_ID -o %e)" +%s)'
        )
    return float(given)
