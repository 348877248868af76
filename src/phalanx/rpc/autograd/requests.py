"""Messages whose tensors take part in distributed autograd, on both of their ends.

Inside of a context a request travels to a service of another name, whose handler runs in the context; so requests
outside of contexts know nothing of all this. The value is encoded without its tensors that require gradients: each
leaves its number, and the tensors go beside it as parts of the graph (:func:`wrap` and :func:`unwrap`).
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.diagnosis.call_site import CallSite, capture
from phalanx.rpc.autograd.contexts import contexts, worker_id
from phalanx.rpc.autograd.graph import receive, send
from phalanx.rpc.codec import PICKLED, Codec, decode, decoding_context, encode
from phalanx.rpc.future import Future
from phalanx.rpc.members import Member
from phalanx.rpc.worker import Incoming, Worker

__all__ = ["Metadata", "request", "running_in", "serve", "unwrap", "wrap"]

# What a message of a context carries: the context's number, the edge (None if no tensor requires gradients), and which
# of the message's tensors do.
Metadata = tuple[int, int | None, tuple[int, ...]]

_IN_CONTEXT = "+gradients"
# What runs for another worker on this thread, for errors.
_running: ContextVar[str] = ContextVar("phalanx_autograd_running", default="")


def wrap(to: Member, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Metadata | None]:
    """Make the tensors of a call or an answer, in their order, part of the current context, on their way to ``to``.

    Returns:
        The tensors to send, which require no gradients, and what goes beside them: None outside of contexts. Inside
        one, the context's number is sent also if no tensor requires gradients, so that nested calls know it.
    """
    inside = contexts.current()
    if inside is None:
        return list(tensors), None
    if to.incarnation != contexts.worker().me.incarnation:
        with inside.lock:
            if inside.released:
                return list(tensors), None
            inside.known[worker_id(to)] = to
    places = tuple(place for place, tensor in enumerate(tensors) if tensor.requires_grad)
    sent = [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]
    if not places or not torch.is_grad_enabled():
        return sent, (inside.number, None, ())
    edge = contexts.next_edge()
    about: str | CallSite = capture() or _running.get() or "a function"
    send(inside, edge, to, [tensors[place] for place in places], about)
    return sent, (inside.number, edge, places)


def unwrap(sender: Member, tensors: Sequence[torch.Tensor], metadata: Metadata | None) -> list[torch.Tensor]:
    """Join the context of a received call or answer, and make its tensors part of the graph here.

    Returns:
        The tensors; those whose sender wants gradients require them.
    """
    received = list(tensors)
    if metadata is None:
        return received
    number, edge, places = metadata
    inside = contexts.join(number, sender)
    if inside is None or edge is None:
        return received
    with torch.enable_grad():
        entered = receive(inside, edge, sender, [received[place] for place in places])
    for place, tensor in zip(places, entered, strict=True):
        received[place] = tensor
    return received


@contextlib.contextmanager
def running_in(metadata: Metadata | None, function: Callable[..., Any] | None = None) -> Iterator[None]:
    """Let the context of a received call be current while what it asks for runs, and while its answer is wrapped.

    Args:
        metadata: what came with the call.
        function: what the call asks for, so that an error in its backward can name it.
    """
    name = _running.set(_described(function) if function is not None and metadata is not None else "")
    try:
        with contexts.entered(None if metadata is None else metadata[0]):
            yield
    finally:
        _running.reset(name)


def _described(function: Callable[..., Any]) -> str:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else name


def request(
    worker: Worker,
    to: str | int | Member,
    service: str,
    value: Any,
    timeout_s: float | None = None,
    *,
    asked: str = "",
    made: Callable[[Any], Any] | None = None,
    failed: Callable[[BaseException], BaseException] | None = None,
    codec: Codec = PICKLED,
) -> Future[Any]:
    """:meth:`Worker.request`; in a context, the tensors of ``value`` and of what is returned take part in it."""
    if contexts.current() is None:
        return worker.request(to, service, value, timeout_s, asked=asked, made=made, failed=failed, codec=codec)
    member = worker.directory.find(to)
    carried = _Carried(_arrive, worker.me, member, value, encode=codec.encode)
    return worker.request(member, service + _IN_CONTEXT, carried, timeout_s, asked=asked, made=made, failed=failed)


def serve(
    worker: Worker,
    service: str,
    handler: Callable[[Incoming, Any], Any],
    function_of: Callable[[Any], Callable[..., Any]],
) -> None:
    """:meth:`Worker.serve`, also for requests that were made in a context.

    Args:
        worker, service, handler: as there.
        function_of: gives the user's function that a request asks for, which errors in its backward will name.
    """
    worker.serve(service, handler)

    def handle(incoming: Incoming, arrived: tuple[Any, Metadata | None]) -> Any:
        value, metadata = arrived
        function = function_of(value)

        def answer(result: Any) -> _Carried:
            return _Carried(_arrive_as_value, worker.me, incoming.peer, result, metadata, function)

        with running_in(metadata, function):
            result = handler(incoming, value)
        return result.then(answer) if isinstance(result, Future) else answer(result)

    worker.serve(service + _IN_CONTEXT, handle)


@dataclass(eq=False)
class _Carried:
    """A value on its way. It is taken apart while the message is pickled, so that all it refers to stays alive."""

    arrive: Callable[..., Any]  # makes of it, at the other side, what the receiver gets
    sender: Member
    to: Member
    value: Any
    # For an answer, which is pickled when its handler has returned: what came with the call, and who has returned it.
    metadata: Metadata | None = None
    function: Callable[..., Any] | None = None
    encode: Callable[..., tuple[bytes, list[memoryview]]] = encode  # the codec's
    reduced: tuple[Any, ...] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self.reduced is None:  # pickling may begin anew, and the tensors leave only once
            self.reduced = self.arrive, (self.sender, *self._taken_apart())
        return self.reduced

    def _taken_apart(self) -> tuple[Any, ...]:
        tensors: list[torch.Tensor] = []

        def reduce(tensor: torch.Tensor) -> Any:
            if not tensor.requires_grad:
                return NotImplemented
            tensors.append(tensor)
            return _tensor_of, (len(tensors) - 1,)

        reducers: dict[type, Callable[[Any], Any]] = {torch.Tensor: reduce, torch.nn.Parameter: reduce}
        head, buffers = self.encode(self.value, reducers=reducers, restart=tensors.clear)
        with running_in(self.metadata, self.function) if self.metadata is not None else contextlib.nullcontext():
            sent, metadata = wrap(self.to, tensors)
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
) -> tuple[Any, Metadata | None]:
    return decode(head, buffers, context=unwrap(sender, tensors, metadata)), metadata


def _arrive_as_value(*arrived: Any) -> Any:
    return _arrive(*arrived)[0]
