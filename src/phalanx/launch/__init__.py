"""Starting ranks: ``phalanx.launch(function, args, n=4)``, and what ``phalanx run`` is made of.

The name is a function to users and a package to Python, so the package can be called; what that does, takes and
returns says ``help(phalanx.launch.function.call.launch)``.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

__all__: list[str] = []


class _CallablePackage(ModuleType):
    def __call__(self, *arguments: Any, **named: Any) -> list[Any]:
        """Call a function on n ranks: see ``help(phalanx.launch.function.call.launch)``."""
        # Imported here, because every start of ``phalanx run`` loads this file.
        from phalanx.launch.function.call import launch

        return launch(*arguments, **named)


sys.modules[__name__].__class__ = _CallablePackage


def __getattr__(name: str) -> Any:
    if name != "__signature__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # For inspect.signature(phalanx.launch), which prompts and notebooks show.
    import inspect

    from phalanx.launch.function.call import launch

    return inspect.signature(launch)
