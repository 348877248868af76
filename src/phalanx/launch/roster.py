"""The agents of one attempt, as the supervisor knows them, and its links to them."""

from __future__ import annotations

import functools
import math
import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from phalanx.launch.link import IN, Link, Lost
from phalanx.launch.output.failure import RankState
from phalanx.launch.protocol import Here, Order

__all__ = ["AgentState", "Links"]


@dataclass(eq=False)
class AgentState:
    """An agent."""

    number: int  # its number among those of the job
    name: str  # its host, as the user wrote it
    ranks: Sequence[RankState]
    link: Link | None = None  # None before it has come and after it has gone
    here: Here | None = None  # what it has said of its host; None before
    started: bool = False  # whether it has forked its ranks
    over: bool = False  # whether no process of the job is left there, as far as the supervisor has been told
    # the exit code with which it ends before the next attempt, because its node was asked to; else None
    leaving: int | None = None
    # what is to be added to a time of its clock, as exactly as the quickest message so far can tell
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

    ``take`` takes what an agent has sent, ``lost`` an agent whose link has ended, and whether its host is silent.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        take: Callable[[AgentState, Sequence[tuple[bytes, bytes]]], None],
        lost: Callable[[AgentState, bool], None],
    ) -> None:
        self._selector, self._take, self._lost = selector, take, lost

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
            self._await(agent, agent.link)

    def feed(self, agent: AgentState, rank: int, data: bytes) -> None:
        """Send an agent a block of input for a rank, if it is there."""
        if agent.link is not None:
            agent.link.send_block(IN, rank, data)
            self._await(agent, agent.link)

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

    def drop(self, agent: AgentState) -> None:
        """Close the link to an agent."""
        if agent.link is not None:
            self._selector.unregister(agent.link)
            agent.link.close()
            agent.link = None
