"""Gradients follow calls: each program gives the gradients, and calls the hooks, that it does in one process."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support import autograd_workers as workers
from tests.support.autograd_workers import parameter, saw
from tests.support.pool import Pool
from torch.nn.parallel import DistributedDataParallel

from phalanx.rpc.agent import Agent
from phalanx.rpc.autograd import engine

Do = Callable[..., Any]
Program = Callable[[Do, int], list[torch.Tensor]]


@pytest.fixture(scope="module", params=[2, 3, 5])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with Pool(request.param, workers.start_worker) as running:
        running.do(workers.forget)
        yield running


# What workers do


def times(do: Do, name: str, x: torch.Tensor) -> torch.Tensor:
    return x * parameter(name, 3)


def hooked(do: Do, name: str, x: torch.Tensor) -> torch.Tensor:
    weight = parameter(name, 3)
    weight.register_hook(saw(f"{name} leaf"))
    y = x * weight
    y.register_hook(saw(f"{name} product"))
    return torch.sin(y)


def halves(do: Do, name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return hooked(do, f"{name} first", x), Noted.apply(hooked(do, f"{name} second", x))


def chain(do: Do, name: str, x: torch.Tensor, rest: list[int]) -> torch.Tensor:
    y = torch.tanh(x * parameter(name, 3))
    if rest:
        y = y + do(rest[0], chain, do, f"{name} {rest[0]}", y * 2, rest[1:])
    return y


def without(do: Do, name: str, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x * parameter(name, 3)
    return y + x


def only_inside(do: Do, name: str, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x * parameter(name, 3)


def in_place(do: Do, name: str, x: torch.Tensor) -> torch.Tensor:
    x.mul_(3)
    y = x * parameter(name, 3)
    y[1:] += x[:2]
    return y


def add(do: Do, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def own(do: Do, name: str) -> torch.Tensor:
    return parameter(name, 3)


class Noted(torch.autograd.Function):
    """The identity, whose backward is noted."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        workers.seen.append(("noted", gradient.clone()))
        return gradient


# Programs


def simple(do: Do, size: int) -> list[torch.Tensor]:
    return [do(1, times, do, "w", parameter("x", 3)).sum()]


def callees_own(do: Do, size: int) -> list[torch.Tensor]:
    return [(do(1, own, do, "w") * 2).sum()]


def itself(do: Do, size: int) -> list[torch.Tensor]:
    return [do(0, hooked, do, "w", parameter("x", 3)).sum()]


def nested(do: Do, size: int) -> list[torch.Tensor]:
    way = [*range(1, size), 0, size - 1]
    return [do(way[0], chain, do, "w", parameter("x", 3), way[1:]).sum()]


def back_and_forth(do: Do, size: int) -> list[torch.Tensor]:
    return [do(1, chain, do, "w", parameter("x", 3) * 2, [0, 1, 0, 1, 0]).sum()]


def one_after_the_other(do: Do, size: int) -> list[torch.Tensor]:
    y = parameter("x", 3)
    for step in range(40):
        y = torch.tanh(do(step % size, times, do, f"w{step % 4} {step % size}", y) + y)
    return [y.sum()]


def used_twice(do: Do, size: int) -> list[torch.Tensor]:
    y = do(1, hooked, do, "w", parameter("x", 3))
    return [(y * y).sum() + do(size - 1, times, do, "v", y).sum() + y[0]]


def sent_twice(do: Do, size: int) -> list[torch.Tensor]:
    x = parameter("x", 3) * 2
    return [do(1, add, do, x, x).sum()]


def unused_result(do: Do, size: int) -> list[torch.Tensor]:
    x = parameter("x", 3) * 2
    x.register_hook(saw("x"))
    unused = Noted.apply(parameter("y", 3) * x)
    unused.register_hook(saw("unused"))
    do(1, hooked, do, "w", unused)
    do(size - 1, chain, do, "v", unused, [0, 1])
    return [do(1, hooked, do, "u", x).sum()]


def unused_half(do: Do, size: int) -> list[torch.Tensor]:
    first, _ = do(1, halves, do, "w", parameter("x", 3))
    _, second = do(size - 1, halves, do, "v", first)
    return [second.sum()]


def unused_everywhere(do: Do, size: int) -> list[torch.Tensor]:
    x = parameter("x", 3) * 2
    do(1, hooked, do, "w", x)
    return [(x * x).sum()]


def changed_in_place(do: Do, size: int) -> list[torch.Tensor]:
    x = parameter("x", 3) * 2
    y = do(1, in_place, do, "w", x)
    x.add_(1)
    y.mul_(x)
    z = do(size - 1, in_place, do, "v", y.clone())
    return [(z + y).sum()]


def no_grad_there(do: Do, size: int) -> list[torch.Tensor]:
    return [do(1, without, do, "w", parameter("x", 3)).sum()]


def no_grad_answer(do: Do, size: int) -> list[torch.Tensor]:
    x = parameter("x", 3)
    return [(do(1, only_inside, do, "w", x).detach() * x).sum()]


def no_grad_here(do: Do, size: int) -> list[torch.Tensor]:
    x = parameter("x", 3)
    with torch.no_grad():
        y = do(1, times, do, "w", x).detach()
    return [(y * x).sum()]


