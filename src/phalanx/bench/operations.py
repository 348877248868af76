"""What is timed, one class per operation, and what each must have computed.

An operation owns one buffer it sends from and one it receives into, made once and used by every backend alike.
*Size* is the whole buffer: the tensor that is reduced, broadcast or sent, and where an operation gathers,
scatters or exchanges blocks, all blocks of a rank together (nccl-tests counts the same way; the OSU benchmarks
count one block). Rank 0 is the root.

The values are small whole numbers, so that every dtype holds every sum exactly, and depend on the rank and on
the place in the tensor with a period of 7, which no power of two is a multiple of: blocks that changed places do
not go unnoticed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Operation", "make_operation"]

_PERIOD = 7
_POISON = 101
_ROOT = 0

Call = Callable[[], Any]


class Operation(ABC):
    """One operation on one rank, with its buffers.

    Args:
        rank, size: this process's place in the world.
        dtype: of the elements.
        nbytes: the size asked for; rounded down to whole elements and blocks, of which there is at least one.

    Attributes:
        send: what this rank gives, where that is not also what it receives into; None if it gives nothing.
        recv: what this rank receives into, or works on in place; None if it receives nothing.
        messages: how many transfers one call stands for: the measured time is divided by it.
    """

    messages = 1

    def __init__(self, rank: int, size: int, dtype: torch.dtype, nbytes: int) -> None:
        self.rank = rank
        self.size = size
        self.dtype = dtype
        elements = nbytes // dtype.itemsize
        self.count = max(1, elements)
        self.block = max(1, elements // size)
        self.whole = self.block * size
        given, received = self.lengths()
        self.send = torch.zeros(given, dtype=dtype) if given else None
        self.recv = torch.zeros(received, dtype=dtype) if received else None

    @abstractmethod
    def lengths(self) -> tuple[int, int]:
        """Elements of ``send`` and of ``recv``; 0 for a buffer this rank does not need."""

    @abstractmethod
    def call(self, group: dist.ProcessGroup, asynchronous: bool) -> Call:
        """What is timed: one call of torch.distributed, complete when it returns."""

    def expected(self) -> torch.Tensor | None:
        """What ``recv`` holds after one call on filled buffers; None where nothing is promised."""
        return None

    @property
    def nbytes(self) -> int:
        """The size that is really used."""
        return max((len(t) for t in (self.send, self.recv) if t is not None), default=0) * self.dtype.itemsize

    def fill(self) -> None:
        """Put the values in that :meth:`expected` is computed from."""
        given, received = self.send, self.recv
        if given is not None:
            given.copy_(self.values(self.rank, 0, len(given)))
        if received is not None:
            received.fill_(_POISON)

    def clear(self) -> None:
        """Zeros: what is reduced in place again and again must not run over."""
        for tensor in (self.send, self.recv):
            if tensor is not None:
                tensor.zero_()

    def wrong(self) -> str:
        """After one call on filled buffers: in words, what is wrong; empty when all is right."""
        expected, got = self.expected(), self.recv
        if expected is None or got is None or torch.equal(got, expected):
            return ""
        index = int((got != expected).nonzero()[0])
        return f"rank {self.rank}, element {index}: got {got[index].item()}, expected {expected[index].item()}"

    def values(self, rank: int, start: int, count: int) -> torch.Tensor:
        """The values ``start`` to ``start + count`` of a rank's tensor."""
        return self._repeat([(i + 3 * rank) % _PERIOD for i in range(_PERIOD)], start, count)

    def sums(self, start: int, count: int) -> torch.Tensor:
        """The sums of those values over all ranks."""
        period = [sum((i + 3 * rank) % _PERIOD for rank in range(self.size)) for i in range(_PERIOD)]
        return self._repeat(period, start, count)

    def _repeat(self, period: list[int], start: int, count: int) -> torch.Tensor:
        offset = start % _PERIOD
        return torch.tensor(period, dtype=self.dtype).repeat(count // _PERIOD + 2)[offset : offset + count]

    def blocks(self, tensor: torch.Tensor | None) -> list[torch.Tensor]:
        """A whole buffer as the list of tensors that the list forms take."""
        if tensor is None:
            return []
        return [tensor[start : start + self.block] for start in range(0, len(tensor), self.block)]


def _finished(function: Callable[..., Any], asynchronous: bool, *args: Any, **kwargs: Any) -> Call:
    if not asynchronous:
        return lambda: function(*args, **kwargs)
    return lambda: function(*args, async_op=True, **kwargs).wait()


class _InPlace(Operation):
    def lengths(self) -> tuple[int, int]:
        return 0, self.count

    def fill(self) -> None:
        if self.recv is not None:
            self.recv.copy_(self.values(self.rank, 0, self.count))


class _AllReduce(_InPlace):
    def call(self, group: dist.ProcessGroup, asynchronous: bool) -> Call:
        return _finished(dist.all_reduce, asynchronous, self.recv, group=group)

    def expected(self) -> torch.Tensor:
        return self.sums(0, self.count)


class _Reduce(_InPlace):
    def call(self, group: dist.ProcessGroup, asynchronous: bool) -> Call:
        return _finished(dist.reduce, asynchronous, self.recv, dst=_ROOT, group=group)

    def expected(self) -> torch.Tensor | None:
        return self.sums(0, self.count) if self.rank == _ROOT else None


class _Broadcast(_InPlace):
    def call(self, group: dist.ProcessGroup, asynchronous: bool) -> Call:
        return _finished(dist.broadcast, asynchronous, self.recv, src=_ROOT, group=group)

    def expected(self) -> torch.Tensor:
        return self.values(_ROOT, 0, self.count)


class _AllGatherSingle(Operation):
    def lengths(self) -> tuple[int, int]:
        return self.block, self.whole

    def call(self, group: dist.ProcessGroup, asynchronous: bool) -> Call:
        return _finished(dist.all_gather_single, asynchronous, self.recv, self.send, group=group)

    def expected(self) -> torch.Tensor | None:
        return torch.cat([self.values(peer, 0, self.block) for peer in range(self.size)])


class _AllGather(_AllGatherSingle):
    def call(self, group: dist.ProcessGroup, asynchronous: bool) -> Call:
        return _finished(dist.all_gather, asynchronous, self.blocks(self.recv), self.send, group=group)


class _Gather(_AllGatherSingle):
    def lengths(self) -> tuple[int, int]:
        return self.block, self.whole if self.rank == _ROOT else 0

    def call(self, group: dist.ProcessGroup, asynchronous: bool) -> Call:
        outputs = self.blocks(self.recv) or None
        return _finished(dist.gather, asynchronous, self.send, outputs, dst=_ROOT, group=group)

    def expected(self) -> torch.Tensor | None:
        return super().expected() if self.rank == _ROOT else None


class _Scatter(Operation):
    def lengths(self) -> tuple[int, int]:
        return self.whole if self.rank == _ROOT else 0, self.block

    def call(self, group: dist.ProcessGroup, asynchronous: bool) -> Call:
        inputs = self.blocks(self.send) or None
        return _finished(dist.scatter, asynchronous, self.recv, inputs, src=_ROOT, group=group)

    def expected(self) -> torch.Tensor:
        return self.values(_ROOT, self.rank * self.block, self.block)


class _ReduceScatterSingle(Operation):
    def lengths(self) -> tuple[int, int]:
        return self.whole, self.block

    def call(self, group: dist.ProcessGroup, asynchronous: bool) -> Call:
        return _finished(dist.reduce_scatter_single, asynchronous, self.recv, self.send, group=group)

    def expected(self) -> torch.Tensor:
        return self.sums(self.rank * self.block, self.block)


class _ReduceScatter(_ReduceScatterSingle):
    def call(self, group: dist.ProcessGroup, asynchronous: bool) -> Call:
        return _finished(dist.reduce_scatter, asynchronous, self.recv, self.blocks(self.send), group=group)


class _AllToAllSingle(Operation):
    def lengths(self) -> tuple[int, int]:
        return self.whole, self.whole

    def call(self, group: dist.ProcessGroup, asynchronous: bool) -> Call:
        return _finished(dist.all_to_all_single, asynchronous, self.recv, self.send, group=group)

    def expected(self) -> torch.Tensor:
        own = self.rank * self.block
        return torch.cat([self.values(peer, own, self.block) for peer in range(self.size)])


class _AllToAll(_AllToAllSingle):
    def call(self, group: dist.ProcessGroup, asynchronous: bool) -> Call:
        return _finished(dist.all_to_all, asynchronous, self.blocks(self.recv), self.blocks(self.send), group=group)


class _SendRecv(Operation):
    """A ping-pong of ranks 0 and 1, 2 and 3, … at the same time; the last of an odd number looks on."""

    messages = 2

    @property
    def partner(self) -> int:
        """The rank this one plays with; itself if there is none."""
        return self.rank ^ 1 if self.rank ^ 1 < self.size else self.rank

    def lengths(self) -> tuple[int, int]:
        plays = self.partner != self.rank
        return (self.count if plays and self.rank % 2 == 0 else 0), (self.count if plays else 0)

    def call(self, group: dist.ProcessGroup, asynchronous: bool) -> Call:
        there, back, partner = self.send, self.recv, self.partner
        if back is None:
            return lambda: None
        steps: Sequence[tuple[Any, torch.Tensor]]
        send, recv = (dist.isend, dist.irecv) if asynchronous else (dist.send, dist.recv)
        steps = [(recv, back), (send, back)] if there is None else [(send, there), (recv, back)]
        (first, one), (second, other) = steps

        def play() -> None:
            first(one, partner, group=group)
            second(other, partner, group=group)

        def play_waiting() -> None:
            first(one, partner, group=group).wait()
            second(other, partner, group=group).wait()

        return play_waiting if asynchronous else play

    def expected(self) -> torch.Tensor | None:
        return self.values(self.rank & ~1, 0, self.count) if self.recv is not None else None


class _Barrier(Operation):
    def lengths(self) -> tuple[int, int]:
        return 0, 0

    def call(self, group: dist.ProcessGroup, asynchronous: bool) -> Call:
        return _finished(dist.barrier, asynchronous, group=group)


_CLASSES: dict[str, type[Operation]] = {
    "all_reduce": _AllReduce,
    "reduce": _Reduce,
    "broadcast": _Broadcast,
    "all_gather": _AllGather,
    "all_gather_single": _AllGatherSingle,
    "gather": _Gather,
    "scatter": _Scatter,
    "reduce_scatter": _ReduceScatter,
    "reduce_scatter_single": _ReduceScatterSingle,
    "all_to_all": _AllToAll,
    "all_to_all_single": _AllToAllSingle,
    "send_recv": _SendRecv,
    "barrier": _Barrier,
}


def make_operation(name: str, rank: int, size: int, dtype: str, nbytes: int) -> Operation:
    """The operation of that name, with buffers of its own.

    Args:
        name: one of ``phalanx.bench.cases.OPERATIONS``.
        rank, size: this process's place in the world.
        dtype: torch's name of the dtype; empty for a barrier.
        nbytes: the size, in bytes.
    """
    return _CLASSES[name](rank, size, getattr(torch, dtype or "uint8"), nbytes)
