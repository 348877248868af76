"""Wrapper subclasses of tensors inside lists of lists, where torch's dispatcher does not look for them.

It asks a wrapper subclass (AsyncCollectiveTensor, TwoTensor) to unwrap itself if one is an argument or in a list. The
lists of an all_gather, a gather, a scatter and a reduce_scatter are one level deeper, so their tensors arrive as they
are, with no memory of their own. Gloo fills such outputs by copying; so does this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.errors import UnsupportedTensor

__all__ = ["StandIns"]

_PYTHON = torch._C.DispatchKey.Python


class StandIns:
    """The arguments of one collective, with plain tensors in the place of wrappers in lists of lists.

    Args:
        names: of the arguments; one that begins with "output" is to be filled.
        arguments: of the collective, the options left out.

    Attributes:
        arguments: the same, or with stand-ins.
        any_filled: whether :meth:`write_back` must be called once the collective has run.

    Raises:
        UnsupportedTensor: an input is a wrapper of which nobody here knows what it holds.
    """

    def __init__(self, names: Sequence[str], arguments: Sequence[Any]) -> None:
        self._filled: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.arguments = [
            self._lists(value, name.startswith("output")) if _is_nested(value) else value
            for name, value in zip(names, arguments, strict=True)
        ]
        self.any_filled = bool(self._filled)

    def _lists(self, lists: Sequence[Sequence[torch.Tensor]], filled: bool) -> list[list[torch.Tensor]]:
        return [[self._plain(tensor, filled) if _is_wrapper(tensor) else tensor for tensor in one] for one in lists]

    def _plain(self, tensor: torch.Tensor, filled: bool) -> torch.Tensor:
        awaited: Callable[[], torch.Tensor] | None = getattr(tensor, "trigger_wait", None)
        if awaited is not None:
            return awaited()  # what the tensor itself does where the dispatcher asks it
        if not filled:
            raise UnsupportedTensor(
                f"a {type(tensor).__name__} in a list of tensors cannot be unwrapped, because torch's dispatcher does "
                f"not ask it to; give the tensors that it wraps"
            )
        stand_in = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._filled.append((tensor, stand_in))
        return stand_in

    def write_back(self) -> None:
        """Copy what the stand-ins have received into the tensors that they stand for."""
        for tensor, stand_in in self._filled:
            tensor.detach().copy_(stand_in)

    def writing_back(self, body: Callable[[], None]) -> Callable[[], None]:
        """The ``body`` of the operation, followed by :meth:`write_back`."""

        def run() -> None:
            body()
            self.write_back()

        return run


def _is_nested(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], (list, tuple))


def _is_wrapper(tensor: torch.Tensor) -> bool:
    return type(tensor) is not torch.Tensor and torch._C._dispatch_keys(tensor).has(_PYTHON)
