"""Why a group over several hosts broke, in words, and whom the error names in its attributes."""

from __future__ import annotations

import pytest

from phalanx.transports.hosts.layout import Layout
from phalanx.transports.hosts.wording import awaited_elsewhere, late, lost

PIDS = [10, 11, 12, 13]
LAYOUT = Layout("aabb", 0, ["h0", "h0", "h1", "h1"])


@pytest.mark.parametrize(
    ("places", "blamed"),
    [
        ({2: "at train.py:7", 3: "at train.py:9"}, 2),
        ({2: "in all_reduce", 3: ""}, 3),
        ({1: "", 3: ""}, 1),
    ],
)
def test_a_rank_that_does_not_answer_is_blamed_before_one_that_does(places: dict[int, str], blamed: int) -> None:
    """A rank of the host of one that is stopped has not come either, because it waits for that one."""
    error = late(places, [], LAYOUT, PIDS, 0, "barrier() at train.py:5", 30.0)
    assert (error.group_rank, error.pid, error.host) == (blamed, PIDS[blamed], LAYOUT.name(blamed))
    assert all(f"rank {rank} of the group (pid {PIDS[rank]} on {LAYOUT.name(rank)})" in str(error) for rank in places)
    assert "rank 0 was in barrier() at train.py:5" in str(error)


def test_a_rank_that_raised_is_said_with_its_exception() -> None:
    fact = {"kind": "lost", "what": "raised", "text": "ValueError: no data at train.py:3", "group_rank": 2, "by": 2}
    error = lost(fact, LAYOUT, PIDS, 0, "barrier() at train.py:5")
    assert "rank 2 of the group (pid 12 on h1) has failed (ValueError: no data at train.py:3)" in str(error)
    assert (error.group_rank, error.pid, error.host) == (2, 12, "h1")


def test_attributes_are_what_those_beside_a_lost_rank_know_of_it() -> None:
    known = {
        "signal": 9,
        "last_operation": "all_reduce #2 (float32, 4 B, sum) at train.py:3",
        "last_line": "train.py:3",
    }
    fact = {"kind": "lost", "what": "", "text": "On h1: it has ended", "group_rank": 2, "by": 3, **known}
    error = lost(fact, LAYOUT, PIDS, 0, "barrier() at train.py:5")
    assert {name: getattr(error, name) for name in known} == known
    del fact["signal"]
    assert lost(fact, LAYOUT, PIDS, 0, "barrier() at train.py:5").signal == 0


@pytest.mark.parametrize(
    ("places", "blamed"), [({2: "stopped (state T)"}, 2), ({1: "in recv from rank 2", 2: "stopped (state T)"}, 2)]
)
def test_message_that_ends_with_a_late_collective_names_the_late_ranks(places: dict[int, str], blamed: int) -> None:
    fact = {"kind": "late", "what": "", "text": "", "group_rank": -1, "by": 0}
    error = awaited_elsewhere(fact, "barrier() at train.py:5", places, [2], LAYOUT, PIDS, 3, "recv from rank 2", 30.0)
    assert (error.group_rank, error.pid, error.host, error.elapsed_s) == (blamed, PIDS[blamed], "h1", 30.0)
    assert "rank 0 of the group was in barrier() at train.py:5" in str(error)
    assert "rank 2 of the group (pid 12 on h1), which was stopped (state T)" in str(error)
    assert str(error).endswith("Let it continue (kill -CONT 12), or end it")
    assert "Rank 3 was in recv from rank 2" in str(error)


@pytest.mark.parametrize(
    ("places", "stopped", "advice"),
    [
        ({2: "stopped (state T)"}, [2], "Let it continue (kill -CONT 12), or end it"),
        ({1: "in barrier", 2: "stopped (state T)"}, [2], "Let it continue (kill -CONT 12), or end it"),
        ({2: "at train.py:7"}, [], "Is it in other code, or much slower? A longer timeout"),
        ({2: "at train.py:7", 3: "at train.py:7"}, [], "Are they in other code, or much slower? A longer timeout"),
    ],
)
def test_what_to_do_about_a_rank_that_did_not_come(places: dict[int, str], stopped: list[int], advice: str) -> None:
    assert advice in str(late(places, stopped, LAYOUT, PIDS, 0, "barrier() at train.py:5", 30.0))
