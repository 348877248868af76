"""Agree on the call of ``world.should_stop()`` at which all ranks of a job leave their loops.

========== ======================= ===================================================================================
state      is left when            what happens
========== ======================= ===================================================================================
unused     a rank calls it         an agent says ``CallsShouldStop``; a request before that is none, and signals act as
                                   in any job
running    somebody asks           the supervisor sends ``Hold`` to all agents: each has its ranks wait in their next
                                   call, and answers how many calls each has begun
holding    all agents have said it the agreed call is the first that no rank has begun; ``StopAt`` goes to all agents
agreed     all ranks have ended    a rank returns False up to that call, and True from there on. Ranks that have not
                                   ended after the grace are killed
========== ======================= ===================================================================================

Ranks wait for agents only, and for one round trip, so nothing can wait in a circle. A second request changes nothing;
a second signal to the launcher acts as in any job. ``training/should_stop.py`` has a rank's side.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from phalanx.launch.job.options import slurm_end_time
from phalanx.launch.output.failure import signal_name
from phalanx.launch.protocol import AskedToStop, CallsShouldStop, Event, Held, Hold, Order, StopAt
from phalanx.training.should_stop import ASKED, CALLS, CELL_WORDS, ENDING, HOLD, STOP_AT, shared_cells
from phalanx.words import format_named

if TYPE_CHECKING:
    from phalanx.launch.job.job import Job
    from phalanx.launch.output.failure import RankState
    from phalanx.launch.roster import AgentState

__all__ = ["GENTLY", "LAUNCHER", "HostStop", "StopInStep"]

#: The signal of ``phalanx stop --gently``, which the launcher alone handles.
GENTLY = signal.SIGRTMAX - 5

_SETTLE_S = 0.002  # until what one core has written is what another one reads: far more than it ever takes
_NAMED_AFTER_S = 30.0
#: The launcher as a source of signals, beside the numbers of nodes.
LAUNCHER = -1
_CANNOT = "no rank has called world.should_stop()"


class HostStop:
    """An agent's side: the cells of its ranks.

    Args:
        ranks: their numbers in the world, in the order of their parts.
    """

    def __init__(self, ranks: Sequence[int] = ()) -> None:
        self._ranks = ranks
        self._cells = shared_cells(len(ranks))
        self.used = False

    def cell(self, part: int) -> memoryview:
        """Return the cell of a rank."""
        return self._cells[part * CELL_WORDS : (part + 1) * CELL_WORDS]

    def calls(self, part: int) -> int:
        """Return how many calls a rank has begun."""
        return self._cells[part * CELL_WORDS + CALLS]

    def news(self) -> list[Event]:
        """Return what ranks have to say that have sent SIGUSR1."""
        said: list[Event] = []
        if not self.used and any(map(self.calls, range(len(self._ranks)))):
            self.used = True
            said.append(CallsShouldStop())
        for part, rank in enumerate(self._ranks):
            at = part * CELL_WORDS + ASKED
            if signum := self._cells[at]:
                self._cells[at] = 0
                said.append(AskedToStop(signal=signum, where=f"rank {rank}"))
        return said

    def hold(self) -> Held:
        """Have ranks wait in their next call; return the last call that each has begun."""
        self._write(HOLD, 1)
        time.sleep(_SETTLE_S)
        return Held(calls={rank: self.calls(part) for part, rank in enumerate(self._ranks)})

    def stop_at(self, call: int) -> None:
        """Let ranks that wait go on, and stop them at this call."""
        self._write(STOP_AT, call)

    def end(self) -> None:
        """Let signals act in the ranks as if they had never called it."""
        self._write(ENDING, 1)

    def _write(self, word: int, value: int) -> None:
        for part in range(len(self._ranks)):
            self._cells[part * CELL_WORDS + word] = value


class StopInStep:
    """The supervisor's side, during one attempt.

    Args:
        job: the job.
        agents: its agents.
        send: sends an agent an order.
        say: prints a line.

    Attributes:
        used: whether a rank has called ``should_stop``.
        why: who has asked for a stop; empty if nobody has.
        for_node: whether all who asked want one node to leave, and the job to go on.
        due_at: when to :meth:`act` next; None for never.
    """

    def __init__(
        self,
        job: Job,
        agents: Sequence[AgentState],
        send: Callable[[AgentState, Order], None],
        say: Callable[[str], None],
    ) -> None:
        self._job, self._agents, self._send, self._say = job, agents, send, say
        self.why = ""
        self.for_node = True
        self.used = self._killed = False
        self._signalled: set[int] = set()  # the launcher and nodes that have been signalled
        self._at = 0  # the agreed call
        self._grace_s, self._kill_at = 0.0, math.inf
        self._awaited: set[int] | None = None  # the agents that are to say their calls; None if nobody is asked
        self._calls: dict[int, int] = {}
        # Each: when, and what is done then.
        self._timers: list[tuple[float, Callable[[], int | None]]] = []
        if job.max_hours is not None:
            text = f"--max-hours {job.max_hours:g}"
            self._timers.append((job.began_at + 3600 * job.max_hours, lambda: self._ask_by_clock(text, None)))
        if job.stop_before_s is not None:
            before_s, text = job.stop_before_s, f"--stop-before {job.stop_before_s:g}"
            left_s = slurm_end_time(os.environ) - time.time() - before_s
            self._timers.append((time.monotonic() + left_s, lambda: self._ask_by_clock(text, before_s)))

    @property
    def due_at(self) -> float | None:
        """Return when :meth:`act` has something to do."""
        return min((when for when, _ in self._timers), default=None)

    # Requests.

    def ask(self, why: str, grace_s: float | None = None, *, for_node: bool = False) -> bool:
        """Have all ranks stop; return whether they can. A later request gives them no more time.

        Args:
            why: who asks.
            grace_s: how long ranks may take, unless the user has said it; None for as long as they want.
            for_node: as the attribute.
        """
        if not self.used:
            return False
        now, grace_s = time.monotonic(), self._job.grace_s if self._job.grace_s is not None else grace_s
        first, self.why, self.for_node = not self.why, self.why or why, self.for_node and for_node
        if grace_s is not None and now + grace_s < self._kill_at:
            self._kill_at, self._grace_s = now + grace_s, grace_s
            self._timers = [(self._kill_at, self._kill)]
        elif first:
            self._timers = [(now + _NAMED_AFTER_S, self._hold)]
        if first:
            self._hold()
        return True

    def forbid_restarts(self, why: str) -> None:
        """Have nothing started again: somebody wants the job to stop, and its ranks are ending already."""
        self.why, self.for_node = self.why or why, False

    def ask_by_signal(self, signum: int, where: str = "", *, source: int | None = None, for_node: bool = False) -> bool:
        """Have all ranks stop if this signal asks for that; return whether it has been used up by that.

        Args:
            signum: the signal.
            where: which process has got it, for people; empty for the launcher.
            source: the launcher or the node, whose second signal ends the job; None for a rank.
            for_node: as the attribute.
        """
        if signum == GENTLY:
            if not self.ask("phalanx stop --gently"):
                self._say(f"phalanx stop --gently: {_CANNOT}; the job goes on")
            return True
        if signum not in self._job.stop_on or source in self._signalled:
            return False
        grace_s = self._job.patience_s(signum) if signum == signal.SIGTERM else None
        why = f"{signal_name(signum)} at {where}" if where else signal_name(signum)
        made = self.ask(why, grace_s, for_node=for_node)
        if made and source is not None:
            self._signalled.add(source)
        return made

    def _ask_by_clock(self, why: str, grace_s: float | None) -> int | None:
        if self.ask(why, grace_s):
            return None
        self._say(f"{why}: {_CANNOT}; the job is ended as by SIGTERM")
        return signal.SIGTERM

    # Agents.

    def _hold(self) -> None:
        there = [agent for agent in self._agents if agent.link is not None and not agent.over]
        self._awaited, self._calls = {agent.number for agent in there}, {}
        for agent in there:
            self._send(agent, Hold())

    def hear(self, agent: AgentState, event: CallsShouldStop | Held | AskedToStop) -> None:
        """Take what an agent says."""
        match event:
            case CallsShouldStop():
                self.used = True
            case Held():
                self._calls.update(event.calls)
                self.lose(agent)
            case AskedToStop():
                self.ask_by_signal(event.signal, event.where)

    def lose(self, agent: AgentState) -> None:
        """Wait no longer for this agent: it has answered, or it has gone."""
        if self._awaited is None:
            return
        self._awaited.discard(agent.number)
        if self._awaited:
            return
        self._awaited = None
        if self._at:
            self._name_late()
            return
        ended = [rank.calls for each in self._agents for rank in each.ranks]
        self._at = max([*self._calls.values(), *ended], default=0) + 1
        for each in self._agents:
            self._send(each, StopAt(call=self._at))

    # Ranks that are late.

    def act(self, now: float) -> int | None:
        """Do what is due; return the signal by which the job is to be ended, if any."""
        due = [do for when, do in self._timers if when <= now]
        self._timers = [(when, do) for when, do in self._timers if when > now]
        signals = [do() for do in due]
        return next((signum for signum in signals if signum is not None), None)

    def _kill(self) -> int:
        self._killed = True
        return signal.SIGKILL

    def _name_late(self) -> None:
        running = {rank.number for agent in self._agents for rank in agent.ranks if rank.end is None}
        if late := self._late({rank: calls for rank, calls in self._calls.items() if rank in running}):
            self._say(f"a stop was requested ({self.why}) {_NAMED_AFTER_S:g} s ago: {late}")

    def _late(self, calls: dict[int, int]) -> str:
        """Say why these ranks, given with their numbers of calls, have not ended."""
        never = [rank for rank, count in calls.items() if not count]
        before = [rank for rank, count in calls.items() if 0 < count < self._at]
        told = [rank for rank, count in calls.items() if count >= self._at]
        parts = [
            (never, "never called world.should_stop()"),
            (before, f"did not come to call {self._at} of world.should_stop()"),
            (told, "was told to stop and did not end" if len(told) == 1 else "were told to stop and did not end"),
        ]
        return "; ".join(f"{format_named('rank', ranks)} {what}" for ranks, what in parts if ranks)

    # The end.

    def explain(self, ranks: Sequence[RankState]) -> tuple[str, int] | None:
        """Say which ranks were killed after the grace, as it is printed, with the exit code; None if none was."""
        killed = {rank.number: rank.calls for rank in ranks if rank.end is None or rank.end.status}
        if not self._killed or not killed:
            return None
        text = f"phalanx: a stop was requested ({self.why}): {self._late(killed)}"
        were = "it was" if len(killed) == 1 else "they were"
        return f"{text}; after {self._grace_s:g} s {were} killed (--grace)\n", 128 + signal.SIGTERM

    def was_reached(self, ranks: Sequence[RankState]) -> bool:
        """Tell whether a rank has stopped at the agreed call."""
        return bool(self._at) and any(rank.calls >= self._at for rank in ranks)

    def conclude(self, ranks: Sequence[RankState]) -> int:
        """Say, after all ranks ended well, at which step they stopped; return the launcher's exit code."""
        if not self.was_reached(ranks):
            return 0  # the job came to its end by itself
        said = max((rank.recording.step for rank in ranks if rank.recording is not None), default=-1)
        self._say(f"stopped after step {said if said >= 0 else self._at} on request ({self.why})")
        if self._job.requeue and (problem := _requeue(os.environ["SLURM_JOB_ID"])):
            self._say(problem)
            return 1
        return 0


def _requeue(job: str) -> str:
    """Have Slurm queue this job again; return what went wrong, or nothing."""
    # Not imported at the top, because most jobs are not queued again.
    import subprocess

    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
        problem = done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else ""
    except OSError as error:
        problem = str(error.strerror)
    return f"scontrol requeue {job} failed: {problem}; queue the job again by hand" if problem else ""
