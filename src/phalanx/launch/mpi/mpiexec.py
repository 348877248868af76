"""The MPI launcher as a process: it is started, its output is read, and its end is awaited."""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time

from phalanx import settings
from phalanx.launch.job.job import Job
from phalanx.launch.job.mpi_launcher import MpiLauncher
from phalanx.launch.output.failure import signal_name
from phalanx.launch.rank.descriptors import Control
from phalanx.launch.relay.channel import Channel, Lost
from phalanx.launch.relay.program import Program

__all__ = ["Mpiexec"]

SHIM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "shim.py")


class Mpiexec(Program):
    """A running MPI launcher.

    Args:
        job: the job.
        launcher: the program, and the options it takes.
        invitation: where its processes find the relay, and the key.

    Raises:
        OSError: the program cannot be executed.
        LaunchError: it cannot place ranks like that.
    """

    def __init__(self, job: Job, launcher: MpiLauncher, invitation: str) -> None:
        self._launcher = launcher
        # A file without a name: nothing to remove, however this ends.
        host_list = os.memfd_create(f"{job.run_id}-hosts")
        os.pwrite(host_list, "".join(f"{host.name}:{host.slots}\n" for host in job.hosts).encode(), 0)
        program = [sys.executable, SHIM, launcher.kind]
        try:
            # The relay hands the input on, because not every MPI launcher does it to the end.
            super().__init__(
                launcher.command(job.ranks, job.hosts, program, f"/dev/fd/{host_list}"),
                {**launcher.environment(), **os.environ, settings.MPI_JOIN: invitation},
                pass_fds=[host_list],
            )
        finally:
            os.close(host_list)

    def take_all(self) -> str:
        """All lines that are still held back, indented."""
        return "".join(f"  {line}\n" for line in self.take_held())

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
