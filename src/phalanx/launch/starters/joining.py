"""Starters whose agents dial the supervisor, and the programs that start these agents, here or on other hosts.

All agents have to come before any rank runs: only then is it known where each rank is.

The ranks' output does not pass through the programs, so what these print is their own. Most of that is about ranks that
failed, which Phalanx explains better; so each line is held back for a moment, in which it may turn out that a rank has
failed.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import selectors
import signal
import subprocess
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from phalanx.launch.job.target import Refusal
from phalanx.launch.link import MESSAGE, Link, Lost, open_door
from phalanx.launch.protocol import Here, Leave, decode_event
from phalanx.launch.roster import AgentState
from phalanx.launch.starters.contract import Starter
from phalanx.system import processes

if TYPE_CHECKING:
    from phalanx.launch.supervisor import Supervisor

__all__ = ["JoiningStarter", "Program"]

# How long a line of a program is held back, and how many are kept.
_HOLD_S = 0.5
_MOST_HELD = 200
# After this long in which no agent came, those that are missing are named.
_NAMED_S = 5.0
# How long agents, and then their programs, may take to leave; then how long programs may take after each signal.
_LEAVE_S, _ASKED_S = 3.0, 1.5


class Program:
    """A running program, which ends with this process.

    Arguments are those of ``subprocess.Popen``. ``handle`` is a pidfd, readable once it has ended; ``output`` is the
    pipe with its output, non-blocking.

    Raises:
        OSError: it cannot be executed.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.command = command
        self._process = subprocess.Popen(
            command,
            bufsize=0,
            env=environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=pass_fds,
            start_new_session=True,
            preexec_fn=functools.partial(_follow_parent, os.getpid()),
        )
        self.output = cast(io.FileIO, self._process.stdout)
        os.set_blocking(self.output.fileno(), False)
        self.handle = os.pidfd_open(self._process.pid)
        self._unfinished = b""
        self._held: list[tuple[float, str]] = []

    @property
    def code(self) -> int | None:
        """Its exit code, as :meth:`reap` has found it; minus a signal; None while it runs."""
        return self._process.returncode

    def read(self) -> bool:
        """Read its output as far as there is any; return False at its end."""
        while data := self.output.read(1 << 16):
            self._take(data)
        if data is None:
            return True
        if self._unfinished:
            self._take(b"\n")
        return False

    def _take(self, data: bytes) -> None:
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        texts = (line.decode(errors="replace").rstrip() for line in lines)
        # Some MPI launchers frame their messages with lines of dashes.
        self._held += [(time.monotonic(), text) for text in texts if text.strip("-= ")]
        del self._held[:-_MOST_HELD]

    def due_at(self) -> float | None:
        """Return when the next of its lines may be passed on."""
        return self._held[0][0] + _HOLD_S if self._held else None

    def take(self, held_for_s: float = 0.0) -> list[str]:
        """Return the lines that have been held back for so long."""
        until = time.monotonic() - held_for_s
        lines = [line for at, line in self._held if at <= until]
        del self._held[: len(lines)]
        return lines

    def reap(self) -> None:
        """Note how it has ended, as ``handle`` says, and what it has said last."""
        self._process.wait()
        self.read()
        self.output.close()
        os.close(self.handle)

    def send(self, signum: int) -> None:
        """Signal it and the other processes of its process group."""
        if self.code is None:
            processes.send_to_group(self._process.pid, signum)


