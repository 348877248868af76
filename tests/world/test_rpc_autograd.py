"""Gradients follow calls: each program gives the gradients, and calls the hooks, that it does in one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.support import autograd_workers as workers
from tests.support.autograd_workers import Do, acts, parameter, saw, times
from tests.support.pool import Pool

from phalanx import rpc
from phalanx.rpc import Member as Worker

Program = Callable[[Do, int], list[torch.Tensor]]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(3, workers.start_worker) as running:
        running.do(workers.forget)
        yield running


def hooked(do: Do, name: str, x: torch.Tensor) -> torch.Tensor:
    weight = parameter(name, 3)
    weight.register_hook(saw(f"{name} leaf"))
    y = x * weight
    y.register_hook(saw(f"{name} product"))
    return torch.sin(y)


def halves(do: Do, name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return hooked(do, f"{name} first", x), acts(hooked(do, f"{name} second", x), saw("noted"))


def chain(do: Do, name: str, x: torch.Tensor, rest: list[int]) -> torch.Tensor:
    y = torch.tanh(x * parameter(name, 3))
    if rest:
        y = y + do(rest[0], chain, do, f"{name} {rest[0]}", y * 2, rest[1:])
    return y


def without(do: Do, name: str, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x * parameter(name, 3)
    return y + x


def in_place(do: Do, name: str, x: torch.Tensor) -> torch.Tensor:
    x.mul_(3)
    y = x * parameter(name, 3)
    y[1:] += x[:2]
    return y


def one_after_the_other(do: Do, size: int) -> list[torch.Tensor]:
    y = parameter("x", 3)
    for step in range(40):
        y = torch.tanh(do(step % size, times, do, f"w{step % 4} {step % size}", y) + y)
    return [y.sum()]


def used_twice(do: Do, size: int) -> list[torch.Tensor]:
    y = do(1, hooked, do, "w", parameter("x", 3))
    return [(y * y).sum() + do(size - 1, times, do, "v", y).sum() + y[0]]


def unused_result(do: Do, size: int) -> list[torch.Tensor]:
    x = parameter("x", 3) * 2
    x.register_hook(saw("x"))
    unused = acts(parameter("y", 3) * x, saw("noted"))
    unused.register_hook(saw("unused"))
    do(1, hooked, do, "w", unused)
    do(size - 1, chain, do, "v", unused, [0, 1])
    return [do(1, hooked, do, "u", x).sum()]


def unused_half(do: Do, size: int) -> list[torch.Tensor]:
    first, _ = do(1, halves, do, "w", parameter("x", 3))
    _, second = do(size - 1, halves, do, "v", first)
    return [second.sum()]


def changed_in_place(do: Do, size: int) -> list[torch.Tensor]:
    x = parameter("x", 3) * 2
    y = do(1, in_place, do, "w", x)
    x.add_(1)
    y.mul_(x)
    z = do(size - 1, in_place, do, "v", y.clone())
    return [(z + y).sum()]


def no_grad_there(do: Do, size: int) -> list[torch.Tensor]:
    return [do(1, without, do, "w", parameter("x", 3)).sum()]


PROGRAMS = [one_after_the_other, used_twice, unused_result, unused_half, changed_in_place, no_grad_there]


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
                values.append(do(to, torch.add, x, draw.choice(values)))
            elif kind == 3:
                way = [draw.randrange(size) for _ in range(draw.randrange(4))]
                values.append(do(to, chain, do, f"{step} of {name}", x, way))
            else:
                values.append(torch.sin(x) * draw.choice(values))
            values[-1].register_hook(saw(f"value {step}"))
        return [draw.choice(values[2:] or values).sum() for _ in range(draw.randrange(1, 3))]

    return program


def expected(program: Program, size: int, passes: int = 1) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """What torch's own autograd computes in one process."""
    workers.parameters.clear()
    workers.seen.clear()
    roots = program(workers.local, size)
    for left in reversed(range(passes)):
        torch.autograd.backward(roots, retain_graph=left > 0)
    found = {name: value.grad for name, value in workers.parameters.items() if value.grad is not None}
    return found, list(workers.seen)


def computed(me: Worker, program: Program, size: int, passes: int = 1) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """What the workers compute, from all of them."""
    if me.rank:
        return {}, []
    with rpc.context() as context_id:
        roots = program(rpc.call, size)
        for left in reversed(range(passes)):
            rpc.backward(context_id, roots, retain_graph=left > 0)
        found: dict[str, torch.Tensor] = {}
        noted = []
        for rank in range(size):
            there, noted_there = rpc.call(rank, workers.gradients, context_id)
            assert not set(there) & set(found), "a parameter is on two workers"
            found.update(there)
            noted += noted_there
    return found, noted


def computed_of(me: Worker, seed: int, size: int) -> tuple[dict[str, torch.Tensor], list[Any]]:
    return computed(me, drawn(seed), size)


def compare(got: tuple[dict[str, torch.Tensor], list[Any]], want: tuple[dict[str, torch.Tensor], list[Any]]) -> None:
    assert sorted(got[0]) == sorted(want[0])
    for name, gradient in want[0].items():
        torch.testing.assert_close(got[0][name], gradient, msg=name)
    assert sorted(name for name, _ in got[1]) == sorted(name for name, _ in want[1])
    for name in {name for name, _ in want[1]}:
        one, other = ([gradient for n, gradient in each[1] if n == name] for each in (got, want))
        assert len(one) == len(other)
        torch.testing.assert_close(sum(one), sum(other), msg=f"seen by the hook {name}")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_gradients_and_hooks_are_those_of_one_process(pool: Pool, program: Program) -> None:
    pool.do(workers.forget)
    compare(pool.do(computed, program, pool.size)[0], expected(program, pool.size))


def test_gradients_of_several_passes_add_up(pool: Pool) -> None:
    pool.do(workers.forget)
    compare(pool.do(computed, unused_half, pool.size, 3)[0], expected(unused_half, pool.size, 3))


def test_random_programs(pool: Pool) -> None:
    for seed in range(30):
        pool.do(workers.forget)
        compare(pool.do(computed_of, seed, pool.size)[0], expected(drawn(seed), pool.size))
