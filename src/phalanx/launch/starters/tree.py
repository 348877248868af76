"""The tree in which the agents of many hosts are started by ssh: the supervisor starts the first, which start others.

A login costs the host that asks for it tens of milliseconds of a core, so one host that logs in to hundreds is what all
the others wait for. Only the starting goes along the tree: every agent joins the supervisor itself, and nothing of the
job passes through another host. A host that another one cannot log in to, because keys or names are known to the
supervisor alone, is started by the supervisor after all; such a cluster only starts later.

Programs of the user's, srun and blaunch are always called by the supervisor: they may work nowhere else, or share the
work out by themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import selectors
from collections.abc import Callable, Sequence

from phalanx.errors import LaunchError
from phalanx.launch.protocol import Event, Printed, Unstarted
from phalanx.launch.starters.invitation import Invitation
from phalanx.launch.starters.ssh import AgentProgram

__all__ = ["FAN", "Branch", "starting_host"]

# How many hosts the supervisor starts itself, and each host of the tree at most as long as fewer than FAN² more wait.
FAN = 16


def starting_host(number: int) -> int | None:
    """Find the host whose agent starts that of a host, both by their numbers; None for the supervisor.

    The first ``FAN`` hosts are started by the supervisor, the next ``FAN`` times as many are dealt out in turn to
    those, and so on.
    """
    first, size, before = 0, FAN, None
    while number >= first + size:
        before = first, size
        first, size = first + size, size * FAN
    return None if before is None else before[0] + (number - first) % before[1]


class Branch:
    """The programs by which one agent starts those of other hosts.

    Args:
        invitation: the agent's own, which differs from theirs only in the host.

    Attributes:
        say, selector: the agent's.
    """

    say: Callable[[Event], None]
    selector: selectors.BaseSelector

    def __init__(self, invitation: Invitation) -> None:
        self._invitation = invitation
        self._programs: dict[int, tuple[int, AgentProgram]] = {}  # by process id, with the number of the host

    @property
    def pids(self) -> list[int]:
        """List the programs that run."""
        return list(self._programs)

    def start(self, hosts: Sequence[tuple[int, str, int]]) -> None:
        """Start agents; the supervisor is told of those that cannot be.

        Args:
            hosts: the number, the name and the number of ranks of each host.
        """
        for number, name, ranks in hosts:
            own = dataclasses.replace(self._invitation, host=number, name=name, ranks=ranks)
            try:
                program = AgentProgram(name, (), own)
            except (OSError, LaunchError):
                self.say(Unstarted(agent=number))
                continue
            self._programs[program.pid] = number, program
            self.selector.register(program.output, selectors.EVENT_READ, functools.partial(self._read, program.pid))

    def _read(self, pid: int) -> None:
        """Pass on what a program prints."""
        number, program = self._programs[pid]
        descriptor = program.output.fileno()
        program.read()
        if program.output.closed:
            self.selector.unregister(descriptor)
        for line in program.take_held():
            self.say(Printed(agent=number, text=line))

    def reap(self, pid: int) -> bool:
        """Tell whether a child that has ended is one of these; if it has failed, tell the supervisor."""
        if pid not in self._programs:
            return False
        number, program = self._programs[pid]
        if not program.output.closed:
            self._read(pid)
        program.reap()
        for line in program.take_held():
            self.say(Printed(agent=number, text=line))
        if not program.output.closed:
            self.selector.unregister(program.output)
            program.output.close()
        program.close_input()
        del self._programs[pid]
        if program.code:
            self.say(Unstarted(agent=number))
        return True

    def forget(self) -> None:
        """Close what only the agent needs, in its fork."""
        for _, program in self._programs.values():
            program.output.close()
            program.close_input()
            with contextlib.suppress(OSError):
                os.close(program.handle)
        self._programs.clear()
