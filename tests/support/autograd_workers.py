"""Workers that call each other within contexts of distributed autograd, and what programs on them need.

A program is a function of ``do`` and the number of workers. ``do(worker, function, do, *arguments)`` calls a function
on a worker (``rpc.call``), or in this process (:func:`local`): so the same program gives the expected values.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from typing import Any

import torch

from phalanx import rpc
from phalanx.rpc import Member as Worker
from tests.support.ranks import Member

Do = Callable[..., Any]

# This worker's parameters, and what its hooks have seen, by name.
parameters: dict[str, torch.Tensor] = {}
seen: list[tuple[str, torch.Tensor]] = []
_making = threading.Lock()  # calls that arrive together must find one parameter, not make one each


def parameter(name: str, *shape: int) -> torch.Tensor:
    """A parameter that lives where it is first asked for. Its values follow from its name."""
    with _making:
        if name not in parameters:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameters[name] = torch.rand(shape, generator=generator).requires_grad_()
        return parameters[name]


def times(do: Do, name: str, x: torch.Tensor) -> torch.Tensor:
    """A product with a parameter."""
    return x * parameter(name, 3)


def saw(name: str) -> Callable[[torch.Tensor], None]:
    """A hook that writes down the gradient that it sees."""
    return lambda gradient: seen.append((name, gradient.clone()))


class _Acts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, act: Callable[[torch.Tensor], object]) -> torch.Tensor:
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.act(gradient)
        return gradient, None


def acts(x: torch.Tensor, act: Callable[[torch.Tensor], object]) -> torch.Tensor:
    """The same values, from a function of autograd whose backward calls ``act`` with the gradient."""
    same: torch.Tensor = _Acts.apply(x, act)
    return same


def start_worker(member: Member) -> Worker:
    """Make this process a worker; the first argument of a pool's jobs."""
    member.join()
    return rpc.init()


def local(_: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in this process instead. It gets copies of tensors, as a remote one does."""
    return function(*(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args))


def forget(_: object) -> None:
    """Forget parameters and what hooks have seen."""
    parameters.clear()
    seen.clear()


def gradients(context_id: int, *, quiet: bool = True) -> tuple[dict[str, torch.Tensor], list[tuple[str, torch.Tensor]]]:
    """The gradients of this worker's parameters, and what its hooks have seen.

    Unless other contexts may have passes under way, ``.grad`` must not have been touched.
    """
    assert not quiet or all(variable.grad is None for variable in parameters.values())
    found = rpc.get_gradients(context_id)
    names = {variable: name for name, variable in parameters.items()}
    return {names[variable]: gradient for variable, gradient in found.items()}, list(seen)
