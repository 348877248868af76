"""What torch's dispatcher does for other backends: every form of a call, its timeout, and shapes that may meet."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.joined import group, in_world, mine, total
from tests.support.ranks import Member, on_ranks, run_ranks

from phalanx.errors import CollectiveMismatch, CollectiveTimeout

SIZES = (1, 2, 3)
MAX = dist.ReduceOp.MAX
SHORT = timedelta(seconds=0.3)


@pytest.mark.parametrize("size", SIZES)
def test_a_process_group_takes_its_arguments_in_every_form_that_torch_documents(size: int) -> None:
    def body(place: Member) -> None:
        pg, n, rank, root = group(), place.size, place.rank, place.rank == 0
        one, everyone = [1.0] * 4, [[float(r + 1)] * 4 for r in range(n)]
        everything, minute = [total(n)] * 4, timedelta(seconds=60)

        def after(call: Callable[[torch.Tensor], dist.Work]) -> list[float]:
            tensor = mine(place)
            call(tensor).wait()
            return tensor.tolist()

        def filled(call: Callable[[list[torch.Tensor]], dist.Work]) -> list[list[float]]:
            tensors = [torch.zeros(4) for _ in range(n)]
            call(tensors).wait()
            return [tensor.tolist() for tensor in tensors]

        assert after(lambda t: pg.allreduce([t])) == everything
        assert after(lambda t: pg.allreduce(t)) == everything
        assert after(lambda t: pg.allreduce([t], MAX)) == everyone[-1]
        assert after(lambda t: pg.allreduce(t, op=MAX)) == everyone[-1]
        assert after(lambda t: pg.allreduce(t, MAX, minute)) == everyone[-1]
        assert after(lambda t: pg.allreduce_coalesced([t])) == everything
        assert after(lambda t: pg.broadcast(t, 0)) == one
        assert after(lambda t: pg.broadcast(t, root=n - 1, timeout=minute)) == everyone[-1]
        assert after(lambda t: pg.reduce(t, 0)) == (everything if root else everyone[rank])
        assert after(lambda t: pg.reduce(t, root=0, op=MAX)) == everyone[-1 if root else rank]
        assert filled(lambda ts: pg.allgather(ts, mine(place))) == everyone
        assert filled(lambda ts: pg.allgather([ts], [mine(place)])) == everyone
        gathered = filled(lambda ts: pg.gather(ts if root else [], mine(place), 0))
        assert not root or gathered == everyone
        sources = [torch.full((4,), float(r + 1)) for r in range(n)]
        assert after(lambda t: pg.scatter(t, sources if root else [], 0)) == everyone[rank]
        assert after(lambda t: pg.reduce_scatter(t, sources)) == [n * value for value in everyone[rank]]
        assert after(lambda t: pg.reduce_scatter(t, sources, op=MAX)) == everyone[rank]
        assert after(lambda t: pg._reduce_scatter_base(t, torch.ones(4 * n))) == [float(n)] * 4
        whole = torch.zeros(4 * n)
        pg._allgather_base(whole, mine(place)).wait()
        assert whole.view(n, 4).tolist() == everyone
        exchanged = torch.zeros(n)
        pg.alltoall_base(exchanged, mine(place, n), [], []).wait()
        assert exchanged.tolist() == [values[0] for values in everyone]
        assert filled(lambda ts: pg.alltoall(ts, [mine(place)] * n)) == everyone
        pg.barrier().wait()
        pg.barrier(timeout=minute).wait()
        if n > 1 and rank < 2:
            message = mine(place)
            (pg.send([message], 1, 3) if root else pg.recv([message], srcRank=0, tag=3)).wait()
            assert message.tolist() == one

    in_world(body, size)


def test_gather_single_has_a_method_to_land_on() -> None:
    """torch calls it from 2.15 on."""

    def body(place: Member) -> None:
        options, output = dist.GatherOptions(), torch.zeros(4 * place.size)
        options.rootRank, options.asyncOp, options.timeout = 0, False, timedelta(seconds=60)
        group().gather_single(output if place.rank == 0 else None, mine(place), options)
        assert place.rank or output.tolist() == [float(r + 1) for r in range(place.size) for _ in range(4)]

    in_world(body, 3)


def test_a_group_has_its_store_and_can_be_split() -> None:
    def body(place: Member) -> None:
        group().get_group_store().set(f"from {place.rank}", "here")
        group().get_group_store().wait([f"from {rank}" for rank in range(place.size)])
        low = group().split_group([0, 1])
        assert (low is None) == (place.rank == 2)
        own = group().split_group([2], group_name="alone") if place.rank == 2 else low
        tensor = mine(place)
        own.allreduce(tensor).wait()
        assert tensor.tolist() == [3.0] * 4
        assert own.size() == (1 if place.rank == 2 else 2)
        dist.barrier()
        own.shutdown()

    in_world(body, 3)


# -- timeouts ------------------------------------------------------------------------------------------


def with_options(kind: type, asynchronous: bool) -> Any:
    options = kind()
    options.timeout, options.asyncOp = SHORT, asynchronous
    return options


def late_by_setting(pg: Any, call: Callable[[], Any]) -> None:
    pg.set_timeout(SHORT)
    call()


def late_by_setting_it_in_torch(pg: Any) -> None:
    dist.distributed_c10d._set_pg_timeout(SHORT, pg)
    dist.all_reduce(torch.ones(4), group=pg)


LATE: dict[str, Callable[[Any], Any]] = {
    "synchronous": lambda pg: pg.allreduce([torch.ones(4)], with_options(dist.AllreduceOptions, False)),
    "asynchronous": lambda pg: pg.allreduce([torch.ones(4)], with_options(dist.AllreduceOptions, True)).wait(),
    "future": lambda pg: pg.allreduce([torch.ones(4)], with_options(dist.AllreduceOptions, True)).get_future().wait(),
    "argument": lambda pg: pg.allreduce(torch.ones(4), MAX, SHORT).wait(),
    "barrier": lambda pg: pg.barrier(timeout=SHORT).wait(),
    "monitored": lambda pg: pg.monitored_barrier(SHORT),
    "wait": lambda pg: pg.allreduce([torch.ones(4)]).wait(SHORT),
    "set": lambda pg: late_by_setting(pg, lambda: dist.all_reduce(torch.ones(4), group=pg)),
    "set, asynchronous": lambda pg: late_by_setting(pg, lambda: pg.allreduce([torch.ones(4)]).wait()),
    "set, message": lambda pg: late_by_setting(pg, lambda: dist.recv(torch.ones(4), src=1, group=pg)),
    "set in torch": late_by_setting_it_in_torch,
}


def test_a_timeout_of_one_call_holds() -> None:
    """Rank 1 does not come; the groups' own timeout is far longer than the test may take."""

    def body(place: Member) -> None:
        place.join(timeout_s=3600)
        groups = {name: dist.new_group() for name in LATE}
        for name, call in LATE.items():
            if place.rank == 0:
                with pytest.raises((CollectiveTimeout, RuntimeError), match=r"under way|did not come"):
                    call(groups[name])
        dist.barrier()

    on_ranks(body, 2)


