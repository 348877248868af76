"""Requests whose tensors take part in distributed autograd, on both of their ends.

Inside of a context a request travels to a service of another name, whose handler runs in the context; so requests
outside of contexts know nothing of all this. The value is encoded without its tensors that require gradients: each
leaves its number, and the tensors go beside it as parts of the graph (``engine.wrap`` and ``engine.unwrap``).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from phalanx.rpc.agent import Agent, Incoming
from phalanx.rpc.autograd.contexts import contexts
from phalanx.rpc.autograd.engine import Metadata, running_in, unwrap, wrap
from phalanx.rpc.codec import PICKLED, Codec, decode, decoding_context, encode
from phalanx.rpc.future import Future
from phalanx.rpc.members import Member

__all__ = ["request", "serve"]

_IN_CONTEXT = "+gradients"


def request(
    agent: Agent,
    to: str | int | Member,
    service: str,
    value: Any,
    timeout_s: float | None = None,
    *,
    asked: str = "",
    made: Callable[[Any], Any] | None = None,
    codec: Codec = PICKLED,
) -> Future[Any]:
    """:meth:`Agent.request`; in a context, the tensors of ``value`` and of what is returned take part in it."""
    if contexts.current() is None:
        return agent.request(to, service, value, timeout_s, asked=asked, made=made, codec=codec)
    member = agent.member(to)
    carried = _Carried(_arrive, agent.me, member, value, encode=codec.encode)
    return agent.request(member, service + _IN_CONTEXT, carried, timeout_s, asked=asked, made=made)


def serve(
    agent: Agent,
    service: str,
    handler: Callable[[Incoming, Any], Any],
    function_of: Callable[[Any], Callable[..., Any]],
) -> None:
    """:meth:`Agent.serve`, also for requests that were made in a context.

    Args:
        agent, service, handler: as there.
        function_of: gives the user's function that a request asks for, which errors in its backward will name.
    """
    agent.serve(service, handler)

    def handle(incoming: Incoming, arrived: _Arrived) -> Any:
        value, metadata = arrived
        function = function_of(value)

        def answer(result: Any) -> _Carried:
            return _Carried(_arrive_as_value, agent.me, incoming.peer, result, metadata, function)

        with running_in(metadata, function):
            result = handler(incoming, value)
        return result.then(answer) if isinstance(result, Future) else answer(result)

    agent.serve(service + _IN_CONTEXT, handle)


class _Arrived(NamedTuple):
    value: Any
    metadata: Metadata | None


class _Carried:
    """A value on its way. It is taken apart while the message is pickled, so that all it refers to stays alive.

    Args:
        arrive: makes of it, at the other side, what the receiver gets.
        sender, to: who sends it to whom.
        value: the value.
        metadata: for an answer, what came with the call; an answer is pickled when its handler has returned.
        function: for an answer, the function that has returned it.
        encode: the codec's, which takes what ``encoding.encode`` takes.
    """

    def __init__(
        self,
        arrive: Callable[..., Any],
        sender: Member,
        to: Member,
        value: Any,
        metadata: Metadata | None = None,
        function: Callable[..., Any] | None = None,
        *,
        encode: Callable[..., tuple[bytes, list[memoryview]]] = encode,
    ) -> None:
        self._arrive, self._sender, self._to, self._value = arrive, sender, to, value
        self._metadata, self._function, self._encode = metadata, function, encode
        self._reduced: tuple[Any, ...] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self._reduced is None:  # pickling may begin anew, and the tensors leave only once
            self._reduced = self._arrive, (self._sender, *self._taken_apart())
        return self._reduced

    def _taken_apart(self) -> tuple[Any, ...]:
        tensors: list[torch.Tensor] = []

        def reduce(tensor: torch.Tensor) -> Any:
            if not tensor.requires_grad:
                return NotImplemented
            tensors.append(tensor)
            return _tensor_of, (len(tensors) - 1,)

        reducers: dict[type, Callable[[Any], Any]] = {torch.Tensor: reduce, torch.nn.Parameter: reduce}
        head, buffers = self._encode(self._value, reducers=reducers, restart=tensors.clear)
        if self._metadata is None:
            sent, metadata = wrap(self._to, tensors)
        else:
            with running_in(self._metadata, self._function):
                sent, metadata = wrap(self._to, tensors)
        return head, [pickle.PickleBuffer(buffer) for buffer in buffers], sent, metadata


def _tensor_of(number: int) -> torch.Tensor:
    tensor: torch.Tensor = decoding_context()[number]
    return tensor


def _arrive(
    sender: Member,
    head: bytes,
    buffers: Sequence[memoryview],
    tensors: Sequence[torch.Tensor],
    metadata: Metadata | None,
) -> _Arrived:
    return _Arrived(decode(head, buffers, context=unwrap(sender, tensors, metadata)), metadata)


def _arrive_as_value(*arrived: Any) -> Any:
    return _arrive(*arrived).value
