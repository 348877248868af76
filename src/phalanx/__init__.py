"""Run one PyTorch program as many processes.

This module has the public names and nothing else. They are resolved on first use, because every ``import torch`` on a
machine where Phalanx is installed imports this module (see ``c10d/register.py``), which must cost nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from phalanx import settings
from phalanx.errors import PhalanxError, RankFailed

if TYPE_CHECKING:
    from phalanx.group import Group as Group
    from phalanx.launch.function.call import launch as launch
    from phalanx.marks import label as label
    from phalanx.parallel.shared import empty as empty
    from phalanx.world import World as World
    from phalanx.world import close as close
    from phalanx.world import init as init

__version__ = settings.VERSION
__all__ = ["Group", "PhalanxError", "RankFailed", "World", "__version__", "close", "empty", "init", "label", "launch"]

_HOME = {
    "Group": "phalanx.group",
    "World": "phalanx.world",
    "close": "phalanx.world",
    "empty": "phalanx.parallel.shared",
    "init": "phalanx.world",
    "label": "phalanx.marks",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name == "launch":
        return import_module("phalanx.launch")  # a package that can be called
    raise AttributeError(f"module 'phalanx' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
