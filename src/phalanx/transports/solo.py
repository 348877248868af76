"""A group of one: every collective is the identity, and there is no other rank to wait for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.errors import RankError
from phalanx.transports.contract import Communicator, Message
from phalanx.transports.operands import reducible

__all__ = ["SoloCommunicator"]


class SoloCommunicator(Communicator):
    """The world of one, so that a script needs no ``if`` for being started plainly."""

    rank = 0
    size = 1

    def can_reduce(self, dtype: torch.dtype, op: int) -> bool:
        return reducible(dtype, op)

    def all_reduce(self, tensor: torch.Tensor, op: int) -> None:
        pass

    def reduce(self, tensor: torch.Tensor, root: int, op: int) -> None:
        pass

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: int) -> None:
        _copy(output, inputs[0])

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        pass

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        _copy(outputs[0], tensor)

    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> None:
        if outputs is not None:
            _copy(outputs[0], tensor)

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> None:
        if inputs is not None:
            _copy(output, inputs[0])

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        _copy(outputs[0], inputs[0])

    def barrier(self) -> None:
        pass

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Message:
        raise RankError("a group of one rank has nobody to send to")

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Message:
        raise RankError("a group of one rank has nobody to receive from")

    def end_messages(self) -> None:
        pass

    def abort(self, doing: str = "") -> None:
        pass

    def close(self) -> None:
        pass


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    if to.data_ptr() != source.data_ptr():
        to.detach().view(-1).copy_(source.detach().view(-1))  # as where there are others, without gradient history
