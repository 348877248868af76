"""What ``CollectiveMismatch`` has as attributes, for programs that read them: on one host and over several."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from tests.support.islands import divide_by
from tests.support.ranks import Member, on_ranks

from phalanx.errors import CollectiveMismatch

# The host of a rank, given the world's size; None for one host.
WORLDS: dict[str, tuple[int, Callable[[int, int], int] | None]] = {
    "one host of 2": (2, None),
    "one host of 3": (3, None),
    "one host of 5": (5, None),
    "1+1": (2, lambda rank, size: rank),
    "1+2": (3, lambda rank, size: min(rank, 1)),
    "1+1+1": (3, lambda rank, size: rank),
}


def in_world(monkeypatch: pytest.MonkeyPatch, world: str) -> int:
    size, host_of = WORLDS[world]
    if host_of is not None:
        divide_by(monkeypatch, host_of)
    return size


def where_raised(error: CollectiveMismatch) -> tuple[str, int]:
    assert 0 < error.elapsed_s < 60
    return error.group, error.sequence


@pytest.mark.parametrize("world", WORLDS)
def test_the_error_has_the_call_of_every_rank(world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size = in_world(monkeypatch, world)

    def body(member: Member) -> dict[int, str]:
        member.join()
        tensor = torch.ones(8 if member.rank == size - 1 else 4)
        with pytest.raises(CollectiveMismatch) as caught:
            dist.all_reduce(tensor)
        return caught.value.calls

    line = body.__code__.co_firstlineno + 4
    expected = {
        rank: f"all_reduce(float32[{8 if rank == size - 1 else 4}], sum) at {__file__}:{line}" for rank in range(size)
    }
    assert on_ranks(body, size) == [expected] * size


@pytest.mark.parametrize("world", WORLDS)
def test_the_error_says_in_which_operation_of_which_group_each_rank_was(
    world: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = in_world(monkeypatch, world)

    def body(member: Member) -> list[tuple[str, tuple[str, int]]]:
        member.join()
        pair = dist.new_group([0, 1])
        found = []
        if isinstance(pair, dist.ProcessGroup):
            for _ in range(3):
                dist.all_reduce(torch.ones(4), group=pair)
            with pytest.raises(CollectiveMismatch) as caught:
                dist.all_reduce(torch.ones(4 + member.rank), group=pair)
            found.append((pair.group_name, where_raised(caught.value)))
        dist.barrier()
        with pytest.raises(CollectiveMismatch) as caught:
            dist.all_reduce(torch.ones(4 + member.rank))
        return [*found, ("0", where_raised(caught.value))]

    for rank, found in enumerate(on_ranks(body, size)):
        names, places = zip(*found, strict=True)
        assert places == ((names[0], 4), ("0", 2))[rank > 1 :]
        assert len(set(names)) == len(names)


def test_a_rank_that_makes_no_call_has_none_there() -> None:
    def body(member: Member) -> list[int] | None:
        member.join()
        dist.barrier()
        member.meet("begun")
        if member.rank == 2:
            member.await_said("told-0", "told-1")
            return None
        with pytest.raises(CollectiveMismatch) as caught:
            dist.reduce(torch.ones(4 + 4 * member.rank), 1 - member.rank)
            dist.barrier()
        member.say(f"told-{member.rank}")
        return sorted(caught.value.calls)

    assert on_ranks(body, 3) == [[0, 1], [0, 1], None]
