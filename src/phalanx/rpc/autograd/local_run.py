"""One run of torch's autograd engine over a worker's part of a distributed backward pass, which waits where it must.

The graph of a worker has no edges to those of others, but depends on them: the gradients of a sent tensor come back
only when the receiver's part has run, which may need gradients of tensors that this worker received later. It is one
run all the same, so every function and hook runs once, with the whole of its gradient.

**Gates.** The sent messages that take part are opened one after the other, the latest first, each by a *gate*: a
function that waits for the gradients of its message and gives them to the message's handles. The gates form a chain of
the lowest priority, so the engine runs everything else that can run before it enters the next one.

A gate never waits for itself. Functions point to older functions only, so the gradients of a received message need what
came after it: the roots, and messages sent later. When a gate is entered, those of all later messages have been passed,
so what others need from this worker for the gate's message has been handed back. Every wait is for something that came
later in real time, and there is no circle in time.

**Leaves.** The engine accumulates into ``.grad`` and runs the hooks of that step: users', and those of
``DistributedDataParallel``, which writes its average there. So each pass lets it, and takes from ``.grad`` what is its
own: the user's ``.grad`` is put aside before the first gradient comes, and put back when the pass ends.

| field | written by | read by | guard |
|---|---|---|---|
| ``_leaves`` | passes that begin | the same | ``_table`` |
| ``.grad`` and the rest of a ``_Leaf`` | engine's threads, and passes that end | the same | ``_Leaf.lock`` |
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from phalanx.rpc.autograd.graph import START, Send, runs

__all__ = ["Leaves", "add", "run_graph"]


def run_graph(
    part: Any,
    leaves: Leaves,
    gates: Sequence[tuple[Send, Sequence[int]]],
    roots: Sequence[torch.Tensor],
    *,
    keep_graph: bool,
) -> None:
    """Run the engine over a worker's part of the graph.

    Args:
        part: the ``Pass``.
        leaves: the leaves that it reaches.
        gates: the sent messages, the latest first, with those of their tensors that take part.
        roots: scalars whose gradients are 1.
        keep_graph: whether the graph can be used again.
    """
    try:
        with torch.enable_grad():
            chain = START
            for send, places in reversed(gates):
                chain = _apply_gate(send, places, chain, *(send.handles[place] for place in places))
                if chain.grad_fn is not None:
                    chain.grad_fn._set_sequence_nr(0)
            # Weakly: the pass may keep an error whose traceback keeps the graph, and Python's garbage collection does
            # not see from tensors to functions.
            first = _apply_begin(weakref.ref(part), weakref.ref(leaves), chain, *roots)
        torch.autograd.backward((first,), retain_graph=keep_graph)
    finally:
        runs.pop(leaves.task, None)


class _Begin(torch.autograd.Function):
    """The first function of a run."""

    @staticmethod
    def forward(ctx: Any, part: Any, leaves: Any, _: torch.Tensor, *roots: torch.Tensor) -> torch.Tensor:
        ctx.part, ctx.leaves = part, leaves
        ctx.gradients = [torch.ones_like(root, memory_format=torch.contiguous_format) for root in roots]
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        task = torch._C._current_graph_task_id()
        runs[task] = ctx.part()
        ctx.leaves().task = task
        return (None, None, None, *ctx.gradients)


class _Gate(torch.autograd.Function):
    """Wait for the gradients of a message."""

    @staticmethod
    def forward(ctx: Any, send: Send, places: Sequence[int], _: torch.Tensor, *handles: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.send, ctx.places = send, places
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        part = runs[torch._C._current_graph_task_id()]
        while not part.has_handed_back(ctx.send):
            _let_run()
        gradients = part.wait_for(ctx.send)
        return (None, None, None, *(gradients[place] for place in ctx.places))


# torch does not type ``apply``.
_apply_begin: Any = _Begin.apply
_apply_gate: Any = _Gate.apply


def _let_run() -> None:
    """Let the engine run, on this thread, functions that those on an accelerator's thread have made possible.

    A backward pass within a function runs whatever is ready on its thread while it waits for the accelerator.
    """
    device = torch.accelerator.current_accelerator()
    with torch.enable_grad():
        there = torch.zeros((), device="cpu", requires_grad=True).to(device or "cpu").mul(1)
        back = there.to("cpu").mul(1)
    torch.autograd.backward(back)


class _Leaf:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.locked_by: Leaves | None = None
        self.owner: Leaves | None = None  # whose gradient is in .grad
        self.kept: torch.Tensor | None = None  # the user's own .grad, while there is an owner


# The leaves that passes have used, by variable. ``_table`` is held while hooks are registered as well: of two threads
# that find a leaf without hooks, one would lose its own.
_leaves: MutableMapping[torch.Tensor, _Leaf] = WeakTensorKeyDictionary()
_table = threading.Lock()


class Leaves:
    """The leaves of one pass on this worker.

    A leaf is locked from before a gradient is accumulated until it has been, because two passes of one process may
    reach it, as on a parameter server.

    Attributes:
        gradients: what has been taken so far; all of it once the pass has ended.
        task: the number of the engine's run.
    """

    def __init__(self) -> None:
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.task = -1
        self._leaves: list[tuple[torch.Tensor, _Leaf]] = []
        self._hooks: list[Any] = []

    def watch(self, nodes: list[Any]) -> None:
        """Prepare the leaves of these functions, before the engine runs."""
        for node in nodes:
            variable = node.variable
            with _table:
                leaf = _leaves.setdefault(variable, _Leaf())
                self._leaves.append((variable, leaf))
                self._hooks.append(node.register_prehook(partial(self._before, variable, leaf)))
                if variable.is_leaf:  # else the engine says that it has become part of a graph
                    self._hooks.append(variable.register_post_accumulate_grad_hook(partial(self._after, leaf)))

    def end(self) -> None:
        """The engine has ended: give every leaf back to its user."""
        for hook in self._hooks:
            hook.remove()
        for variable, leaf in self._leaves:
            if leaf.locked_by is self:  # the engine has failed between the two hooks
                self._unlock(leaf)
            with leaf.lock:
                if leaf.owner is self:
                    self._take(variable)
                    variable.grad, leaf.owner, leaf.kept = leaf.kept, None, None
        self._leaves, self._hooks = [], []

    def _before(self, variable: torch.Tensor, leaf: _Leaf, gradients: tuple[torch.Tensor | None, ...]) -> None:
        if torch._C._current_graph_task_id() != self.task or gradients[0] is None:
            return
        leaf.lock.acquire()
        leaf.locked_by = self
        if leaf.owner is None:
            leaf.kept, variable.grad = variable.grad, None
        elif leaf.owner is not self:
            leaf.owner._take(variable)
        leaf.owner = self

    def _after(self, leaf: _Leaf, _: torch.Tensor) -> None:
        if torch._C._current_graph_task_id() == self.task and leaf.locked_by is self:
            self._unlock(leaf)

    def _take(self, variable: torch.Tensor) -> None:
        if variable.grad is not None:
            self.gradients[variable] = variable.grad
            variable.grad = None

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
