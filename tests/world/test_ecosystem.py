"""What torch builds on process groups works over the backend: FSDP2, DTensor, functional collectives, compile, …"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from tests.support.ranks import Member, on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def model_and_data() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 6)), torch.randn(12, 12)


def step(model: torch.nn.Module, data: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("size", [2, 3])
def test_fsdp2_ends_where_one_process_ends(size: int) -> None:
    model, data = model_and_data()
    step(model, data)
    expected = [parameter.detach().clone() for parameter in model.parameters()]

    def body(member: Member) -> bool:
        member.join()
        model, data = model_and_data()
        mesh = init_device_mesh("cpu", (member.size,))
        for layer in model:  # type: ignore[attr-defined]
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        step(model, data.chunk(member.size)[member.rank])
        for parameter, want in zip(model.parameters(), expected, strict=True):
            assert isinstance(parameter, DTensor)
            torch.testing.assert_close(parameter.full_tensor().detach(), want)
        dist.destroy_process_group()
        return True

    assert on_ranks(body, size) == [True] * size


@pytest.mark.parametrize("size", [2, 3])
def test_dtensor_redistributes(size: int) -> None:
    def body(member: Member) -> bool:
        member.join()
        mesh = init_device_mesh("cpu", (member.size,))
        whole = torch.arange(60.0).view(12, 5)
        rows = distribute_tensor(whole, mesh, [Shard(0)])
        assert torch.equal(rows.redistribute(mesh, [Replicate()]).to_local(), whole)
        assert torch.equal(rows.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
        total = rows.sum()
        assert isinstance(total, DTensor)
        assert total.full_tensor().item() == whole.sum().item()
        dist.destroy_process_group()
        return True

    assert on_ranks(body, size) == [True] * size


@pytest.mark.parametrize("size", [2, 3])
def test_functional_collectives_eager_and_compiled(size: int) -> None:
    def body(member: Member) -> bool:
        member.join()
        group: Any = dist.group.WORLD
        n, rank = member.size, member.rank

        def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            summed = functional.all_reduce(x, "sum", group)
            gathered = functional.all_gather_tensor(x, 0, group)
            scattered = functional.reduce_scatter_tensor(gathered, "sum", 0, group)
            exchanged = functional.all_to_all_single(gathered, None, None, group)
            copied = functional.broadcast(x, 1, group)
            return tuple(t + 0 for t in (summed, gathered, scattered, exchanged, copied))

        x = torch.full((2,), float(rank + 1))
        total = n * (n + 1) / 2
        expected = (
            [total] * 2,
            [float(r + 1) for r in range(n) for _ in range(2)],
            [float(n * (rank + 1))] * 2,
            [float(rank + 1)] * (2 * n),
            [2.0] * 2,
        )
        for run in (program, torch.compile(program, backend="aot_eager")):
            assert tuple(t.tolist() for t in run(x)) == expected
        dist.destroy_process_group()
        return True

    assert on_ranks(body, size) == [True] * size


def test_coalescing_manager_and_monitoring_of_groups() -> None:
    def body(member: Member) -> bool:
        member.join()
        tensors = [torch.full((k,), 1.0) for k in (1, 5, 3000)]
        with _coalescing_manager(async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
        outputs, parts = [torch.empty(4), torch.empty(8)], [torch.ones(2) * member.rank, torch.ones(4) * member.rank]
        with _coalescing_manager():
            for output, part in zip(outputs, parts, strict=True):
                dist.all_gather_single(output, part)
        assert all(bool((tensor == 2).all()) for tensor in tensors)
        assert outputs[0].tolist() == [0, 0, 1, 1]
        assert outputs[1].tolist() == [0] * 4 + [1] * 4
        dist.destroy_process_group()
        return True

    assert on_ranks(body, 2) == [True, True]
