"""Memory that a group keeps for what comes from other hosts.

A page of new memory costs more, when it is first written, than all that is done with it later.
"""

from __future__ import annotations

import torch

__all__ = ["Scratch"]


class Scratch:
    """Tensors by name, whose memory is used again by the next one of that name.

    One thread uses it at a time, and it gives no name away again before it is done with the tensor that had it.
    """

    def __init__(self) -> None:
        self._memory: dict[object, torch.Tensor] = {}

    def take(self, name: object, like: torch.Tensor) -> torch.Tensor:
        """A flat tensor of the same dtype and number of elements as another; what it holds is undefined."""
        memory = self._memory.get(name)
        if memory is None or memory.nbytes < like.nbytes:
            memory = self._memory[name] = torch.empty(max(1, like.nbytes), dtype=torch.uint8)
        return memory[: like.nbytes].view(like.dtype)
