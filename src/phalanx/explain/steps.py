"""Put what the ranks have noted in steps: what is moved in a step waits for nothing that is moved in it.

A rank that reads what another one has put somewhere, or gets a message, is in a later step than that one was then.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from phalanx.explain.ranks import RECEIVED, SENT, Cell, Event, Kept, Plan, TracedRank, run_rank
from phalanx.launch.function.call import launch
from phalanx.native.core import Traced
from phalanx.words import format_spans

Kind = Literal["puts", "adds", "takes", "combines", "sends", "raises", "sees"]
_KINDS: dict[int, Kind] = {
    Traced.PUT: "puts",
    Traced.TAKEN: "takes",
    Traced.ADDED: "adds",
    Traced.COMBINED: "combines",
    Traced.RAISED: "raises",
    Traced.SAW: "sees",
    SENT: "sends",
}
_READS = (Traced.TAKEN, Traced.ADDED)


@dataclass(frozen=True)
class Move:
    """A thing that a rank does in a step.

    Attributes:
        kind: ``puts`` into the memory that its host shares, ``takes`` from there, ``adds`` what it reads there,
            ``combines`` what other hosts have sent with its own, ``sends`` to another host, ``raises`` its counter,
            ``sees`` that of another one.
        other: the rank that had put there what it takes or adds, or to which it sends; -1 if none.
        cells: blocks, with the ranks that have contributed; nothing if it is not data, but what the ranks agree by.
    """

    kind: Kind
    rank: int
    other: int
    nbytes: int
    cells: tuple[Cell, ...]


@dataclass
class Step:
    """The moves of a step by ranks, and what lies in each block of each rank's result after it."""

    moves: list[Move]
    kept: list[Kept]


@dataclass
class Explained:
    """A call, as it was run.

    Attributes:
        given: what lies in each block that each rank gives.
        agreement_nbytes: what the ranks move beside the data, to find out that all have made the same call.
    """

    plan: Plan
    given: list[Kept]
    steps: list[Step]
    agreement_nbytes: int

    def links(self) -> dict[tuple[int, int], int]:
        """Count the bytes from one rank to another, through shared memory or over the network."""
        return _links_of(move for step in self.steps for move in step.moves)

    def to_json(self) -> dict[str, Any]:
        hosts = self.plan.host_of
        return {
            "operation": self.plan.operation,
            "hosts": list(self.plan.hosts),
            "bytes": self.plan.nbytes,
            "given": [_kept_json(kept) for kept in self.given],
            "steps": [
                {
                    "moves": [
                        {
                            "kind": move.kind,
                            "rank": move.rank,
                            "other": None if move.other < 0 else move.other,
                            "bytes": move.nbytes,
                            "blocks": [cell_text(cell) for cell in move.cells],
                        }
                        for move in step.moves
                    ],
                    "results": [_kept_json(kept) for kept in step.kept],
                }
                for step in self.steps
            ],
            "links": [
                {
                    "from": one,
                    "to": other,
                    "by": "memory" if hosts[one] == hosts[other] else "network",
                    "bytes": nbytes,
                }
                for (one, other), nbytes in self.links().items()
            ],
            "agreement_bytes": self.agreement_nbytes,
        }


def _links_of(moves: Iterable[Move]) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = defaultdict(int)
    for move in moves:
        if move.kind == "sends":
            found[move.rank, move.other] += move.nbytes
        elif move.kind in ("takes", "adds") and move.other not in (-1, move.rank):
            found[move.other, move.rank] += move.nbytes
    return dict(sorted(found.items()))


