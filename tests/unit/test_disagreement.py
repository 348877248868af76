"""What recordings show of ranks that parted, where the backend's own error cannot say it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from phalanx.diagnosis.diagnose import disagreement
from phalanx.diagnosis.snapshot import Group, Record, Recording

GLOO = Group("0", "gloo", (0, 1, 2), 0)
LAST = Record(1, GLOO, 2, "all_reduce", 16, "float32", "sum", -1, "train.py:7", "", -1, 2_000, 3_000, True, -1)
FIRST = replace(LAST, number=0, in_group=1, site="train.py:5", entered_ns=1_000, left_ns=1_500, failed=False)
AT_NS = 3_000.0
BEFORE = "; its last operation was all_reduce #1 (float32, 16 B, sum) at train.py:5"


def recorded(*records: Record) -> Recording:
    return Recording(1, 0, 3, -1, "", len(records), records)


def all_but(rank_1: Recording) -> dict[int, Recording]:
    return {0: recorded(FIRST, LAST), 1: rank_1, 2: recorded(FIRST, LAST)}


def both(**of_rank_1: object) -> dict[int, Recording]:
    return all_but(recorded(FIRST, replace(LAST, **of_rank_1)))


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
    earlier = both(**differs) | {1: recorded(replace(FIRST, op="max"), LAST)}
    assert disagreement(earlier, 0, AT_NS)[2] == "  rank 1: all_reduce #1 (float32, 16 B, max) at train.py:5"


def test_matrices_of_different_shapes_are_a_difference_and_others_are_none() -> None:
    last = replace(LAST, nbytes=24, shape="[2, 3]")
    seen = {rank: recorded(FIRST, last) for rank in (0, 2)}
    for shape, differs in (("[3, 2]", True), ("", False), ("[1, 2, 3]", False)):
        told = disagreement({**seen, 1: recorded(FIRST, replace(last, shape=shape))}, 0, AT_NS)
        assert bool(told) is differs
        assert not differs or told[2] == "  rank 1: all_reduce #2 (float32[3, 2], 24 B, sum) at train.py:7"


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
    last = replace(LAST, group=replace(GLOO, backend=backend), kind=kind, op="")
    recordings = {rank: recorded(replace(last, nbytes=16 * (rank + 1))) for rank in range(3)}
    assert bool(disagreement(recordings, 0, AT_NS)) is not may_differ


def test_a_rank_that_had_not_come_is_named_also_if_it_came_afterwards() -> None:
    for records in (FIRST,), (FIRST, replace(LAST, entered_ns=4_000)):
        line = f"rank 1 had not come to all_reduce #2 at train.py:7{BEFORE}"
        assert disagreement(all_but(recorded(*records)), 0, AT_NS) == [line]
    for states, how in (
        (([], []), ""),
        (([1], []), ", which was stopped (state T),"),
        (([], [1]), ", which ended (exit code 0),"),
    ):
        told = disagreement(all_but(recorded()), 0, AT_NS, *states)
        assert told == [f"rank 1{how} had not come to all_reduce #2 at train.py:7"]
    join = replace(LAST, kind="init", in_group=1, site="train.py:3", op="", dtype="", nbytes=0)
    joins = {0: recorded(join), 1: recorded(), 2: recorded(join)}
    assert disagreement(joins, 0, AT_NS) == ["rank 1 had not come to init at train.py:3"]


def test_of_a_collective_found_late_nobody_is_said_not_to_have_come() -> None:
    """Ranks that came to it a moment ago have no record yet."""
    found = all_but(recorded(FIRST)) | {0: recorded(FIRST, replace(LAST, found_late=True))}
    assert disagreement(found, 0, AT_NS) == [f"rank 1 was not seen in all_reduce #2 at train.py:7{BEFORE}"]


def test_disagreement_is_silent_where_calls_agree_or_are_not_torchs() -> None:
    assert disagreement(both(site="train.py:9"), 0, AT_NS) == []
    assert disagreement(both(nbytes=32) | {0: recorded(FIRST)}, 0, AT_NS) == []
    assert disagreement({}, 0, AT_NS) == []
    own = replace(GLOO, backend="phalanx")
    last = {rank: recorded(replace(LAST, group=own, nbytes=rank)) for rank in range(3)}
    assert disagreement(last, 0, AT_NS) == []


@pytest.mark.parametrize(
    ("peer", "kind", "end"), [(1, "recv", "from rank 1"), (1, "send", "to rank 1"), (-1, "recv", "from any rank")]
)
def test_the_other_end_of_a_message_is_told_if_it_has_ended(peer: int, kind: str, end: str) -> None:
    message = recorded(FIRST, replace(LAST, kind=kind, peer=peer, op=""))
    ranks = all_but(recorded(FIRST)) | {0: message}
    told = f"rank 1, which ended (exit code 0), is the other end of {kind} {end} (float32, 16 B) at train.py:7{BEFORE}"
    assert disagreement(ranks, 0, AT_NS, ended=[1]) == [told]
    assert disagreement(ranks, 0, AT_NS) == ([told.replace(", which ended (exit code 0),", "")] if peer >= 0 else [])
