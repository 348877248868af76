"""Local steps: each rank's optimizer goes its own way for K steps, and then the replicas are averaged.

The plain form is local SGD (Stich 2018, arXiv:1805.09767). With ``outer="diloco"`` the mean of what the ranks have
changed is taken as a gradient, by which an outer optimizer moves the parameters that all ranks had before: SGD with
Nesterov momentum 0.9 and learning rate 0.7 (Douillard et al. 2023, arXiv:2311.08105, section 2 and figure 6).

Steps are counted by a hook that torch calls after each step of any optimizer of the process. torch's own averager is
not used: it averages after the first step instead of the K-th, leaves out parameters that have no gradient at that
moment, and puts other memory under the parameters.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from phalanx.errors import ArgumentError
from phalanx.parallel.exchange import Exchange, Unchanged
from phalanx.parallel.gradients import FlatTensors

__all__ = ["OUTER", "LocalSteps", "average_optimizer"]

OUTER: dict[str, dict[str, Any]] = {"diloco": {"lr": 0.7, "momentum": 0.9, "nesterov": True}}


class LocalSteps:
    """Make replicas one again every K steps, and when asked.

    Args:
        module: the plain module, alike on every rank.
        group: the ranks with a replica.
        exchange: takes the mean of what the ranks have changed.
        every: K.
        outer: a name in ``OUTER``, or None for the mean itself.
    """

    def __init__(
        self, module: torch.nn.Module, group: dist.ProcessGroup, exchange: Exchange, every: int, outer: str | None
    ) -> None:
        self._group, self._exchange, self._every, self._outer = group, exchange, every, outer
        self._plain = Unchanged(group)
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._ids = {id(parameter) for parameter in parameters}
        self._parameters = FlatTensors(parameters)
        buffers = list(module.buffers())
        self._averaged = FlatTensors(buffer for buffer in buffers if buffer.is_floating_point() or buffer.is_complex())
        self._copied = [b for b in buffers if not (b.is_floating_point() or b.is_complex())]
        # The parameters that all ranks had at the last average, flat, at least in float32. They are needed where what
        # the ranks have changed is rounded or goes through an outer optimizer, and taken before the first step.
        self._anchored = outer is not None or not isinstance(exchange, Unchanged)
        self._anchors: list[torch.Tensor] = []
        self._outer_optimizer: torch.optim.Optimizer | None = None
        self.steps = 0  # since the last average that was due
        self._counts: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._loaded = 0  # the steps of this period that were made before the run was resumed
        self._differ = False  # whether this rank has made a step since the replicas were the same
        here = weakref.ref(self)

        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (steps := here()) is not None and steps._trains(optimizer):
                _refuse_parts(optimizer)
                if steps._anchored and not steps._anchors:
                    steps._take_anchors()

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (steps := here()) is not None and steps._trains(optimizer):
                steps._count(optimizer)

        for handle in (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)):
            weakref.finalize(self, handle.remove)

    def _trains(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(id(parameter) in self._ids for group in optimizer.param_groups for parameter in group["params"])

    def _count(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step. Of several optimizers the one with the fewest counts, unless it is unused for K steps."""
        self._differ = True
        self._counts[optimizer] = self._counts.get(optimizer, self._loaded) + 1
        self.steps = min(self._counts.values())
        if self.steps >= self._every or self._counts[optimizer] >= 2 * self._every:
            self._end_period()

    @torch.no_grad()
    def _end_period(self) -> None:
        flats = self._parameters.take()
        if self._anchored:
            changes = [flat - anchor for flat, anchor in zip(flats, self._anchors, strict=True)]
            self._exchange.mean_(changes, self._parameters.shapes)
            self._move_anchors(changes)
            for flat, anchor in zip(flats, self._anchors, strict=True):
                flat.copy_(anchor)
        else:
            self._exchange.mean_(flats, self._parameters.shapes)
        self._parameters.give()
        self._average_buffers()
        self._differ, self.steps, self._loaded = False, 0, 0
        self._counts.clear()

    def _take_anchors(self) -> None:
        flats = self._parameters.take()
        self._anchors = [flat.to(torch.promote_types(flat.dtype, torch.float32), copy=True) for flat in flats]

    def _move_anchors(self, changes: Sequence[torch.Tensor]) -> None:
        if self._outer is None:
            for anchor, change in zip(self._anchors, changes, strict=True):
                anchor += change
            return
        if self._outer_optimizer is None:
            self._outer_optimizer = torch.optim.SGD(self._anchors, **OUTER[self._outer])
        for anchor, change in zip(self._anchors, changes, strict=True):
            anchor.grad = change.neg_()
        self._outer_optimizer.step()
        for anchor in self._anchors:
            anchor.grad = None

    def _average_buffers(self) -> None:
        if self._averaged.flats:
            self._plain.mean_(self._averaged.take(), self._averaged.shapes)
            self._averaged.give()
        for buffer in self._copied:
            dist.broadcast(buffer, group=self._group, group_src=0)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Give every replica the mean of all, within a period; the period goes on. Every rank must call it."""
        device = self._parameters.flats[0].device
        differ = torch.tensor([int(self._differ)], device=device)
        dist.all_reduce(differ, op=dist.ReduceOp.MAX, group=self._group)
        if not differ.item():
            return
        self._plain.mean_(self._parameters.take(), self._parameters.shapes)
        self._parameters.give()
        self._average_buffers()
        self._differ = False

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beside the parameters; the same on every rank."""
        momentum = []
        if self._outer_optimizer is not None:
            momentum = [self._outer_optimizer.state[anchor]["momentum_buffer"].clone() for anchor in self._anchors]
        anchors = [anchor.clone() for anchor in self._anchors]
        return {"steps": self.steps, "outer": self._outer, "anchors": anchors, "momentum": momentum}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from a :meth:`state_dict`; None begins a period with the parameters as they are now."""
        self._anchors, self._outer_optimizer = [], None
        self._counts.clear()
        self._differ, self.steps, self._loaded = False, 0, 0
        if state is None:
            return
        self.steps = self._loaded = state["steps"]
        if not (self._anchored and state["anchors"]):
            return
        device = [flat.device for flat in self._parameters.flats]
        self._anchors = [anchor.clone().to(place) for anchor, place in zip(state["anchors"], device, strict=True)]
        if self._outer is not None and self._outer == state["outer"] and state["momentum"]:
            self._outer_optimizer = torch.optim.SGD(self._anchors, **OUTER[self._outer])
            for anchor, momentum in zip(self._anchors, state["momentum"], strict=True):
                self._outer_optimizer.state[anchor]["momentum_buffer"] = momentum.clone().to(anchor.device)


def _refuse_parts(optimizer: torch.optim.Optimizer) -> None:
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if zero is not None and isinstance(optimizer, zero.ZeroRedundancyOptimizer):
        raise ArgumentError(
            "ZeroRedundancyOptimizer updates a part of the parameters on each rank, from gradients that all ranks have "
            "averaged, and with sync_every none are; use a plain optimizer, or leave sync_every out"
        )


@torch.no_grad()
def average_optimizer(optimizer: torch.optim.Optimizer, group: dist.ProcessGroup) -> None:
    """Give every rank the mean of the optimizers' states, so that one of them can be saved. Every rank must call it.

    Averaged are those tensors of floating point that all ranks have for a parameter. Others, such as counts of steps,
    are the same on all ranks.
    """
    tensors: dict[tuple[int, str, tuple[int, ...], str], torch.Tensor] = {}
    parameters = [parameter for own in optimizer.param_groups for parameter in own["params"]]
    for number, parameter in enumerate(parameters):
        for key, tensor in optimizer.state.get(parameter, {}).items():
            if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.is_floating_point():
                tensors[number, key, tuple(tensor.shape), str(tensor.dtype)] = tensor
    have: list[Any] = [None] * group.size()
    dist.all_gather_object(have, list(tensors), group)
    common = set(have[0]).intersection(*have[1:])
    flat = FlatTensors(tensor for name, tensor in tensors.items() if name in common)
    Unchanged(group).mean_(flat.take(), flat.shapes)
    flat.give()
