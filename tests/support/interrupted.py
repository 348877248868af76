"""A store that does something else before one of the requests to it, such as what another rank does at that moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import HashStore, Store

__all__ = ["Interrupted"]


class Interrupted(Store):
    """A store that does something else, once, before one of the requests to it. C++ may use it as well.

    Args:
        whole: where the keys are.
        counts: whether a request for a key is one of those that are counted; by default all are.

    Attributes:
        all: where the keys are.
        requests_until: how many requests come before that; negative if there is none to come.
        something: what is done then.
        log: what was asked, each with its keys.
    """

    def __init__(self, whole: Store | None = None, counts: Callable[[str], bool] = lambda key: True) -> None:
        super().__init__()
        self.all: Any = HashStore() if whole is None else whole
        self.requests_until = -1
        self.something: Callable[[], None] = lambda: None
        self.log: list[tuple[str, tuple[str, ...]]] = []
        self._counts = counts

    def _count(self, name: str, *keys: str) -> Any:
        if self._counts(keys[0]):
            self.requests_until -= 1
            if self.requests_until == -1:
                self.something()
        self.log.append((name, keys))
        return self.all

    def add(self, key: str, amount: int) -> int:
        return int(self._count("add", key).add(key, amount))

    def set(self, key: str, value: str | bytes) -> None:
        self._count("set", key).set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._count("get", key).get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(self._count("get", *keys).multi_get(keys))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return bytes(self._count("compare_set", key).compare_set(key, expected, desired))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._count("check", *keys).check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._count("wait", *keys).wait(list(keys), *(() if timeout is None else (timeout,)))

    def delete_key(self, key: str) -> bool:
        return bool(self._count("delete", key).delete_key(key))

    def num_keys(self) -> int:
        return int(self.all.num_keys())

    def has_extended_api(self) -> bool:
        return bool(self.all.has_extended_api())

    # Two methods are called from C++ by the names that they have there.
    getNumKeys = num_keys  # noqa: N815
    deleteKey = delete_key  # noqa: N815
