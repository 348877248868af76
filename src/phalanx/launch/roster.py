"""The agents and ranks of one attempt, as the supervisor knows them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phalanx.launch.link import Link
from phalanx.launch.output.failure import End, Report
from phalanx.launch.output.streams import RankStream
from phalanx.launch.protocol import Here
from phalanx.launch.rank.trace import Stage

if TYPE_CHECKING:
    from phalanx.diagnosis.snapshot import Recording

__all__ = ["AgentState", "RankState"]


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
        later: what is to be added to a time of its clock, as exactly as the quickest message so far can tell; 0 on this
            host.
        sent_at: since when something may be on its way to it; None for nothing.
    """

    number: int
    name: str
    ranks: Sequence[RankState]
    link: Link | None = None
    here: Here | None = None
    started: bool = False
    over: bool = False
    later: float = math.inf
    sent_at: float | None = None
    numbers: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.numbers = [rank.number for rank in self.ranks]

    def own_time(self, then: float) -> float:
        """A time of its clock on this process's."""
        return then + self.later

    def hear_clock(self, now: float) -> None:
        """Take the time of its clock, from a message that has just come."""
        self.later = min(self.later, time.monotonic() - now)

    @property
    def place(self) -> tuple[str, str] | None:
        """What distinguishes its host from all others; None before it has come."""
        return (self.here.machine, self.here.name) if self.here is not None else None

    @property
    def title(self) -> str:
        """Its host: as the user wrote it, and as it calls itself."""
        known = self.here.name if self.here is not None else self.name
        return self.name if known == self.name else f"{self.name} ({known})"
