"""The programs by which the head ends what is left on hosts whose agents are lost, as far as they can be reached."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence

from phalanx import settings
from phalanx.errors import LaunchError
from phalanx.launch.job.hosts import is_here
from phalanx.launch.relay.program import Program
from phalanx.launch.remote.starter import command_for

__all__ = ["Sweeps"]

_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sweep_host.py")
# How long they may take: a host that is switched off does not answer at all.
_PATIENCE_S = 3.0


class Sweeps:
    """Those of one job.

    Args:
        starter: the user's starter and its arguments; empty for ssh.

    Attributes:
        programs: those that have been started.
        until: when they are given up, on the clock of ``time.monotonic``.
    """

    def __init__(self, starter: Sequence[str]) -> None:
        self._starter = starter
        self._lost: set[str] = set()
        self.programs: list[Program] = []
        self.until = 0.0

    def begin(self, host: str, agent: str) -> None:
        """Begin on a host, unless that has been done.

        Args:
            host: the host, as the user wrote it. What is left on the head's own is ended by the head.
            agent: the name of the agent that is lost (``settings.AGENT``).
        """
        if agent in self._lost or is_here(host, starter=bool(self._starter)):
            return
        self._lost.add(agent)
        words = (sys.executable, "-I", "-S", _PROGRAM, f"{settings.AGENT}={agent}")
        with contextlib.suppress(OSError, LaunchError):  # it could be started when the agent was
            self.programs.append(Program(command_for(host, self._starter, words)))
            self.until = time.monotonic() + _PATIENCE_S
