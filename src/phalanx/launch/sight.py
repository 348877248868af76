"""What the launcher sees of its ranks while they run: by itself on this host, by others on other hosts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from phalanx.diagnosis.reading import read_recording
from phalanx.diagnosis.snapshot import RankSnapshot, Recording
from phalanx.errors import PhalanxError
from phalanx.launch.output.failure import End
from phalanx.launch.rank.progress import Progress
from phalanx.launch.rank.trace import Trace
from phalanx.system import processes
from phalanx.system.folder import own_folder

__all__ = ["Examination", "Pace", "Sight", "SightElsewhere", "SightHere", "Watched"]

# How many of a rank's last operations other hosts send: for a line, and for a report.
_RECORDS_OF_LINE, _RECORDS_OF_REPORT = 16, 512
# The same for all ranks of a large job together, in a report: they come in one message, which is read at once.
_RECORDS_OF_ALL, _FEWEST_RECORDS = 1 << 16, 16
# A rank in an operation for so long may wait for one that is stopped. While none is, as in a suspended job, the
# recordings need not be read for that.
_MAY_WAIT_S = 0.5
# How long they may take, and how much longer if ranks are to write their stacks: a stopped one does not, and their
# zygote waits three seconds for it.
_ANSWER_S, _STACKS_S = 3.0, 3.0


class Watched(Protocol):
    """What the launcher knows of a rank: its pid once it runs, and its end once it has ended."""

    pid: int | None
    end: End | None


@dataclass(frozen=True)
class Pace:
    """How the ranks get on, as far as that can be known at once.

    Attributes:
        waited_s, still_s: as in :class:`Examination`.
        stopped: the ranks that a signal has stopped, if others may wait for them.
    """

    waited_s: float
    still_s: float
    stopped: tuple[int, ...] = ()


@dataclass(frozen=True)
class Examination:
    """What was seen of all ranks at one moment.

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
        """The ranks of hosts that did not answer."""
        return [seen.rank for seen in self.ranks if seen.silent]


class Sight(Protocol):
    """How the launcher sees its ranks."""

    def look(self) -> Pace:
        """How the ranks get on."""

    def ask(self, of: Sequence[int], skip: Sequence[int], *, whole: bool) -> Examination | None:
        """Look closely, and have ranks write their stacks; None if the answer comes later.

        Args:
            of: the ranks that are to write their stacks.
            skip: ranks whose hosts are not asked, because they have not answered before.
            whole: whether it is for a report, which has more operations.
        """

    def see(self, stacks: Mapping[int, str]) -> Examination | None:
        """Look closely after the ranks have written these stacks; None if this is not how answers come."""

    def hear(self, message: Mapping[str, Any]) -> Examination | None:
        """Take what others have seen; an answer, if it is one."""


class SightHere:
    """All ranks are of this host, and have their recorders where the launcher reads them.

    Args:
        trace: where they have their recorders and write their stacks.
        ranks: gives what the launcher knows of each rank, in their order.
        order: sends the zygote an order.
    """

    def __init__(self, trace: Trace, ranks: Callable[[], Sequence[Watched]], order: Callable[..., None]) -> None:
        self._trace, self._ranks, self._order = trace, ranks, order
        self._progress = Progress(trace)

    def look(self) -> Pace:
        """See :class:`Sight`."""
        progress = self._progress
        progress.look(
            {rank: known.pid for rank, known in enumerate(self._ranks()) if known.pid is not None and known.end is None}
        )
        stopped = progress.stopped if progress.others_waited_s >= _MAY_WAIT_S else ()
        return Pace(progress.waited_s, time.monotonic() - progress.moved_at, stopped)

    def ask(self, of: Sequence[int], skip: Sequence[int], *, whole: bool) -> Examination | None:
        """See :class:`Sight`. The stacks come in a message, whose receiver calls :meth:`see`."""
        if not of:
            return self.see({})
        self._order(do="stacks", of=of)
        return None

    def see(self, stacks: Mapping[int, str]) -> Examination:
        """See :class:`Sight`."""
        pace = self.look()
        ranks = [self._seen(rank, known) for rank, known in enumerate(self._ranks())]
        return Examination(ranks, stacks, pace.waited_s, pace.still_s)

    def hear(self, message: Mapping[str, Any]) -> Examination | None:
        """See :class:`Sight`."""
        return None

    def _seen(self, rank: int, known: Watched) -> RankSnapshot:
        state = processes.state_of(known.pid) if known.pid is not None and known.end is None else ""
        return RankSnapshot(
            rank,
            self._recording(rank),
            state,
            _ended(known.end),
            asked=self._trace.asked(rank),
            ended_well=_well(known.end),
        )

    def _recording(self, rank: int) -> Recording | None:
        try:
            found = read_recording(self._trace.descriptor, self._trace.place_of_recorder(rank))
        except (OSError, ValueError, PhalanxError):
            return None
        return found.beside(own_folder()) if found is not None else None


