"""A look at one key of a store, whoever keeps the store."""

from __future__ import annotations

from torch._C._distributed_c10d import Store

__all__ = ["peek"]

_NOTHING = b"\x00nothing"  # what no key has as its value


def peek(store: Store, key: str) -> bytes | None:
    """The value of a key, or None if it is not there.

    One request, which never waits. A ``get`` after a ``check`` would wait for a key that was deleted in between.
    """
    value = store.compare_set(key, _NOTHING.decode(), _NOTHING.decode())
    return None if value == _NOTHING else value
