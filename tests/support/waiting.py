"""Waiting for what another thread or process brings about."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["soon"]


def soon(happens: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    """Whether it happens within ``timeout_s``; returns as soon as it does."""
    until = time.monotonic() + timeout_s
    while not happens():
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True
