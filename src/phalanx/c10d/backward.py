"""Operations that a hook of autograd begins and nobody waits for: they have run when their backward pass returns.

``DistributedDataParallel(delay_all_reduce_named_params=...)`` reduces gradients in a hook, asynchronously, and drops
the handle. The optimizer then reads them without any wait. Whether it reads them reduced is a race in torch, which a
backend that begins at once wins almost always; this one begins a small operation when somebody waits for it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from phalanx.c10d.operation import Operation
from phalanx.c10d.progress import Progress

__all__ = ["BackwardPasses", "current_pass"]

current_pass = torch._C._current_graph_task_id  # the number of this thread's backward pass; negative outside of one


class BackwardPasses:
    """The operations of one group that began in backward passes under way.

    ``_begun`` is added to by the threads that run a pass's hooks, and taken from by the one that ends the pass, when no
    hook of it runs any more. Passes may run side by side, each with a key of its own.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._begun: dict[int, list[tuple[weakref.ref[Any], Operation]]] = {}

    def begun(self, work: Any) -> None:
        """Note an operation that was begun in this thread's backward pass, by its handle."""
        number = current_pass()
        if number not in self._begun:
            self._begun[number] = []
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._end(number))
        self._begun[number].append((weakref.ref(work), work.operation))

    def _end(self, number: int) -> None:
        """Wait for the operations whose handles are gone. A handle that still exists is its owner's to wait for."""
        for handle, operation in self._begun.pop(number, ()):
            if handle() is None and not operation.done:
                self._progress.help(operation)
                operation.wait_done(None)
                if operation.error is not None:
                    raise operation.error
