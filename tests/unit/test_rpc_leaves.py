"""Backward passes that reach the same leaf at the same time."""

from __future__ import annotations

import inspect
import threading
import time
from typing import Any

import torch

from phalanx.rpc.autograd import gates
from phalanx.rpc.autograd.leaves import Leaves

_HOOKS = inspect.getattr_static(torch.Tensor, "_post_accumulate_grad_hooks")


class _SlowToAnswer(torch.nn.Parameter):
    """Threads that ask at the same time whether it has hooks get the same answer."""

    @property
    def _post_accumulate_grad_hooks(self) -> Any:
        hooks = _HOOKS.__get__(self)
        if hooks is None:
            time.sleep(0.2)
        return hooks

    @_post_accumulate_grad_hooks.setter
    def _post_accumulate_grad_hooks(self, hooks: Any) -> None:
        _HOOKS.__set__(self, hooks)


def test_passes_that_begin_together_on_a_leaf_end() -> None:
    leaf = _SlowToAnswer(torch.ones(3))
    roots = [(leaf * factor).sum() for factor in (1.0, 2.0, 3.0)]
    passes = [Leaves() for _ in roots]
    together = threading.Barrier(len(roots))
    watched = threading.Barrier(len(roots))

    def run(root: torch.Tensor, leaves: Leaves) -> None:
        node: Any = root.grad_fn.next_functions[0][0].next_functions[0][0]  # type: ignore[union-attr]
        together.wait(60)
        leaves.watch([node])
        watched.wait(60)
        gates.run([], [root], lambda: leaves.begin(torch._C._current_graph_task_id()), keep_graph=False)

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in zip(roots, passes, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), "a pass waits for a leaf that another one keeps locked"
    for leaves in passes:
        leaves.end()
    assert leaf.grad is None
    for leaves, factor in zip(passes, (1.0, 2.0, 3.0), strict=True):
        torch.testing.assert_close(leaves.gradients[leaf], torch.full((3,), factor))
