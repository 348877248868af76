"""The sizes at which the ways of moving tensors between hosts change."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Sizes"]

# What a leader's frames carry together. Two ways are saved, and each host sends its data to all others.
_FRAMES_BYTES = 64 * 1024
_LEAST_FRAME_BYTES = 4 * 1024
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class Sizes:
    """These sizes in one group; all its ranks have the same.

    Attributes:
        frame_bytes: the most data that one host sends another in a frame.
        chunk_bytes: how much of a larger tensor is moved at once, so that wire and memory work at the same time.
    """

    frame_bytes: int
    chunk_bytes: int = _CHUNK_BYTES

    @staticmethod
    def among(hosts: int) -> Sizes:
        """Those of a group over so many hosts."""
        return Sizes(max(_LEAST_FRAME_BYTES, _FRAMES_BYTES // max(1, hosts - 1)))
