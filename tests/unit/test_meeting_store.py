"""Of the ranks that wait for the same others to make a group, one says so, each time anew."""

from __future__ import annotations

import pytest
from torch._C._distributed_c10d import HashStore

from phalanx.transports.meeting_store import OFFER, MeetingStore


@pytest.mark.parametrize("size", [3, 5])
def test_one_rank_says_for_whom_it_waits_and_not_always_the_same(capfd: pytest.CaptureFixture[str], size: int) -> None:
    whole = HashStore()
    ranks = [MeetingStore("group", whole, range(size), rank=rank) for rank in range(size)]

    def said_by(rank: int, nth: int) -> str:
        ranks[rank]._say_who_is_missing([OFFER], 5.0 * 4 ** (nth - 1), nth)
        return capfd.readouterr().err

    line = f"rank 0 has not come as far as rank {size - 1}, which waits for it to make a group of ranks 0-{size - 1}"
    assert line in said_by(size - 1, 1)
    assert [said_by(rank, 1) for rank in range(1, size)] == [""] * (size - 1)
    assert "as far as rank 1, which waits for it" in said_by(1, 2)  # also if the rank has ended that said it before
    assert said_by(size - 1, 2) == ""


def test_ranks_that_wait_for_others_say_so_as_well(capfd: pytest.CaptureFixture[str]) -> None:
    whole = HashStore()
    first, last = (MeetingStore("group", whole, range(3), rank=rank) for rank in (0, 2))
    last._say_who_is_missing([OFFER], 5.0, 1)
    assert "rank 0 has not come as far as rank 2" in capfd.readouterr().err
    first._say_who_is_missing(["joined/1", "joined/2"], 5.0, 1)
    assert "ranks 1-2 have not come as far as rank 0, which waits for them" in capfd.readouterr().err
    last._say_who_is_missing(["joined/0", "joined/1"], 5.0, 1)  # of a later step, in which rank 0 is late again
    assert "ranks 0-1 have not come as far as rank 2" in capfd.readouterr().err


def test_the_key_of_what_was_said_goes_with_the_others_of_its_rank(capfd: pytest.CaptureFixture[str]) -> None:
    whole = HashStore()
    store = MeetingStore("group", whole, range(3), rank=1)
    before = whole.num_keys()
    store._say_who_is_missing([OFFER], 5.0, 1)
    assert whole.num_keys() == before + 1
    store.clear()
    assert whole.num_keys() == before
