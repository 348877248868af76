"""Gradients live in contexts: trainers, ``.grad``, hooks, sparse gradients and DDP within them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support import autograd_workers as workers
from tests.support.autograd_workers import Do, own, parameter, times
from tests.support.pool import Pool
from torch.nn.parallel import DistributedDataParallel

from phalanx.rpc.agent import Agent
from phalanx.rpc.autograd import engine


@pytest.fixture(scope="module", params=[2, 3, 5])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with Pool(request.param, workers.start_worker) as running:
        running.do(workers.forget)
        yield running


def train(agent: Agent, size: int) -> list[torch.Tensor]:
    """Threads of every worker train at the same time, each in contexts of its own, on the first one's parameter."""
    results: list[Any] = [None] * 4

    def trainer(place: int) -> None:
        for turn in range(5):
            x = torch.full((3,), float(100 * agent.me.rank + 10 * place + turn))
            with engine.context() as context_id:
                engine.backward(context_id, [workers.remote(0, times, workers.remote, "shared", x).sum()])
                got, _ = workers.remote(0, workers.gradients_now, context_id)
                torch.testing.assert_close(got["shared"], x)
        results[place] = True

    threads = [threading.Thread(target=trainer, args=(place,)) for place in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_trainers_do_not_race(pool: Pool) -> None:
    pool.do(workers.forget)
    assert all(all(results) for results in pool.do(train, pool.size))


def keeps_grad(agent: Agent) -> None:
    if agent.me.rank:
        return
    x = torch.ones(3, requires_grad=True)
    (x * 5).sum().backward()
    before = x.grad
    with engine.context() as context_id:
        engine.backward(context_id, [workers.remote(1, times, workers.remote, "w", x).sum()])
        assert before is not None
        assert x.grad is before
        assert torch.equal(before, torch.full((3,), 5.0))
        assert list(engine.get_gradients(context_id)) == [x]


def test_grad_is_not_touched(pool: Pool) -> None:
    pool.do(workers.forget)
    pool.do(keeps_grad)


def late_leaf(agent: Agent, size: int) -> None:
    """The first message of the context that reaches a worker has no tensors; its answer has."""
    if agent.me.rank:
        return
    with engine.context() as context_id:
        y = workers.remote(1, passed_on, workers.remote, size - 1)
        engine.backward(context_id, [(y * 2).sum()])
        got, _ = workers.remote(size - 1, workers.gradients, context_id)
    torch.testing.assert_close(got["late"], torch.full((3,), 2.0))


def passed_on(do: Do, to: int) -> torch.Tensor:
    return do(to, own, do, "late")  # type: ignore[no-any-return]


def test_calls_without_tensors_are_part_of_a_context(pool: Pool) -> None:
    pool.do(workers.forget)
    pool.do(late_leaf, pool.size)


def post_hooks(agent: Agent) -> list[str]:
    if agent.me.rank:
        return []
    seen = []
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    accumulate: Any = y.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    accumulate.register_hook(lambda _, gradients: seen.append("function"))
    x.register_post_accumulate_grad_hook(lambda _: seen.append("leaf"))
    with engine.context() as context_id:
        engine.backward(context_id, [workers.remote(1, times, workers.remote, "w", y).sum()])
    return seen


def test_hooks_of_the_accumulation_run_once(pool: Pool) -> None:
    assert pool.do(post_hooks)[0] == ["leaf", "function"]


def sparse(agent: Agent) -> None:
    if agent.me.rank:
        return
    table = torch.nn.Embedding(10, 3, sparse=True)
    rows = torch.tensor([1, 2, 2])
    (table(rows) * parameter("w", 3)).sum().backward()
    assert table.weight.grad is not None
    with engine.context() as context_id:
        y = workers.remote(1, times, workers.remote, "w", table(rows))
        engine.backward(context_id, [y.sum()], retain_graph=True)
        engine.backward(context_id, [y.sum()])
        got = engine.get_gradients(context_id)[table.weight]
    assert got.is_sparse
    torch.testing.assert_close(got.to_dense(), 2 * table.weight.grad.to_dense())


def test_sparse_gradients_stay_sparse(pool: Pool) -> None:
    pool.do(workers.forget)
    pool.do(sparse)


def replicas(agent: Agent, as_views: bool) -> None:
    """Every worker but the last has a replica under DDP, behind a layer of the last worker."""
    size = dist.get_world_size()
    group = dist.new_group(list(range(size - 1)))
    if agent.me.rank == size - 1:
        dist.barrier()
        return
    torch.manual_seed(1)
    layer = torch.nn.Linear(3, 2)
    model = DistributedDataParallel(layer, process_group=group, gradient_as_bucket_view=as_views)
    inputs = torch.arange(3.0) + agent.me.rank
    for _ in range(2):
        with engine.context() as context_id:
            hidden = workers.remote(size - 1, times, workers.remote, "hidden", inputs)
            engine.backward(context_id, [torch.tanh(model(hidden)).sum()])
            got = engine.get_gradients(context_id)
            there, _ = workers.remote(size - 1, workers.gradients_now, context_id)
        assert layer.weight.grad is None
        weight = parameter("hidden", 3)
        wanted = []
        for rank in range(size - 1):
            plain = torch.nn.Linear(3, 2)
            plain.load_state_dict(layer.state_dict())
            hidden_there = (torch.arange(3.0) + rank) * weight
            torch.tanh(plain(hidden_there)).sum().backward()
            wanted.append((plain.weight.grad, plain.bias.grad))
            if rank == agent.me.rank:
                torch.testing.assert_close(there["hidden"], weight.grad)
            weight.grad = None
        for parameter_, place in ((layer.weight, 0), (layer.bias, 1)):
            mean = sum(each[place] for each in wanted) / (size - 1)  # type: ignore[misc]
            torch.testing.assert_close(got[parameter_], mean)
    dist.barrier()


@pytest.mark.parametrize("as_views", [False, True])
def test_ddp_averages_within_a_context(pool: Pool, as_views: bool) -> None:
    pool.do(workers.forget)
    pool.do(replicas, as_views)
