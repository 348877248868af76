"""The MPI launcher as a process: it is started, its output is read, and its end is awaited.

The ranks' output does not pass through it, so what it prints is its own. Most of that is about ranks that failed, which
Phalanx explains better; so each line is held back for a moment, in which it may turn out that a rank has failed.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time

from phalanx import settings
from phalanx.launch.job.job import Job
from phalanx.launch.job.mpi_launcher import MpiLauncher
from phalanx.launch.relay.channel import Channel, Lost
from phalanx.launch.output.failure import signal_name
from phalanx.launch.rank.descriptors import Control
from phalanx.system import processes

__all__ = ["Mpiexec"]

SHIM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "shim.py")
# How long a line of its output is held back, and how many are kept.
_HOLD_S = 0.5
_MOST_HELD = 200


class Mpiexec:
    """A running MPI launcher.

    Args:
        job: the job.
        launcher: the program, and the options it takes.
        invitation: where its processes find the relay, and the key.

    Attributes:
        handle: a pidfd, readable once it has ended.
        output: the pipe with its output, non-blocking; closed at its end.
        code: how it ended; None while it runs.

    Raises:
        OSError: the program cannot be executed.
        LaunchError: it cannot place ranks like that.
    """

    def __init__(self, job: Job, launcher: MpiLauncher, invitation: str) -> None:
        self._launcher = launcher
        self.code: int | None = None
        # A file without a name: nothing to remove, however this ends.
        host_list = os.memfd_create(f"{job.run_id}-hosts")
        os.pwrite(host_list, "".join(f"{host.name}:{host.slots}\n" for host in job.hosts).encode(), 0)
        program = [sys.executable, SHIM, launcher.kind]
        output, printed = os.pipe()
        try:
            process = subprocess.Popen(
                launcher.command(job.ranks, job.hosts, program, f"/dev/fd/{host_list}"),
                env={**launcher.environment(), **os.environ, settings.MPI_JOIN: invitation},
                # The relay hands the input on, because not every MPI launcher does it to the end.
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                pass_fds=[host_list],
                start_new_session=True,
                preexec_fn=functools.partial(_follow_parent, os.getpid()),
            )
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(printed)
            os.close(host_list)
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
        """When the next of its lines may be passed on."""
        return self._held[0][0] + _HOLD_S if self._held else None

    def take_due(self) -> list[str]:
        """The lines that have been held back long enough."""
        now, due = time.monotonic(), []
        while self._held and self._held[0][0] + _HOLD_S <= now:
            due.append(self._held.pop(0)[1])
        return due

    def take_all(self) -> str:
        """All lines that are still held back, indented."""
        held, self._held = self._held, []
        return "".join(f"  {line}\n" for _, line in held)

    def reap(self) -> None:
        """It has ended, as ``handle`` says: note how."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.handle)
        self.code = os.waitstatus_to_exitcode(status)
        self.read()

    def send(self, signum: int) -> None:
        """Signal it and the other processes of its process group."""
        if self.code is None:
            processes.send_to_group(self.pid, signum)

    def see_out(self, channels: list[Channel], control: Control | None, patience_s: float) -> bool:
        """Wait until it and the keepers have ended; a keeper may still have to tidy up on its host.

        Args:
            channels: the keepers' connections; those that have ended are closed and taken out.
            control: where the supervisor sends orders, SIGKILL among them; None if it has gone.
            patience_s: how long to wait at most.

        Returns:
            Whether the supervisor is still there.
        """
        until = time.monotonic() + patience_s
        with selectors.DefaultSelector() as selector:
            for channel in channels:
                selector.register(channel, selectors.EVENT_READ, channel)
            if self.code is None:
                selector.register(self.handle, selectors.EVENT_READ)
            if control is not None:
                # A second Ctrl-C, or the supervisor's end.
                selector.register(control, selectors.EVENT_READ, control)
            while channels or self.code is None:
                self.read()
                ready = selector.select(min(0.1, max(0.0, until - time.monotonic())))
                if time.monotonic() >= until:
                    break
                for key, _ in ready:
                    if isinstance(key.data, Channel):
                        try:
                            key.data.flush()
                            key.data.receive()
                        except Lost:
                            selector.unregister(key.data)
                            channels.remove(key.data)
                            key.data.close()
                    elif key.data is None:
                        selector.unregister(self.handle)
                        self.reap()
                    elif control is not None:
                        order = control.receive()
                        if order is None:
                            selector.unregister(control)
                            control = None
                        elif order.get("signal") == signal.SIGKILL:
                            self.send(signal.SIGKILL)
        return control is not None

    @property
    def exit_code(self) -> int:
        """The exit code of ``phalanx run`` if it was this launcher that ended the job."""
        code = self.code or 1
        return 128 - code if code < 0 else code

    def describe_end(self) -> str:
        """How it ended, for people."""
        program = f"{self._launcher.name} ({self._launcher.title})"
        if self.code is None:
            return f"{program} ended the job"
        if self.code < 0:
            return f"{program} was ended by signal {-self.code} ({signal_name(-self.code)})"
        return f"{program} ended with exit code {self.code}"

    def remove_folder(self, folder: str) -> None:
        """Remove the session folder it made for its processes, which it leaves if it is killed.

        Args:
            folder: what a rank on this host found in its environment; removed only if its name ends in this pid.
        """
        if self.code is not None and os.path.basename(folder).endswith(f".{self.pid}"):
            with contextlib.suppress(OSError):
                if os.lstat(folder).st_uid == os.geteuid():
                    shutil.rmtree(folder, ignore_errors=True)


def _follow_parent(parent: int) -> None:
    # By SIGTERM, not SIGKILL: it has processes on other hosts to end, and files to remove.
    processes.die_with_parent(parent, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
