"""The agent of this host: a fork of ``phalanx run``, which stays for all attempts.

It is forked before the supervisor is made, so that it imports torch meanwhile and inherits nothing of the supervisor's.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.errors import PROCESS_LIMIT_HINT, LaunchError
from phalanx.launch.job.job import Job
from phalanx.launch.link import Link, link_pair
from phalanx.launch.protocol import Leave
from phalanx.launch.starters.contract import Starter
from phalanx.system import processes

if TYPE_CHECKING:
    from phalanx.launch.rank.start import RankStart
    from phalanx.launch.roster import AgentState
    from phalanx.launch.supervisor import Supervisor

__all__ = ["LocalAgent", "LocalStarter", "fork_agent", "fork_process"]

# How long the agent may take to leave.
_LEAVE_S = 3.0


def fork_process(be: Callable[[], RankStart]) -> int | RankStart:
    """Fork a process that becomes an agent, with all signals blocked. Returns its id, and in each rank its start.

    Raises:
        LaunchError: the system refuses another process.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise LaunchError(f"cannot fork: {error.strerror}; {PROCESS_LIMIT_HINT}, or free memory") from error
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return pid
    os.setsid()  # out of the terminal's foreground group, in which Ctrl-C is the supervisor's
    processes.set_name("phalanx-agent")
    processes.adopt_orphans()
    return be()


@dataclass
class LocalAgent:
    """The agent: its process, a pidfd, the link to it, and its exit status; None while it runs."""

    pid: int
    handle: int
    link: Link
    status: int | None = None


def fork_agent(job: Job, file_limit: tuple[int, int]) -> LocalAgent | RankStart:
    """Fork the agent. Returns in each rank its start.

    Raises:
        LaunchError: the system refuses another process.
    """
    link, theirs = link_pair()
    supervisor = os.getpid()

    def be_agent() -> RankStart:
        link.close()
        # It sees the supervisor's end as the end of the link, unless it has been stopped.
        processes.die_with_parent(supervisor, signal.SIGCONT)
        from phalanx.launch.agent import Agent  # here, so that only the agent waits for it

        before_import = {"OMP_NUM_THREADS": job.threads, **job.before_torch()}
        return Agent(theirs, file_limit, job.host).run(job.target, before_import if job.preload else None)

    pid = fork_process(be_agent)
    if not isinstance(pid, int):
        return pid
    theirs.close()
    return LocalAgent(pid, os.pidfd_open(pid), link)


class LocalStarter(Starter):
    """Goes on with the agent that was forked.

    Args:
        supervisor: that of the attempt.
        agent: the agent.
    """

    def __init__(self, supervisor: Supervisor, agent: LocalAgent) -> None:
        from phalanx.launch.roster import AgentState

        self._supervisor, self._agent = supervisor, agent
        self._until: float | None = None
        self.agents = [AgentState(0, supervisor.job.host, supervisor.ranks)]

    def begin(self) -> None:
        self._supervisor.selector.register(self._agent.handle, selectors.EVENT_READ, self._reap)
        self._supervisor.links.admit(self.agents[0], self._agent.link)

    def _reap(self) -> None:
        """Note how the agent has ended."""
        if self._agent.status is None:
            self._supervisor.selector.unregister(self._agent.handle)
            os.close(self._agent.handle)
            _, status = os.waitpid(self._agent.pid, 0)
            self._agent.status = os.waitstatus_to_exitcode(status)

    def due_at(self) -> float | None:
        return self._until

    def has_ranks(self) -> bool:
        """Tell whether the agent has forked."""
        return self._agent.status is None and bool(processes.children_of(self._agent.pid))

    def describe_lost(self, agent: AgentState, *, silent: bool) -> tuple[str, int]:
        """Say how the agent has ended, which it does not by itself."""
        from phalanx.launch.output.failure import describe_lost_agent

        self._reap()
        # Processes that the agent could not end have become children of this one, which is a subreaper.
        processes.end_descendants(but=self._supervisor.strangers)
        return describe_lost_agent(self._agent.status or 0, self._agent.pid, self._supervisor.job.host)

    def give_up(self, agent: AgentState) -> None:
        """Kill the agent: it is stopped, or hangs. Without it the kernel ends the ranks."""
        self.kill()

    def dismiss(self, turn: Callable[[], None]) -> None:
        """Have the agent leave, and wait for its end."""
        self._supervisor.send(self.agents[0], Leave())
        self._until = time.monotonic() + _LEAVE_S
        while self._agent.status is None:
            if self._until is not None and time.monotonic() >= self._until:
                self._until = None
                self.kill()
            turn()
        self._until = None

    def kill(self) -> None:
        """Kill the agent."""
        if self._agent.status is None:
            os.kill(self._agent.pid, signal.SIGKILL)
