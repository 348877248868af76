"""Gradients through calls and remote objects, against one process without calls."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from phalanx import rpc
from tests.rpc.workers import next_of, with_workers
from tests.support.ranks import Member

SIZES = [1, 2, 3, 5]


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


def double(values: torch.Tensor) -> torch.Tensor:
    return values * 2


async def double_later(values: torch.Tensor) -> torch.Tensor:
    return values * 2


def linear(weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return values @ weight


def is_parameter(weight: torch.Tensor) -> tuple[bool, bool]:
    return isinstance(weight, nn.Parameter), weight.requires_grad


def run_module(module: nn.Module, values: torch.Tensor) -> torch.Tensor:
    return module(values)  # type: ignore[no-any-return]


def items(values: torch.Tensor) -> Any:
    yield values.detach() + 1


def fails(values: torch.Tensor) -> torch.Tensor:
    return Failing.apply(values)  # type: ignore[no-any-return]


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ValueError("no such gradient")


def plainly(program: Callable[..., torch.Tensor], layers: list[Layer], own: torch.Tensor) -> list[torch.Tensor | None]:
    program(layers, own, lambda _, function, *args: function(*args)).backward()
    return [layer.weight.grad for layer in layers] + [own.grad]


def chain(layers: list[Any], own: torch.Tensor, do: Callable[..., Any]) -> torch.Tensor:
    values = own
    for layer in layers:
        values = layer.apply(values)
    return values.sum()


def nests(layers: list[Any], own: torch.Tensor, do: Callable[..., Any]) -> torch.Tensor:
    total = own.sum()
    for layer in layers:
        given = layer.apply(own)
        nest = {"pair": (given, [own][0]), "scale": own, "text": "as it is"}
        found = layer.apply_nested(nest)
        assert found["text"] == "as it is"
        assert found["both"][1] == 7
        assert found["both"][0] is found["same"]
        assert not found["plain"].requires_grad
        total = total + (found["both"][0] * found["same"]).sum() * found["plain"]
    return total


def calls_within_calls(layers: list[Any], own: torch.Tensor, do: Callable[..., Any]) -> torch.Tensor:
    values = own
    for layer, other in zip(layers, layers[1:] + layers[:1], strict=True):
        values = layer.through(other, values)
    return values.mean()


def functions(layers: list[Any], own: torch.Tensor, do: Callable[..., Any]) -> torch.Tensor:
    total = own.new_zeros(())
    for number, layer in enumerate(layers):
        values = do(number, double, layer.apply(own))
        total = total + do(number, linear, own, values).sum()
    return total


PROGRAMS = [chain, nests, calls_within_calls, functions]


@pytest.mark.parametrize("size", SIZES)
def test_gradients_are_those_of_one_process(size: int) -> None:
    def body(member: Member) -> list[tuple[str, int]]:
        wrong = []
        for program in PROGRAMS:
            names = [f"{program.__name__} {member.rank} {rank}" for rank in range(size)]
            own, same = weights("own"), weights("own")
            layers = [rpc.make(f"worker{rank}", Layer, name) for rank, name in enumerate(names)]
            with rpc.context() as context_id:
                rpc.backward(context_id, [program(layers, own, rpc.call)])
                got = [layer.gradient(context_id) for layer in layers] + [rpc.get_gradients(context_id)[own]]
            expected = plainly(program, [Layer(name) for name in names], same)
            wrong += [
                (program.__name__, place)
                for place, (one, other) in enumerate(zip(got, expected, strict=True))
                if one is None or other is None or not torch.allclose(one, other)
            ]
        return wrong

    assert with_workers(body, size) == [[]] * size


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_started_awaited_or_sent_to_each_takes_part(size: int) -> None:
    def body(member: Member) -> bool:
        to, own = next_of(member), weights("own")
        layer = rpc.make(to, Layer, "later")
        with rpc.context() as context_id:
            futures = [rpc.start(to, double, own), rpc.start(to, double_later, own), layer.start.apply_later(own)]
            futures += rpc.each(None, double, own)
            rpc.backward(context_id, [torch.stack([future.wait().sum() for future in futures]).sum()])
            got = rpc.get_gradients(context_id)[own], layer.gradient(context_id)
        there, same = Layer("later"), weights("own")
        (2 * same * (2 + size - 1)).sum().backward()
        there.apply(same).sum().backward()
        assert same.grad is not None
        assert there.weight.grad is not None
        return torch.allclose(got[0], same.grad) and torch.allclose(got[1], there.weight.grad)

    assert with_workers(body, size) == [True] * size


def test_an_object_made_in_a_context_depends_on_what_it_was_made_of() -> None:
    def body(member: Member) -> Any:
        own = weights("own")
        with rpc.context() as context_id:
            made = rpc.make(next_of(member), dict, weight=own * 3)
            rpc.backward(context_id, [rpc.call(made, "get", "weight").sum()])
            return rpc.get_gradients(context_id)[own].tolist()

    assert with_workers(body, 2) == [[[3.0] * 3] * 3] * 2


def test_parameters_and_modules_are_sent_as_part_of_the_graph() -> None:
    def body(member: Member) -> Any:
        to, values = next_of(member), torch.ones(1, 2)
        module = nn.Linear(2, 1)
        with rpc.context() as context_id:
            rpc.backward(context_id, [rpc.call(to, run_module, module, values).sum()])
            gradients = rpc.get_gradients(context_id)
        outside = rpc.call(to, is_parameter, module.weight)
        return gradients[module.weight].tolist(), gradients[module.bias].tolist(), outside

    assert with_workers(body, 2) == [([[1.0, 1.0]], [1.0], (True, True))] * 2


def test_without_gradients_nothing_is_recorded_and_streams_pass() -> None:
    def body(member: Member) -> Any:
        to, own = next_of(member), weights("own")
        with rpc.context() as context_id:
            with torch.no_grad():
                still = rpc.call(to, double, own)
            streamed = list(rpc.call(to, items, own))
            return still.requires_grad, torch.equal(streamed[0], own.detach() + 1), len(rpc.get_gradients(context_id))

    assert with_workers(body, 2) == [(False, True, 0)] * 2


def test_references_arrive_within_contexts_and_keep_their_objects() -> None:
    def body(member: Member) -> Any:
        own = weights("own")
        with rpc.context() as context_id:
            there = rpc.make(next_of(member), Layer, "there")
            back = rpc.call(next_of(member), hand_back, there, own)
            del there
            rpc.backward(context_id, [back[0].apply(back[1]).sum()])
            return rpc.get_gradients(context_id)[own].shape == own.shape

    assert with_workers(body, 3) == [True] * 3


def hand_back(reference: Any, values: torch.Tensor) -> tuple[Any, torch.Tensor]:
    return reference, values * 2


def test_an_error_in_backward_names_the_function_and_its_worker() -> None:
    def body(member: Member) -> str:
        own = weights("own")
        with rpc.context() as context_id:
            loss = rpc.call(next_of(member), fails, own).sum()
            with pytest.raises(ValueError, match="no such gradient") as caught:
                rpc.backward(context_id, [loss])
            return str(caught.value)

    for rank, text in enumerate(with_workers(body, 2)):
        assert "fails" in text
        assert f"worker{1 - rank}" in text
