"""What each rank of a group says of itself in the store, before the group can communicate otherwise."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import Store

from phalanx.errors import InitializationError
from phalanx.words import format_limit, format_named

__all__ = ["said_by_all"]


def said_by_all(store: Store, name: str, rank: int, size: int, timeout: timedelta, value: str) -> list[str]:
    """Say something, and wait for what the others say. Every rank of the group calls it.

    Args:
        store: the group's own part of the job's store.
        name: what is being said, in a word; no other call uses it there.
        rank: this process's rank in the group.
        size: the number of ranks.
        timeout: how long to wait for the others.
        value: what this rank says.

    Returns:
        What the ranks say, in their order.

    Raises:
        InitializationError: a rank has gone, or has said nothing in time; the message names it.
    """
    store.set(f"{name}/{rank}", value)
    keys = [f"{name}/{other}" for other in range(size)]
    try:
        store.wait(keys, timeout)
    except InitializationError:
        raise  # a rank has gone
    except RuntimeError as error:
        absent = [other for other, key in enumerate(keys) if not store.check([key])]
        raise InitializationError(
            f"while this group over several hosts was made, {format_named('rank', absent)} said nothing for "
            f"{format_limit(timeout.total_seconds())} (in the step {name!r}); look at the output of each such rank"
        ) from error
    return [value.decode() for value in store.multi_get(keys)]
