"""The operations that can be measured: what each moves, its calls and the right result.

Help texts, the command line, the calls and the checks come from the tables at the end. torch is imported in functions
alone, because the command line reads them before anything is measured. Rank 0 is the root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROOT = 0
# torch's names of the dtypes, and MPI's names of those that every MPI library has.
DTYPES = {
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "float16": None,
    "bfloat16": None,
    "int8": "INT8_T",
    "uint8": "UINT8_T",
    "int32": "INT32_T",
    "int64": "INT64_T",
}
# A rank's values repeat after a period that divides no power of two, so blocks that changed places are noticed. They
# are small and whole, so every dtype holds every sum exactly. No result has the poison.
_PERIOD, _POISON = 7, 101


class SizeOf(Enum):
    """Bytes that the size in the tables counts."""

    TENSOR = auto()  # the one tensor that is reduced, broadcast or sent
    BLOCKS = auto()  # all the blocks that a rank gathers, scatters or exchanges, together
    NOTHING = auto()  # no data is moved, so neither sizes nor dtypes are measured


class Buffers:
    """The memory of one operation on one rank, which all backends use.

    Attributes:
        count: the elements of a tensor of the size.
        block: the elements of one of ``size`` blocks; ``whole``: those of all; ``own``: where this rank's begins.
        send, recv: what this rank gives and receives into; None if it needs no such tensor.
        partner: the rank that plays ping-pong with this one: 0 with 1, 2 with 3, …; None for the last of an odd number.
    """

    def __init__(self, operation: Operation, rank: int, size: int, dtype: str, nbytes: int) -> None:
        import torch

        self.rank, self.size, self._in_place = rank, size, operation.in_place
        self.is_root = rank == ROOT
        self.partner = rank ^ 1 if rank ^ 1 < size else None
        self.dtype: torch.dtype = getattr(torch, dtype)
        elements = nbytes // self.dtype.itemsize
        self.count, self.block = max(1, elements), max(1, elements // size)
        self.whole, self.own = self.block * size, self.block * rank
        self.send, self.recv = (
            torch.zeros(count, dtype=self.dtype) if count else None
            for count in (operation.sends(self), operation.receives(self))
        )
        self._tensors = [tensor for tensor in (self.send, self.recv) if tensor is not None]

    @property
    def nbytes(self) -> int:
        """The size that is really used on this rank."""
        return max((tensor.nbytes for tensor in self._tensors), default=0)

    def fill(self) -> None:
        """Write this rank's values into its input, and poison into a tensor that only receives."""
        for tensor in self._tensors:
            if tensor is self.send or self._in_place:
                tensor.copy_(self.values(self.rank, 0, len(tensor)))
            else:
                tensor.fill_(_POISON)

    def clear(self) -> None:
        """Write zeros, so that a tensor that is reduced in place again and again does not overflow."""
        for tensor in self._tensors:
            tensor.zero_()

    def difference(self, expected: torch.Tensor | None) -> str | None:
        """Describe how ``recv`` differs from ``expected``; None if it does not, or if nothing is expected."""
        if expected is None or self.recv is None or self.recv.equal(expected):
            return None
        index = int((self.recv != expected).nonzero()[0])
        got, wanted = self.recv[index].item(), expected[index].item()
        return f"rank {self.rank}, element {index}: got {got}, expected {wanted}"

    def values(self, rank: int, start: int, count: int) -> torch.Tensor:
        """Return the values ``start`` to ``start + count`` of a rank's tensor."""
        return self._sum([rank], start, count)

    def sums(self, start: int, count: int) -> torch.Tensor:
        """Return the sums of those values over all ranks."""
        return self._sum(range(self.size), start, count)

    def _sum(self, ranks: Iterable[int], start: int, count: int) -> torch.Tensor:
        import torch

        period = [sum((start + i + 3 * rank) % _PERIOD for rank in ranks) for i in range(_PERIOD)]
        return torch.tensor(period, dtype=self.dtype).repeat(count // _PERIOD + 1)[:count]

    def joined(self, start: int) -> torch.Tensor:
        """Return one block of every rank, in the order of the ranks: the one that begins at ``start``."""
        import torch

        return torch.cat([self.values(rank, start, self.block) for rank in range(self.size)])

    def blocks(self, tensor: torch.Tensor | None) -> list[torch.Tensor]:
        """Return a whole buffer as the list of blocks that the list forms take; empty without a buffer."""
        return [] if tensor is None else list(tensor.split(self.block))  # type: ignore[no-untyped-call]


class MpiBuffers:
    """The same memory as mpi4py takes it, with MPI's datatype; ``mpi`` is the module ``mpi4py.MPI``."""

    def __init__(self, buffers: Buffers, mpi: Any, datatype: str) -> None:
        kind = getattr(mpi, datatype)
        self.mpi, self.is_root, self.partner = mpi, buffers.is_root, buffers.partner
        self.send, self.recv = (
            None if tensor is None else [tensor.numpy(), kind] for tensor in (buffers.send, buffers.recv)
        )


Call = Callable[[], Any]  # complete when it returns
TorchCall = Callable[[Any, Buffers, bool], Call]
MpiCall = Callable[[MpiBuffers, bool], Call]


def _torch(name: str, arguments: Callable[[Buffers], tuple[Any, ...]], **keywords: Any) -> TorchCall:
    def prepare(group: Any, buffers: Buffers, asynchronous: bool) -> Call:
        from phalanx.c10d import torch_versions

        call = partial(torch_versions.function(name), *arguments(buffers), group=group, **keywords)
        return (lambda: call(async_op=True).wait()) if asynchronous else call

    return prepare


def _torch_gather_single(group: Any, buffers: Buffers, asynchronous: bool) -> Call:
    """Call the process group's method, which some lack; before 2.15 torch.distributed has no function."""
    from torch._C._distributed_c10d import GatherOptions

    options = GatherOptions()
    options.rootRank, options.asyncOp = ROOT, asynchronous

    def call() -> None:
        work = group.gather_single(buffers.recv, buffers.send, options)
        if work is not None:  # a synchronous call may return one too, which torch.distributed waits for
            work.wait()

    return call


def _mpi(method: str, arguments: Callable[[MpiBuffers], tuple[Any, ...]]) -> MpiCall:
    def prepare(buffers: MpiBuffers, asynchronous: bool) -> Call:
        name = f"I{method.lower()}" if asynchronous else method
        call = partial(getattr(buffers.mpi.COMM_WORLD, name), *arguments(buffers))
        return (lambda: call().Wait()) if asynchronous else call

    return prepare


def _torch_ping_pong(group: Any, buffers: Buffers, asynchronous: bool) -> Call:
    import torch.distributed as dist

    send: Any = partial(dist.isend if asynchronous else dist.send, group=group)
    recv: Any = partial(dist.irecv if asynchronous else dist.recv, group=group)
    if asynchronous:
        return _ping_pong(buffers, lambda *given: send(*given).wait(), lambda *given: recv(*given).wait())
    return _ping_pong(buffers, send, recv)


def _mpi_ping_pong(buffers: MpiBuffers, asynchronous: bool) -> Call:
    world = buffers.mpi.COMM_WORLD
    if asynchronous:
        return _ping_pong(buffers, lambda *given: world.Isend(*given).Wait(), lambda *given: world.Irecv(*given).Wait())
    return _ping_pong(buffers, world.Send, world.Recv)


def _ping_pong(buffers: Buffers | MpiBuffers, send: Callable[[Any, int], Any], recv: Callable[[Any, int], Any]) -> Call:
    """Make one rally: the rank with a buffer to send begins, and the other one returns what it has received."""
    partner, there, back = buffers.partner, buffers.send, buffers.recv
    if partner is None:
        return lambda: None

    def begin() -> None:
        send(there, partner)
        recv(back, partner)

    def answer() -> None:
        recv(back, partner)
        send(back, partner)

    return answer if there is None else begin


@dataclass(frozen=True)
class Operation:
    """An operation.

    Attributes:
        name: as in torch.distributed.
        size_of: what the size means.
        sends, receives: how many elements this rank's two buffers have; 0 for one that it does not need.
        expected: what ``recv`` holds after one call on filled buffers; None if nothing is promised on this rank.
        torch: makes the call that is timed, from a group, the buffers and whether to use ``async_op``.
        mpi: the same for MPI, whose one form stands for those with lists and with single tensors.
    """

    name: str
    size_of: SizeOf
    sends: Callable[[Buffers], int]
    receives: Callable[[Buffers], int]
    expected: Callable[[Buffers], torch.Tensor | None]
    torch: TorchCall
    mpi: MpiCall

    @property
    def in_place(self) -> bool:
        """Tell whether the input is in ``recv``."""
        return self.name in ("all_reduce", "reduce", "broadcast")

    @property
    def messages(self) -> int:
        """The transfers that follow one after the other in a call: the measured time is divided by it."""
        return 2 if self.name == "send_recv" else 1


_Moves = tuple[SizeOf, Callable[[Buffers], int], Callable[[Buffers], int], Callable[[Buffers], "torch.Tensor | None"]]
_TENSOR, _BLOCKS = SizeOf.TENSOR, SizeOf.BLOCKS
# The fields from size_of to expected. send_recv is a ping-pong of ranks 0 and 1, 2 and 3, … at the same time.
_MOVES: dict[str, _Moves] = {
    "all_reduce": (_TENSOR, lambda b: 0, lambda b: b.count, lambda b: b.sums(0, b.count)),
    "reduce": (_TENSOR, lambda b: 0, lambda b: b.count, lambda b: b.sums(0, b.count) if b.is_root else None),
    "broadcast": (_TENSOR, lambda b: 0, lambda b: b.count, lambda b: b.values(ROOT, 0, b.count)),
    "all_gather": (_BLOCKS, lambda b: b.block, lambda b: b.whole, lambda b: b.joined(0)),
    "gather": (_BLOCKS, lambda b: b.block, lambda b: b.whole * b.is_root, lambda b: b.joined(0) if b.is_root else None),
    "scatter": (_BLOCKS, lambda b: b.whole * b.is_root, lambda b: b.block, lambda b: b.values(ROOT, b.own, b.block)),
    "reduce_scatter": (_BLOCKS, lambda b: b.whole, lambda b: b.block, lambda b: b.sums(b.own, b.block)),
    "all_to_all": (_BLOCKS, lambda b: b.whole, lambda b: b.whole, lambda b: b.joined(b.own)),
    "send_recv": (
        _TENSOR,
        lambda b: b.count if b.partner is not None and b.rank % 2 == 0 else 0,
        lambda b: b.count if b.partner is not None else 0,
        lambda b: b.values(b.rank & ~1, 0, b.count),
    ),
    "barrier": (SizeOf.NOTHING, lambda b: 0, lambda b: 0, lambda b: None),
}
_TORCH: dict[str, TorchCall] = {
    "all_reduce": _torch("all_reduce", lambda b: (b.recv,)),
    "reduce": _torch("reduce", lambda b: (b.recv,), dst=ROOT),
    "broadcast": _torch("broadcast", lambda b: (b.recv,), src=ROOT),
    "all_gather": _torch("all_gather", lambda b: (b.blocks(b.recv), b.send)),
    "all_gather_single": _torch("all_gather_single", lambda b: (b.recv, b.send)),
    "gather": _torch("gather", lambda b: (b.send, b.blocks(b.recv) or None), dst=ROOT),
    "gather_single": _torch_gather_single,
    "scatter": _torch("scatter", lambda b: (b.recv, b.blocks(b.send) or None), src=ROOT),
    "reduce_scatter": _torch("reduce_scatter", lambda b: (b.recv, b.blocks(b.send))),
    "reduce_scatter_single": _torch("reduce_scatter_single", lambda b: (b.recv, b.send)),
    "all_to_all": _torch("all_to_all", lambda b: (b.blocks(b.recv), b.blocks(b.send))),
    "all_to_all_single": _torch("all_to_all_single", lambda b: (b.recv, b.send)),
    "send_recv": _torch_ping_pong,
    "barrier": _torch("barrier", lambda b: ()),
}
_MPI: dict[str, MpiCall] = {
    "all_reduce": _mpi("Allreduce", lambda b: (b.mpi.IN_PLACE, b.recv)),
    # MPI_IN_PLACE is for the root alone.
    "reduce": _mpi("Reduce", lambda b: ((b.mpi.IN_PLACE, b.recv) if b.is_root else (b.recv, None)) + (b.mpi.SUM, ROOT)),
    "broadcast": _mpi("Bcast", lambda b: (b.recv, ROOT)),
    "all_gather": _mpi("Allgather", lambda b: (b.send, b.recv)),
    "gather": _mpi("Gather", lambda b: (b.send, b.recv, ROOT)),
    "scatter": _mpi("Scatter", lambda b: (b.send, b.recv, ROOT)),
    "reduce_scatter": _mpi("Reduce_scatter_block", lambda b: (b.send, b.recv)),
    "all_to_all": _mpi("Alltoall", lambda b: (b.send, b.recv)),
    "send_recv": _mpi_ping_pong,
    "barrier": _mpi("Barrier", lambda b: ()),
}
OPERATIONS = {
    name: Operation(name, *_MOVES[form], call, _MPI[form])
    for name, call in _TORCH.items()
    for form in [name.removesuffix("_single")]
}
