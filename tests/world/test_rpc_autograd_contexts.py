"""Gradients live in contexts: trainers, ``.grad``, hooks, sparse gradients and DDP within them."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from tests.support import autograd_workers as workers
from tests.support.autograd_workers import Do, parameter, times
from tests.support.pool import Pool
from torch.nn.parallel import DistributedDataParallel

from phalanx import rpc
from phalanx.rpc import Member as Worker


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(3, workers.start_worker) as running:
        running.do(workers.forget)
        yield running


def train(me: Worker) -> None:
    """Threads of every worker train at the same time, each in contexts of its own, on the first one's parameter."""

    def trainer(place: int) -> None:
        for turn in range(5):
            x = torch.full((3,), float(100 * me.rank + 10 * place + turn))
            with rpc.context() as context_id:
                rpc.backward(context_id, [rpc.call(0, times, rpc.call, "shared", x).sum()])
                got, _ = rpc.call(0, workers.gradients, context_id, quiet=False)
                torch.testing.assert_close(got["shared"], x)

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        list(threads.map(trainer, range(4)))


def keeps_grad(me: Worker) -> None:
    if me.rank:
        return
    x = torch.ones(3, requires_grad=True)
    (x * 5).sum().backward()
    before = x.grad
    with rpc.context() as context_id:
        rpc.backward(context_id, [rpc.call(1, times, rpc.call, "w", x).sum()])
        assert before is not None
        assert x.grad is before
        assert torch.equal(before, torch.full((3,), 5.0))
        assert list(rpc.get_gradients(context_id)) == [x]


def late_leaf(me: Worker) -> None:
    """The first message of the context that reaches a worker has no tensors; its answer has."""
    if me.rank:
        return
    size = dist.get_world_size()
    with rpc.context() as context_id:
        y = rpc.call(1, passed_on, rpc.call, size - 1)
        rpc.backward(context_id, [(y * 2).sum()])
        got, _ = rpc.call(size - 1, workers.gradients, context_id)
    torch.testing.assert_close(got["late"], torch.full((3,), 2.0))


def passed_on(do: Do, to: int) -> torch.Tensor:
    return do(to, parameter, "late", 3)  # type: ignore[no-any-return]


def sparse(me: Worker) -> None:
    if me.rank:
        return
    table = torch.nn.Embedding(10, 3, sparse=True)
    rows = torch.tensor([1, 2, 2])
    (table(rows) * parameter("w", 3)).sum().backward()
    assert table.weight.grad is not None
    with rpc.context() as context_id:
        y = rpc.call(1, times, rpc.call, "w", table(rows))
        rpc.backward(context_id, [y.sum()], retain_graph=True)
        rpc.backward(context_id, [y.sum()])
        got = rpc.get_gradients(context_id)[table.weight]
    assert got.is_sparse
    torch.testing.assert_close(got.to_dense(), 2 * table.weight.grad.to_dense())


@pytest.mark.parametrize("job", [train, keeps_grad, late_leaf, sparse], ids=lambda job: job.__name__)
def test_gradients_live_in_the_context(pool: Pool, job: Callable[[Worker], None]) -> None:
    pool.do(workers.forget)
    pool.do(job)


def replicas(me: Worker) -> None:
    """Every worker but the last has a replica under DDP, behind a layer of the last worker."""
    size = dist.get_world_size()
    group = dist.new_group(list(range(size - 1)))
    if me.rank == size - 1:
        dist.barrier()
        return
    torch.manual_seed(1)
    layer = torch.nn.Linear(3, 2)
    model = DistributedDataParallel(layer, process_group=group, gradient_as_bucket_view=True)
    inputs = torch.arange(3.0) + me.rank
    for _ in range(2):
        with rpc.context() as context_id:
            hidden = rpc.call(size - 1, times, rpc.call, "hidden", inputs)
            rpc.backward(context_id, [torch.tanh(model(hidden)).sum()])
            got = rpc.get_gradients(context_id)
            there, _ = rpc.call(size - 1, workers.gradients, context_id, quiet=False)
        assert layer.weight.grad is None
        weight = parameter("hidden", 3)
        wanted = []
        for rank in range(size - 1):
            plain = torch.nn.Linear(3, 2)
            plain.load_state_dict(layer.state_dict())
            hidden_there = (torch.arange(3.0) + rank) * weight
            torch.tanh(plain(hidden_there)).sum().backward()
            wanted.append((plain.weight.grad, plain.bias.grad))
            if rank == me.rank:
                torch.testing.assert_close(there["hidden"], weight.grad)
            weight.grad = None
        for parameter_, place in ((layer.weight, 0), (layer.bias, 1)):
            mean = sum(each[place] for each in wanted) / (size - 1)  # type: ignore[misc]
            torch.testing.assert_close(got[parameter_], mean)
    dist.barrier()


def test_ddp_averages_within_a_context(pool: Pool) -> None:
    pool.do(workers.forget)
    pool.do(replicas)