class SightElsewhere:
    """The ranks' parents look at them (``relay/observer.py``), and say so when one waits for long.

    Args:
        ranks: gives what the launcher knows of each rank, in their order.
        hosts: gives the host of each rank, in their order.
        order: sends the relay an order.
    """

    def __init__(
        self,
        ranks: Callable[[], Sequence[Watched]],
        hosts: Callable[[], Sequence[str]],
        order: Callable[..., None],
    ) -> None:
        self._ranks, self._hosts, self._order = ranks, hosts, order
        # Of each parent whose ranks wait: since when they do, and when one of them was last seen to move.
        self._waits: dict[int, tuple[float, float]] = {}
        self._stopped: dict[int, tuple[int, ...]] = {}

    def look(self) -> Pace:
        """See :class:`Sight`. Parents whose ranks do not wait are not known to stand still before they are asked."""
        stopped = tuple(sorted(rank for ranks in self._stopped.values() for rank in ranks))
        if not self._waits:
            return Pace(0.0, 0.0, stopped)
        now = time.monotonic()
        waited_s = now - min(since for since, _ in self._waits.values())
        return Pace(waited_s, now - max(at for _, at in self._waits.values()), stopped)

    def ask(self, of: Sequence[int], skip: Sequence[int], *, whole: bool) -> Examination | None:
        """See :class:`Sight`."""
        self._order(
            do="examine",
            of=list(of),
            skip=list(skip),
            records=self._of_report() if whole else _RECORDS_OF_LINE,
            within_s=_ANSWER_S + (_STACKS_S if of else 0.0),
        )
        return None

    def _of_report(self) -> int:
        return min(_RECORDS_OF_REPORT, max(_FEWEST_RECORDS, _RECORDS_OF_ALL // len(self._ranks())))

    def see(self, stacks: Mapping[int, str]) -> Examination | None:
        """See :class:`Sight`."""
        return None

    def hear(self, message: Mapping[str, Any]) -> Examination | None:
        """See :class:`Sight`."""
        if message["event"] == "waits":
            now = time.monotonic()
            self._stopped[message["parent"]] = tuple(message["stopped"])
            self._waits.pop(message["parent"], None)
            if message["waited_s"]:
                self._waits[message["parent"]] = now - message["waited_s"], now - message["still_s"]
            return None
        hosts = self._hosts()
        named = hosts if len(set(hosts)) > 1 else [""] * len(hosts)
        local: list[int] = []  # each rank's number among those of its host
        counts: dict[str, int] = {}
        for host in hosts:
            local.append(counts.get(host, 0))
            counts[host] = local[-1] + 1
        silent = set(message["silent"])
        ranks = [
            replace(
                _sent(rank, known, message["ranks"].get(str(rank), {}), named[rank], silent=rank in silent),
                local_rank=local[rank],
            )
            for rank, known in enumerate(self._ranks())
        ]
        stacks = {int(rank): stack for rank, stack in message["stacks"].items()}
        return Examination(ranks, stacks, message["waited_s"], message["still_s"])


def _sent(rank: int, known: Watched, sent: Mapping[str, Any], host: str, *, silent: bool) -> RankSnapshot:
    recording = sent.get("recording")
    found = None
    if recording is not None:
        found = Recording.from_json(recording).later(sent["later_ns"]).beside(own_folder())
    ended = _ended(known.end)
    return RankSnapshot(
        rank,
        found,
        sent.get("state", "") if not ended else "",
        ended,
        asked=sent.get("asked", ""),
        host=host,
        silent=silent and not ended,
        ended_well=_well(known.end),
    )


def _ended(end: End | None) -> str:
    return "" if end is None else f"exit code {end.status}" if end.status >= 0 else f"signal {-end.status}"


def _well(end: End | None) -> bool:
    return end is not None and end.status == 0
