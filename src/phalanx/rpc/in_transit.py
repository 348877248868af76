"""What must stay alive while a message is on its way, and what must be settled before its receiver goes on.

A reference to a remote object that travels from A to B is held by A until B's own hold is known to the object's owner.
So the layer that knows about references notes them here while a message is encoded or decoded, and the agent, which
knows when a message has been received, keeps and settles them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["Kept", "arrived", "keep", "receiving", "sending"]

T = TypeVar("T")

# A thing that a receiver relies on, and what is to be called when the receiver of an answer has made use of it.
Kept = tuple[Any, Callable[[], object] | None]


class _Local(threading.local):
    kept: list[Kept] | None = None
    to_settle: list[Callable[[], None]] | None = None


_local = _Local()


def keep(thing: Any, taken: Callable[[], object] | None = None) -> None:
    """Note, while a message is encoded on this thread, what its receiver relies on until it has settled.

    Args:
        thing: stays alive until then.
        taken: is called then if the message is an answer for which its caller still waited.
    """
    if _local.kept is not None:
        _local.kept.append((thing, taken))


def arrived(settle: Callable[[], None]) -> None:
    """Note, while a message is decoded on this thread, what is to be called before its receiver goes on."""
    if _local.to_settle is None:
        settle()
    else:
        _local.to_settle.append(settle)


def sending(encode: Callable[..., T], *arguments: Any) -> tuple[T, list[Kept]]:
    """What ``encode(*arguments)`` returns, and what :func:`keep` was called with meanwhile."""
    kept: list[Kept] = []
    before, _local.kept = _local.kept, kept
    try:
        return encode(*arguments), kept
    finally:
        _local.kept = before


def receiving(decode: Callable[..., T], *arguments: Any) -> tuple[T, list[Callable[[], None]]]:
    """What ``decode(*arguments)`` returns, and what :func:`arrived` was called with meanwhile."""
    to_settle: list[Callable[[], None]] = []
    before, _local.to_settle = _local.to_settle, to_settle
    try:
        return decode(*arguments), to_settle
    finally:
        _local.to_settle = before
