"""Gradients of leaves, kept apart for each backward pass instead of in ``.grad``.

The autograd engine accumulates into ``.grad``, and only it runs the hooks of that step: those of users, and those of
``DistributedDataParallel``, which averages what it finds in ``.grad`` and writes the average there before the engine
returns. So the engine does as it always does, and each pass takes from ``.grad`` what is its own:

- Before a gradient is accumulated, the user's own ``.grad`` is put aside (by the first pass that uses the leaf), or
  what another pass has there is taken out for it. From then until it has been accumulated, the leaf is locked: two
  passes of one process may have reached the same leaf, as on a parameter server.
- When a pass ends, it takes what it has in ``.grad``, with what DDP made of it, and the user's own comes back.

``_Leaf.lock`` guards ``.grad`` and the other attributes. It is taken and released on the engine's thread that runs the
leaf's function, and by a pass that ends; nothing waits for anything else while it holds it. If the engine fails between
the two hooks, the pass releases it when it ends.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch

__all__ = ["Leaves"]


class _Leaf:
    def __init__(self, variable: torch.Tensor) -> None:
        self.variable = variable
        self.lock = threading.Lock()
        self.users = 0
        self.locked_by: Leaves | None = None
        self.owner: Leaves | None = None  # whose gradient is in .grad
        self.kept: torch.Tensor | None = None  # the user's own .grad, while there is an owner


# The leaves that some pass uses, by the id of the variable, which they keep alive. ``_table`` guards them, and is held
# while hooks are registered: torch makes a leaf's table of hooks with the first one, and of two threads that both find
# none, one loses its hook. A pass whose second hook is lost keeps the leaf locked, and others wait for it.
_leaves: dict[int, _Leaf] = {}
_table = threading.Lock()


class Leaves:
    """The leaves of one pass on this worker.

    Attributes:
        gradients: what has been taken so far; all of it once the pass has ended.
    """

    def __init__(self) -> None:
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self._task = -1
        self._leaves: list[_Leaf] = []
        self._hooks: list[Any] = []

    def watch(self, nodes: list[Any]) -> None:
        """Prepare the leaves of these functions, before the engine runs."""
        for node in nodes:
            variable = node.variable
            with _table:
                leaf = _leaves.get(id(variable))
                if leaf is None:
                    leaf = _leaves[id(variable)] = _Leaf(variable)
                leaf.users += 1
                self._leaves.append(leaf)
                self._hooks.append(node.register_prehook(partial(self._before, leaf)))
                if variable.is_leaf:  # else the engine says that it has become part of a graph
                    self._hooks.append(variable.register_post_accumulate_grad_hook(partial(self._after, leaf)))

    def begin(self, task: int) -> None:
        """The engine runs, under this number."""
        self._task = task

    def end(self) -> None:
        """The engine has ended: give every leaf back to its user."""
        for hook in self._hooks:
            hook.remove()
        for leaf in self._leaves:
            if leaf.locked_by is self:
                self._unlock(leaf)
            with leaf.lock:
                if leaf.owner is self:
                    self._take(leaf)
                    leaf.variable.grad, leaf.owner, leaf.kept = leaf.kept, None, None
            with _table:
                leaf.users -= 1
                if not leaf.users:
                    del _leaves[id(leaf.variable)]
        self._leaves, self._hooks = [], []

    def _before(self, leaf: _Leaf, gradients: tuple[torch.Tensor | None, ...]) -> None:
        if torch._C._current_graph_task_id() != self._task or gradients[0] is None:
            return
        leaf.lock.acquire()
        leaf.locked_by = self
        if leaf.owner is None:
            leaf.kept, leaf.variable.grad = leaf.variable.grad, None
        elif leaf.owner is not self:
            leaf.owner._take(leaf)
        leaf.owner = self

    def _after(self, leaf: _Leaf, _: torch.Tensor) -> None:
        if torch._C._current_graph_task_id() == self._task and leaf.locked_by is self:
            self._unlock(leaf)

    def _take(self, leaf: _Leaf) -> None:
        gradient = leaf.variable.grad
        if gradient is not None:
            self.gradients[leaf.variable] = gradient
            leaf.variable.grad = None

    def _unlock(self, leaf: _Leaf) -> None:
        leaf.locked_by = None
        leaf.lock.release()


def add(total: dict[torch.Tensor, torch.Tensor], gradients: dict[torch.Tensor, torch.Tensor]) -> None:
    """Add the gradients of a pass to those of earlier ones."""
    with torch.no_grad():
        for variable, gradient in gradients.items():
            old = total.get(variable)
            if old is None:
                total[variable] = _own(gradient)
            elif old.is_sparse:
                total[variable] = gradient + old
            else:
                old.add_(gradient)


def _own(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient in memory of its own. DDP may keep it in a bucket, which the next pass overwrites."""
    if gradient.layout is not torch.strided or type(gradient) is not torch.Tensor:
        return gradient
    shares = gradient.untyped_storage().nbytes() > gradient.numel() * gradient.element_size()
    return gradient.clone() if shares else gradient
