"""What torch's dispatcher does for other backends: wrapper subclasses, profilers and modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member
from tests.support.worlds import every_rank
from torch.distributed import _functional_collectives as functional
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.two_tensor import TwoTensor

from phalanx.errors import BackendError, UnsupportedTensor

MAX = dist.ReduceOp.MAX


def group() -> Any:
    return dist.group.WORLD


def mine(member: Member) -> torch.Tensor:
    return torch.full((4,), member.rank + 1.0)


# -- wrapper subclasses --------------------------------------------------------------------------------


@every_rank()
def test_a_subclass_in_a_list_is_unwrapped(member: Member) -> None:
    """torch's dispatcher does not look into lists of lists, which these collectives have."""

    def pending(tensor: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(tensor, "avg", group())  # type: ignore[no-any-return]

    n, rank = member.size, member.rank
    everyone = [[float(other + 1)] * 4 for other in range(n)]
    for later in (False, True):

        def end(work: dist.Work | None) -> None:
            if work is not None:
                work.wait()

        outputs = [pending(torch.zeros(4)) for _ in range(n)]
        end(dist.all_gather(outputs, mine(member), async_op=later))
        assert [t.tolist() for t in outputs] == everyone

        pairs = [TwoTensor(torch.zeros(4), torch.ones(4)) for _ in range(n)]
        end(dist.all_gather(pairs, mine(member), async_op=later))
        assert [(t.a.tolist(), t.b.tolist()) for t in pairs] == [(one, one) for one in everyone]

        outputs = [pending(torch.zeros(4)) for _ in range(n)]
        end(dist.gather(mine(member), outputs if rank == 0 else None, dst=0, async_op=later))
        assert [t.tolist() for t in outputs] == (everyone if rank == 0 else [[0.0] * 4] * n)

        part, given = torch.zeros(4), [pending(torch.full((4,), float(other))) for other in range(n)]
        end(dist.scatter(part, given if rank == 0 else None, src=0, async_op=later))
        assert part.tolist() == [float(rank)] * 4

        end(dist.reduce_scatter(part, given, async_op=later))
        assert part.tolist() == [float(n * rank)] * 4
    with pytest.raises(UnsupportedTensor, match="TwoTensor in a list"):
        dist.reduce_scatter(torch.zeros(4), [TwoTensor(torch.ones(4), torch.ones(4))] * n)


@pytest.mark.filterwarnings("ignore")  # torch's own, about layouts that it calls prototypes
@every_rank(2)
def test_other_layouts_are_refused_before_any_rank_is_asked(member: Member) -> None:
    values, parts = torch.ones(2, 3), [torch.ones(2), torch.ones(3)]
    calls: list[Callable[[torch.Tensor], Any]] = [
        lambda tensor: dist.broadcast(tensor, 0),
        lambda tensor: dist.reduce(tensor, 0),
        lambda tensor: dist.all_gather([tensor] * member.size, tensor),
        lambda tensor: dist.all_to_all([tensor] * member.size, [tensor] * member.size),
        lambda tensor: dist.send(tensor, 1 - member.rank),
        lambda tensor: dist.all_reduce(tensor, op=MAX, async_op=True),
    ]
    for tensor in (
        values.to_sparse_csr(),
        torch.quantize_per_tensor(values, 1.0, 0, torch.quint8),
        torch.nested.nested_tensor(parts),
        torch.nested.nested_tensor(parts, layout=torch.jagged),
        values.to_mkldnn(),
    ):
        for call in calls:
            with pytest.raises(UnsupportedTensor):
                call(tensor)
    for call in calls[:5]:
        with pytest.raises(UnsupportedTensor, match=rf"rank {member.rank} gave one of"):
            call(values.to_sparse())
    dist.all_reduce(values)
    assert values.tolist() == [[2.0] * 3] * 2


@every_rank(2)
def test_the_core_refuses_data_at_null(member: Member) -> None:
    class WithoutMemory(torch.Tensor):
        def data_ptr(self) -> int:
            return 0

    c, null, other = group()._communicator, torch.ones(4).as_subclass(WithoutMemory), 1 - member.rank
    real, parts, op = torch.ones(4), [torch.ones(4), torch.ones(4)], dist.ReduceOp.SUM.value
    for call in (
        lambda: c.all_reduce(null, op),
        lambda: c.broadcast(null, 0),
        lambda: c.all_gather([null, null], real),
        lambda: c.scatter(real, [null, null], member.rank),
        lambda: c.all_to_all(parts, [null, null]),
        lambda: c.send(null, other, 0),
        lambda: c.recv(null, other, 0),
    ):
        with pytest.raises(BackendError, match="memory"):
            call()
    dist.all_reduce(real)  # nothing has happened to the group
    assert real.tolist() == [2.0] * 4


# -- profilers and modes -------------------------------------------------------------------------------


@every_rank()
def test_a_profiler_shows_every_operation_with_its_shapes_and_bytes(member: Member) -> None:
    """On rank 0 alone, while the other ranks run the same calls without one."""
    n, is_root = member.size, member.rank == 0

    def calls() -> None:
        dist.all_reduce(torch.ones(2, 3))
        work = dist.all_reduce(torch.ones(5), op=MAX, async_op=True)
        assert work is not None
        work.wait()
        dist.broadcast(torch.ones(3), src=0)
        dist.all_gather([torch.zeros(2) for _ in range(n)], torch.ones(2))
        dist.reduce_scatter_tensor(torch.zeros(2), torch.ones(2 * n))
        dist.gather(torch.ones(2), [torch.zeros(2) for _ in range(n)] if is_root else None)
        dist.all_to_all_single(torch.zeros(n), torch.ones(n))
        dist.barrier()
        if is_root:
            dist.send(torch.ones(7), dst=1)
            dist.recv(torch.ones(7), src=1)
        elif member.rank == 1:
            dist.recv(torch.ones(7), src=0)
            dist.send(torch.ones(7), dst=0)

    if not is_root:
        calls()
        return
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        calls()
    seen = {event.name: event for event in profiler.events() if event.name.startswith("phalanx:")}
    names = "all_reduce broadcast all_gather reduce_scatter_single gather all_to_all_single barrier send recv"
    assert set(seen) == {f"phalanx:{name}" for name in names.split()}
    reductions = [event for event in profiler.events() if event.name == "phalanx:all_reduce"]
    assert [event.input_shapes for event in reductions] == [[[2, 3]], [[5]]]
    assert [event.kwinputs["nbytes"] for event in reductions] == [24, 20]
    assert seen["phalanx:all_gather"].kwinputs["nbytes"] == 8 * (n + 1)
