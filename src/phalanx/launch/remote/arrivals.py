"""From the first starter until every agent has come: the programs that start agents, and what goes wrong with them."""

from __future__ import annotations

import functools
import os
import selectors
import time
from collections.abc import Sequence

from phalanx import settings
from phalanx.launch.job.hosts import is_here
from phalanx.launch.job.job import Job
from phalanx.launch.job.target import Refusal
from phalanx.launch.remote.environment import carried_variables
from phalanx.launch.remote.host import Host
from phalanx.launch.remote.protocol import Invitation, attempt_name
from phalanx.launch.remote.starter import AgentProgram
from phalanx.launch.remote.tree import starting_host
from phalanx.words import format_list

__all__ = ["Arrivals"]

# After this long in which no agent came, the hosts of those that are missing are named.
_NAMED_S = 5.0
# After this long the job is given up.
_GIVEN_UP_S = 60.0
# Once a starter has failed, how long others may fail for the same reason, so that one message names them all.
_SETTLE_S = 0.3


class Arrivals:
    """The starters of all hosts.

    Args:
        job: the job.
        hosts: its hosts.
        selector: where the head waits. What is registered there is a function to call.
        door: where agents find the head, and the key.
    """

    def __init__(self, job: Job, hosts: Sequence[Host], selector: selectors.BaseSelector, door: str) -> None:
        self._job = job
        self._hosts = hosts
        self._selector = selector
        self._door = door
        self._named = False
        self._began = self._came_at = time.monotonic()
        self._failures: dict[int, str] = {}
        self._refuse_at: float | None = None
        self._environment = carried_variables(os.environ, job.named)
        self._children: dict[int, list[Host]] = {}
        self._printed: list[tuple[Host, str]] = []  # by the programs that other agents have started

    @property
    def complete(self) -> bool:
        """Whether every agent has come."""
        return all(host.here for host in self._hosts)

    def start(self) -> None:
        """Start the agents of all hosts, but for those that other agents will start.

        Raises:
            Refusal: the starter cannot be executed.
        """
        for host in self._hosts:
            parent = starting_host(host.number)
            if parent is None or self._job.starter or is_here(host.name):
                self._start(host)
            else:
                self._children.setdefault(parent, []).append(host)

    def came(self, host: Host) -> list[Host]:
        """The agent of a host has come; returns the hosts whose agents it is to start."""
        self._came_at = time.monotonic()
        return self._children.pop(host.number, [])

    def heard(self, host: Host, line: str) -> None:
        """A program that another agent has started for a host has printed a line."""
        self._printed.append((host, line))

    def take_over(self, host: Host) -> None:
        """Another agent could not start the agent of this host.

        Raises:
            Refusal: the starter cannot be executed.
        """
        if not host.here:
            self._printed = [(other, line) for other, line in self._printed if other is not host]
            self._start(host)

    def _start(self, host: Host) -> None:
        job = self._job
        invitation = Invitation(
            version=settings.VERSION,
            environment=self._environment,
            directory=os.getcwd(),
            door=self._door,
            host=host.number,
            name=host.name,
            python=job.target.is_python,
            path=job.target.path,
            ranks=len(host.ranks),
            interface=job.interface,
            bind=job.bind,
            device=job.device,
            attempt=attempt_name(job),
        )
        try:
            program = host.program = AgentProgram(host.name, job.starter, invitation)
        except OSError as error:
            name = job.starter[0] if job.starter else "ssh"
            raise Refusal(f"phalanx: {host.name}: {name} cannot be started: {error.strerror}", 126) from error
        self._selector.register(program.handle, selectors.EVENT_READ, functools.partial(self._on_end, host))
        self._selector.register(program.output, selectors.EVENT_READ, functools.partial(self._on_output, program))

    def _on_output(self, program: AgentProgram) -> None:
        if program.output.closed:
            return  # its end has been noticed in this very turn
        descriptor = program.output.fileno()
        program.read()
        if program.output.closed:
            self._selector.unregister(descriptor)

    def _on_end(self, host: Host) -> None:
        program = host.program
        if program is None:
            return
        self._selector.unregister(program.handle)
        if not program.output.closed:
            self._selector.unregister(program.output)
        program.reap()
        program.output.close()
        program.close_input()
        if not host.here and program.code:
            self._failures[host.number] = program.why_it_ended()
            if self._refuse_at is None:
                self._refuse_at = time.monotonic() + _SETTLE_S

    def due_at(self) -> float | None:
        """When :meth:`act` has something to do next; None for never."""
        times = [self._refuse_at]
        if not self.complete:
            times.append(self._came_at + (_GIVEN_UP_S if self._named else _NAMED_S))
        times += [host.program.due_at() for host in self._hosts if host.program is not None and host.here]
        return min((when for when in times if when is not None), default=None)

    def act(self, now: float, *, failing: bool) -> list[str]:
        """What is to be printed now.

        Args:
            now: the time of ``time.monotonic``.
            failing: whether the job is ending for a known reason, so that starters say nothing new.

        Raises:
            Refusal: an agent cannot come.
        """
        lines = []
        for host in self._hosts:
            if host.program is not None and host.here:
                lines += [f"[{host.name}] {line}" for line in host.program.take_due() if not failing]
        if self._printed:
            lines += [f"[{host.name}] {line}" for host, line in self._printed if host.here and not failing]
            self._printed = [(host, line) for host, line in self._printed if not host.here]
        missing = [host.name for host in self._hosts if not host.here and host.number not in self._failures]
        if self._refuse_at is not None and (now >= self._refuse_at or not missing):
            raise Refusal("\n".join(f"phalanx: {line}" for _, line in sorted(self._failures.items())), 1)
        if missing and now >= self._came_at + _GIVEN_UP_S:
            raise Refusal(
                f"phalanx: {format_list(missing)} did not join within {_GIVEN_UP_S:.0f} s. The command that starts "
                f"Phalanx there ran, but nothing has connected from there: try phalanx doctor -H",
                1,
            )
        if missing and not self._named and now >= self._came_at + _NAMED_S:
            self._named = True
            who = f"{format_list(missing)} {'has' if len(missing) == 1 else 'have'}"
            lines.append(f"phalanx: after {now - self._began:.0f} s {who} not joined yet")
        return lines
