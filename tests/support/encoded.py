"""Values on their way through RPC's encoding."""

from __future__ import annotations

from typing import Any

from phalanx.rpc.encoding import decode, encode

__all__ = ["carried"]


def carried(value: Any, **options: Any) -> Any:
    """The value after its way: what a link hands on is a copy of the bytes, and its memory is writable."""
    head, buffers = encode(value, **options)
    assert all(buffer.contiguous and buffer.format == "B" and buffer.ndim == 1 for buffer in buffers)
    return decode(bytes(head), [memoryview(bytearray(buffer)) for buffer in buffers])
