"""Calls that ranks have recorded on torch's own backends, compared from outside."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from ctypes import sizeof
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import cast

import pytest

from phalanx.native.core import SeenRecord
from phalanx.watch.calls import shape_word
from phalanx.watch.comparison import Comparison
from phalanx.watch.done_calls import CallGatherer, DoneCalls
from phalanx.watch.records import KINDS, Group, Record, RecorderCopy

ALL_REDUCE, BROADCAST, ALL_GATHER, REDUCE, REDUCE_SCATTER, GATHER, SCATTER, ALL_TO_ALL = 1, 2, 3, 5, 6, 7, 8, 9
SEND, INIT = 10, 12
FLOAT, INT, SUM = 1 << 8, 2 << 8, 1 << 16
GLOO = Group("0", "gloo", (0, 1, 2), 0)
SCRIPT = """\
def step(x, late):
    if late:
        all_reduce(x)
    else:
        all_reduce(x)
    all_reduce(x)
    if late:
        all_reduce(x)
        return
    all_reduce(x)
"""


@dataclass(frozen=True)
class Call:
    line: int = 3
    what: int = ALL_REDUCE | FLOAT | SUM
    nbytes: int = 16
    root: int = -1
    in_group: int = 0  # as it comes, if it is 0
    is_done: bool = True
    failed: bool = False
    shape: tuple[int, ...] = ()


class Copy:
    """What :class:`RecorderCopy` gives of a recorder, of calls in place of one."""

    def __init__(self, calls: Sequence[Call], file: str, group: Group = GLOO) -> None:
        self.begun, self._file, self._group = len(calls), file, group
        self._shapes = ["", *{str(list(call.shape)) for call in calls if call.shape}]
        rows = [
            SeenRecord(
                number=number,
                entered_ns=1,
                left_ns=int(call.is_done),
                nbytes=call.nbytes,
                in_group=call.in_group or number + 1,
                what=call.what,
                group=7,
                site=call.line,
                peer=call.root,
                failed=int(call.failed),
                shape=self._shapes.index(str(list(call.shape))) if call.shape else 0,
            )
            for number, call in enumerate(calls)
        ]
        self.seen = (SeenRecord * len(rows))(*rows)

    def place(self, number: int) -> tuple[str, int]:
        return f"{self._file}:{number}", number

    def group(self, number: int) -> Group:
        return self._group

    def record(self, index: int) -> Record:
        row = self.seen[index]
        kind = KINDS[row.what & 0xFF]
        dtype = {FLOAT: "float32", INT: "int32"}[row.what & 0xFF00]
        op = "sum" if row.what & SUM else ""
        about = (row.number, self._group, row.in_group, kind, row.nbytes, dtype, op, row.peer)
        return Record(*about, f"{self._file}:{row.site}", "", -1, 1, 2, False, -1, shape=self._shapes[row.shape])


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(SCRIPT)
    return str(path)


class Looks:
    """Several looks at the recorders of ranks, which are whole each time."""

    def __init__(self, file: str, size: int, group: Group = GLOO, *, lines: bool = True) -> None:
        self._file, self._group = file, group
        self._gatherer = CallGatherer(range(size), 4096)
        self._comparison = Comparison(time.time() + 60, 4096, lines=lines)

    def gather(self, *ranks: Sequence[Call]) -> list[DoneCalls]:
        for rank, calls in enumerate(ranks):
            self._gatherer.read(rank, cast(RecorderCopy, Copy(calls, self._file, self._group)))
        return self._gatherer.take()

    def look(self, *ranks: Sequence[Call]) -> list[str]:
        return self._comparison.look(self.gather(*ranks))


def compare(file: str, *ranks: Sequence[Call], group: Group = GLOO, lines: bool = True) -> list[str]:
    return Looks(file, len(ranks), group, lines=lines).look(*ranks)


def test_a_row_is_as_long_as_the_cores() -> None:
    from phalanx.watch import done_calls

    assert done_calls._ROW.size == sizeof(SeenRecord)


@pytest.mark.parametrize(
    "odd",
    [Call(what=ALL_REDUCE | INT | SUM), Call(what=ALL_REDUCE | FLOAT), Call(nbytes=32), Call(what=BROADCAST | FLOAT)],
)
def test_calls_that_differ_are_listed_once(file: str, odd: Call) -> None:
    usual = [Call()] * 3
    (told,) = compare(file, usual, [Call(), odd, odd], usual)
    assert "  ranks 0, 2: all_reduce #2 (float32, 16 B, sum) at " in told
    assert "  rank 1: " in told
    assert " #2 (" in told.partition("rank 1: ")[2]


@pytest.mark.parametrize(
    ("backend", "kind", "may_differ"),
    [
        ("gloo", GATHER, False),
        ("gloo", SCATTER, False),
        ("gloo", ALL_GATHER, False),
        ("nccl", ALL_GATHER, True),
        ("gloo", ALL_TO_ALL, True),
    ],
)
def test_bytes_are_compared_where_the_backend_wants_them_alike(
    file: str, backend: str, kind: int, may_differ: bool
) -> None:
    usual, odd = [Call(what=kind | FLOAT)], [Call(what=kind | FLOAT, nbytes=8)]
    assert bool(compare(file, usual, odd, usual, group=Group("0", backend, (0, 1, 2), 0))) is not may_differ


def of_shapes(kind: int, *shapes: tuple[int, ...]) -> list[list[Call]]:
    return [[Call(what=kind | FLOAT, nbytes=4 * prod(shape), shape=shape)] for shape in shapes]


@pytest.mark.parametrize("kind", [ALL_REDUCE, BROADCAST, ALL_GATHER, REDUCE, GATHER, SCATTER])
def test_matrices_of_different_shapes_are_a_mistake(file: str, kind: int) -> None:
    (told,) = compare(file, *of_shapes(kind, (2, 3), (3, 2), (2, 3)))
    first, second, third = told.splitlines()[1:4]
    assert re.match(r"  ranks 0, 2: \w+ #1 \(float32\[2, 3\], 24 B[,)]", first), told
    assert re.match(r"  rank 1: \w+ #1 \(float32\[3, 2\], 24 B[,)]", second), told
    assert third.startswith("Every rank")


@pytest.mark.parametrize("kind", [REDUCE_SCATTER, ALL_TO_ALL])
def test_where_each_rank_may_bring_its_own_size_its_shape_is_its_own(file: str, kind: int) -> None:
    assert compare(file, *of_shapes(kind, (2, 3), (3, 2), (2, 3))) == []


def test_shapes_of_operations_over_gpus_are_compared_as_their_sizes_are(file: str) -> None:
    nccl = Group("0", "nccl", (0, 1), 0)
    assert compare(file, *of_shapes(ALL_GATHER, (2, 3), (3, 2)), group=nccl) == []
    assert compare(file, *of_shapes(ALL_REDUCE, (2, 3), (3, 2)), group=nccl) != []


def test_a_rank_without_a_shape_is_told_beside_those_whose_shapes_differ(file: str) -> None:
    usual = Call(nbytes=24, shape=(2, 3))
    (told,) = compare(file, [Call(nbytes=24)], [usual], [replace(usual, shape=(3, 2))])
    ranks = re.findall(r"^  (rank \d): all_reduce #1 \((.+), 24 B, sum\)", told, re.MULTILINE)
    assert ranks == [("rank 0", "float32"), ("rank 1", "float32[2, 3]"), ("rank 2", "float32[3, 2]")]


def test_shapes_are_told_apart_by_the_rule_of_phalanxs_own_backends(file: str) -> None:
    """Shapes of 24 elements drawn at random: the ranks differ if the words of two do, which are not 0."""
    draw = random.Random(1)
    whole = [(24,), (24, 1), (1, 24), (4, 6), (4, 1, 6), (1, 4, 6, 1), (6, 4), (2, 12), (12, 2), (2, 3, 4), (4, 3, 2)]
    for size in (2, 3, 5):
        group = Group("0", "gloo", tuple(range(size)), 0)
        for _ in range(100):
            drawn = [draw.choice(whole) for _ in range(size)]
            # What the recorder has of a shape that goes with any other is nothing.
            shown = [shape if shape_word(shape) else () for shape in drawn]
            ranks = [[Call(nbytes=96, shape=shape)] for shape in shown]
            differ = len({shape_word(shape) for shape in drawn} - {0}) > 1
            assert bool(compare(file, *ranks, group=group)) is differ, drawn


@pytest.mark.parametrize(
    "odd", [Call(is_done=False, nbytes=32), Call(failed=True, nbytes=32), Call(what=SEND | INT, in_group=9)]
)
def test_what_is_not_done_has_failed_or_is_a_message_is_not_compared(file: str, odd: Call) -> None:
    assert compare(file, [Call()] * 2, [Call(), odd], [Call()] * 2) == []


def test_ranks_that_are_behind_and_groups_of_phalanx_are_left_alone(file: str) -> None:
    ahead = [Call(), Call(nbytes=32)]
    assert compare(file, ahead, [Call()], ahead) == []
    own = Group("0", "phalanx", (0, 1, 2), 0)
    assert compare(file, ahead, [Call(), Call()], ahead, group=own) == []


def test_a_difference_is_found_when_the_last_rank_has_come_and_not_again(file: str) -> None:
    look = Looks(file, 3).look
    usual, odd = [Call()] * 5, [Call(), Call(nbytes=32), Call()]
    assert look(usual[:2], odd[:1], usual[:1]) == []
    assert look(usual[:2], odd[:2], usual[:1]) == []
    assert len(look(usual, odd[:2], usual)) == 1
    assert look(usual, [*odd, Call(nbytes=64)], usual) == []


def lines(*numbers: int) -> list[Call]:
    return [Call(line=number) for number in numbers]


@pytest.mark.parametrize(
    ("of_rank_0", "of_rank_1"),
    [((3, 6), (6, 3)), ((3, 6, 3, 6, 3, 6), (3, 6, 6, 3, 6, 3)), ((3, 6, 8), (6, 8, 3)), ((6, 10), (10, 6))],
)
def test_lines_that_are_crossed_are_named(file: str, of_rank_0: Sequence[int], of_rank_1: Sequence[int]) -> None:
    (told,) = compare(file, lines(*of_rank_0), lines(*of_rank_1), lines(*of_rank_0))
    assert "ranks 0 and 1 of a group make the same calls in different orders" in told
    assert compare(file, lines(*of_rank_0), lines(*of_rank_1), lines(*of_rank_0), lines=False) == []


@pytest.mark.parametrize(
    ("of_rank_0", "of_rank_1"),
    [
        ((3, 6, 3, 6), (5, 6, 5, 6)),  # a branch by rank, whose arms no rank runs both
        ((3, 6, 5, 6), (5, 6, 3, 6)),  # two arms, in turns
        ((8, 10), (10, 8)),  # two arms, one of which ends with return
        ((3, *[6] * 8, 6), (6, *[6] * 8, 3)),  # in step for long between
    ],
)
def test_lines_of_a_program_that_is_right_are_not(
    file: str, of_rank_0: Sequence[int], of_rank_1: Sequence[int]
) -> None:
    assert compare(file, lines(*of_rank_0), lines(*of_rank_1), lines(*of_rank_0)) == []


def test_places_of_which_it_is_not_known_whether_they_exclude_each_other_are_not_named(file: str) -> None:
    Path(file).unlink()
    assert compare(file, lines(3, 6), lines(6, 3), lines(3, 6)) == []


def looks(file: str, *each: tuple[Sequence[Call], Sequence[Call]]) -> list[str]:
    """What one comparison says in several looks at two ranks."""
    made = Looks(file, 2, Group("0", "gloo", (0, 1), 0))
    return [text for ranks in each for text in made.look(*ranks)]


@pytest.mark.parametrize("gap", [0, 50])
def test_lines_that_met_before_a_gap_say_nothing_about_those_behind_it(file: str, gap: int) -> None:
    """Among the calls that have been written over, the ranks may have been in step for long."""
    first = [Call(3, in_group=1)], [Call(6, in_group=1)]
    behind = [Call(6, in_group=2 + gap)], [Call(3, in_group=2 + gap)]
    assert bool(looks(file, first, behind)) == (gap == 0)


def test_a_group_in_which_a_call_has_failed_is_compared_no_longer(file: str) -> None:
    """A script that goes on from there may have its ranks count from different calls."""
    failed = [Call(in_group=1, failed=True)], [Call(in_group=1, failed=True)]
    behind = [Call(in_group=2), Call(in_group=3)], [Call(in_group=2, nbytes=32), Call(in_group=3)]
    assert looks(file, failed, behind) == []
    assert looks(file, behind) != []