def cell_text(cell: Cell) -> str:
    """Name a block and its ranks: ``B[0-3]`` is the second block, of the ranks 0 to 3."""
    block, mask = cell
    ranks = [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
    return f"{chr(ord('A') + block)}[{format_spans(ranks).replace(' ', '')}]"


def _kept_json(kept: Kept) -> list[list[str]]:
    return [[cell_text(cell) for cell in block] for block in kept]


def explain_collective(plan: Plan) -> Explained:
    """Run the call on new ranks of this machine, and say what it did step by step."""
    with tempfile.TemporaryDirectory(prefix="phalanx-explain-") as folder:
        ranks = launch(run_rank, (plan, folder), n=plan.ranks, device="cpu", prefix=False)
    return _Steps(plan, ranks).explained


class _Steps:
    """Put the events that each rank has noted in steps."""

    def __init__(self, plan: Plan, ranks: list[TracedRank]) -> None:
        self._host = plan.host_of
        self._at = [0] * plan.ranks  # the step in which each rank is
        # Of each host: from where to where in the shared memory a rank has put something, and in which step.
        self._written: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
        self._sent: dict[object, tuple[int, tuple[Cell, ...]]] = {}
        # Of each rank: what has come by message, and the first step that can use it.
        self._arrived: dict[int, dict[Cell, int]] = defaultdict(dict)
        # Of each rank and block of its result: in which step a message brings it, and what.
        self._came: dict[int, dict[int, tuple[int, tuple[Cell, ...]]]] = defaultdict(dict)
        self._raised: dict[int, int] = {}
        moves: dict[int, list[Move]] = defaultdict(list)
        agreement: list[Move] = []
        kept: dict[tuple[int, int], Kept] = {}
        for event in sorted(event for rank in ranks for event in rank.events):
            beside = not event.cells and event.what in (*_READS, Traced.PUT, SENT) and plan.operation != "barrier"
            step, done = self._place(event, beside)
            (agreement if beside else moves[step]).extend(done)
            if event.what != RECEIVED:
                kept[step, event.rank] = event.kept
        in_place = plan.operation in ("all_reduce", "reduce", "broadcast")
        begin = [rank.given if in_place else ((),) * len(rank.result) for rank in ranks]
        now, steps = begin, list[Step]()
        for number in sorted(number for number in moves if moves[number]):
            now = [kept.get((number, rank), before) for rank, before in enumerate(now)]
            after = [self._with_messages(rank, number, now[rank], begin[rank]) for rank in range(plan.ranks)]
            steps.append(Step(_joined(moves[number]), after))
        if steps:
            steps[-1].kept = [rank.result for rank in ranks]
        beside_nbytes = sum(_links_of(agreement).values())
        self.explained = Explained(plan, [rank.given for rank in ranks], steps, beside_nbytes)

    def _with_messages(self, rank: int, step: int, kept: Kept, before: Kept) -> Kept:
        """List a rank's result after a step: a message has come when the step is over in which it is sent."""
        found = list(kept)
        for block, (when, cells) in self._came[rank].items():
            found[block] = cells if when <= step else before[block]
        return tuple(found)

    def _place(self, event: Event, beside: bool) -> tuple[int, list[Move]]:
        """Find the step of an event, and what it moved. What is moved ``beside`` the data delays nothing."""
        rank, others = event.rank, [(-1, event.nbytes)]
        if event.what == RECEIVED:
            sent, cells = self._sent.get((event.at, rank, event.turn), (-1, ()))
            for block in event.into:
                own = tuple(cell for cell in cells if len(event.into) == 1 or cell[0] == block)
                self._came[rank][block] = sent, own
            self._arrived[rank].update(dict.fromkeys(cells, sent + 1))
            return max(self._at[rank], sent), []
        # What has come is used from now on: by its cells, because a rank may do other things until it has come.
        arrived = self._arrived[rank]
        used = arrived if event.what == Traced.COMBINED else (cell for cell in event.cells if cell in arrived)
        if event.what in (Traced.PUT, SENT, Traced.COMBINED):
            self._at[rank] = max(self._at[rank], *(arrived[cell] for cell in used), 0)
        if event.what in _READS:
            others = self._read(event)
        elif event.what == Traced.SAW:
            self._at[rank] = max(self._at[rank], self._raised.get(event.at, 0) + 1)
            others = [(event.at, 0)]
        step = self._at[rank]
        if event.what == Traced.PUT:
            self._write(event, -1 if beside else step)
        elif event.what == Traced.RAISED:
            self._raised[rank] = step
        elif event.what == SENT:
            self._sent[rank, event.at, event.turn] = -1 if beside else step, event.cells
            others = [(event.at, event.nbytes)]
        return step, [Move(_KINDS[event.what], rank, other, nbytes, event.cells) for other, nbytes in others]

    def _write(self, event: Event, step: int) -> None:
        begin, end = event.at, event.at + event.nbytes
        written = self._written[self._host[event.rank]]
        kept = []
        for low, high, rank, when in written:
            if low < begin:
                kept.append((low, min(high, begin), rank, when))
            if high > end:
                kept.append((max(low, end), high, rank, when))
        written[:] = [*(each for each in kept if each[0] < each[1]), (begin, end, event.rank, step)]

    def _read(self, event: Event) -> list[tuple[int, int]]:
        """Find who had put there what is read, and how much; the reader is in a later step than these."""
        found: dict[int, int] = defaultdict(int)
        for low, high, rank, when in self._written[self._host[event.rank]]:
            nbytes = min(high, event.at + event.nbytes) - max(low, event.at)
            if nbytes > 0:
                found[rank] += nbytes
                self._at[event.rank] = max(self._at[event.rank], when + 1)
        return list(found.items()) or [(-1, event.nbytes)]


def _joined(moves: list[Move]) -> list[Move]:
    """Sort the moves of a step by ranks; those of one kind between the same two become one."""
    found: dict[tuple[int, Kind], dict[int, list[Move]]] = {}  # in the order in which each rank did them first
    for move in moves:
        found.setdefault((move.rank, move.kind), {}).setdefault(move.other, []).append(move)
    joined = []
    for (rank, kind), by_other in sorted(found.items(), key=lambda each: each[0][0]):
        for other, alike in sorted(by_other.items()):
            cells = tuple(sorted({cell for move in alike for cell in move.cells}))
            joined.append(Move(kind, rank, other, sum(move.nbytes for move in alike), cells))
    return joined
