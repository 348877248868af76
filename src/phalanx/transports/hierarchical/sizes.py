"""The sizes at which the ways of moving tensors between hosts change, and memory that a group keeps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Scratch", "Sizes", "in_chunks"]

# What the frames of all other hosts carry together to one leader.
_FRAMES_BYTES = 64 * 1024
_LEAST_FRAME_BYTES = 4 * 1024
# What they carry each in an all_to_all: the copies cost less than a message for each pair of hosts.
_EXCHANGE_BYTES = 32 * 1024
_CHUNK_BYTES = 4 << 20
# What one host sends all others in an all_to_all by its leader. The copies cost less than a message for each pair of
# ranks up to about so much.
_LED_BYTES = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """The sizes of one group, equal on all its ranks.

    Attributes:
        frame_bytes: the most data of a host's frame in other collectives than all_to_all.
        exchange_bytes: the same in an all_to_all, all that a host has for others.
        chunk_bytes: about how much of a larger tensor is moved at once, so that wire and memory work at the same time;
            see :func:`in_chunks`.
        shared_bytes: the most that the leader of one host sends that of another for its ranks in an all_to_all.
    """

    frame_bytes: int
    exchange_bytes: int
    chunk_bytes: int = _CHUNK_BYTES
    shared_bytes: int = _LED_BYTES

    @staticmethod
    def among(hosts: int) -> Sizes:
        """Return those of a group over so many hosts."""
        others = max(1, hosts - 1)
        frame_bytes = max(_LEAST_FRAME_BYTES, _FRAMES_BYTES // others)
        return Sizes(frame_bytes, max(frame_bytes, _EXCHANGE_BYTES), shared_bytes=_LED_BYTES // others)


def in_chunks(flat: torch.Tensor, chunk_bytes: int) -> list[torch.Tensor]:
    """The parts of a flat tensor that are moved one after the other; equal tensors have equal ones.

    The first and the last have half of ``chunk_bytes``, since the wire stands still while the first one is combined and
    the last one is spread. Those between have up to twice as much, since each costs the processors the same besides its
    bytes.
    """
    if flat.nbytes <= chunk_bytes:
        return [flat]
    if flat.nbytes <= 2 * max(chunk_bytes, flat.itemsize):
        return list(flat.split(-(-flat.numel() // 2)))
    edge = max(1, chunk_bytes // 2 // flat.itemsize)
    middle = flat.numel() - 2 * edge
    each = -(-middle // -(-middle // (4 * edge)))
    if edge >= 64:
        each = -(-each // 64) * 64  # they begin at cache lines
    return [flat[:edge], *flat[edge : edge + middle].split(each), flat[edge + middle :]]


class Scratch:
    """Tensors by name, whose memory is used again by the next one of that name.

    New memory costs more, when it is first written, than all that is done with it later. One thread uses it at a time,
    and is done with a tensor before it takes its name again.
    """

    def __init__(self) -> None:
        self._memory: dict[object, torch.Tensor] = {}

    def take(self, name: object, like: torch.Tensor) -> torch.Tensor:
        """Return a flat tensor of the same dtype and number of elements as another; what it holds is undefined."""
        return self.take_bytes(name, like.nbytes).view(like.dtype)

    def take_bytes(self, name: object, nbytes: int) -> torch.Tensor:
        """Return so many bytes."""
        memory = self._memory.get(name)
        if memory is None or memory.nbytes < nbytes:
            memory = self._memory[name] = torch.empty(max(1, nbytes), dtype=torch.uint8)
        return memory[:nbytes]
