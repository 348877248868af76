"""The edges between the graphs of workers: a tensor that is sent leaves one graph and enters another.

The sender of a message keeps a :class:`Send`: where the gradients of the tensors go in its own graph. Each tensor at
the receiver is the output of an autograd function, whose backward hands a gradient back instead of computing one; a
:class:`Recv` describes the functions of a message. Both have the number of the edge.

A :class:`Send` has one handle for each tensor, which is computed from it by the identity and has no memory of its own.
It keeps the place in the graph at which the tensor was when it was sent, also if it is changed in place afterwards.
Each tensor has a handle and a function of its own, because a backward pass may need some tensors of a message only, and
no hook must run for a tensor that nobody used. To programs that look at the graph, the functions of one message are
equal, since torch has one for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.diagnosis.call_site import CallSite, text_of
from phalanx.errors import PhalanxError
from phalanx.rpc.autograd.contexts import Context
from phalanx.rpc.members import Member

__all__ = ["START", "Reach", "Recv", "Send", "receive", "runs", "send"]

# The beginning of every chain of functions of this package, so that their outputs require gradients. It gets none.
START = torch.zeros((), device="cpu", requires_grad=True)


# The passes under way, by the number that torch's engine has for its run, which it knows on each of its threads. The
# thread that drives a run writes at its beginning and its end; functions read in between.
runs: dict[int, Any] = {}


@dataclass(eq=False)
class Send:
    """The tensors of one message, as its sender's graph knows them."""

    edge: int
    order: int  # its place among the edges of this worker
    to: Member
    handles: list[torch.Tensor]  # one for each tensor that requires gradients, which are those of the handle
    about: str | CallSite  # the function that returned them, or the call that sent them

    def __str__(self) -> str:
        if isinstance(self.about, str):
            return f"what {self.about} returned to {self.to}"
        return f"what was sent to {self.to} at {text_of(self.about)}"

    # What torch shows of its own

    @property
    def metadata(self) -> dict[str, Any]:
        return {}

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        return tuple(handle.grad_fn.next_functions[0] for handle in self.handles if handle.grad_fn is not None)

    def name(self) -> str:
        return "torch::distributed::autograd::SendRpcBackward"


@dataclass(eq=False)
class Recv:
    """The tensors of one message, as its receiver's graph knows them."""

    edge: int
    order: int  # its place among the edges of this worker
    context: int
    sender: Member  # who gets the gradients
    node: Any = None  # the autograd function of its first tensor; None when the context was released


def send(context: Context, edge: int, to: Member, tensors: Sequence[torch.Tensor], about: str | CallSite) -> None:
    """Record that tensors, all of which require gradients, are being sent."""
    handles = [_Identity.apply(tensor) for tensor in tensors]
    with context.lock:
        context.sends[edge] = Send(edge, next(context.order), to, handles, about)


def receive(context: Context, edge: int, sender: Member, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Record that tensors have been received whose sender wants gradients; they are returned as parts of the graph."""
    with context.lock:
        recv = Recv(edge, next(context.order), context.number, sender)
    received = []
    for place, tensor in enumerate(tensors):
        if tensor.grad_fn is not None:  # the same tensor twice
            tensor = tensor.detach()
        tensor._backward_hooks = None  # unpickling leaves an empty table, in which new hooks would not be found
        received.append(_Received.apply(START, recv, place, [tensor]))
    recv.node = received[0].grad_fn
    with context.lock:
        context.recvs[edge] = recv
    return received


def _forward_identity(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
    ctx.set_materialize_grads(False)
    if tensor.layout is torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor.new_empty(()).expand(tensor.shape)
    return tensor.detach()


def _backward_identity(_: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient


def _forward_received(ctx: Any, _: torch.Tensor, recv: Recv, place: int, tensor: list[torch.Tensor]) -> torch.Tensor:
    ctx.set_materialize_grads(False)
    ctx.recv, ctx.place = recv, place
    return tensor[0]


def _backward_received(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, None, None, None]:
    recv: Recv = ctx.recv
    run = runs.get(torch._C._current_graph_task_id())
    if run is None:
        raise PhalanxError(
            f"a local backward() has reached a tensor that came from {recv.sender}. Gradients follow calls only in a "
            f"distributed one: backward(context_id, [loss]), within the context of the calls; or detach() the tensor"
        )
    run.hand_back(recv, ctx.place, gradient)
    return None, None, None, None


def _same_message(node: Any, other: object) -> bool:
    return type(other) is _RECV_NODE and node.recv is other.recv  # type: ignore[attr-defined]


def _hash_of_message(node: Any) -> int:
    return hash(node.recv)


def _function(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    """An autograd function whose nodes have the name that torch's have, which profiles show."""
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(f"torch::distributed::autograd::{name}", (torch.autograd.Function,), members)


_Identity = _function("SendRpc", _forward_identity, _backward_identity)
_Received = _function("RecvRpc", _forward_received, _backward_received)
_RECV_NODE: type = _Received._backward_cls
_RECV_NODE.__eq__ = _same_message  # type: ignore[assignment]
_RECV_NODE.__hash__ = _hash_of_message  # type: ignore[assignment]
_ACCUMULATE: type = type(torch.autograd.graph.get_gradient_edge(START).node)


class Reach:
    """The part of this worker's graph of a context that a backward pass will reach, found before it runs."""

    def __init__(self, context: int) -> None:
        self._context = context
        self._seen: set[Any] = set()
        self.leaves: list[Any] = []  # the functions that accumulate gradients of leaves
        self.recvs: dict[Recv, set[int]] = {}  # and the places of those tensors that gradients will reach

    def extend(self, tensors: Iterable[torch.Tensor]) -> dict[Recv, list[int]]:
        """Follow the graph from more tensors.

        Functions run in the order of their numbers, the highest first. None but a pass's own waits may have number 0,
        so that a wait comes last; the first function that a thread makes is given another here.

        Returns:
            What is new among the received messages.

        Raises:
            PhalanxError: a tensor was received in another context.
        """
        fresh: dict[Recv, list[int]] = {}
        # All of them are results. torch's get_gradient_edge makes a view as well, which sparse tensors do not have.
        pending: list[Any] = [((tensor.grad_fn, tensor.output_nr),) for tensor in tensors]
        while pending:
            for node, _ in pending.pop():
                kind = type(node)
                if node is None or (kind is not _RECV_NODE and node in self._seen):
                    continue
                if kind is _ACCUMULATE:
                    self._seen.add(node)
                    self.leaves.append(node)
                    continue
                if not node._sequence_nr():
                    node._set_sequence_nr(1)
                if kind is _RECV_NODE:
                    self._enter(node.recv, node.place, fresh)
                    continue
                self._seen.add(node)
                pending.append(node.next_functions)
        return fresh

    def _enter(self, recv: Recv, place: int, fresh: dict[Recv, list[int]]) -> None:
        if recv.context != self._context:
            raise PhalanxError(
                f"the backward pass of context {self._context} has reached a tensor that came from {recv.sender} in "
                f"context {recv.context}, through which gradients cannot go. detach() what is kept from one context to "
                f"the next"
            )
        places = self.recvs.setdefault(recv, set())
        if place not in places:
            places.add(place)
            fresh.setdefault(recv, []).append(place)
