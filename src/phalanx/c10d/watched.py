"""Whether somebody watches this thread's operations: a profiler, or one of torch's dispatch modes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import profiler

__all__ = ["Around", "around", "is_watched", "recorded"]

_number_of_modes = torch._C._len_torch_dispatch_stack


def is_watched() -> bool:
    """Whether torch's dispatcher must see a call. Every call pays for this test."""
    return profiler._is_profiler_enabled or _number_of_modes() > 0


class Around(threading.local):
    """What this thread's current call wants done around its operation, whichever thread runs that.

    Attributes:
        wraps: each takes the operation's body and returns a new one.
    """

    wraps: tuple[Callable[[Callable[[], None]], Callable[[], None]], ...] = ()


around = Around()


def recorded(name: str, tensors: Sequence[torch.Tensor], call: Callable[[], Any], asynchronous: bool) -> Any:
    """``call()``, shown by the profiler, if one is on, as an event with the tensors' shapes and bytes.

    Args:
        name: of the event.
        tensors: those that are moved.
        call: starts the operation, or runs it.
        asynchronous: whether the operation goes on after ``call``; then the event ends when the operation has run, or
            if another thread has run it, when this one has waited for it. A profiler belongs to a thread: what ends on
            another one has no end there, and is shown as if it had ended with what was under way when it began.
    """
    if not profiler._is_profiler_enabled:
        return call()
    nbytes = sum(t.numel() * t.element_size() for t in tensors if t.layout == torch.strided)
    event = torch._C._profiler._RecordFunctionFast(name, list(tensors), {"nbytes": nbytes})
    event.__enter__()
    ended, caller = False, threading.get_ident()

    def end() -> None:
        nonlocal ended
        if not ended and threading.get_ident() == caller:
            ended = True
            event.__exit__(None, None, None)

    def ending(body: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                body()
            finally:
                end()

        return run

    before, going = around.wraps, False
    if asynchronous:
        around.wraps = (*before, ending)
    try:
        result = call()
        operation = getattr(result, "operation", None) if asynchronous else None
        if operation is not None:
            operation.waited = end
        going = asynchronous
        return result
    finally:
        around.wraps = before
        if not going:
            end()