def _follow_parent(parent: int) -> None:
    # By SIGTERM, not SIGKILL: it has processes on other hosts to end, and files to remove.
    processes.die_with_parent(parent, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


class JoiningStarter(Starter):
    """A starter whose agents dial the supervisor.

    Args:
        supervisor: that of the attempt.
        secret: the key by which agents prove themselves; empty for a new one.

    Attributes:
        invitation: what an agent needs to join (``launch/link.py``).
        programs: those that were started, each with its agent; None for one that starts all agents.
        name: what the user calls the program that starts all agents.
        patience_s: how long after the last agent that came the missing ones are given up; None for never.
    """

    name = ""
    patience_s: float | None = None

    def __init__(self, supervisor: Supervisor, secret: str = "") -> None:
        self.supervisor, self.job, self.selector = supervisor, supervisor.job, supervisor.selector
        self.agents: list[AgentState] = []
        self._door, self.invitation = open_door(self.job.addresses, self.selector, self._welcome, secret)
        self.programs: dict[Program, AgentState | None] = {}
        self._began = self._came_at = time.monotonic()
        self._named = False
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

    @abstractmethod
    def describe_missing(self, missing: Sequence[AgentState]) -> str:
        """Say which agents have not come yet."""

    @abstractmethod
    def describe_given_up(self, missing: Sequence[AgentState]) -> str:
        """Say for which agents the job is given up."""

    def on_program_end(self, program: Program, agent: AgentState | None) -> None:
        """Act on the end of a program, which was reaped."""

    # Arrivals.

    def _welcome(self, link: Link) -> None:
        """Wait for the first message of a process that has proven the key: it says which agent it is."""
        self.selector.register(link, selectors.EVENT_READ, functools.partial(self._seat, link))
        self._seat(link)

    def _seat(self, link: Link) -> None:
        here = None
        try:
            frames = link.receive()
            if not frames:
                return
            kind, first = frames[0]
            here = decode_event(first) if kind == MESSAGE else None
        except Lost:
            pass
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
        agent.here, self._came_at = here, time.monotonic()
        agent.hear_clock(here.now)
        self.supervisor.links.admit(agent, link)
        self.supervisor.take(agent, frames[1:])
        if all(each.here is not None for each in self.agents):
            try:
                self.complete()
            except Refusal as refusal:
                self.supervisor.refuse(refusal)

    def missing(self) -> list[AgentState]:
        """List the agents that have not come and still may."""
        return [agent for agent in self.agents if agent.here is None]

    def _missing_at(self) -> float | None:
        """Return when missing agents are named, and then when they are given up."""
        if self.supervisor.over or not self.missing():
            return None
        after_s = self.patience_s if self._named else _NAMED_S
        return None if after_s is None else self._came_at + after_s

    # Programs.

    def run_program(self, program: Program, agent: AgentState | None = None) -> None:
        """Watch a program that was started."""
        self.programs[program] = agent
        self.selector.register(program.handle, selectors.EVENT_READ, functools.partial(self._on_end, program))
        self.selector.register(program.output, selectors.EVENT_READ, functools.partial(self._on_output, program))

    def _on_output(self, program: Program) -> None:
        if program.code is None and not program.read():  # else its end has been noticed in this very turn
            self.selector.unregister(program.output)

    def _on_end(self, program: Program) -> None:
        self.selector.unregister(program.handle)
        with contextlib.suppress(KeyError):  # its output has ended before
            self.selector.unregister(program.output)
        program.reap()
        self.on_program_end(program, self.programs[program])

    def _talking(self) -> dict[Program, str]:
        """Find the programs with lines to be passed on, and whose they are.

        Lines of a program whose agent has not come may say why it does not.
        """
        talking = {
            program: agent.name if agent is not None else self.name
            for program, agent in self.programs.items()
            if program.due_at() is not None and (agent is None or agent.here is not None)
        }
        return {} if talking and (self.supervisor.over or self.supervisor.is_failing()) else talking

    def due_at(self) -> float | None:
        times = [self._door.tend(time.monotonic()), self._until, self._missing_at()]
        times += [program.due_at() for program in self._talking()]
        return min((when for when in times if when is not None), default=None)

    def act(self, now: float) -> list[str]:
        """Pass on what programs have printed, and name agents that do not come."""
        lines = []
        for program, name in self._talking().items():
            lines += [f"[{name}] {line}" for line in program.take(_HOLD_S)]
        missing_at = self._missing_at()
        if missing_at is not None and now >= missing_at:
            if self._named:
                raise Refusal(f"phalanx: {self.describe_given_up(self.missing())}", 1)
            self._named = True
            lines.append(f"phalanx: after {now - self._began:.0f} s {self.describe_missing(self.missing())}")
        return lines

    # The end.

    def give_up(self, agent: AgentState) -> None:
        self.supervisor.links.drop(agent)

    def leave_s(self) -> float:
        """Return how long agents, and programs whose agents have come, may take to leave."""
        return _LEAVE_S

    def dismiss(self, turn: Callable[[], None]) -> None:
        for agent in self.agents:
            self.supervisor.send(agent, Leave())
        self._door.close()
        # What has started an agent that is lost, or has never come, may never end by itself.
        leaving = [program for program, agent in self.programs.items() if agent is None or agent.link is not None]

        def stay() -> bool:
            return any(agent.link for agent in self.agents) or any(program.code is None for program in leaving)

        self._wait(turn, self.leave_s(), stay)
        for signum in (signal.SIGTERM, signal.SIGKILL):
            for program in self.programs:
                program.send(signum)
            self._wait(turn, _ASKED_S, lambda: any(program.code is None for program in self.programs))
        for agent in self.agents:
            self.supervisor.links.drop(agent)

    def _wait(self, turn: Callable[[], None], patience_s: float, stay: Callable[[], bool]) -> None:
        self._until = time.monotonic() + patience_s
        while self._until is not None and stay() and time.monotonic() < self._until:
            turn()
        self._until = None

    def kill(self) -> None:
        self._until = None
        for program in self.programs:
            program.send(signal.SIGKILL)
