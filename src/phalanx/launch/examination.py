"""Ask all agents what their ranks do, while the job runs: the agents look at them (``observer.py``).

An agent says when a rank waits for long. The supervisor may then ask all agents what their ranks do: their states and
operations, and where those stand that it names. An agent that does not answer in time is left out, and its ranks are
named instead, so that it delays nothing. An answer that comes later belongs to no question any more and is dropped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.diagnosis.snapshot import RankSnapshot, Recording
from phalanx.launch.output.failure import End
from phalanx.launch.protocol import Examine, Examined, Order, Waits
from phalanx.launch.roster import AgentState
from phalanx.system.files import own_folder

__all__ = ["Examination", "Examiner", "Pace"]

# How many of a rank's last operations an answer has: for a line, and for a report.
_RECORDS_OF_LINE, _RECORDS_OF_REPORT = 16, 512
# The same for all ranks of a large job together, in a report.
_RECORDS_OF_ALL, _FEWEST_RECORDS = 1 << 16, 16
# How long an answer may take, and how much longer if ranks are to write their stacks: a stopped one does not, and its
# agent waits three seconds for it.
_ANSWER_S, _STACKS_S = 3.0, 3.0


@dataclass(frozen=True)
class Pace:
    """The progress of the ranks, as far as it is known without asking an agent.

    Attributes:
        waited_s, still_s: as in :class:`Examination`.
        stopped: the ranks that a signal has stopped.
    """

    waited_s: float
    still_s: float
    stopped: tuple[int, ...] = ()


@dataclass(frozen=True)
class Examination:
    """One view of all ranks, at one moment.

    Attributes:
        ranks: the ranks, without their places.
        stacks: what those that were asked have written, as faulthandler does, by rank.
        waited_s: how long the one that has been in its operation for longest has been there.
        still_s: for how long no rank has begun or ended an operation.
    """

    ranks: Sequence[RankSnapshot]
    stacks: Mapping[int, str]
    waited_s: float
    still_s: float

    @property
    def silent(self) -> list[int]:
        """List the ranks of hosts that did not answer."""
        return [seen.rank for seen in self.ranks if seen.silent]


class Examiner:
    """Asks the agents, one question at a time.

    Args:
        agents: they.
        hosts: gives the host of each rank.
        send: sends an agent an order.
        done: takes what has been found.
    """

    def __init__(
        self,
        agents: Sequence[AgentState],
        hosts: Callable[[], Sequence[str]],
        send: Callable[[AgentState, Order], None],
        done: Callable[[Examination], None],
    ) -> None:
        self._agents, self._hosts, self._send, self._done = agents, hosts, send, done
        # Of each agent whose ranks wait: since when they do, and when one of them was last seen to move.
        self._waits: dict[int, tuple[float, float]] = {}
        self._stopped: dict[int, Sequence[int]] = {}
        self._number = 0
        self._awaited: set[int] = set()  # the agents whose answers are
        self._silent: set[int] = set()  # the ranks whose agents do not answer
        self._answers: list[tuple[AgentState, Examined, float]] = []
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

    def ask(self, of: Sequence[int], skip: Sequence[int], *, whole: bool) -> None:
        """Look closely, and have ranks write their stacks. A question that is still open is over.

        Args:
            of: the ranks that are to write their stacks.
            skip: ranks whose agents are not asked, because they have not answered before.
            whole: whether it is for a report, which has more operations.
        """
        self._number += 1
        count = sum(len(agent.ranks) for agent in self._agents)
        records = min(_RECORDS_OF_REPORT, max(_FEWEST_RECORDS, _RECORDS_OF_ALL // count)) if whole else _RECORDS_OF_LINE
        asked = [agent for agent in self._agents if agent.link is not None and not agent.over]
        skipped = [agent for agent in asked if set(agent.numbers) & set(skip)]
        self._silent = {rank for agent in skipped for rank in agent.numbers}
        self._awaited = {agent.number for agent in asked if agent not in skipped}
        self._answers = []
        self.due_at = time.monotonic() + _ANSWER_S + (_STACKS_S if of else 0.0)
        for agent in asked:
            if agent.number in self._awaited:
                self._send(agent, Examine(number=self._number, of=list(of), records=records))

    def hear(self, agent: AgentState, answer: Examined) -> None:
        """Take an answer."""
        if answer.number == self._number and agent.number in self._awaited:
            self._awaited.discard(agent.number)
            self._answers.append((agent, answer, agent.later))

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
        self._silent |= {rank for agent in self._agents if agent.number in self._awaited for rank in agent.numbers}
        self._awaited = set()
        hosts = self._hosts()
        named = hosts if len(set(hosts)) > 1 else [""] * len(hosts)
        sent = {rank: (seen, later) for _, answer, later in self._answers for rank, seen in answer.ranks.items()}
        local: dict[str, int] = {}
        found = []
        for rank in sorted((rank for agent in self._agents for rank in agent.ranks), key=lambda rank: rank.number):
            number = local[hosts[rank.number]] = local.get(hosts[rank.number], -1) + 1
            seen, later = sent.get(rank.number, ({}, 0.0))
            found.append(self._seen(rank.number, rank.end, seen, later, named[rank.number], number))
        stacks = {rank: stack for _, answer, _ in self._answers for rank, stack in answer.stacks.items()}
        waited_s = max((answer.waited_s for _, answer, _ in self._answers), default=0.0)
        still_s = min((answer.still_s for _, answer, _ in self._answers), default=0.0)
        self._done(Examination(found, stacks, waited_s, still_s))

    def _seen(
        self, rank: int, end: End | None, sent: Mapping[str, Any], later: float, host: str, number: int
    ) -> RankSnapshot:
        ended = "" if end is None else f"exit code {end.status}" if end.status >= 0 else f"signal {-end.status}"
        return RankSnapshot(
            rank,
            received_recording(sent.get("recording"), later),
            sent.get("state", "") if not ended else "",
            ended,
            asked=sent.get("asked", ""),
            host=host,
            silent=rank in self._silent and not ended,
            ended_well=end is not None and end.status == 0,
            local_rank=number,
        )


def received_recording(sent: Any, later: float) -> Recording | None:
    """Read a rank's operations as its agent has sent them, by this process's clock and with the user's paths."""
    if sent is None or not math.isfinite(later):
        return None
    return Recording.from_json(sent).seen_from(own_folder(), round(later * 1e9))
