"""Torch's hooks on collectives: its flight recorder, its check for NaN.

From torch 2.14 on, hooks belong to a process group and are called by torch's dispatcher, past which our groups are
called (docs/design/transports.md). A hooked group has every call go through it (``collectives.front``): torch calls the
hooks, and then the group's backend, which does what an unhooked group would have done at once. A group is hooked if the
environment asks for hooks when it is made: torch's recorder is on by default, and would be paid by every small call.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Backend

from phalanx.c10d.collectives import Collectives
from phalanx.c10d.dispatcher import OPERATIONS, begin, here
from phalanx.c10d.work import DoneWork

__all__ = ["HookedBackend", "PythonBackend", "hooks_are_wanted"]

RECORDER_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the first that is set holds, as in torch
NAN_CHECK = "TORCH_DIST_NAN_CHECK"


def hooks_are_wanted() -> bool:
    """Return whether torch's own variables ask for its hooks, and this torch has them."""
    size = next((os.environ[name] for name in RECORDER_SIZES if os.environ.get(name)), "0")
    are_asked_for = os.environ.get(NAN_CHECK) == "1" or (size.isdigit() and int(size) > 0)
    return are_asked_for and hasattr(c10d, "FlightRecorderHook")


class PythonBackend(Backend):
    """A backend of a process group, as torch's dispatcher calls it. A subclass has the ``group`` that it stands for."""

    # torch asks for these without end where a class written in Python leaves them to it.
    supports_coalescing = supports_reconfigure = supports_shrinking = supports_splitting = supports_window = False
    _supports_time_estimate = False
    group: Any

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        name: str = self.group.getBackendName()
        return name


class HookedBackend(PythonBackend):
    """The group's methods as they are without hooks, for torch's dispatcher, which has called the hooks."""

    def __init__(self, group: Any) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group


def _of_backend(name: str) -> Callable[..., Any]:
    body, has_options = getattr(Collectives, name), OPERATIONS[name].options is not None

    def call(self: HookedBackend, *arguments: Any) -> Any:
        given, opts = (arguments[:-1], arguments[-1]) if has_options else (arguments, None)
        dispatched, begun = here.call, partial(begin, self.group, name, body, given, opts)
        if dispatched is None or dispatched.group is not self.group:
            return begun() or DoneWork([])
        return dispatched.run(begun, given)

    call.__name__ = name
    return call


for _name in OPERATIONS:
    setattr(HookedBackend, _name, _of_backend(_name))
