"""Gradients through calls and remote objects, against one process without calls."""

from __future__ import annotations

import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import torch
from torch import nn

from phalanx import rpc
from phalanx.rpc.autograd.local_run import Leaves
from tests.rpc.workers import next_of, with_workers
from tests.support.ranks import Member


def weights(name: str) -> torch.Tensor:
    """A leaf whose values follow from its name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.rand(3, 3, generator=generator, dtype=torch.float64).requires_grad_()


class Layer:
    """A part of a model, with a parameter of its own."""

    def __init__(self, name: str) -> None:
        self.weight = weights(name)

    def apply(self, values: torch.Tensor) -> torch.Tensor:
        return torch.tanh(values @ self.weight)

    async def apply_later(self, values: torch.Tensor) -> torch.Tensor:
        return self.apply(values)

    def apply_nested(self, nest: dict[str, Any]) -> dict[str, Any]:
        first, second = nest["pair"]
        both = first * nest["scale"] + second
        return {"both": (both, 7), "same": both, "text": nest["text"], "plain": self.weight.detach().sum()}

    def through(self, other: Any, values: torch.Tensor) -> torch.Tensor:
        return torch.sin(other.apply(values)) + values

    def gradient(self, context_id: int) -> torch.Tensor | None:
        assert self.weight.grad is None
        return rpc.get_gradients(context_id).get(self.weight)


async def double_later(values: torch.Tensor) -> torch.Tensor:
    return values * 2


def is_parameter(weight: torch.Tensor) -> tuple[bool, bool]:
    return isinstance(weight, nn.Parameter), weight.requires_grad


def run_module(module: nn.Module, values: torch.Tensor) -> torch.Tensor:
    return module(values)  # type: ignore[no-any-return]


def program(layers: list[Any], own: torch.Tensor) -> torch.Tensor:
    """Calls of methods, with tensors within other things, and calls within calls."""
    total = own.sum()
    for layer, other in zip(layers, layers[1:] + layers[:1], strict=True):
        found = layer.apply_nested({"pair": (layer.apply(own), own), "scale": own, "text": "as it is"})
        assert found["text"] == "as it is"
        assert found["both"][1] == 7
        assert found["both"][0] is found["same"]
        assert not found["plain"].requires_grad
        total = total + (found["both"][0] * found["same"]).sum() * found["plain"] + layer.through(other, own).mean()
    return total


def test_gradients_through_objects_are_those_of_one_process() -> None:
    def body(member: Member) -> None:
        own, same = weights("own"), weights("own")
        names = [f"{member.rank} {rank}" for rank in range(3)]
        layers, plain = (
            [rpc.make(rank, Layer, name) for rank, name in enumerate(names)],
            [Layer(name) for name in names],
        )
        with rpc.context() as context_id:
            rpc.backward(context_id, [program(layers, own)])
            got = [layer.gradient(context_id) for layer in layers] + [rpc.get_gradients(context_id)[own]]
        program(plain, same).backward()
        torch.testing.assert_close(got, [layer.weight.grad for layer in plain] + [same.grad])

    with_workers(body, 3)


def test_what_is_started_awaited_or_sent_to_each_takes_part() -> None:
    size = 3

    def body(member: Member) -> None:
        to, own = next_of(member), weights("own")
        layer = rpc.make(to, Layer, "later")
        with rpc.context() as context_id:
            futures = [rpc.start(to, torch.neg, own), rpc.start(to, double_later, own), layer.start.apply_later(own)]
            futures += rpc.each(None, torch.neg, own)
            rpc.backward(context_id, [torch.stack([future.wait().sum() for future in futures]).sum()])
            got = [rpc.get_gradients(context_id)[own], layer.gradient(context_id)]
        there, same = Layer("later"), weights("own")
        (same * (-1 + 2 - (size - 1)) + there.apply(same)).sum().backward()
        torch.testing.assert_close(got, [same.grad, there.weight.grad])

    with_workers(body, size)


def test_parameters_and_modules_are_sent_as_part_of_the_graph() -> None:
    def body(member: Member) -> None:
        to, values, own = next_of(member), torch.ones(1, 2), weights("own")
        module = nn.Linear(2, 1)
        with rpc.context() as context_id:
            made = rpc.make(to, dict, weight=own * 3)  # an object depends on what it was made of
            loss = rpc.call(to, run_module, module, values).sum() + rpc.call(made, "get", "weight").sum()
            rpc.backward(context_id, [loss])
            found = rpc.get_gradients(context_id)
        gradients = [found[module.weight].tolist(), found[module.bias].tolist(), found[own].tolist()]
        assert gradients == [[[1.0, 1.0]], [1.0], [[3.0] * 3] * 3]
        assert rpc.call(to, is_parameter, module.weight) == (True, True)

    with_workers(body, 2)


def test_hooks_of_a_leaf_are_registered_by_one_pass_at_a_time() -> None:
    """torch loses one of two that begin together, and a pass that has lost one keeps the leaf locked for ever."""
    leaf, busy = torch.ones(3, requires_grad=True), threading.Lock()

    def register(_: object) -> Mock:
        assert busy.acquire(False), "two passes register at once"
        time.sleep(0.1)
        busy.release()
        return Mock()

    node, passes = Mock(variable=leaf, register_prehook=register), [Leaves(), Leaves()]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda each: each.watch([node]), passes))
    for each in passes:
        each.end()
