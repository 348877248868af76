"""What this process's flight recorder knows of the operation that an error about other ranks has ended."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TypeVar

from phalanx.diagnosis import recorder
from phalanx.diagnosis.records import copy_memory, is_message
from phalanx.errors import CollectiveMismatch, CollectiveTimeout, PeerLost
from phalanx.native.core import SeenRecord

__all__ = ["with_own_wait"]

_Error = TypeVar("_Error", bound=BaseException)


def with_own_wait(error: _Error) -> _Error:
    """Add to an error in which operation of which group this process was, how long, and which rank is to blame.

    For calls that differ it names no rank to blame: any of them may be the one that was meant.

    It looks at the oldest collective that is under way, or else at the oldest message, or at the last operation if that
    has just failed. Nothing is added without a recorder, for another error, or if operations of several groups are
    under way, since then any of them may be the one that failed.
    """
    memory = recorder.own_memory()
    if not memory or not isinstance(error, (PeerLost, CollectiveTimeout, CollectiveMismatch)):
        return error
    copy = copy_memory(memory)
    own = None if copy is None else _operation(copy.seen)
    if copy is None or own is None:
        return error
    group = copy.group(own.group)
    error.group, error.sequence = group.name, own.in_group
    error.elapsed_s = error.elapsed_s or ((own.left_ns or time.monotonic_ns()) - own.entered_ns) / 1e9
    if isinstance(error, CollectiveMismatch):
        return error
    if error.rank < 0 and 0 <= error.group_rank < len(group.ranks):
        error.rank = group.ranks[error.group_rank]
    return error


def _operation(copied: Iterable[SeenRecord]) -> SeenRecord | None:
    seen = list(copied)
    under_way = [one for one in seen if not one.left_ns]
    if len({one.group for one in under_way}) > 1:
        return None
    if under_way:
        return min(under_way, key=lambda one: (is_message(one), one.number))
    last = max(seen, key=lambda one: one.number, default=None)
    return last if last is not None and last.failed else None
