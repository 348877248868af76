"""An MPI launcher starts an agent for each rank, which must be a child of what the launcher's process manager started.

All agents have to come before any rank runs, because only then is it known where each rank is (``mpi_placing.py``). A
rank's host is the one that its agent reports; if the MPI launcher was asked for another one, a note is printed. The
agents stay until all ranks have ended, so the MPI launcher sees all its processes end at once and with exit code 0, and
has nothing to report.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from phalanx import settings
from phalanx.errors import LaunchError
from phalanx.launch.job.target import Refusal
from phalanx.launch.output.failure import RankState, signal_name
from phalanx.launch.protocol import Here
from phalanx.launch.roster import AgentState
from phalanx.launch.starters.hosts import JoiningStarter
from phalanx.launch.starters.mpi_placing import find_contradiction, place_ranks, planned_hosts
from phalanx.launch.starters.program import Program
from phalanx.words import format_named

if TYPE_CHECKING:
    from phalanx.launch.supervisor import Supervisor

__all__ = ["MpiStarter"]

_SHIM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "shim.py")
# After this long without some ranks the missing ones are named; this long after the last one came, the job is given up.
_NAMED_S, _GIVEN_UP_S = 5.0, 120.0
# How long agents and the MPI launcher may take to leave, if a host is out of reach, for which the MPI launcher would
# wait, and if none is; and the MPI launcher after each signal.
_LEAVE_S, _LOST_LEAVE_S, _ASKED_S = 3.0, 0.7, 1.5


class MpiStarter(JoiningStarter):
    """Runs the MPI launcher."""

    def __init__(self, supervisor: Supervisor) -> None:
        super().__init__(supervisor, "")
        assert self.job.mpi is not None
        self._launcher = self.job.mpi
        self._mpiexec: Program | None = None
        self._notices_at: float | None = self.began + _NAMED_S
        self.agents = [AgentState(rank.number, self.job.host, [rank]) for rank in supervisor.ranks]

    def begin(self) -> None:
        """Start the MPI launcher."""
        job = self.job
        # A file without a name: nothing to remove, however this ends.
        host_list = os.memfd_create(f"{job.run_id}-hosts")
        os.pwrite(host_list, "".join(f"{host.name}:{host.slots}\n" for host in job.hosts).encode(), 0)
        shim = [sys.executable, _SHIM, self._launcher.kind]
        try:
            self._mpiexec = Program(
                self._launcher.command(job.ranks, job.hosts, shim, f"/dev/fd/{host_list}"),
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
        known = here.size == len(self.agents) and here.agent < here.size
        if not known or self.agents[here.agent].here is not None:
            already = ", of which there is one already" if here.size == len(self.agents) else ""
            raise Refusal(
                f"phalanx: {self._launcher.name} was asked for {len(self.agents)} ranks, and a process on {here.name} "
                f"says it is rank {here.agent} of {here.size}{already}; remove options that set the number of ranks "
                f"from --mpi",
                2,
            )
        if self.named:
            self._notices_at = time.monotonic() + _GIVEN_UP_S
        return self.agents[here.agent]

    def complete(self) -> None:
        """Place the ranks."""
        self._notices_at = None
        here = [agent.here for agent in self.agents if agent.here is not None]
        rows = place_ranks(self.job, here)
        note = find_contradiction(self.job, self._launcher.name, rows, here)
        self.supervisor.all_here(rows, [note] if note else [])

    def one_of_each_host(self) -> Sequence[AgentState]:
        """See :class:`Starter`."""
        return list({agent.place: agent for agent in self.agents if agent.link is not None}.values())

    def times(self) -> list[float | None]:
        """See :class:`JoiningStarter`."""
        return [self._notices_at]

    def act(self, now: float) -> list[str]:
        """See :class:`Starter`."""
        lines = []
        if self._mpiexec is not None and not self.supervisor.is_failing() and not self.supervisor.over:
            lines = [f"[{self._launcher.name}] {line}" for line in self._mpiexec.take_due()]
        if self._notices_at is not None and now >= self._notices_at and not self.supervisor.over:
            lines += self._notice(now)
        return lines

    def _notice(self, now: float) -> list[str]:
        """Name ranks that do not come. As long as none has there is no hurry: the job may wait in a queue.

        Not all MPI launchers notice that a process has ended before it has called MPI, so Phalanx must.
        """
        missing = [agent.number for agent in self.missing()]
        some = len(missing) < len(self.agents)
        if some and now >= self.came_at + _GIVEN_UP_S:
            raise Refusal(
                f"phalanx: {format_named('rank', missing)} did not come within {_GIVEN_UP_S:.0f} s of the others; "
                f"{self._launcher.name} may have lost the process, or its host cannot start Python",
                1,
            )
        self._notices_at = self.came_at + _GIVEN_UP_S if some else None
        if self.named:
            return []
        self.named = True
        planned = planned_hosts(self.job)
        hosts = list(dict.fromkeys(planned[rank] for rank in missing)) if planned else []
        where = f" (on {', '.join(hosts)})" if hosts else ""
        ranks = format_named("rank", missing)
        return [f"phalanx: after {now - self.began:.0f} s {self._launcher.name} has not brought {ranks}{where} yet"]

    def on_program_end(self, program: Program) -> None:
        """Await the agents, which end their ranks: the MPI launcher has ended, and the shims with it."""
        if not self.supervisor.going and not self.supervisor.over:
            missing = [agent.number for agent in self.missing()]
            which = f"{format_named('rank', missing)} had come" if missing else "the ranks were started"
            text = f"phalanx: {self._describe_end()} before {which}\n{self._said()}"
            self.supervisor.refuse(Refusal(text, self._exit_code()))
        elif not self.supervisor.over:
            self.supervisor.give_up_after(self.job.patience_s(None) + 2.0)

    def describe_lost(self, agent: AgentState, *, silent: bool) -> tuple[str, int]:
        """See :class:`Starter`."""
        host = agent.here.name if agent.here is not None else agent.name
        if silent:
            return f"host {host} is lost: it has failed, or its network has", 0
        return f"rank {agent.number} on {host} is lost: its agent was killed, or its host shut down", 0

    def is_gone(self) -> bool:
        """Tell whether the MPI launcher has ended, so that the loss of an agent is no fault of its own."""
        return self._mpiexec is not None and self._mpiexec.code is not None

    def give_up(self, agent: AgentState) -> None:
        """See :class:`Starter`."""
        self.supervisor.links.drop(agent)

    def leave_s(self) -> float:
        """See :class:`JoiningStarter`."""
        if not self.supervisor.going or any(agent.link is None for agent in self.agents):
            # The MPI launcher would wait for processes that have not begun, or whose host is out of reach.
            if self._mpiexec is not None:
                self._mpiexec.send(signal.SIGTERM)
            return _LOST_LEAVE_S
        return _LEAVE_S

    def asked_s(self) -> float:
        """See :class:`JoiningStarter`."""
        return _ASKED_S

    def explain(self, failures: Sequence[RankState]) -> tuple[str, int] | None:
        """Blame the MPI launcher if no rank has failed by itself: its output says why."""
        if not failures or any(failure.has_failed for failure in failures):
            return None
        ranks = format_named("rank", [failure.number for failure in failures])
        return f"phalanx: {self._describe_end()}, and {ranks} with it\n{self._said()}", self._exit_code()

    def _said(self) -> str:
        lines = self._mpiexec.take_held() if self._mpiexec is not None else []
        return "".join(f"  {line}\n" for line in lines)

    def _exit_code(self) -> int:
        code = (self._mpiexec.code if self._mpiexec is not None else 0) or 1
        return 128 - code if code < 0 else code

    def _describe_end(self) -> str:
        program = f"{self._launcher.name} ({self._launcher.title})"
        code = self._mpiexec.code if self._mpiexec is not None else None
        if code is None:
            return f"{program} ended the job"
        if code < 0:
            return f"{program} was ended by signal {-code} ({signal_name(-code)})"
        return f"{program} ended with exit code {code}"
