"""The agents of other hosts: ssh, or a program of the user's, starts one on each.

All agents have to come before any rank runs: only then are the hosts compared (``agreement.py``), the ranks placed, and
the table shown. With many hosts, those that have come start others (``tree.py``). If an agent and its ranks are killed
at once, processes that the ranks had started are left. So on a host that is lost a program kills what is left
(``sweep_host.py``), for a few seconds at most; a host that cannot be reached is left alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import signal
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from phalanx import settings
from phalanx.errors import LaunchError
from phalanx.launch.job.binding import cores_per_rank
from phalanx.launch.job.hosts import is_here
from phalanx.launch.job.target import Refusal
from phalanx.launch.link import MESSAGE, Link, Lost, open_door
from phalanx.launch.protocol import Here, Invite, Printed, Unstarted, decode_event
from phalanx.launch.roster import AgentState
from phalanx.launch.starters.agreement import find_differences
from phalanx.launch.starters.contract import Starter
from phalanx.launch.starters.environment import carried_variables
from phalanx.launch.starters.invitation import Invitation, agent_name, attempt_name
from phalanx.launch.starters.program import Program
from phalanx.launch.starters.ssh import AgentProgram, command_for
from phalanx.launch.starters.tree import starting_host
from phalanx.topology.device_files import device_of_rank
from phalanx.topology.table import RankRow
from phalanx.words import format_count, format_list

if TYPE_CHECKING:
    from phalanx.launch.job.job import Job
    from phalanx.launch.supervisor import Supervisor

__all__ = ["HostsStarter", "JoiningStarter", "place_ranks"]

# After this long in which no agent came, the hosts of those that are missing are named; then the job is given up.
_NAMED_S, _GIVEN_UP_S = 5.0, 60.0
# Once a starter has failed, how long others may fail for the same reason, so that one message names them all.
_SETTLE_S = 0.3
# How long agents that are there may take to leave, and programs to end once their agents have left; then how long
# programs may take after each signal.
_LEAVE_S, _ASKED_S = 3.0, 0.5
# How long the programs may take that end what is left on a lost host.
_SWEEP_S = 3.0
_SWEEP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sweep_host.py")


class JoiningStarter(Starter):
    """A starter whose agents dial the supervisor: the door, and the programs that have started them.

    Args:
        supervisor: that of the attempt.
        secret: the key by which agents prove themselves; empty for a new one.
    """

    def __init__(self, supervisor: Supervisor, secret: str) -> None:
        self.supervisor, self.job, self.selector = supervisor, supervisor.job, supervisor.selector
        self.agents: list[AgentState] = []
        self.door, self.invitation = open_door(self.job.addresses, self.selector, self._welcome, secret)
        self.programs: list[Program] = []
        self.began = self.came_at = time.monotonic()
        self.named = False
        self._until: float | None = None

    @abstractmethod
    def came(self, here: Here) -> AgentState:
        """Find which agent has come.

        Raises:
            Refusal: it is not one of this job.
        """

    @abstractmethod
    def complete(self) -> None:
        """Go on: all agents have come.

        Raises:
            Refusal: the hosts do not fit together.
        """

    def on_program_end(self, program: Program) -> None:
        """Act on the end of a program, which was reaped."""

    # Arrivals.

    def _welcome(self, link: Link) -> None:
        """Wait for the first message of a process that has proven the key: it says which agent it is."""
        self.selector.register(link, selectors.EVENT_READ, functools.partial(self._seat, link))
        self._seat(link)

    def _seat(self, link: Link) -> None:
        try:
            frames = link.receive()
        except Lost:
            self.selector.unregister(link)
            link.close()
            return
        if not frames:
            return
        kind, first = frames[0]
        here = decode_event(first) if kind == MESSAGE else None
        self.selector.unregister(link)
        if not isinstance(here, Here):
            link.close()
            return
        try:
            agent = self.came(here)
        except Refusal as refusal:
            link.close()
            self.supervisor.refuse(refusal)
            return
        agent.here, self.came_at = here, time.monotonic()
        agent.hear_clock(here.now)
        self.supervisor.links.admit(agent, link)
        self.supervisor.take(agent, frames[1:])
        try:
            self.welcomed(agent)
            if all(each.here is not None for each in self.agents):
                self.complete()
        except Refusal as refusal:
            self.supervisor.refuse(refusal)

    def welcomed(self, agent: AgentState) -> None:
        """Tell an agent that has come what it is to do."""

    def missing(self) -> list[AgentState]:
        """List the agents that have not come."""
        return [agent for agent in self.agents if agent.here is None]

    # Programs.

    def run_program(self, program: Program) -> None:
        """Watch a program that was started."""
        self.programs.append(program)
        self.selector.register(program.handle, selectors.EVENT_READ, functools.partial(self._on_end, program))
        self.selector.register(program.output, selectors.EVENT_READ, functools.partial(self._on_output, program))

    def _on_output(self, program: Program) -> None:
        if not program.output.closed:  # else its end has been noticed in this very turn
            descriptor = program.output.fileno()
            program.read()
            if program.output.closed:
                self.selector.unregister(descriptor)

    def _on_end(self, program: Program) -> None:
        self.selector.unregister(program.handle)
        if not program.output.closed:
            self.selector.unregister(program.output)
        program.reap()
        program.output.close()
        self.on_program_end(program)

    def due_at(self) -> float | None:
        """See :class:`Starter`."""
        times = [self.door.tend(time.monotonic()), *self.times()]
        times += [program.due_at() for program in self.programs]
        return min((when for when in [*times, self._until] if when is not None), default=None)

    def times(self) -> list[float | None]:
        """Return when else :meth:`act` has something to do."""
        return []

    def dismiss(self, turn: Callable[[], None]) -> None:
        """See :class:`Starter`."""
        self.door.close()
        self._wait(
            turn, self.leave_s(), lambda: [each for each in self.agents if each.link is not None] or self.awaited()
        )
        for signum in (signal.SIGTERM, signal.SIGKILL):
            for program in self.running():
                program.send(signum)
            self._wait(turn, self.asked_s(), self.running)
        for agent in self.agents:
            self.supervisor.links.drop(agent)

    def leave_s(self) -> float:
        """Return how long agents, and programs whose agents have come, may take to leave."""
        return _LEAVE_S

    def asked_s(self) -> float:
        """Return how long programs may take after each signal."""
        return _ASKED_S

    def awaited(self) -> list[Program]:
        """List the programs that end by themselves once the agents have left."""
        return self.running()

    def running(self) -> list[Program]:
        """List the programs that have not ended."""
        return [program for program in self.programs if program.code is None]

    def _wait(self, turn: Callable[[], None], patience_s: float, left: Callable[[], Sequence[object]]) -> None:
        self._until = time.monotonic() + patience_s
        while self._until is not None and left() and time.monotonic() < self._until:
            turn()
        self._until = None

    def kill(self) -> None:
        """See :class:`Starter`."""
        self._until = None
        for program in self.running():
            program.send(signal.SIGKILL)


class HostsStarter(JoiningStarter):
    """Has an agent started on each host."""

    def __init__(self, supervisor: Supervisor) -> None:
        super().__init__(supervisor, supervisor.job.key)
        first = 0
        for number, host in enumerate(self.job.hosts):
            count = host.slots or 1
            self.agents.append(AgentState(number, host.name, supervisor.ranks[first : first + count]))
            first += count
        self._environment = carried_variables(os.environ, self.job.named)
        self._host_of: dict[Program, AgentState] = {}
        self._failures: dict[int, str] = {}
        self._refuse_at: float | None = None
        self._children: dict[int, list[AgentState]] = {}
        self._printed: list[tuple[AgentState, str]] = []  # by the programs that other agents have started
        self._leaving: set[Program] = set()
        self._swept_until = 0.0

    def begin(self) -> None:
        """Start the agents, but for those that other agents will start."""
        for agent in self.agents:
            parent = starting_host(agent.number)
            if parent is None or self.job.starter or is_here(agent.name):
                self._start(agent)
            else:
                self._children.setdefault(parent, []).append(agent)

    def _start(self, agent: AgentState) -> None:
        job = self.job
        invitation = Invitation(
            version=settings.VERSION,
            environment=self._environment,
            directory=os.getcwd(),
            door=self.invitation,
            host=agent.number,
            name=agent.name,
            python=job.target.is_python,
            path=job.target.path,
            ranks=len(agent.ranks),
            interface=job.interface,
            bind=job.bind,
            device=job.device,
            attempt=attempt_name(job),
        )
        try:
            program = AgentProgram(agent.name, job.starter, invitation)
        except OSError as error:
            name = job.starter[0] if job.starter else "ssh"
            raise Refusal(f"phalanx: {agent.name}: {name} cannot be started: {error.strerror}", 126) from error
        self._host_of[program] = agent
        self.run_program(program)

    def on_program_end(self, program: Program) -> None:
        """See :class:`JoiningStarter`."""
        if isinstance(program, AgentProgram):
            program.close_input()
            agent = self._host_of[program]
            if agent.here is None and program.code:
                self._failures[agent.number] = program.why_it_ended()
                self._refuse_at = self._refuse_at or time.monotonic() + _SETTLE_S

    def hear(self, event: Printed | Unstarted) -> None:
        """See :class:`Starter`."""
        agent = self.agents[event.agent]
        if isinstance(event, Printed):
            self._printed.append((agent, event.text))
        elif agent.here is None:  # another agent could not start this one
            self._printed = [(other, line) for other, line in self._printed if other is not agent]
            try:
                self._start(agent)
            except Refusal as refusal:
                self.supervisor.refuse(refusal)

    def came(self, here: Here) -> AgentState:
        """See :class:`JoiningStarter`."""
        agent = self.agents[here.agent]
        if agent.here is not None:
            raise Refusal(f"phalanx: two agents say that they are the one of {agent.name}; its starter ran twice", 1)
        return agent

    def welcomed(self, agent: AgentState) -> None:
        """Have it start others."""
        children = self._children.pop(agent.number, [])
        if children:
            hosts = [(child.number, child.name, len(child.ranks)) for child in children]
            self.supervisor.send(agent, Invite(hosts=hosts))

    def complete(self) -> None:
        """Place the ranks: they follow the order of the hosts, as the user wrote them."""
        here = [agent.here for agent in self.agents if agent.here is not None]
        differences = find_differences([agent.name for agent in self.agents], here)
        if differences:
            raise Refusal("\n".join(f"phalanx: {line}" for line in differences), 1)
        self.supervisor.all_here(*place_ranks(self.job, self.agents))

    def times(self) -> list[float | None]:
        """See :class:`JoiningStarter`."""
        missing = self._came_within() if self.missing() else None
        return [self._refuse_at, missing]

    def _came_within(self) -> float:
        return self.came_at + (_GIVEN_UP_S if self.named else _NAMED_S)

    def act(self, now: float) -> list[str]:
        """See :class:`Starter`."""
        lines, failing = [], self.supervisor.is_failing()
        for program, agent in self._host_of.items():
            if agent.here is not None:
                lines += [f"[{agent.name}] {line}" for line in program.take_due() if not failing]
        if self._printed:
            lines += [f"[{agent.name}] {line}" for agent, line in self._printed if agent.here and not failing]
            self._printed = [(agent, line) for agent, line in self._printed if not agent.here]
        if self.supervisor.over:
            return lines
        missing = [agent.name for agent in self.missing() if agent.number not in self._failures]
        if self._refuse_at is not None and (now >= self._refuse_at or not missing):
            self._refuse_at = None
            raise Refusal("\n".join(f"phalanx: {line}" for _, line in sorted(self._failures.items())), 1)
        if missing and now >= self.came_at + _GIVEN_UP_S:
            raise Refusal(
                f"phalanx: {format_list(missing)} did not join within {_GIVEN_UP_S:.0f} s. The command that starts "
                f"Phalanx there ran, but nothing has connected from there: try phalanx doctor -H",
                1,
            )
        if missing and not self.named and now >= self.came_at + _NAMED_S:
            self.named = True
            who = f"{format_list(missing)} {'has' if len(missing) == 1 else 'have'}"
            lines.append(f"phalanx: after {now - self.began:.0f} s {who} not joined yet")
        return lines

    def describe_lost(self, agent: AgentState, *, silent: bool) -> tuple[str, int]:
        """See :class:`Starter`."""
        why = f"host {agent.title} is lost: it has failed, its network has, or Phalanx's process there was killed"
        return why, 0

    def on_lost(self, agent: AgentState) -> None:
        """See :class:`Starter`."""
        if not self.supervisor.going or is_here(agent.name, starter=bool(self.job.starter)):
            return
        mark = f"{settings.AGENT}={agent_name(attempt_name(self.job), agent.number)}"
        with contextlib.suppress(OSError, LaunchError):  # it could be started when the agent was
            words = (sys.executable, "-I", "-S", _SWEEP, mark)
            self.run_program(Program(command_for(agent.name, self.job.starter, words)))
            self._swept_until = time.monotonic() + _SWEEP_S

    def give_up(self, agent: AgentState) -> None:
        """See :class:`Starter`."""
        self.supervisor.links.drop(agent)

    def dismiss(self, turn: Callable[[], None]) -> None:
        """See :class:`Starter`."""
        for program in self.running():
            program.send(signal.SIGCONT)  # nsenter stops with what it has started, and does not go on with it
        # What has started an agent that is lost, or has never come, may never end by itself.
        self._leaving = {program for program, agent in self._host_of.items() if agent.link is not None}
        super().dismiss(turn)

    def awaited(self) -> list[Program]:
        """See :class:`JoiningStarter`."""
        return [program for program in self.running() if program in self._leaving or program not in self._host_of]

    def leave_s(self) -> float:
        """See :class:`JoiningStarter`."""
        return max(_LEAVE_S, self._swept_until - time.monotonic())


def place_ranks(job: Job, agents: Sequence[AgentState]) -> tuple[list[RankRow], list[str]]:
    """Place the ranks on the hosts of agents that have come; the rows of the rank table, and notes for the user."""
    rows: list[RankRow] = []
    notes: list[str] = []
    for agent in agents:
        said = agent.here
        assert said is not None
        cpus = list(map(tuple, said.cpus))
        share = cores_per_rank(len(agent.ranks), said.cores, cpus)
        threads = int(job.threads.partition(",")[0]) if job.threads else share
        for local, rank in enumerate(agent.ranks):
            own = cpus[local] if cpus else ()
            device = device_of_rank(local, job.device, said.accelerators)
            cores = len(own) or said.cores
            rows.append(RankRow(rank.number, agent.number, said.name, local, device, None, cores, threads, own))
        if len(agent.ranks) > said.cores and not notes:
            notes.append(
                f"{format_count(len(agent.ranks), 'rank')} share {format_count(said.cores, 'core')} on "
                f"{agent.name}; they will take turns, and a timing says little about a machine with a core for each"
            )
    return rows, notes
