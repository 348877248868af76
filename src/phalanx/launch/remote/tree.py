"""The tree in which the agents of many hosts are started by ssh: the head starts the first ones, which start others.

A login costs the host that asks for it tens of milliseconds of a core, so one host that logs in to hundreds is what all
the others wait for. Only the starting goes along the tree: every agent joins the head itself, and nothing of the job
passes through another host. A host that another one cannot log in to, because keys or names are known to the head
alone, is started by the head after all; such a cluster only starts later.

Programs of the user's, srun and blaunch are always called by the head: they may work nowhere else, or share the work
out by themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
from collections.abc import Mapping, Sequence

from phalanx.errors import LaunchError
from phalanx.launch.relay.channel import Channel
from phalanx.launch.remote.protocol import Invitation
from phalanx.launch.remote.starter import AgentProgram

__all__ = ["FAN", "Branch", "starting_host"]

# How many hosts the head starts itself, and each host of the tree at most as long as there are fewer than FAN² more.
FAN = 16


def starting_host(number: int) -> int | None:
    """The host whose agent starts that of a host, both by their numbers in the job; None for the head.

    The first ``FAN`` hosts are started by the head, the next ``FAN`` times as many are dealt out in turn to those, and
    so on.
    """
    first, size, before = 0, FAN, None
    while number >= first + size:
        before = first, size
        first, size = first + size, size * FAN
    return None if before is None else before[0] + (number - first) % before[1]


class Branch:
    """The programs by which one agent starts those of other hosts.

    Args:
        channel: the agent's connection to the head.
        invitation: the agent's own, which differs from theirs only in the host.
    """

    def __init__(self, channel: Channel, invitation: Invitation) -> None:
        self._channel = channel
        self._invitation = invitation
        self._programs: dict[int, AgentProgram] = {}

    @property
    def pids(self) -> list[int]:
        """The programs that run."""
        return [program.pid for program in self._programs.values()]

    def start(self, hosts: Sequence[tuple[int, str, int]]) -> None:
        """Start agents; the head is told of those that cannot be.

        Args:
            hosts: the number, the name and the number of ranks of each host.
        """
        for number, name, ranks in hosts:
            own = dataclasses.replace(self._invitation, host=number, name=name, ranks=ranks)
            try:
                self._programs[number] = AgentProgram(name, (), own)
            except (OSError, LaunchError):
                self._channel.say(event="unstarted", host=number)

    def register(self, poll: select.poll) -> None:
        """Wait for the programs, too."""
        for program in self._programs.values():
            poll.register(program.handle, select.POLLIN)
            if not program.output.closed:
                poll.register(program.output, select.POLLIN)

    def serve(self, ready: Mapping[int, int]) -> None:
        """Pass on what the programs print, and tell the head which have failed.

        Args:
            ready: the descriptors that are ready.
        """
        for number, program in list(self._programs.items()):
            ended = program.handle in ready
            if ended:
                program.reap()
            elif not program.output.closed and program.output.fileno() in ready:
                program.read()
            for line in program.take_held():
                self._channel.say(event="printed", host=number, text=line)
            if ended:
                program.output.close()
                program.close_input()
                del self._programs[number]
                if program.code:
                    self._channel.say(event="unstarted", host=number)

    def forget(self) -> None:
        """In a fork of the agent: close what only the agent needs."""
        for program in self._programs.values():
            program.output.close()
            program.close_input()
            with contextlib.suppress(OSError):
                os.close(program.handle)
        self._programs.clear()
