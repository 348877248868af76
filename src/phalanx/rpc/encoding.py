"""A stand-in until the room's own is there."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

__all__ = ["decode", "encode"]


def encode(value: Any) -> tuple[bytes, list[memoryview]]:
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return head, [buffer.raw() for buffer in buffers]


def decode(head: bytes | memoryview, buffers: Sequence[memoryview]) -> Any:
    return pickle.loads(head, buffers=buffers)
