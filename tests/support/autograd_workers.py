"""Workers that call each other within contexts of distributed autograd, and programs that run on them or in one process.

A program is a function of ``do`` and the number of workers; ``do(worker, function, do, *arguments)`` calls a function on a worker, or
here: so the same program gives the expected values, by torch's own autograd.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from phalanx import rpc
from phalanx.rpc import session
from phalanx.rpc.agent import Agent, Incoming
from phalanx.rpc.autograd import engine
from phalanx.rpc.future import Future
from tests.support.ranks import Member

CALL = "test.call"

# This worker's parameters, and what its hooks have seen, by name.
parameters: dict[str, torch.Tensor] = {}
seen: list[tuple[str, torch.Tensor]] = []


def parameter(name: str, *shape: int) -> torch.Tensor:
    """A parameter that lives where it is first asked for. Its values follow from its name."""
    if name not in parameters:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parameters[name] = torch.rand(shape, generator=generator).requires_grad_()
    return parameters[name]


def saw(name: str) -> Callable[[torch.Tensor], None]:
    """A hook that writes down the gradient that it sees."""

    def hook(gradient: torch.Tensor) -> None:
        seen.append((name, gradient.clone()))

    return hook


def start_worker(member: Member) -> Agent:
    """Make this process a worker that serves calls; the first argument of a pool's jobs."""
    member.join()
    rpc.init()
    agent = session.agent()
    agent.serve(CALL, _perform)
    return agent


def start(to: Any, function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Begin a call whose gradients will follow it."""
    agent = session.agent()
    leaves, spec = tree_flatten(args)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors, metadata = engine.wrap(to, [leaves[place] for place in places])
    rest = [None if place in places else leaf for place, leaf in enumerate(leaves)]
    callee = agent.member(to)

    def received(answer: Any) -> Any:
        return _whole(callee, *answer)

    return agent.request(callee, CALL, (function, rest, spec, places, tensors, metadata)).then(received)


def remote(to: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on a worker."""
    return start(to, function, *args).wait()


def local(_: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in this process instead."""
    return function(*args)


def _perform(incoming: Incoming, asked: Any) -> Any:
    function, *encoded = asked
    args = _whole(incoming.peer, *encoded)
    with engine.running_in(asked[-1], function):
        leaves, spec = tree_flatten(function(*args))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors, metadata = engine.wrap(incoming.peer, [leaves[place] for place in places])
    rest = [None if place in places else leaf for place, leaf in enumerate(leaves)]
    return rest, spec, places, tensors, metadata


def _whole(sender: Any, rest: list[Any], spec: Any, places: list[int], tensors: Any, metadata: Any) -> Any:
    for place, tensor in zip(places, engine.unwrap(sender, tensors, metadata), strict=True):
        rest[place] = tensor
    return tree_unflatten(rest, spec)


def forget(_: Agent) -> None:
    """Forget parameters and what hooks have seen."""
    parameters.clear()
    seen.clear()


def gradients(context_id: int) -> tuple[dict[str, torch.Tensor], list[tuple[str, torch.Tensor]]]:
    """The gradients of this worker's parameters, and what its hooks have seen; ``.grad`` must not have been touched."""
    found = engine.get_gradients(context_id)
    assert all(variable.grad is None for variable in parameters.values())
    names = {variable: name for name, variable in parameters.items()}
    return {names[variable]: gradient for variable, gradient in found.items()}, list(seen)
