"""An MPI launcher starts an agent for each rank, which must be a child of what the launcher's process manager started.

A rank's host is the one that its agent reports, whatever the MPI launcher was asked for. The agents stay until all
ranks have ended, so the MPI launcher sees all its processes end at once and with exit code 0, and has nothing to
report.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from phalanx import settings
from phalanx.errors import LaunchError
from phalanx.launch.job.job import Job
from phalanx.launch.job.target import Refusal
from phalanx.launch.output.failure import RankState, signal_name
from phalanx.launch.protocol import Here
from phalanx.launch.roster import AgentState
from phalanx.launch.starters import start_agent
from phalanx.launch.starters.joining import JoiningStarter, Program
from phalanx.topology.table import RankRow
from phalanx.words import format_named

if TYPE_CHECKING:
    from phalanx.launch.supervisor import Supervisor

__all__ = ["MpiStarter", "place_ranks"]

# How long the MPI launcher may take to leave if a host is out of reach, for whose processes it would wait.
_LOST_LEAVE_S = 0.7


class MpiStarter(JoiningStarter):
    """Runs the MPI launcher."""

    def __init__(self, supervisor: Supervisor) -> None:
        super().__init__(supervisor)
        assert self.job.mpi is not None
        self._launcher = self.job.mpi
        self.name = self._launcher.name
        self._mpiexec: Program | None = None
        self.agents = [AgentState(rank.number, self.job.host, [rank]) for rank in supervisor.ranks]

    def begin(self) -> None:
        """Start the MPI launcher."""
        job = self.job
        # A file without a name: nothing to remove, however this ends.
        host_list = os.memfd_create(f"{job.run_id}-hosts")
        os.pwrite(host_list, "".join(f"{host.name}:{host.slots}\n" for host in job.hosts).encode(), 0)
        agent = [sys.executable, start_agent.__file__, "mpi", self._launcher.kind]
        try:
            self._mpiexec = Program(
                self._launcher.command(job.ranks, job.hosts, agent, f"/dev/fd/{host_list}"),
                {**self._launcher.environment(), **os.environ, settings.MPI_JOIN: self.invitation},
                pass_fds=[host_list],
            )
        except LaunchError as error:
            raise Refusal(f"phalanx: {error}", 2) from error
        except OSError as error:
            raise Refusal(f"phalanx: {self._launcher.path} cannot be executed: {error.strerror}", 126) from error
        finally:
            os.close(host_list)
        self.run_program(self._mpiexec)

    def came(self, here: Here) -> AgentState:
        """Give an agent its rank."""
        if here.size != len(self.agents) or self.agents[here.agent].here is not None:
            raise Refusal(
                f"phalanx: {self.name} was asked for {len(self.agents)} ranks, and a process on {here.name} "
                f"says it is rank {here.agent} of {here.size}; remove options that set the number of ranks from --mpi",
                2,
            )
        self.patience_s = 120.0  # before any has come there is no hurry: the job may wait in a queue
        return self.agents[here.agent]

    def complete(self) -> None:
        """Place the ranks."""
        here = [agent.here for agent in self.agents if agent.here is not None]
        self.supervisor.all_here(place_ranks(self.job, here), [])

    def describe_missing(self, missing: Sequence[AgentState]) -> str:
        # In rank order, the hosts that were asked for; none if the MPI launcher was to choose.
        asked = [host.name for host in self.job.hosts for _ in range(host.slots or 0)]
        hosts = list(dict.fromkeys(asked[agent.number] for agent in missing)) if asked else []
        where = f" (on {', '.join(hosts)})" if hosts else ""
        return f"{self.name} has not brought {_ranks_of(missing)}{where} yet"

    def describe_given_up(self, missing: Sequence[AgentState]) -> str:
        """Name ranks that do not come: not all MPI launchers notice that a process has ended before it called MPI."""
        return (
            f"{_ranks_of(missing)} did not come within {self.patience_s:.0f} s of the others; {self.name} may have "
            f"lost the process, or its host cannot start Python"
        )

    def on_program_end(self, program: Program, agent: AgentState | None) -> None:
        """Await the agents, which end their ranks: the MPI launcher has ended, and the shims with it."""
        if not self.supervisor.going and not self.supervisor.over:
            missing = self.missing()
            which = f"{_ranks_of(missing)} had come" if missing else "the ranks were started"
            self.supervisor.refuse(Refusal(f"phalanx: {self._describe_end(f'before {which}')}", self._exit_code()))
        elif not self.supervisor.over:
            self.supervisor.give_up_after(self.job.patience_s(None) + 2.0)

    def describe_lost(self, agent: AgentState, *, silent: bool) -> tuple[str, int]:
        host = agent.here.name if agent.here is not None else agent.name
        if silent:
            return f"host {host} is lost: it has failed, or its network has", 0
        return f"rank {agent.number} on {host} is lost: its agent was killed, or its host shut down", 0

    def is_gone(self) -> bool:
        """Tell whether the MPI launcher has ended, so that the loss of an agent is no fault of its own."""
        return self._mpiexec is not None and self._mpiexec.code is not None

    def leave_s(self) -> float:
        if self.supervisor.going and all(agent.link is not None for agent in self.agents):
            return super().leave_s()
        # The MPI launcher would wait for processes that have not begun, or whose host is out of reach.
        if self._mpiexec is not None:
            self._mpiexec.send(signal.SIGTERM)
        return _LOST_LEAVE_S

    def explain(self, failures: Sequence[RankState]) -> tuple[str, int] | None:
        """Blame the MPI launcher if no rank has failed by itself: its output says why."""
        if not failures or any(failure.has_failed for failure in failures):
            return None
        ranks = format_named("rank", [failure.number for failure in failures])
        return f"phalanx: {self._describe_end(f'and {ranks} with it', ', ')}", self._exit_code()

    def _exit_code(self) -> int:
        code = (self._mpiexec.code if self._mpiexec is not None else 0) or 1
        return 128 - code if code < 0 else code

    def _describe_end(self, rest: str, between: str = " ") -> str:
        """Say how the MPI launcher has ended, the rest of the sentence, and what it has printed."""
        code, said = (self._mpiexec.code, self._mpiexec.take()) if self._mpiexec is not None else (None, [])
        how = "ended the job"
        if code is not None:
            how = f"was ended by signal {-code} ({signal_name(-code)})" if code < 0 else f"ended with exit code {code}"
        lines = "".join(f"  {line}\n" for line in said)
        return f"{self.name} ({self._launcher.title}) {how}{between}{rest}\n{lines}"


def _ranks_of(agents: Sequence[AgentState]) -> str:
    return format_named("rank", [agent.number for agent in agents])


def place_ranks(job: Job, here: Sequence[Here]) -> list[RankRow]:
    """Make the rank table of a job from what its agents, which have all come, say about themselves.

    Hosts are numbered by their first rank, and local ranks are counted on each host, so the table is right for every
    placement. A formula like rank // ranks-per-node is wrong if the MPI launcher deals ranks out to hosts in turn.

    Args:
        job: the job.
        here: what each rank's agent said.
    """
    nodes: dict[tuple[str, str], int] = {}
    count: dict[int, int] = {}
    placed = []
    for said in here:
        node = nodes.setdefault((said.machine, said.name), len(nodes))
        placed.append((node, count.get(node, 0)))
        count[node] = placed[-1][1] + 1
    masks = [(node, tuple(said.cpus[0])) for (node, _), said in zip(placed, here, strict=True)]
    rows = []
    for rank, ((node, local), said) in enumerate(zip(placed, here, strict=True)):
        cores = len(said.cpus[0])
        # Ranks with the same set of cores share it; a rank that was bound to cores of its own has them alone.
        threads = int(job.threads.partition(",")[0]) if job.threads else max(1, cores // masks.count(masks[rank]))
        rows.append(RankRow(rank, node, said.name, local, job.device_of(local), None, cores, threads))
    return rows
