"""What ``CollectiveMismatch`` has as attributes, for programs that read them: on one host and over several."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist
from tests.support.islands import pretend_host
from tests.support.ranks import Member, on_ranks

from phalanx.errors import CollectiveMismatch

PLACES = pytest.mark.parametrize("place", ["000", "011"])  # the host of each rank


def join(member: Member, place: str) -> None:
    if len(set(place)) > 1:
        pretend_host(int(place[member.rank]))
    member.join()


def where_raised(error: CollectiveMismatch) -> tuple[str, int]:
    assert 0 < error.elapsed_s < 60
    return error.group, error.sequence


@PLACES
def test_the_error_says_in_which_operation_of_which_group_each_rank_was(place: str) -> None:
    def body(member: Member) -> list[tuple[str, int]]:
        join(member, place)
        pair = dist.new_group([0, 1])
        found = []
        if isinstance(pair, dist.ProcessGroup):
            for _ in range(3):
                dist.all_reduce(torch.ones(4), group=pair)
            with pytest.raises(CollectiveMismatch) as caught:
                dist.all_reduce(torch.ones(4 + member.rank), group=pair)
            assert where_raised(caught.value) == (pair.group_name, 4)
            assert pair.group_name != "0"
            found.append(where_raised(caught.value))
        dist.barrier()
        with pytest.raises(CollectiveMismatch) as caught:
            dist.all_reduce(torch.ones(4 + member.rank))
        calls = {rank: f"all_reduce(float32[{4 + rank}], sum) at {__file__}:{line}" for rank in range(3)}
        assert caught.value.calls == calls
        return [*found, where_raised(caught.value)]

    line = body.__code__.co_firstlineno + 14
    for rank, found in enumerate(on_ranks(body, 3)):
        assert found[-1] == ("0", 2)
        assert len(found) == (2 if rank < 2 else 1)


def test_the_call_of_a_rank_that_has_gone_on_is_read_from_its_recorder() -> None:
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
    for calls in on_ranks(body, 3)[1:]:
        assert calls[0] == f"broadcast #2 (float32, 16 B, src=0) at {__file__}:{line}", calls


@PLACES
@pytest.mark.parametrize("user", [True, False], ids=["its own function", "only torch's"])
def test_the_call_of_another_thread_has_its_name(place: str, user: bool) -> None:
    """As where an asynchronous checkpoint and the training use one group."""

    def body(member: Member) -> str:
        join(member, place)

        def save() -> None:
            dist.all_gather([torch.ones(2)] * 3, torch.ones(2))

        work = save if user else partial(dist.all_gather, [torch.ones(2)] * 3, torch.ones(2))
        with (
            ThreadPoolExecutor(1, "saver") as pool,
            pytest.raises(CollectiveMismatch, match="a group of its own") as error,
        ):
            pool.submit(work).result() if member.rank else dist.all_reduce(torch.ones(8))
        return error.value.calls[1]

    line = body.__code__.co_firstlineno + 4
    where = f"{__file__}:{line}" if user else "torch.distributed.c10d_logger.wrapper"
    assert on_ranks(body, 3) == [f"all_gather(float32[2]) at {where} in thread 'saver_0'"] * 3


def test_error_between_hosts_has_no_part_of_the_call_as_its_cause() -> None:
    """Inside a host an all_reduce has parts, which nobody has called."""

    def body(member: Member) -> BaseException | None:
        join(member, "0011")
        with pytest.raises(CollectiveMismatch) as caught:
            dist.all_reduce(torch.ones(2 if member.rank == 1 else 3))
        return caught.value.__cause__

    assert on_ranks(body, 4) == [None] * 4
