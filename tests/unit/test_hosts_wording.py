"""Why a group over several hosts broke, in words, and whom the error names in its attributes."""

from __future__ import annotations

import pytest

from phalanx.transports.hosts.layout import Layout
from phalanx.transports.hosts.wording import late, lost

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
