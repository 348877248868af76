"""A store made of MPI, for the few entries that the ranks of a Gloo group exchange while they make it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

__all__ = ["MpiStore"]


class MpiStore(Store):
    """Each rank writes its keys, then reads the others'. The first read of a key that is not there brings them all.

    That is one collective, so all ranks must read others' keys, or none, and write before they read. Making a Gloo
    group does just that: every rank publishes its address and reads everybody else's.
    """

    def __init__(self, comm: Any) -> None:
        super().__init__()
        self._comm = comm
        self._entries: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._entries[key] = bytes(value)

    def get(self, key: str) -> bytes:
        if key not in self._entries:
            self._exchange()
        return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if any(key not in self._entries for key in keys):
            self._exchange()

    def check(self, keys: list[str]) -> bool:
        return all(key in self._entries for key in keys)

    def _exchange(self) -> None:
        for entries in self._comm.allgather(self._entries):
            self._entries.update(entries)
