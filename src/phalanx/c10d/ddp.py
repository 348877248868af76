"""Support for ``DistributedDataParallel`` beyond a backend's calls.

- Operations of a backward pass have run when it returns, and their errors are raised with their own types.
- Parameters that took no part in a backward pass are named.
- DDP's built-in hooks are torch's own in Python: those in C++ insist on futures that C++ has completed.
"""

from __future__ import annotations

import re
import weakref
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, get_debug_level, set_debug_level

from phalanx.c10d.progress import Operation, Progress
from phalanx.c10d.work import PhalanxWork
from phalanx.errors import UnusedParameters

__all__ = ["BackwardPasses", "current_pass", "serve_reducers"]

# -- the end of a backward pass --------------------------------------------------------------------

current_pass = torch._C._current_graph_task_id  # the number of this thread's backward pass; negative outside of one


class BackwardPasses:
    """The operations of one group that began in backward passes under way, ended when their pass returns.

    Only those whose handle is gone are waited for: a handle that exists is its owner's to wait for. DDP's reducer drops
    its handles and waits in C++ for futures, of whose errors torch keeps only the text; the callback here is queued
    first. ``delay_all_reduce_named_params`` drops them too, and nobody waits before the optimizer reads the gradients.
    An error that a wait has raised already, in a communication hook, say, is not raised again.

    ``_begun`` has a key for each pass. The threads that run a pass's hooks add to it, the one that ends it takes it.
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
        for handle, operation in self._begun.pop(number, ()):
            if handle() is None and not operation.told:
                PhalanxWork(self._progress, operation).wait()


# -- torch's reducer of one replica ----------------------------------------------------------------

_GROUP_AT, _NAMES_AT = 3, 8  # among the arguments of torch's Reducer, on torch 2.13 to 2.15
_register_own: Any = dist._register_builtin_comm_hook


class _ServedReducer(dist.Reducer):  # type: ignore[misc, name-defined]
    """torch's reducer of one replica, which says by their names which parameters had no gradient.

    DDP finds at its next forward that a gradient never came, and numbers the parameters. It names them too if torch's
    debug level is above OFF while its reducer is made, which costs nothing later. The error begins with the names,
    because the other ranks, or their launcher, show its first line.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.group = arguments[_GROUP_AT] if len(arguments) > _GROUP_AT else None
        self._names: list[str] = []
        level = get_debug_level()
        if level == DebugLevel.OFF:
            names = arguments[_NAMES_AT] if len(arguments) > _NAMES_AT else None
            self._names = [names[index] for index in sorted(names)] if isinstance(names, dict) else []
            set_debug_level(DebugLevel.INFO)
        try:
            super().__init__(*arguments, **options)
        finally:
            set_debug_level(level)

    def _rebuild_buckets(self) -> Any:
        try:
            return super()._rebuild_buckets()
        except RuntimeError as error:
            words = set(re.split(r"[\s,]+", str(error)))
            named = [name for name in self._names if name in words]
            if not named or self.group is None:
                raise
            raise UnusedParameters.without_gradient(self.group.rank(), named, str(error)) from None


def _register_builtin_comm_hook(reducer: Any, kind: Any) -> None:
    """Register a built-in hook of DDP; on a group that is written in Python torch's own in Python."""
    group = getattr(reducer, "group", None)
    if group is None or not type(group).__module__.startswith("phalanx."):
        _register_own(reducer, kind)
        return
    # Not before, because it imports torch's compiler, which DDP has done by now.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    is_plain = kind == dist.BuiltinCommHookType.ALLREDUCE
    hook = default_hooks.allreduce_hook if is_plain else default_hooks.fp16_compress_hook
    dist._register_comm_hook(reducer, group, hook)


@cache
def serve_reducers() -> None:
    """Have DDP's reducers served as above, from now on, in this process."""
    setattr(dist, "Reducer", _ServedReducer)  # noqa: B010
    setattr(dist, "_register_builtin_comm_hook", _register_builtin_comm_hook)  # noqa: B010
