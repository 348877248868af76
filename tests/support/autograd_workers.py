"""Workers that call each other within contexts of distributed autograd, and what programs on them need.

A program is a function of ``do`` and the number of workers. ``do(worker, function, do, *arguments)`` calls a function
on a worker, or in this process: so the same program gives the expected values, by torch's own autograd.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from typing import Any

import torch

from phalanx import rpc
from phalanx.rpc import session
from phalanx.rpc.agent import Agent, Incoming
from phalanx.rpc.autograd import engine
from phalanx.rpc.future import Future
from tests.support.ranks import Member

CALL = "test.call"
Do = Callable[..., Any]

# This worker's parameters, and what its hooks have seen, by name.
parameters: dict[str, torch.Tensor] = {}
seen: list[tuple[str, torch.Tensor]] = []
# Calls that arrive together must find one parameter, not make one each.
_making = threading.Lock()


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


def own(do: Do, name: str) -> torch.Tensor:
    return parameter(name, 3)


def saw(name: str) -> Callable[[torch.Tensor], None]:
    """A hook that writes down the gradient that it sees."""

    def hook(gradient: torch.Tensor) -> None:
        seen.append((name, gradient.clone()))

    return hook


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


def start_worker(member: Member) -> Agent:
    """Make this process a worker that serves calls; the first argument of a pool's jobs."""
    member.join()
    session.on_init(lambda agent: agent.serve(CALL, _perform))
    rpc.init()
    return session.agent()


def start(to: Any, function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Begin a call whose gradients will follow it."""
    agent = session.agent()
    callee = agent.member(to)
    request = agent.request(callee, CALL, (function, *_message(callee, args)))
    return request.then(lambda answer: _whole(callee, *answer))


def remote(to: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on a worker."""
    return start(to, function, *args).wait()


def local(_: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in this process instead. It gets copies of tensors, as a remote one does."""
    return function(*(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args))


def _perform(incoming: Incoming, asked: Any) -> Any:
    function, value, tensors, metadata = asked
    args = _whole(incoming.peer, value, tensors, metadata)
    with engine.running_in(metadata, function):
        return _message(incoming.peer, function(*args), answer=True)


class _Place(int):
    """Stands for a tensor of a message."""


def _message(to: Any, value: Any, *, answer: bool = False) -> Any:
    tensors: list[torch.Tensor] = []

    def without(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            tensors.append(part)
            return _Place(len(tensors) - 1)
        return type(part)(map(without, part)) if type(part) in (tuple, list) else part

    rest = without(value)
    return rest, *engine.wrap(to, tensors, answer=answer)


def _whole(sender: Any, value: Any, tensors: Any, metadata: Any) -> Any:
    received = engine.unwrap(sender, tensors, metadata)

    def whole(part: Any) -> Any:
        if isinstance(part, _Place):
            return received[part]
        return type(part)(map(whole, part)) if type(part) in (tuple, list) else part

    return whole(value)


def forget(_: Agent) -> None:
    """Forget parameters and what hooks have seen."""
    parameters.clear()
    seen.clear()


def gradients(context_id: int) -> tuple[dict[str, torch.Tensor], list[tuple[str, torch.Tensor]]]:
    """The gradients of this worker's parameters, and what its hooks have seen; ``.grad`` must not have been touched."""
    assert all(variable.grad is None for variable in parameters.values())
    return gradients_now(context_id)


def gradients_now(context_id: int) -> tuple[dict[str, torch.Tensor], list[tuple[str, torch.Tensor]]]:
    """The same, while other contexts may have passes under way."""
    found = engine.get_gradients(context_id)
    names = {variable: name for name, variable in parameters.items()}
    return {names[variable]: gradient for variable, gradient in found.items()}, list(seen)
