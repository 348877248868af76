"""The agents of other hosts: ssh, or a program of the user's, starts one on each.

With many hosts, those that have come start others (``tree.py``). All are compared, and the ranks placed, before any
user code runs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from phalanx import settings
from phalanx.launch.job.binding import cores_per_rank
from phalanx.launch.job.hosts import is_here
from phalanx.launch.job.target import Refusal
from phalanx.launch.output.failure import signal_name
from phalanx.launch.protocol import Here
from phalanx.launch.roster import AgentState
from phalanx.launch.starters.invitation import OTHER_VERSION, UNREACHABLE, Invitation, carried_variables
from phalanx.launch.starters.joining import JoiningStarter, Program
from phalanx.launch.starters.ssh import command_for
from phalanx.launch.starters.tree import starting_host
from phalanx.topology.device_files import device_of_rank
from phalanx.topology.table import RankRow
from phalanx.words import format_count, format_list

if TYPE_CHECKING:
    from phalanx.launch.job.job import Job
    from phalanx.launch.supervisor import Supervisor

__all__ = ["HostsStarter", "find_differences", "place_ranks"]

# Once a starter has failed, how long others may fail for the same reason, so that one message names them all.
_SETTLE_S = 0.3
# The exit codes of a shell, and of programs like it, for a command that cannot be executed or is not there.
_NO_PROGRAM = (126, 127)
_SSH_FAILED = 255


class HostsStarter(JoiningStarter):
    """Has an agent started on each host."""

    patience_s = 60.0

    def __init__(self, supervisor: Supervisor) -> None:
        super().__init__(supervisor, supervisor.job.key)
        first = 0
        for number, host in enumerate(self.job.hosts):
            count = host.slots or 1
            self.agents.append(AgentState(number, host.name, supervisor.ranks[first : first + count]))
            first += count
        # Those that are not started from here.
        self._others = [
            (agent.number, agent.name, len(agent.ranks))
            for agent in self.agents
            if starting_host(agent.number) is not None and not self.job.starter and not is_here(agent.name)
        ]
        self._failures: dict[int, str] = {}
        self._refuse_at: float | None = None

    def begin(self) -> None:
        """Start the agents, but for those that others start. All at once: most of a login is waiting."""
        others = {number for number, _, _ in self._others}
        for agent in self.agents:
            if agent.number not in others:
                self._start(agent)

    def start_after_all(self, agent: AgentState) -> None:
        if agent.here is None and not self.supervisor.over:
            try:
                self._start(agent)
            except Refusal as refusal:
                self.supervisor.refuse(refusal)

    def _start(self, agent: AgentState) -> None:
        job = self.job
        invitation = Invitation(
            version=settings.VERSION,
            environment=carried_variables(os.environ, job.named),
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
            others=self._others,
        )
        command, given = command_for(agent.name, job.starter), invitation.as_file()
        try:
            self.run_program(Program(command, stdin=given), agent)
        except OSError as error:
            text = f"phalanx: {agent.name}: {command[0]} cannot be started: {error.strerror}"
            raise Refusal(text, 126) from error
        finally:
            os.close(given)

    def on_program_end(self, program: Program, agent: AgentState | None) -> None:
        if agent is not None and agent.here is None and program.code:
            self._failures[agent.number] = _why_it_ended(agent.name, program)
            self._refuse_at = self._refuse_at or time.monotonic() + _SETTLE_S

    def came(self, here: Here) -> AgentState:
        agent = self.agents[here.agent]
        if agent.here is not None:
            raise Refusal(f"phalanx: two agents say that they are the one of {agent.name}; its starter ran twice", 1)
        return agent

    def complete(self) -> None:
        """Place the ranks: they follow the order of the hosts, as the user wrote them."""
        here = [agent.here for agent in self.agents if agent.here is not None]
        differences = find_differences([agent.name for agent in self.agents], here)
        if differences:
            raise Refusal("\n".join(f"phalanx: {line}" for line in differences), 1)
        self.supervisor.all_here(*place_ranks(self.job, self.agents))

    def missing(self) -> list[AgentState]:
        return [agent for agent in super().missing() if agent.number not in self._failures]

    def describe_missing(self, missing: Sequence[AgentState]) -> str:
        names = [agent.name for agent in missing]
        return f"{format_list(names)} {'has' if len(names) == 1 else 'have'} not joined yet"

    def describe_given_up(self, missing: Sequence[AgentState]) -> str:
        names = format_list([agent.name for agent in missing])
        return (
            f"{names} did not join within {self.patience_s:.0f} s. The command that starts Phalanx there ran, but "
            f"nothing has connected from there: try phalanx doctor -H"
        )

    def due_at(self) -> float | None:
        times = [when for when in (super().due_at(), self._refuse_at) if when is not None]
        return min(times, default=None)

    def act(self, now: float) -> list[str]:
        if self._refuse_at is not None and (now >= self._refuse_at or not self.missing()):
            self._refuse_at = None
            raise Refusal("\n".join(f"phalanx: {line}" for _, line in sorted(self._failures.items())), 1)
        return super().act(now)

    def describe_lost(self, agent: AgentState, *, silent: bool) -> tuple[str, int]:
        why = f"host {agent.title} is lost: it has failed, its network has, or Phalanx's process there was killed"
        return why, 0


def _why_it_ended(name: str, program: Program) -> str:
    """Say in one line why the program that starts the agent of a host has ended before the agent came."""
    said = program.take()
    last = said[-1].strip() if said else "it printed nothing"
    starter = os.path.basename(program.command[0])
    if program.code in (UNREACHABLE, OTHER_VERSION):
        return f"{name}: {last}"
    if program.code == _SSH_FAILED and starter == "ssh":
        return (
            f"{name}: ssh could not log in there: {last}; it must work without a question: "
            f"ssh -o BatchMode=yes {name} true"
        )
    if program.code in _NO_PROGRAM:
        return (
            f"{name}: {sys.executable} cannot be run there: {last}; the same Python, with Phalanx, must be at "
            f"the same place on all hosts"
        )
    code = program.code or 0
    how = f"exit code {code}" if code >= 0 else signal_name(-code)
    return f"{name}: {starter} ended with {how} before the host had joined: {last}"


def find_differences(names: Sequence[str], here: Sequence[Here], *, may_share: bool = False) -> list[str]:
    """Name each thing in which the hosts of a job differ and must not; empty if they fit together.

    Args:
        names: the hosts, as the user wrote them.
        here: what the agent of each has said.
        may_share: whether two of them may be one host.
    """
    for name, said in zip(names, here, strict=True):
        if said.same.keys() != here[0].same.keys():
            [script], [other] = (sorted(a.same.keys() - b.same.keys()) for a, b in ((said, here[0]), (here[0], said)))
            return [f"{name} is to run {script}, and {names[0]} {other}; give the same command on every node"]
    machines: dict[tuple[str, str], list[str]] = {}
    for name, said in zip(names, here, strict=True):
        machines.setdefault((said.machine, said.name), []).append(name)
    lines = [
        f"{format_list(same)} are one host, which calls itself {own_name}; list it once, with the number of its ranks"
        for (_, own_name), same in machines.items()
        if len(same) > 1 and not may_share
    ]
    lines += dict.fromkeys(problem for said in here for problem in said.problems)
    for thing in here[0].same:
        found: dict[str, list[str]] = {}
        for name, said in zip(names, here, strict=True):
            found.setdefault(said.same[thing], []).append(name)
        if len(found) == 1 and "" not in found:
            continue
        if not os.path.isabs(thing):
            values = [f"{value or 'not installed'} on {format_list(hosts)}" for value, hosts in found.items()]
            lines.append(f"{thing} is {'; '.join(values)}; install the same version on all hosts")
        elif "" in found:
            lines.append(f"{thing}: there is no such file on {format_list(found[''])}")
        else:
            groups = "; other than on ".join(format_list(hosts) for hosts in found.values())
            lines.append(
                f"{thing} is not the same file on {groups}; copy it to all hosts, or use a directory that they share"
            )
    return lines


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