def several_roots(do: Do, size: int) -> list[torch.Tensor]:
    x = parameter("x", 3)
    y = do(1, hooked, do, "w", x)
    return [y.sum(), do(size - 1, hooked, do, "v", y).sum(), (x * 3).sum(), (y * x).sum()]


def around(do: Do, size: int) -> list[torch.Tensor]:
    h = torch.tanh(parameter("x", 3))
    h.register_hook(saw("h"))
    for step in range(3):
        h = h + do(1, hooked, do, f"w{step}", h)
        h.register_hook(saw(f"h{step}"))
    return [h.sum()]


def hooks_that_change(do: Do, size: int) -> list[torch.Tensor]:
    x = parameter("x", 3)
    x.register_hook(lambda gradient: gradient * 2)
    y = do(1, times, do, "w", x)
    y.register_hook(lambda gradient: gradient * 3)
    return [y.sum()]


PROGRAMS = [
    simple,
    callees_own,
    itself,
    nested,
    back_and_forth,
    one_after_the_other,
    used_twice,
    sent_twice,
    unused_result,
    unused_half,
    unused_everywhere,
    changed_in_place,
    no_grad_there,
    no_grad_answer,
    no_grad_here,
    several_roots,
    around,
    hooks_that_change,
]


def drawn(seed: int) -> Program:
    """A program of a few random steps, which call workers with what earlier steps have made."""

    def program(do: Do, size: int) -> list[torch.Tensor]:
        draw = random.Random(seed)
        values = [parameter("x", 3), torch.tanh(parameter("y", 3))]
        for step in range(draw.randrange(3, 12)):
            x, to = draw.choice(values), draw.randrange(size)
            name = f"{draw.randrange(3)} on {to}"
            kind = draw.randrange(5)
            if kind == 0:
                values.append(do(to, times, do, name, x))
            elif kind == 1:
                values += do(to, halves, do, f"{step} of {name}", x)
            elif kind == 2:
                values.append(do(to, add, do, x, draw.choice(values)))
            elif kind == 3:
                way = [draw.randrange(size) for _ in range(draw.randrange(4))]
                values.append(do(to, chain, do, f"{step} of {name}", x, way))
            else:
                values.append(torch.sin(x) * draw.choice(values))
            values[-1].register_hook(saw(f"value {step}"))
        return [draw.choice(values[2:] or values).sum() for _ in range(draw.randrange(1, 3))]

    return program


# Jobs of the pool


def expected(program: Program, size: int, passes: int = 1) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """What torch's own autograd computes in one process."""
    workers.parameters.clear()
    workers.seen.clear()
    roots = program(workers.local, size)
    for left in reversed(range(passes)):
        torch.autograd.backward(roots, retain_graph=left > 0)
    found = {name: value.grad for name, value in workers.parameters.items() if value.grad is not None}
    return found, list(workers.seen)


def computed(agent: Agent, program: Program, size: int, passes: int = 1) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """What the workers compute, from all of them."""
    if agent.me.rank:
        return {}, []
    with engine.context() as context_id:
        roots = program(workers.remote, size)
        for left in reversed(range(passes)):
            engine.backward(context_id, roots, retain_graph=left > 0)
        found: dict[str, torch.Tensor] = {}
        noted = []
        for rank in range(size):
            there, noted_there = workers.remote(rank, workers.gradients, context_id)
            assert not set(there) & set(found), "a parameter is on two workers"
            found.update(there)
            noted += noted_there
    return found, noted


def drawn_programs(agent: Agent, seeds: range, size: int) -> list[Any]:
    results = []
    for seed in seeds:
        if not agent.me.rank:
            for rank in range(size):
                workers.remote(rank, workers.forget, None)
            results.append(computed(agent, drawn(seed), size))
    return results


def compare(got: tuple[dict[str, torch.Tensor], list[Any]], want: tuple[dict[str, torch.Tensor], list[Any]]) -> None:
    assert sorted(got[0]) == sorted(want[0])
    for name, gradient in want[0].items():
        torch.testing.assert_close(got[0][name], gradient, msg=name)
    assert sorted(name for name, _ in got[1]) == sorted(name for name, _ in want[1])
    for name in {name for name, _ in want[1]}:
        one, other = ([gradient for n, gradient in each[1] if n == name] for each in (got, want))
        assert len(one) == len(other)
        torch.testing.assert_close(sum(one), sum(other), msg=f"seen by the hook {name}")


def size_of(pool: Pool) -> int:
    return pool._size


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_gradients_and_hooks_are_those_of_one_process(pool: Pool, program: Program) -> None:
    size = size_of(pool)
    pool.do(workers.forget)
    got = pool.do(computed, program, size)[0]
    compare(got, expected(program, size))


@pytest.mark.parametrize("program", [nested, used_twice, unused_half], ids=lambda program: program.__name__)
def test_the_gradients_of_several_passes_add_up(pool: Pool, program: Program) -> None:
    size = size_of(pool)
    pool.do(workers.forget)
    got = pool.do(computed, program, size, 3)[0]
    compare(got, expected(program, size, 3))


def test_random_programs(pool: Pool) -> None:
    size, seeds = size_of(pool), range(40)
    results = pool.do(drawn_programs, seeds, size)[0]
    for seed, got in zip(seeds, results, strict=True):
        compare(got, expected(drawn(seed), size))


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
    assert all(all(results) for results in pool.do(train, size_of(pool)))


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
    pool.do(late_leaf, size_of(pool))


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
