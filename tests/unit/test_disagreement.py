"""What recordings show of ranks that parted, where the backend's own error cannot say it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.watch.disagreement import disagreement
from phalanx.watch.records import Group, Record, Recording

GLOO = Group("0", "gloo", (0, 1, 2), 0)
LAST = Record(1, GLOO, 2, "all_reduce", 16, "float32", "sum", -1, "train.py:7", "", -1, 2_000, 3_000, True, -1)
FIRST = replace(LAST, number=0, in_group=1, site="train.py:5", entered_ns=1_000, left_ns=1_500, failed=False)
AT_NS = 3_000.0


def recorded(*records: Record) -> Recording:
    return Recording(1, 0, 3, -1, "", len(records), records)


def both(**of_rank_1: object) -> dict[int, Recording]:
    other = replace(LAST, **of_rank_1)  # type: ignore[arg-type]
    return {0: recorded(FIRST, LAST), 1: recorded(FIRST, other), 2: recorded(FIRST, LAST)}


@pytest.mark.parametrize(
    ("differs", "call"),
    [
        ({"nbytes": 32}, "all_reduce #2 (float32, 32 B, sum)"),
        ({"dtype": "int32"}, "all_reduce #2 (int32, 16 B, sum)"),
        ({"kind": "broadcast", "op": "", "peer": 0}, "broadcast #2 (float32, 16 B, src=0)"),
        ({"kind": "barrier", "op": "", "dtype": "", "nbytes": 0}, "barrier #2"),
    ],
)
def test_the_calls_that_differed_are_listed(differs: dict[str, object], call: str) -> None:
    assert disagreement(both(**differs), 0, AT_NS) == [
        "the ranks called different operations:",
        "  ranks 0, 2: all_reduce #2 (float32, 16 B, sum) at train.py:7",
        f"  rank 1: {call} at train.py:7",
    ]


@pytest.mark.parametrize("count", [5, 64])
def test_disagreement_lists_the_first_calls_and_counts_the_others(count: int) -> None:
    group = replace(GLOO, ranks=tuple(range(count)))
    ranks = {
        rank: recorded(*(replace(record, group=group) for record in (FIRST, replace(LAST, nbytes=8 * rank + 8))))
        for rank in range(count)
    }
    assert disagreement(ranks, 0, AT_NS) == [
        "the ranks called different operations:",
        *(f"  rank {rank}: all_reduce #2 (float32, {8 * rank + 8} B, sum) at train.py:7" for rank in range(3)),
        f"  and {count - 3} other calls on other ranks",
    ]


def test_matrices_of_different_shapes_are_a_difference_and_others_are_none() -> None:
    last = replace(LAST, nbytes=24, shape="[2, 3]")
    seen = {rank: recorded(FIRST, last) for rank in (0, 2)}
    odd = recorded(FIRST, replace(last, shape="[3, 2]"))
    assert disagreement({**seen, 1: odd}, 0, AT_NS) == [
        "the ranks called different operations:",
        "  ranks 0, 2: all_reduce #2 (float32[2, 3], 24 B, sum) at train.py:7",
        "  rank 1: all_reduce #2 (float32[3, 2], 24 B, sum) at train.py:7",
    ]
    for shape in ("", "[1, 2, 3]"):
        assert disagreement({**seen, 1: recorded(FIRST, replace(last, shape=shape))}, 0, AT_NS) == []


def test_calls_that_agree_are_not_blamed() -> None:
    assert disagreement(both(site="train.py:9"), 0, AT_NS) == []
    assert disagreement(both(kind="all_to_all", nbytes=32) | {0: both(kind="all_to_all")[1]}, 1, AT_NS) != []


@pytest.mark.parametrize(
    ("backend", "kind", "may_differ"),
    [
        ("gloo", "all_to_all", True),
        ("gloo", "all_gather", False),
        ("nccl", "all_gather", True),
        ("nccl", "gather", False),
        ("gloo", "broadcast", False),
    ],
)
def test_other_bytes_differ_only_where_the_backend_wants_them_alike(backend: str, kind: str, may_differ: bool) -> None:
    group = replace(GLOO, backend=backend)
    recordings = {
        rank: recorded(replace(LAST, group=group, kind=kind, op="", nbytes=16 * (rank + 1))) for rank in range(3)
    }
    assert bool(disagreement(recordings, 0, AT_NS)) is not may_differ


def test_difference_in_an_earlier_call_comes_first() -> None:
    found = both(nbytes=32) | {1: recorded(replace(FIRST, op="max"), LAST)}
    assert disagreement(found, 0, AT_NS)[1:] == [
        "  ranks 0, 2: all_reduce #1 (float32, 16 B, sum) at train.py:5",
        "  rank 1: all_reduce #1 (float32, 16 B, max) at train.py:5",
    ]


def test_a_rank_that_had_not_come_is_named_also_if_it_came_afterwards() -> None:
    line = (
        "rank 1 had not come to all_reduce #2 at train.py:7; "
        "its last operation was all_reduce #1 (float32, 16 B, sum) at train.py:5"
    )
    for records in (FIRST,), (FIRST, replace(LAST, entered_ns=4_000)):
        found = both() | {1: recorded(*records)}
        assert disagreement(found, 0, AT_NS) == [line]
    assert disagreement(both() | {1: recorded()}, 0, AT_NS) == ["rank 1 had not come to all_reduce #2 at train.py:7"]
    for states, how in (([1], []), "which was stopped (state T)"), (([1], [1]), "which ended (exit code 0)"):
        told = disagreement(both() | {1: recorded()}, 0, AT_NS, *states)
        assert told == [f"rank 1, {how}, had not come to all_reduce #2 at train.py:7"]


def test_of_a_collective_found_late_nobody_is_said_not_to_have_come() -> None:
    """Ranks that came to it a moment ago have no record yet."""
    found = both() | {0: recorded(FIRST, replace(LAST, found_late=True)), 1: recorded(FIRST)}
    assert disagreement(found, 0, AT_NS) == [
        "rank 1 was not seen in all_reduce #2 at train.py:7; "
        "its last operation was all_reduce #1 (float32, 16 B, sum) at train.py:5"
    ]


def test_disagreement_is_silent_without_an_operation_of_torchs_backend() -> None:
    differing = both(nbytes=32)
    assert disagreement(differing | {0: recorded(FIRST)}, 0, AT_NS) == []
    assert disagreement({}, 0, AT_NS) == []
    own = Group("0", "phalanx", (0, 1, 2), 0)
    records = {
        rank: recorded(*(replace(record, group=own) for record in recording.records))
        for rank, recording in differing.items()
    }
    assert disagreement(records, 0, AT_NS) == []


@pytest.mark.parametrize(
    ("peer", "kind", "end"), [(1, "recv", "from rank 1"), (1, "send", "to rank 1"), (-1, "recv", "from any rank")]
)
def test_the_other_end_of_a_message_is_told_if_it_has_ended(peer: int, kind: str, end: str) -> None:
    ranks = {**both(), 0: recorded(FIRST, replace(LAST, kind=kind, peer=peer, op="")), 1: recorded(FIRST)}
    before = "; its last operation was all_reduce #1 (float32, 16 B, sum) at train.py:5"
    told = f"rank 1, which ended (exit code 0), is the other end of {kind} {end} (float32, 16 B) at train.py:7{before}"
    assert disagreement(ranks, 0, AT_NS, ended=[1]) == [told]
    assert disagreement(ranks, 0, AT_NS) == ([told.replace(", which ended (exit code 0),", "")] if peer >= 0 else [])
