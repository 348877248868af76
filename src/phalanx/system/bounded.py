"""Doing something that may never return, such as asking a host that may be gone, for a limited time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["within"]

T = TypeVar("T")


def within(timeout_s: float, task: Callable[[], T]) -> T:
    """What ``task`` returns or raises. It runs on a thread of its own, which is left alone if it takes too long.

    Raises:
        TimeoutError: it has not returned in time.
    """
    outcome: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(task())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="phalanx-bounded", daemon=True)
    thread.start()
    thread.join(min(timeout_s, threading.TIMEOUT_MAX))
    if errors:
        raise errors[0]
    if not outcome:
        raise TimeoutError(f"not done within {timeout_s:g} s")
    return outcome[0]
