"""A job that is watched: look after look at its ranks, on this host and on the others."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.diagnosis.pace import GroupKey, Pace
from phalanx.launch.running.elsewhere import Elsewhere, RanksElsewhere
from phalanx.launch.running.jobs import RankProcess, RunningJob
from phalanx.launch.running.looking import RanksHere
from phalanx.launch.running.rank_look import RankLook
from phalanx.system import processes
from phalanx.system.foreign_values import checked

__all__ = ["Look", "Watcher"]


@dataclass(frozen=True)
class Look:
    """A look at all ranks of a job.

    Attributes:
        job: the job, as its launcher describes it now.
        at: the time, in seconds since 1970.
        interval_s: the time since the look before; 0 at the first.
        ranks: those that can be seen, by rank.
        hidden: the ranks that cannot be seen, each with its host and the reason.
        launcher: the state of the launcher, as the kernel names it.
    """

    job: RunningJob
    at: float
    interval_s: float
    ranks: Sequence[RankLook]
    hidden: Mapping[int, tuple[str, str]]
    launcher: str

    def to_json(self) -> dict[str, Any]:
        """Plain values, from which :meth:`from_json` makes the same look."""
        return {
            "job": asdict(self.job),
            "at": self.at,
            "interval_s": self.interval_s,
            "ranks": [look.to_json() for look in self.ranks],
            "hidden": [[rank, host, why] for rank, (host, why) in self.hidden.items()],
            "launcher": self.launcher,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any], later_ns: int) -> Look:
        """See :meth:`to_json`.

        Args:
            values: the plain values.
            later_ns: how much this host's monotonic clock is ahead of that of the host where the look was taken.

        Raises:
            ValueError, TypeError, KeyError, IndexError, AttributeError: they were not made by :meth:`to_json`.
        """
        made = {
            "job": RunningJob.from_json(values["job"]),
            "ranks": _with_lags([RankLook.from_json(look, later_ns) for look in values["ranks"]]),
            "hidden": {int(rank): (str(host), str(why)) for rank, host, why in values["hidden"]},
        }
        return checked(cls, {**values, **made})


class Watcher:
    """One who looks at a job again and again. Use as a context manager, or call :meth:`close`.

    Args:
        job: the job.
        here: look at the ranks of this host only.

    Attributes:
        pause_s: how long the other hosts are to be left alone before the next look.
    """

    def __init__(self, job: RunningJob, *, here: bool = False) -> None:
        self.job = job
        self.pause_s = 0.0
        self._here = here
        self._before_ns = 0
        self._open()

    def _open(self) -> None:
        job = self.job
        self._ranks = RanksHere(job.run_id)
        self._others = RanksElsewhere(job.run_id, job.starter, len(job.hosts))

    @property
    def id(self) -> str:
        """The name by which users call the job."""
        return self.job.id

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close what is open of the job, and end the helpers on other hosts."""
        self._ranks.close()
        self._others.close()

    def look(self, patience_s: float = 0.0) -> Look | None:
        """Look at the job; None if it has ended.

        Args:
            patience_s: how long to wait for what is to be seen on other hosts.
        """
        job = self.job.again()
        if job is None:
            return None
        self.job = job
        looks, unseen = self._ranks.look(job.processes)
        asked = [] if self._here else [rank for rank in unseen if rank.host != job.host and rank.reach]
        others = self._others.look(asked, patience_s) if asked else Elsewhere()
        self.pause_s = others.pause_s
        looks = sorted([*looks, *others.looks], key=lambda look: look.rank)
        seen = {look.rank for look in looks}
        hidden = {
            rank.rank: (rank.host, others.why.get(rank.rank) or self._why_hidden(rank))
            for rank in unseen
            if rank.rank not in seen
        }
        now_ns = time.monotonic_ns()
        interval_s = (now_ns - self._before_ns) / 1e9 if self._before_ns else 0.0
        self._before_ns = now_ns
        return Look(job, time.time(), interval_s, _with_lags(looks), hidden, processes.state_of(job.pid))

    def _why_hidden(self, rank: RankProcess) -> str:
        if rank.host == self.job.host:
            return "it has ended, or is in another container"
        if rank.reach:
            return f"only {self.job.host} was to be looked at"
        return (
            f"{self.job.mpi or 'another program'} has started it there, and Phalanx has no way to that host of its own"
        )


def _with_lags(looks: Iterable[RankLook]) -> list[RankLook]:
    """The same looks, each with how far the rank is behind the first one of a group that it is in."""
    looks = list(looks)
    furthest: dict[GroupKey, int] = {}
    for look in looks:
        for group, count in (look.pace.collectives if look.pace is not None else {}).items():
            furthest[group] = max(furthest.get(group, 0), count)
    groups: dict[int, list[GroupKey]] = {}
    for group in furthest:
        for rank in group[1]:
            groups.setdefault(rank, []).append(group)
    return [look.with_lag(_lag(look.pace, groups.get(look.rank, ()), furthest)) for look in looks]


def _lag(pace: Pace | None, groups: Iterable[GroupKey], furthest: Mapping[GroupKey, int]) -> int | None:
    if pace is None:
        return max((furthest[group] for group in groups), default=None)
    # A recorder that does not go back to the first operation may have written over a group that is seldom used.
    known = [group for group in groups if group in pace.collectives or pace.complete]
    return max((furthest[group] - pace.collectives.get(group, 0) for group in known), default=None)
