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
from types import TracebackType

from phalanx import settings
from phalanx.errors import LaunchError
from phalanx.launch.rank.trace import trace_name
from phalanx.launch.running.jobs import RunningJob
from phalanx.system import processes
from phalanx.system.limits import raise_file_limit
from phalanx.system.processes import start_of
from phalanx.words import format_count, format_named

__all__ = ["stop"]

# The order in which a launcher is asked; it may have been started to ignore some, as in the background of a script.
_ASKED_BY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# How much longer than its ranks' time to end a launcher may take, before it counts as stuck.
_LAUNCHER_S = 30.0
# How long a launcher may take to carry out the order to kill its ranks, and how long its helpers without it.
_KILL_S = 10.0
# How long a launcher may take to notice the first signal.
_TAKEN_S = 1.0
_LOOK_S = 0.005
# After so long it is said that the ranks have time to end.
_SAID_AFTER_S = 2.0


def stop(job: RunningJob, *, at_once: bool, say: Callable[[str], None]) -> float:
    """End a job, and wait until nothing of it is left on this host.

    Args:
        job: the job.
        at_once: kill the ranks without giving them time.
        say: prints a line about what takes time.

    Returns:
        How long it took, in seconds.

    Raises:
        LaunchError: processes of the job could not be ended; the message names them.
    """
    begun = time.monotonic()
    raise_file_limit()
    with _Processes() as held:
        launcher = held.hold(job.pid, job.start)
        if launcher is None or _ends_by_itself(launcher, job, at_once=at_once, say=say):
            return time.monotonic() - begun
        # Its children may be older than the job, if a shell became the launcher by exec.
        for child in processes.children_of(job.pid):
            if processes.belongs_to(child, -1, trace_name(job.run_id), [f"{settings.RUN_ID}={job.run_id}".encode()]):
                for pid in (child, *processes.descendants_of([child])):
                    held.hold(pid, start_of(pid))
        say(f"its launcher (pid {job.pid}) does not end the job; it is killed, and its helpers kill the ranks")
        launcher.send(signal.SIGKILL)
        for process in held.await_ends(_KILL_S):
            process.send(signal.SIGKILL)
        left = sorted(process.pid for process in held.await_ends(_KILL_S))
        if left:
            why = "it hangs inside the kernel, or is" if len(left) == 1 else "they hang inside the kernel, or are"
            who = format_named("process", left)
            raise LaunchError(f"job {job.id}: {who} could not be ended: {why} another user's")
    return time.monotonic() - begun


class _Process:
    """A process, by a descriptor that stays its own."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self.descriptor = descriptor

    def send(self, signum: int) -> None:
        """Signal it, unless it has ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self.descriptor, signum)

    def has_ended_within(self, patience_s: float) -> bool:
        """Wait for its end."""
        return not processes.await_ends([self.descriptor], patience_s)


class _Processes:
    """The processes of a job that ran when it was to end."""

    def __init__(self) -> None:
        self._held: list[_Process] = []

    def __enter__(self) -> _Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._held:
            os.close(process.descriptor)

    def hold(self, pid: int, start: int) -> _Process | None:
        """Hold the process that has this id and was started then; None if it has ended."""
        if not (hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal")):
            raise LaunchError(f"this Python was built without pidfd_open(); end the job by kill {pid}")
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        except OSError as error:
            raise LaunchError(f"process {pid} cannot be held: {error.strerror}; end it by kill {pid}") from error
        if not start or start_of(pid) != start:
            os.close(descriptor)
            return None
        self._held.append(_Process(pid, descriptor))
        return self._held[-1]

    def await_ends(self, patience_s: float) -> list[_Process]:
        """Those that have not ended within so many seconds."""
        left = processes.await_ends([process.descriptor for process in self._held], patience_s)
        return [process for process in self._held if process.descriptor in left]


def _ends_by_itself(launcher: _Process, job: RunningJob, *, at_once: bool, say: Callable[[str], None]) -> bool:
    """Ask the launcher to end its job; whether it has, and has ended itself."""
    heard = [signum for signum in _ASKED_BY if not processes.ignores(launcher.pid, signum)]
    state = processes.state_of(launcher.pid)
    if state == "T":
        say(f"its launcher (pid {job.pid}) is stopped (state T); it is continued, so that it can end the job")
    elif state == "t":
        say(f"its launcher (pid {job.pid}) is held by a debugger (state t), and may not answer")
    if not heard:
        return False
    launcher.send(heard[0])
    launcher.send(signal.SIGCONT)  # a stopped process receives the signal only when it continues
    if not at_once:
        return _ends_in_order(launcher, job, say)
    # A launcher that was asked kills its ranks at Ctrl-C, if it has taken the first signal by then.
    until = time.monotonic() + _TAKEN_S
    while time.monotonic() < until and processes.awaits_signal(launcher.pid, heard[0]):
        if launcher.has_ended_within(_LOOK_S):  # its end is an event; that it has taken a signal is none
            return True
    if launcher.has_ended_within(0.1):
        return True
    if signal.SIGINT not in heard:
        return False
    launcher.send(signal.SIGINT)
    return launcher.has_ended_within(_KILL_S)


def _ends_in_order(launcher: _Process, job: RunningJob, say: Callable[[str], None]) -> bool:
    if launcher.has_ended_within(_SAID_AFTER_S):
        return True
    say(
        f"waiting for {format_count(job.ranks, 'rank')}, which may take {job.end_s:g} s to end; "
        f"phalanx stop --kill {job.id} ends them at once"
    )
    return launcher.has_ended_within(job.end_s + _LAUNCHER_S - _SAID_AFTER_S)
