"""Errors of the all-reduces that DDP queues during backward, raised out of ``backward()`` with their own types.

DDP waits for its all-reduces in C++, on futures, and of an error from Python torch's future keeps only the text:
``RuntimeError: Got the following error when running the callback: …``. So a callback of the backward pass, which runs
before DDP's own because it is queued before it, waits for the operations first, and raises the error itself.

Only DDP's operations are waited for: a program may leave one under way when its backward ends, because other ranks join
it later. An error that a communication hook has had from its own wait is not raised again: a hook that keeps it lets
the backward pass end, as torchft's does, which gives up the step afterwards and goes on with the ranks that are left.
"""

from __future__ import annotations

import threading
from types import FrameType

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.autograd.graph import _engine_run_backward

from phalanx.c10d.work import PhalanxWork

__all__ = ["raise_in_backward"]

_BETWEEN = ("phalanx.c10d.", "torch._ops")  # the modules between a caller and the process group


class _Current(threading.local):
    """The backward pass of which this thread last queued operations; the thread alone uses it.

    Attributes:
        graph_task: its number.
        works: its operations that have not been waited for.
    """

    graph_task = -1
    works: list[PhalanxWork]


_current = _Current()


def raise_in_backward(work: PhalanxWork, caller: FrameType | None) -> None:
    """If DDP has queued this operation, have its error raised at the end of the backward pass.

    Args:
        work: the operation.
        caller: the frame that queued it.
    """
    graph_task = torch._C._current_graph_task_id()
    if graph_task < 0 or not _of_ddp(caller):
        return
    if _current.graph_task != graph_task:
        works: list[PhalanxWork] = []
        _current.graph_task, _current.works = graph_task, works
        Variable._execution_engine.queue_callback(lambda: _wait_for(works))
    _current.works.append(work)


def _of_ddp(frame: FrameType | None) -> bool:
    """Whether DDP's reducer made the call: directly from C++, or by a communication hook."""
    hook: FrameType | None = None
    while frame is not None and frame.f_code is not _engine_run_backward.__code__:
        if not frame.f_globals.get("__name__", "").startswith(_BETWEEN):
            hook = frame
        frame = frame.f_back
    while frame is not None:
        frame = frame.f_back
        if frame is not None and frame.f_code is _engine_run_backward.__code__:
            return False  # a backward inside a backward (a checkpoint) ends before DDP waits
    return hook is None or any(isinstance(value, dist.GradBucket) for value in hook.f_locals.values())


def _wait_for(works: list[PhalanxWork]) -> None:
    try:
        for work in works:
            if not work.told:
                work.wait()
    finally:
        works.clear()
