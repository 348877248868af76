"""The agents and ranks of one attempt, as the supervisor knows them, and its links to the agents."""

from __future__ import annotations

import functools
import math
import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phalanx.launch.link import IN, Link, Lost
from phalanx.launch.output.failure import End, Report
from phalanx.launch.output.streams import RankStream
from phalanx.launch.protocol import Here, Order
from phalanx.launch.rank.trace import Stage
from phalanx.wire.sockets import LOOK_S

if TYPE_CHECKING:
    from phalanx.diagnosis.snapshot import Recording

__all__ = ["AgentState", "Links", "RankState"]

# A host is out of reach if nothing has been heard of it for so long, though its kernel is probed every second; and if
# what has been sent to it is on its way for a moment, because an answer may be coming when this machine was suspended.
_UNANSWERED_S, _UNDER_WAY_S = 3.5, 1.0


@dataclass(eq=False)
class RankState:
    """A rank.

    Attributes:
        number: its number in the world.
        out, err: its output.
        pid: its process on its host; 0 before it was forked.
        end: how it ended; None while it has not.
        report: why it failed, as it has said; None if it has not.
        stage, asked, operation, stack: what its agent said of it when it ended.
        recording: its last operations, on this host's clock; None if there are none.
    """

    number: int
    out: RankStream
    err: RankStream
    pid: int = 0
    end: End | None = None
    report: Report | None = None
    stage: Stage = Stage.STARTED
    asked: str = ""
    operation: str = ""
    stack: str = ""
    recording: Recording | None = None


@dataclass(eq=False)
class AgentState:
    """An agent.

    Attributes:
        number: its number among those of the job.
        name: its host, as the user wrote it.
        ranks: its ranks.
        link: None before it has come and after it has gone.
        here: what it has said of its host; None before.
        started: whether it has forked its ranks.
        over: whether no process of the job is left there, as far as the supervisor has been told.
        leaving: the exit code with which it ends before the next attempt, because its node was asked to; else None.
        later: what is to be added to a time of its clock, as exactly as the quickest message so far can tell; 0 on this
            host.
    """

    number: int
    name: str
    ranks: Sequence[RankState]
    link: Link | None = None
    here: Here | None = None
    started: bool = False
    over: bool = False
    leaving: int | None = None
    later: float = math.inf
    numbers: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.numbers = [rank.number for rank in self.ranks]

    def own_time(self, then: float) -> float:
        """Convert a time of its clock to this process's."""
        return then + self.later

    def hear_clock(self, now: float) -> None:
        """Take the time of its clock, from a message that has just come."""
        self.later = min(self.later, time.monotonic() - now)

    @property
    def place(self) -> tuple[str, str] | None:
        """Identify its host among all others; None before it has come."""
        return (self.here.machine, self.here.name) if self.here is not None else None

    @property
    def title(self) -> str:
        """Name its host as the user wrote it, and as it calls itself."""
        known = self.here.name if self.here is not None else self.name
        return self.name if known == self.name else f"{self.name} ({known})"


class Links:
    """The links to the agents that have come: orders out, events and output in, without ever waiting for one of them.

    Args:
        selector: where the supervisor waits.
        take: takes what an agent has sent.
        lost: takes an agent whose link has ended, and whether its host does not answer any more.

    Attributes:
        look_at: when to :meth:`look` next; None for never.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        take: Callable[[AgentState, Sequence[tuple[bytes, bytes]]], None],
        lost: Callable[[AgentState, bool], None],
    ) -> None:
        self._selector, self._take, self._lost = selector, take, lost
        self._sent: dict[AgentState, float] = {}  # since when something may be on its way to an agent
        self.look_at: float | None = None

    def admit(self, agent: AgentState, link: Link) -> None:
        """Serve the link of an agent that has come."""
        agent.link = link
        if not link.peer:
            agent.later = 0.0  # of this host, with the same clock
        self._selector.register(link, selectors.EVENT_READ, functools.partial(self._serve, agent))

    def send(self, agent: AgentState, order: Order) -> None:
        """Send an agent an order, if it is there."""
        if agent.link is not None:
            agent.link.send(order)
            self._note(agent, agent.link)

    def feed(self, agent: AgentState, rank: int, data: bytes) -> None:
        """Send an agent a block of input for a rank, if it is there."""
        if agent.link is not None:
            agent.link.send_block(IN, rank, data)
            self._note(agent, agent.link)

    def _note(self, agent: AgentState, link: Link) -> None:
        if link.peer:
            self._sent.setdefault(agent, time.monotonic())
            self.look_at = self.look_at or time.monotonic() + LOOK_S
        self._await(agent, link)

    def _await(self, agent: AgentState, link: Link) -> None:
        """Wait for what comes, and for room while bytes wait to be sent."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.waiting else 0)
        if self._selector.get_key(link).events != events:
            self._selector.modify(link, events, functools.partial(self._serve, agent))

    def _serve(self, agent: AgentState) -> None:
        link = agent.link
        if link is None:
            return
        link.flush()
        try:
            frames = link.receive()
        except Lost as lost:
            self._lost(agent, lost.silent)
            return
        self._take(agent, frames)
        if agent.link is link:
            self._await(agent, link)

    def look(self, now: float) -> None:
        """Look whether what was sent arrives. The kernel waits anew for an answer to whatever is sent."""
        if self.look_at is None or now < self.look_at:
            return
        for agent, since in list(self._sent.items()):
            silent_s = agent.link.unanswered_s() if agent.link is not None else 0.0
            lost = silent_s >= _UNANSWERED_S and now - since >= _UNDER_WAY_S
            if lost or not silent_s:
                del self._sent[agent]
            if lost:
                self._lost(agent, True)
        self.look_at = now + LOOK_S if self._sent else None

    def drop(self, agent: AgentState) -> None:
        """Close the link to an agent."""
        if agent.link is not None:
            self._selector.unregister(agent.link)
            agent.link.close()
            agent.link = None
