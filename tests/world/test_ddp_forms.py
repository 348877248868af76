"""Less usual forms of data parallelism over the backend, beside Gloo: hooks in C++, sparse and delayed gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks
from torch.nn.parallel import DistributedDataParallel

SIZES = (1, 2, 3)


class Words(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, 4, sparse=True)
        self.last = torch.nn.Linear(4, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(batch))  # type: ignore[no-any-return]


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))


def losses(place: Member, model: torch.nn.Module, batch: Callable[[torch.Generator], torch.Tensor]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(place.rank)
    found = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(batch(generator)).pow(2).mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def numbers(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(6, 4, generator=generator)


def words(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 10, (5,), generator=generator)


@pytest.mark.parametrize("size", SIZES)
def test_every_form_trains_as_over_gloo(size: int) -> None:
    def body(place: Member) -> None:
        place.join()
        gloo = dist.new_group(backend="gloo")

        def hooked(kind: Any, group: Any) -> list[float]:
            model = DistributedDataParallel(net(), process_group=group)
            model._register_builtin_comm_hook(kind)
            return losses(place, model, numbers)

        def sparse(group: Any) -> list[float]:
            torch.manual_seed(0)
            return losses(place, DistributedDataParallel(Words(), process_group=group), words)

        kinds = torch._C._distributed_c10d.BuiltinCommHookType
        for run in (
            sparse,
            lambda group: hooked(kinds.ALLREDUCE, group),
            lambda group: hooked(kinds.FP16_COMPRESS, group),
        ):
            assert run(dist.group.WORLD) == pytest.approx(run(gloo), rel=1e-6)
        dist.destroy_process_group()

    on_ranks(body, size)


@pytest.mark.parametrize("size", SIZES)
def test_delayed_gradients_are_reduced_when_backward_returns(size: int) -> None:
    def body(place: Member) -> list[float]:
        place.join()
        plain = losses(place, DistributedDataParallel(net()), numbers)
        for _ in range(10):
            module = net()
            delayed = [(name, p) for name, p in module.named_parameters() if name.startswith("2")]
            model = DistributedDataParallel(
                module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module[0].weight
            )
            assert losses(place, model, numbers) == pytest.approx(plain, rel=1e-6)
        dist.destroy_process_group()
        return plain

    on_ranks(body, size)


@pytest.mark.parametrize("size", SIZES)
def test_a_sparse_tensor_is_reduced_asynchronously(size: int) -> None:
    def body(place: Member) -> None:
        place.join()
        tensor = torch.eye(3).to_sparse()
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        assert tensor.to_dense().tolist() == (place.size * torch.eye(3)).tolist()
        dist.destroy_process_group()

    on_ranks(body, size)


@pytest.mark.parametrize("size", SIZES)
def test_tensors_that_require_gradients_are_moved(size: int) -> None:
    def body(place: Member) -> None:
        place.join()
        n, root = place.size, place.rank == 0

        def ones(count: int = 1) -> torch.Tensor:
            return torch.ones(count, requires_grad=True)

        def zeros(count: int = 1) -> torch.Tensor:
            return torch.zeros(count, requires_grad=True)

        def list_of(make: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
            return [make() for _ in range(n)]

        exchanged, scattered, gathered, everything = zeros(n), zeros(), list_of(zeros), zeros(n)
        dist.all_to_all_single(exchanged, ones(n))
        dist.all_to_all_single(torch.zeros(n), ones(n))
        dist.scatter(scattered, list_of(ones) if root else None)
        dist.all_gather(gathered, ones())
        dist.all_gather_into_tensor(everything, ones())
        dist.all_to_all(list_of(zeros), list_of(ones))
        reduced = zeros()
        dist.reduce_scatter_tensor(reduced, ones(n))
        dist.broadcast(ones(), src=0)
        assert exchanged.tolist() == everything.tolist() == [t.item() for t in gathered] == [1.0] * n
        assert scattered.item() == 1.0
        assert reduced.item() == n
        dist.destroy_process_group()

    on_ranks(body, size)
