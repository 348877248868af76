"""Ask all agents what their ranks do, while the job runs: their states, operations and stacks (``observer.py``).

An agent that does not answer in time is left out, and its ranks count as silent. A later answer is dropped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.diagnosis.snapshot import RankSnapshot, Recording
from phalanx.launch.protocol import Examine, Examined, Order, Waits
from phalanx.launch.roster import AgentState
from phalanx.system.files import own_folder
from phalanx.topology.table import RankRow

__all__ = ["Examination", "Examiner", "Pace"]

# How many of a rank's last operations an answer has: for a line, and for a report.
_RECORDS_OF_LINE, _RECORDS_OF_REPORT = 16, 512
# The same for all ranks of a large job together, in a report.
_RECORDS_OF_ALL, _FEWEST_RECORDS = 1 << 16, 16
# How long an answer may take, and how much longer if ranks are to write their stacks: the agent waits so long for one
# that has no core to run on.
_ANSWER_S, _STACKS_S = 3.0, 3.0


@dataclass(frozen=True)
class Pace:
    """What agents have said unasked: as in :class:`Examination`, and which ranks a signal has stopped."""

    waited_s: float
    still_s: float
    stopped: tuple[int, ...] = ()


@dataclass(frozen=True)
class Examination:
    """One view of all ranks, at one moment."""

    ranks: Sequence[RankSnapshot]  # the ranks, without their places
    stacks: Mapping[int, str]  # what they have written, as faulthandler does, by rank
    waited_s: float  # how long the one that has been in its operation for longest has been there
    still_s: float  # for how long no rank has begun or ended an operation


class Examiner:
    """Ask the agents, one question at a time.

    ``rows`` gives the host and the local rank of each rank, ``send`` sends an agent an order, ``done`` takes what has
    been found.
    """

    def __init__(
        self,
        agents: Sequence[AgentState],
        rows: Callable[[], Sequence[RankRow]],
        send: Callable[[AgentState, Order], None],
        done: Callable[[Examination], None],
    ) -> None:
        self._agents, self._rows, self._send, self._done = agents, rows, send, done
        # Of each agent whose ranks wait: since when they do, and when one of them was last seen to move.
        self._waits: dict[int, tuple[float, float]] = {}
        self._stopped: dict[int, Sequence[int]] = {}
        self._number = 0
        self._awaited: set[int] = set()  # the agents whose answers are
        self._answers: list[tuple[Examined, float]] = []  # and what is to be added to the times of each
        self.due_at: float | None = None

    # What agents say unasked.

    def hear_waits(self, agent: AgentState, said: Waits) -> None:
        """Take how long a rank has waited, as its agent says."""
        now = time.monotonic()
        self._stopped[agent.number] = said.stopped
        self._waits.pop(agent.number, None)
        if said.waited_s:
            self._waits[agent.number] = now - said.waited_s, now - said.still_s

    def look(self) -> Pace:
        """Tell how the ranks get on. Agents whose ranks do not wait may move or not, before they are asked."""
        stopped = tuple(sorted(rank for ranks in self._stopped.values() for rank in ranks))
        if not self._waits:
            return Pace(0.0, 0.0, stopped)
        now = time.monotonic()
        waited_s = now - min(since for since, _ in self._waits.values())
        return Pace(waited_s, now - max(at for _, at in self._waits.values()), stopped)

    # Questions.

    def ask(self, *, stacks: bool, whole: bool) -> None:
        """Ask what the ranks do: also for their stacks, and for as many operations as a report has."""
        self._number += 1
        count = sum(len(agent.ranks) for agent in self._agents)
        records = min(_RECORDS_OF_REPORT, max(_FEWEST_RECORDS, _RECORDS_OF_ALL // count)) if whole else _RECORDS_OF_LINE
        self._answers = []
        self._awaited = {agent.number for agent in self._agents if agent.link is not None and not agent.over}
        self.due_at = time.monotonic() + _ANSWER_S + (_STACKS_S if stacks else 0.0)
        for agent in self._agents:
            if agent.number in self._awaited:
                self._send(agent, Examine(number=self._number, stacks=stacks, records=records))

    def hear(self, agent: AgentState, answer: Examined) -> None:
        """Take an answer."""
        if answer.number == self._number and agent.number in self._awaited:
            self._awaited.discard(agent.number)
            self._answers.append((answer, agent.later))

    def lose(self, agent: AgentState) -> None:
        """Expect nothing of an agent that has gone, or has no rank any more."""
        self._awaited.discard(agent.number)
        self._waits.pop(agent.number, None)
        self._stopped.pop(agent.number, None)

    def drop(self) -> None:
        """Drop an open question: the job ends for a known reason, and an answer could only blame ranks."""
        self.due_at, self._awaited = None, set()

    def act(self, now: float) -> None:
        """Say what was found, if all have answered or the time is up."""
        if self.due_at is None or (self._awaited and now < self.due_at):
            return
        self.due_at = None
        silent, self._awaited = self._awaited, set()
        rows = self._rows()
        several = len({row.host for row in rows}) > 1
        sent = {rank: (said, later) for answer, later in self._answers for rank, said in answer.ranks.items()}
        seen = []
        for agent in self._agents:
            for rank in agent.ranks:
                said, later = sent.get(rank.number, ({}, 0.0))
                status = rank.end.status if rank.end is not None else None
                ended = "" if status is None else f"exit code {status}" if status >= 0 else f"signal {-status}"
                one = RankSnapshot(
                    rank.number,
                    received_recording(said.get("recording"), later),
                    said.get("state", "") if not ended else "",
                    ended,
                    asked=said.get("asked", ""),
                    host=rows[rank.number].host if several else "",
                    silent=agent.number in silent and not ended,
                    ended_well=status == 0,
                    local_rank=rows[rank.number].local_rank,
                )
                seen.append(one)
        seen.sort(key=lambda one: one.rank)
        stacks = {rank: stack for answer, _ in self._answers for rank, stack in answer.stacks.items()}
        waited_s = max((answer.waited_s for answer, _ in self._answers), default=0.0)
        still_s = min((answer.still_s for answer, _ in self._answers), default=0.0)
        self._done(Examination(seen, stacks, waited_s, still_s))


def received_recording(sent: Any, later: float) -> Recording | None:
    """Read a rank's operations as its agent has sent them, by this process's clock and with the user's paths."""
    if sent is None or not math.isfinite(later):
        return None
    return Recording.from_json(sent).later(round(later * 1e9)).beside(own_folder())
