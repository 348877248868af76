"""What this process has asked another process for, where its launcher can read it.

The launcher's notes about ranks that hang, or have been killed, say it: neither can be asked then.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["publish", "publish_by"]

_publish: Callable[[str], None] | None = None


def publish_by(function: Callable[[str], None]) -> None:
    """Have ``function`` called with each text; the launcher does so in its ranks."""
    global _publish
    _publish = function


def publish(text: str) -> None:
    """Let the launcher know what this process has asked for, such as ``worker1 for add (train.py:12)``.

    An empty text says that there is nothing any more. Under another launcher nothing happens.
    """
    if _publish is not None:
        _publish(text)
