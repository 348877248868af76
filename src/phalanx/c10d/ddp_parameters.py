"""Names for parameters that took no part in a backward pass.

DDP finds at its next forward that a gradient never came, and raises an error that numbers the parameters. It names
them too if torch's debug level is above OFF while DDP's reducer is made. That costs nothing later, so the level is
raised for that moment: for our groups, and under ``phalanx run`` for those of torch's own backends too. The error that
is raised then begins with the names, because the other ranks, which wait for those gradients, or their launcher, show
its first line.
"""

from __future__ import annotations

import re
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, get_debug_level, set_debug_level

from phalanx.c10d.base import BaseProcessGroup
from phalanx.errors import UnusedParameters

__all__ = ["name_parameters"]

_GROUP_AT, _NAMES_AT = 3, 8  # among the arguments of torch's Reducer, on torch 2.13 to 2.15

_kinds: list[type[dist.ProcessGroup]] = [BaseProcessGroup]  # the groups whose reducers name them

_Reducer: Any = getattr(dist, "Reducer", object)


class _NamingReducer(_Reducer):  # type: ignore[misc]
    """torch's reducer of one replica, which says by their names which parameters had no gradient."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        group = arguments[_GROUP_AT] if len(arguments) > _GROUP_AT else None
        self._rank, self._names = -1, list[str]()
        level = get_debug_level()
        if isinstance(group, dist.ProcessGroup) and isinstance(group, tuple(_kinds)) and level == DebugLevel.OFF:
            names = arguments[_NAMES_AT] if len(arguments) > _NAMES_AT else None
            self._rank = group.rank()
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
            if not named:
                raise
            raise UnusedParameters.without_gradient(self._rank, named, str(error)) from None


def name_parameters(*, of_any_group: bool = False) -> None:
    """Have the reducers of this process name the parameters. Called whenever a group is made.

    Args:
        of_any_group: also those of groups of torch's own backends, from now on.
    """
    if of_any_group and dist.ProcessGroup not in _kinds:
        _kinds.append(dist.ProcessGroup)
    if _Reducer is not object:
        setattr(dist, "Reducer", _NamingReducer)  # noqa: B010
