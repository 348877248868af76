"""What ``CollectiveMismatch`` has as attributes, for programs that read them: on one host and over several."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist
from tests.support.islands import divide_by
from tests.support.ranks import Member, on_ranks

from phalanx.c10d import base
from phalanx.errors import CollectiveMismatch

# The host of a rank, given the world's size; None for one host.
WORLDS: dict[str, tuple[int, Callable[[int, int], int] | None]] = {
    "one host of 3": (3, None),
    "1+2": (3, lambda rank, size: min(rank, 1)),
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
        assert caught.value.calls == {
            rank: f"all_reduce(float32[{4 + rank}], sum) at {__file__}:{line}" for rank in range(size)
        }
        return [*found, ("0", where_raised(caught.value))]

    line = body.__code__.co_firstlineno + 12
    for rank, found in enumerate(on_ranks(body, size)):
        names, places = zip(*found, strict=True)
        assert places == ((names[0], 4), ("0", 2))[rank > 1 :]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("size", [3, pytest.param(5, marks=pytest.mark.long)])
def test_the_call_of_a_rank_that_has_gone_on_is_read_from_its_recorder(size: int) -> None:
    """A broadcast's root waits for nobody: it is in other code when the others find that one of them differs."""

    def body(member: Member) -> dict[int, str]:
        member.join()
        dist.barrier()
        if member.rank == 0:
            dist.broadcast(torch.ones(4), src=0)
            member.say("went on")
            member.await_said("told")
            return {}
        member.await_said("went on")
        with pytest.raises(CollectiveMismatch) as caught:
            dist.all_reduce(torch.ones(4))
        if member.rank == 1:
            member.say("told")
        return caught.value.calls

    line = body.__code__.co_firstlineno + 4
    for calls in on_ranks(body, size)[1:]:
        assert calls[0] == f"broadcast #2 (float32, 16 B, src=0) at {__file__}:{line}", calls


@pytest.mark.parametrize("size", [3, pytest.param(5, marks=pytest.mark.long)])
def test_rank_that_closes_is_told_of_an_earlier_call_that_differed(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "LAST_CALLS_S", 60.0)

    def body(member: Member) -> str:
        member.join()
        dist.barrier()
        last = size - 1
        if member.rank < last:
            for length in (4, 5):
                dist.broadcast(torch.ones(length), src=0)
            member.say(f"closes-{member.rank}")
            with pytest.raises(CollectiveMismatch) as caught:
                dist.destroy_process_group()
            return str(caught.value)
        for rank in range(last):
            member.await_said(f"closes-{rank}")
        with pytest.raises(CollectiveMismatch) as caught:
            dist.all_reduce(torch.ones(4))
        return str(caught.value)

    for text in on_ranks(body, size):
        assert f"rank {size - 1}: all_reduce(float32[4], sum) at {__file__}:" in text, text
        assert "broadcast" in text, text


@pytest.mark.parametrize("world", ["one host of 3", "1+2"])
@pytest.mark.parametrize("user", [True, False], ids=["its own function", "only torch's"])
def test_the_call_of_another_thread_has_its_name(world: str, user: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where an asynchronous checkpoint and the training use one group."""
    size = in_world(monkeypatch, world)

    def body(member: Member) -> str:
        member.join()

        def save() -> None:
            dist.all_gather([torch.ones(2)] * size, torch.ones(2))

        work = save if user else partial(dist.all_gather, [torch.ones(2)] * size, torch.ones(2))
        with (
            ThreadPoolExecutor(1, "saver") as pool,
            pytest.raises(CollectiveMismatch, match="a group of its own") as error,
        ):
            pool.submit(work).result() if member.rank else dist.all_reduce(torch.ones(8))
        return error.value.calls[1]

    line = body.__code__.co_firstlineno + 4
    place = f"{__file__}:{line}" if user else "torch.distributed.c10d_logger.wrapper"
    assert on_ranks(body, size) == [f"all_gather(float32[2]) at {place} in thread 'saver_0'"] * size
