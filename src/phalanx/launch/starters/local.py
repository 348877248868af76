"""The agent of this host: a fork of the supervisor, which stays for all attempts."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from phalanx.errors import PROCESS_LIMIT_HINT
from phalanx.launch.agent import Agent, Inheritance
from phalanx.launch.job.target import Refusal
from phalanx.launch.link import link_pair
from phalanx.launch.output.failure import describe_lost_agent
from phalanx.launch.rank.start import RankStart
from phalanx.launch.roster import AgentState
from phalanx.launch.starters.contract import Starter, stand_apart
from phalanx.system import processes

if TYPE_CHECKING:
    from phalanx.launch.supervisor import Supervisor

__all__ = ["LocalStarter"]

# How long the agent may take to leave.
_LEAVE_S = 3.0


class LocalStarter(Starter):
    """Forks the agent, or goes on with that of the attempt before.

    Args:
        supervisor: that of the attempt.
        before: the starter of the attempt before; None in the first.
    """

    def __init__(self, supervisor: Supervisor, before: Starter | None = None) -> None:
        self._supervisor = supervisor
        self._before = before
        self._pid = self._handle = 0
        self._status: int | None = None
        self._until: float | None = None
        self.agents = [AgentState(0, supervisor.job.host, supervisor.ranks)]

    def begin(self, inheritance: Inheritance) -> RankStart | None:
        """Fork, unless there is an agent."""
        [agent] = self.agents
        if isinstance(self._before, LocalStarter):
            self._pid, self._handle = self._before._pid, self._before._handle
            link = self._before.agents[0].link
            assert link is not None
        else:
            link, theirs = link_pair()
            supervisor = self._supervisor
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            try:
                self._pid = os.fork()
            except OSError as error:
                raise Refusal(
                    f"phalanx: no process can be started: {error.strerror}; {PROCESS_LIMIT_HINT}", 1
                ) from error
            if self._pid == 0:
                signal.set_wakeup_fd(-1)
                supervisor.forget()
                link.close()
                supervisor.listener.close()
                stand_apart(inheritance.handlers, "phalanx-agent")
                return Agent(theirs, inheritance, supervisor.job.host).run()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
            self._handle = os.pidfd_open(self._pid)
        self._supervisor.selector.register(self._handle, selectors.EVENT_READ, self._reap)
        self._supervisor.admit(agent, link)
        return None

    def _reap(self) -> None:
        """The agent has ended."""
        if self._status is None:
            self._supervisor.selector.unregister(self._handle)
            os.close(self._handle)
            _, status = os.waitpid(self._pid, 0)
            self._status = os.waitstatus_to_exitcode(status)

    def due_at(self) -> float | None:
        """When to stop waiting for the agent."""
        return self._until

    def has_ranks(self) -> bool:
        """Whether the agent has forked."""
        return self._pid > 0 and self._status is None and bool(processes.children_of(self._pid))

    def describe_lost(self, agent: AgentState, *, silent: bool) -> tuple[str, int]:
        """How the agent has ended, which it does not by itself."""
        if self._status is None:
            self._reap()
        # Processes that the agent could not end have become children of this one, which is a subreaper.
        processes.end_descendants(but=self._supervisor.strangers)
        return describe_lost_agent(self._status or 0, self._pid, self._supervisor.job.host)

    def give_up(self, agent: AgentState) -> None:
        """Kill the agent: it is stopped, or hangs. Without it the kernel ends the ranks."""
        self.kill()

    def dismiss(self, turn: Callable[[], None]) -> None:
        """Wait for the end of the agent."""
        self._until = time.monotonic() + _LEAVE_S
        while self._pid and self._status is None:
            if self._until is not None and time.monotonic() >= self._until:
                self._until = None
                self.kill()
            turn()
        self._until = None

    def kill(self) -> None:
        """Kill the agent."""
        if self._pid and self._status is None:
            os.kill(self._pid, signal.SIGKILL)
