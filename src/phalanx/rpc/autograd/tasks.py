"""Which distributed backward pass a function of the graph runs for.

One run of torch's autograd engine has a number, which torch knows on each of the engine's threads. A run of a
distributed pass enters itself under its number when its first function runs.

``_runs`` is written by the thread that drives a run, at its beginning and at its end, and read by hooks on the engine's
threads in between; each access is one operation on a dictionary.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

__all__ = ["Run", "current", "enter", "leave"]


class Run(Protocol):
    """A distributed pass on this worker, as functions of the graph see it."""

    def hand_back(self, recv: Any, place: int, gradient: torch.Tensor | None) -> None:
        """Take the gradient of one tensor of a received message, which its sender gets."""


_runs: dict[int, Run] = {}


def enter(run: Run) -> int:
    """Say, within a function of the graph, which pass it runs for. Returns the number for ``leave``."""
    number = torch._C._current_graph_task_id()
    _runs[number] = run
    return number


def leave(number: int) -> None:
    """The run of the engine has ended."""
    _runs.pop(number, None)


def current() -> Run | None:
    """The pass for which the engine runs on this thread; None if it runs for none."""
    return _runs.get(torch._C._current_graph_task_id())