def test_a_timeout_of_one_call_is_that_calls_only() -> None:
    """The call's is the long one: a busy machine may be late for the short one of the group, which must run out."""

    def body(place: Member) -> None:
        place.join()
        dist.barrier()
        group().set_timeout(SHORT)
        place.meet("short")
        if place.rank == 1:
            time.sleep(3 * SHORT.total_seconds())
        group().allreduce(torch.ones(4), MAX, timedelta(seconds=60)).wait()
        place.meet("called")
        if place.rank == 0:
            with pytest.raises(CollectiveTimeout):
                dist.all_reduce(torch.ones(4))
        place.meet("told")

    on_ranks(body, 2)


# -- shapes --------------------------------------------------------------------------------------------


def test_a_tensor_meets_one_of_as_many_elements() -> None:
    def body(place: Member) -> None:
        shapes: list[tuple[tuple[int, ...], ...]] = [
            ((), (1,), (1, 1)),
            ((2, 3), (6,), (6, 1)),
            ((2, 1, 3), (2, 3), (1, 2, 3)),
        ]
        for of_ranks in shapes:
            tensor = torch.full(of_ranks[place.rank], float(place.rank + 1))
            dist.broadcast(tensor, src=0)
            assert set(tensor.view(-1).tolist()) == {1.0}
            tensor += place.rank
            dist.all_reduce(tensor)
            assert set(tensor.view(-1).tolist()) == {6.0}

    in_world(body, 3)


def test_a_transposed_matrix_is_a_mismatch_and_nobody_is_said_to_have_called_nothing() -> None:
    def body(place: Member) -> None:
        place.join()
        dist.all_reduce(torch.ones((3, 2) if place.rank == 1 else (2, 3)))

    for outcome in run_ranks(body, 3):
        assert isinstance(outcome.error, CollectiveMismatch)
        assert "float32[3, 2]" in str(outcome.error)
        assert "not called anything" not in str(outcome.error)
