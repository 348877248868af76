"""What a backward pass will reach in the graph of this worker, found before it runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from phalanx.errors import PhalanxError
from phalanx.rpc.autograd.edges import RECV_NODE, START, Recv

__all__ = ["Reach"]

_ACCUMULATE: type = type(torch.autograd.graph.get_gradient_edge(START).node)


class Reach:
    """The part of the graph that has been found.

    Args:
        context: the number of the context whose graph it is.

    Attributes:
        leaves: the functions that accumulate gradients of leaves.
        recvs: the received messages, each with the places of the tensors that gradients will reach.
    """

    def __init__(self, context: int) -> None:
        self._context = context
        self._seen: set[Any] = set()
        self.leaves: list[Any] = []
        self.recvs: dict[Recv, set[int]] = {}

    def extend(self, tensors: Iterable[torch.Tensor]) -> dict[Recv, list[int]]:
        """Follow the graph from more tensors.

        Functions of the graph run in the order of their numbers, the highest first. None but a pass's own waits may
        have number 0, so that a wait comes last; the first function that a thread makes is given another here.

        Returns:
            What is new among the received messages.

        Raises:
            PhalanxError: a tensor was received in another context.
        """
        fresh: dict[Recv, list[int]] = {}
        seen = self._seen
        # All of them are results. torch's get_gradient_edge makes a view as well, which sparse tensors do not have.
        pending: list[Any] = [((tensor.grad_fn, tensor.output_nr),) for tensor in tensors]
        while pending:
            for node, _ in pending.pop():
                if node is None:
                    continue
                kind = type(node)
                if kind is RECV_NODE:
                    node._set_sequence_nr(max(1, node._sequence_nr()))
                    self._enter(node.recv, node.place, fresh)
                    continue
                if node in seen:
                    continue
                seen.add(node)
                if kind is _ACCUMULATE:
                    self.leaves.append(node)
                    continue
                if not node._sequence_nr():
                    node._set_sequence_nr(1)
                if kind is RECV_NODE:
                    continue
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
