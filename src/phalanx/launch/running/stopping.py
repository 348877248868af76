"""Ending a job from outside: its launcher is asked, and killed only if it does not answer.

The launcher is the one that ends a job in order, as after Ctrl-C: it asks the ranks, gives them time, kills those that
are late, and ends when nothing of the job is left. If it is killed itself, its helpers notice that, and kill the ranks.

Every process is held by a descriptor (pidfd) that was opened before its start time was compared. So a signal never
reaches another process that was given the same id.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

from phalanx import settings
from phalanx.errors import LaunchError
from phalanx.launch.rank.trace import trace_name
from phalanx.launch.running.jobs import RunningJob
from phalanx.system import processes
from phalanx.system.limits import raise_file_limit
from phalanx.system.processes import start_of
from phalanx.words import format_count, format_named

# The order in which a launcher is asked; it may have been started to ignore some, as in the background of a script.
_ASKED_BY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# How much longer than its ranks' time to end a launcher may take, before it counts as stuck.
_LAUNCHER_S = 30.0
# How long a launcher may take to carry out the order to kill its ranks, and how long its helpers without it.
_KILL_S = 10.0
# How long a launcher may take to notice a signal.
_TAKEN_S = 0.5
# After so long it is said that the ranks have time to end.
_SAID_AFTER_S = 2.0


def stop(job: RunningJob, *, at_once: bool, say: Callable[[str], None]) -> float:
    """End a job, and wait until nothing of it is left on this host; how long it took, in seconds.

    ``at_once`` gives the ranks no time, and ``say`` prints a line about what takes time.

    Raises:
        LaunchError: processes of the job could not be ended; the message names them.
    """
    begun = time.monotonic()
    raise_file_limit()
    with contextlib.ExitStack() as stack:
        launcher = _hold(job.pid, job.start, stack)
        if launcher is None or _ends_by_itself(launcher, job, at_once=at_once, say=say):
            return time.monotonic() - begun
        held = {launcher: job.pid}
        # Its children may be older than the job, if a shell became the launcher by exec.
        for child in processes.children_of(job.pid):
            if processes.belongs_to(child, -1, trace_name(job.run_id), [f"{settings.RUN_ID}={job.run_id}".encode()]):
                for pid in (child, *processes.descendants_of([child])):
                    if (process := _hold(pid, start_of(pid), stack)) is not None:
                        held[process] = pid
        say(f"its launcher (pid {job.pid}) does not end the job; it is killed, and its helpers kill the ranks")
        _send(launcher, signal.SIGKILL)
        for process in processes.await_ends(held, _KILL_S):
            _send(process, signal.SIGKILL)
        left = sorted(held[process] for process in processes.await_ends(held, _KILL_S))
        if left:
            who = format_named("process", left)
            raise LaunchError(f"job {job.id}: {who} could not be ended: held inside the kernel, or another user's")
    return time.monotonic() - begun


def _hold(pid: int, start: int, stack: contextlib.ExitStack) -> int | None:
    """Open a pidfd of the process that has this id and was started then; None if it has ended."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    stack.callback(os.close, process)
    return process if start and start_of(pid) == start else None


def _send(process: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(process, signum)


def _has_ended_within(process: int, patience_s: float) -> bool:
    return not processes.await_ends([process], patience_s)


def _ends_by_itself(launcher: int, job: RunningJob, *, at_once: bool, say: Callable[[str], None]) -> bool:
    """Ask the launcher to end its job; whether it has, and has ended itself."""
    heard = [signum for signum in _ASKED_BY if "SigIgn" not in processes.signal_sets(job.pid, signum)]
    state = processes.state_of(job.pid)
    if state == "T":
        say(f"its launcher (pid {job.pid}) is stopped (state T); it is continued, so that it can end the job")
    elif state == "t":
        say(f"its launcher (pid {job.pid}) is held by a debugger (state t), and may not answer")
    if not heard:
        return False
    _send(launcher, heard[0])
    _send(launcher, signal.SIGCONT)  # a stopped process receives the signal only when it continues
    if at_once:  # a launcher that has been asked kills its ranks at Ctrl-C
        until = time.monotonic() + _KILL_S
        while time.monotonic() < until:
            if _has_ended_within(launcher, _TAKEN_S):
                return True
            _send(launcher, signal.SIGINT)
        return False
    if _has_ended_within(launcher, _SAID_AFTER_S):
        return True
    say(
        f"waiting for {format_count(job.ranks, 'rank')}, which may take {job.end_s:g} s to end; "
        f"phalanx stop --kill {job.id} ends them at once"
    )
    return _has_ended_within(launcher, job.end_s + _LAUNCHER_S - _SAID_AFTER_S)
