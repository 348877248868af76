"""A program that starts agents for the supervisor, here or on other hosts: it is started, read, signalled and reaped.

The ranks' output does not pass through it, so what it prints is its own. Most of that is about ranks that failed, which
Phalanx explains better; so each line is held back for a moment, in which it may turn out that a rank has failed.
"""

from __future__ import annotations

import functools
import io
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from phalanx.system import processes

__all__ = ["Program"]

# How long a line of its output is held back, and how many are kept.
_HOLD_S = 0.5
_MOST_HELD = 200


class Program:
    """A running program, which ends with this process.

    Args:
        command: its words.
        environment: its environment; by default this process's.
        stdin: its standard input.
        pass_fds: descriptors that it inherits.

    Attributes:
        pid: its process id.
        handle: a pidfd, readable once it has ended.
        output: the pipe with its output, non-blocking; closed at its end.
        code: how it ended; None while it runs.

    Raises:
        OSError: it cannot be executed.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.code: int | None = None
        output, printed = os.pipe()
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=stdin,
                stdout=printed,
                stderr=subprocess.STDOUT,
                pass_fds=pass_fds,
                start_new_session=True,
                preexec_fn=functools.partial(_follow_parent, os.getpid()),
            )
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(printed)
        self.pid = process.pid
        process.returncode = 0  # this class waits for it, so Popen need not
        self.handle = os.pidfd_open(self.pid)
        self.output = io.FileIO(output)
        os.set_blocking(output, False)
        self._unfinished = b""
        self._held: list[tuple[float, str]] = []

    def read(self) -> None:
        """Read its output as far as there is any; closes ``output`` at its end."""
        while not self.output.closed:
            try:
                data = os.read(self.output.fileno(), 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self.output.close()
                data = b"\n" if self._unfinished else b""
            *lines, self._unfinished = (self._unfinished + data).split(b"\n")
            texts = (line.decode(errors="replace").rstrip() for line in lines)
            # Some MPI launchers frame their messages with lines of dashes.
            self._held += [(time.monotonic(), text) for text in texts if text.strip("-= ")]
            del self._held[:-_MOST_HELD]

    def due_at(self) -> float | None:
        """Return when the next of its lines may be passed on."""
        return self._held[0][0] + _HOLD_S if self._held else None

    def take_due(self) -> list[str]:
        """Return the lines that were held back long enough."""
        now, due = time.monotonic(), []
        while self._held and self._held[0][0] + _HOLD_S <= now:
            due.append(self._held.pop(0)[1])
        return due

    def take_held(self) -> list[str]:
        """Return all lines that are still held back."""
        held, self._held = self._held, []
        return [line for _, line in held]

    def reap(self) -> None:
        """Note how it has ended, as ``handle`` says."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.handle)
        self.code = os.waitstatus_to_exitcode(status)
        self.read()

    def send(self, signum: int) -> None:
        """Signal it and the other processes of its process group."""
        if self.code is None:
            processes.send_to_group(self.pid, signum)


def _follow_parent(parent: int) -> None:
    # By SIGTERM, not SIGKILL: it has processes on other hosts to end, and files to remove.
    processes.die_with_parent(parent, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
