"""PowerSGD (Vogels et al. 2019, arXiv:1905.13727): matrices travel as products of two thin ones, by torch's own hook.

torch's hook keeps its memory (what an approximation has left out, and the last factors) by the number of DDP's bucket,
and DDP divides the gradients into other buckets after the first step. So the hook is given one bucket here, which
always has all gradients in the order of the parameters.

Tall tensors, such as a table of 262,144 rows and one column, are no smaller as such a product, and cut into a square of
no low rank either. They travel as integers of three bits (``integers.py``). Small tensors travel whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from phalanx.errors import ArgumentError
from phalanx.parallel.exchange import Exchange, Unchanged
from phalanx.parallel.gradients import FlatTensors
from phalanx.parallel.integers import Integers, Lanes

__all__ = ["LowRank"]

MATRIX_RANK = 3  # from 3 on torch makes factors orthogonal by QR; its other way fails for matrices of a lower rank
PLAIN_STEPS = 10  # exchanges without loss at the beginning, where gradients change most
SMALL = 4096  # a tensor of fewer elements that is no matrix travels whole
TALL_BITS = 3


class _Sorted:
    """Memory for a flat tensor, and apart for those tensors within it that travel as integers, and for the others."""

    def __init__(self, flat: torch.Tensor, shapes: Sequence[torch.Size]) -> None:
        self.whole = torch.zeros_like(flat, dtype=torch.promote_types(flat.dtype, torch.float32))
        pieces = torch.split(self.whole, [shape.numel() for shape in shapes])
        tensors = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        self.tall = FlatTensors(tensor for tensor in tensors if _is_tall(tensor.shape))
        self.others = FlatTensors(tensor for tensor in tensors if not _is_tall(tensor.shape))

    def take(self, flat: torch.Tensor) -> None:
        self.whole.copy_(flat)
        self.tall.take()
        self.others.take()

    def give(self, flat: torch.Tensor) -> None:
        self.tall.give()
        self.others.give()
        flat.copy_(self.whole)

    def bucket(self, index: int) -> Any:
        """The others as a bucket of DDP's, as far as torch's hook asks for it; None if there are none."""
        if not self.others.flats:
            return None
        shapes = self.others.shapes[0]
        pieces = torch.split(self.others.flats[0], [shape.numel() for shape in shapes])
        views = [piece.view(shape if shape else (1,)) for piece, shape in zip(pieces, shapes, strict=True)]
        return SimpleNamespace(
            index=lambda: index,
            buffer=lambda: self.others.flats[0],
            gradients=lambda: views,
            is_last=lambda: False,  # after the last one the hook would count a step, and LowRank counts them
        )


class LowRank(Exchange):
    """PowerSGD with error feedback and warm start. It keeps four bytes for each element: what is left out so far."""

    name = "powersgd"

    def __init__(self, group: dist.ProcessGroup, lanes: Lanes) -> None:
        self._group = group
        self._plain, self._integers = Unchanged(group), Integers(lanes, TALL_BITS)
        self._sorted: list[_Sorted] = []
        self._restarts = 0
        self._torch = self._new_state()

    def _new_state(self) -> PowerSGDState:
        try:
            return PowerSGDState(
                self._group,
                matrix_approximation_rank=MATRIX_RANK,
                start_powerSGD_iter=PLAIN_STEPS,
                orthogonalization_epsilon=1e-8,  # the gradients of a layer may all be zero
                random_seed=self._restarts,
            )
        except ImportError as error:
            raise ArgumentError('compress="powersgd" needs numpy, from which torch\'s hook draws its seed') from error

    def mean_(self, flats: Sequence[torch.Tensor], shapes: Sequence[Sequence[torch.Size]]) -> None:
        if self._torch.iter < PLAIN_STEPS:
            self._torch.iter += 1
            self._plain.mean_(flats, shapes)
            return
        if not self._sorted:
            self._sorted = [_Sorted(flat, own) for flat, own in zip(flats, shapes, strict=True)]
            self._move_memory([flat.device for flat in flats])
        for flat, held in zip(flats, self._sorted, strict=True):
            held.take(flat)
        tall = [held.tall for held in self._sorted if held.tall.flats]
        self._integers.mean_([part.flats[0] for part in tall], [part.shapes[0] for part in tall])
        hook: Any = powerSGD_hook
        buckets = [held.bucket(index) for index, held in enumerate(self._sorted)]
        for bucket in filter(None, buckets):
            hook(self._torch, bucket).wait()
        # An infinity or NaN would stay in the memory, and so in all later gradients. All ranks see the same ones.
        if not all(bool(bucket.buffer().isfinite().all()) for bucket in buckets if bucket is not None):
            self._restarts += 1
            self._torch = self._new_state()
            self._torch.iter = PLAIN_STEPS
        for flat, held in zip(flats, self._sorted, strict=True):
            held.give(flat)

    def _move_memory(self, devices: Sequence[torch.device]) -> None:
        """Bring the memory of a checkpoint, which comes from a file, to the devices of the gradients."""
        for memory in (self._torch.error_dict, self._torch.p_memory_dict, self._torch.q_memory_dict):
            for index, tensor in memory.items():
                memory[index] = tensor.to(devices[index])

    def settle(self) -> None:
        """Give every rank the mean of what all have left out: the sum of their gradients stays the same."""
        self._integers.settle()
        errors = self._torch.error_dict
        self._plain.mean_([errors[index] for index in sorted(errors)], [])

    def state_dict(self) -> dict[str, Any]:
        state = self._torch
        memory = {"errors": state.error_dict, "p": state.p_memory_dict, "q": state.q_memory_dict}
        copies = {name: _copied(held) for name, held in memory.items()}
        return {"steps": state.iter, "restarts": self._restarts, "tall": self._integers.state_dict(), **copies}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restarts = state.get("restarts", 0)
        self._sorted = []
        self._torch = self._new_state()
        self._integers.load_state_dict(state.get("tall", {}))
        if state:
            self._torch.iter = state["steps"]
            self._torch.error_dict = _copied(state["errors"])
            self._torch.p_memory_dict, self._torch.q_memory_dict = _copied(state["p"]), _copied(state["q"])


def _copied(memory: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {index: tensor.clone() for index, tensor in memory.items()}


def _is_tall(shape: torch.Size) -> bool:
    return shape.numel() >= SMALL and not _worth_factors(shape)


def _worth_factors(shape: torch.Size) -> bool:
    """Tell whether torch's hook would send two factors for a matrix: they have at most half of its elements."""
    if len(shape) < 2 or not shape.numel():
        return False
    rows, columns = shape[0], shape.numel() // shape[0]
    return 2 * (rows + columns) * min(rows, columns, MATRIX_RANK) < rows * columns
