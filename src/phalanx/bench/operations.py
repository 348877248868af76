"""The operations that can be measured, one row each: a new collective is one more row here.

Help texts, the command line, the calls and the checks are derived from this table. It does not import torch, because
the command line reads it before anything is measured. Rank 0 is the root.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from phalanx.bench.calls import (
    MpiCall,
    TorchCall,
    mpi_call,
    mpi_ping_pong,
    partner_of,
    torch_call,
    torch_gather_single,
    torch_ping_pong,
)

if TYPE_CHECKING:
    import torch

    from phalanx.bench.buffers import Buffers

__all__ = ["DTYPES", "OPERATIONS", "Operation", "SizeOf"]

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


class SizeOf(Enum):
    """Which bytes the size in the tables counts."""

    TENSOR = auto()  # the one tensor that is reduced, broadcast or sent
    BLOCKS = auto()  # all the blocks that a rank gathers, scatters or exchanges, together
    NOTHING = auto()  # no data is moved, so neither sizes nor dtypes are measured


@dataclass(frozen=True)
class Operation:
    """One row of the table.

    Attributes:
        name: as in torch.distributed.
        size_of: what the size means.
        sends, receives: how many elements this rank's two buffers have; 0 for one that it does not need.
        expected: what ``recv`` holds after one call on filled buffers; None if nothing is promised on this rank.
        torch: makes the call that is timed, from a group, the buffers and whether to use ``async_op``.
        mpi: the same for MPI, from the buffers as mpi4py takes them.
        in_place: the input is in ``recv``.
        messages: how many transfers follow one after the other in a call: the measured time is divided by it.
    """

    name: str
    size_of: SizeOf
    sends: Callable[[Buffers], int]
    receives: Callable[[Buffers], int]
    expected: Callable[[Buffers], torch.Tensor | None]
    torch: TorchCall
    mpi: MpiCall
    in_place: bool = False
    messages: int = 1

    def make_buffers(self, rank: int, size: int, dtype: str, nbytes: int) -> Buffers:
        """The buffers of this operation on one rank.

        Args:
            rank, size: this process's place in the world.
            dtype: torch's name of the dtype.
            nbytes: the size, in bytes.
        """
        import torch

        from phalanx.bench.buffers import Buffers

        kind: torch.dtype = getattr(torch, dtype)
        return Buffers(rank, size, kind, nbytes, sends=self.sends, receives=self.receives, in_place=self.in_place)


def _nothing(_: Buffers) -> int:
    return 0


def _tensor(buffers: Buffers) -> int:
    return buffers.count


def _block(buffers: Buffers) -> int:
    return buffers.block


def _blocks(buffers: Buffers) -> int:
    return buffers.whole


def _blocks_on_root(buffers: Buffers) -> int:
    return buffers.whole if buffers.rank == ROOT else 0


def _ball(buffers: Buffers) -> int:
    """A ping-pong's message, on the even rank of each pair, which begins."""
    return _caught(buffers) if buffers.rank % 2 == 0 else 0


def _caught(buffers: Buffers) -> int:
    return 0 if partner_of(buffers.rank, buffers.size) is None else buffers.count


def _own_start(buffers: Buffers) -> int:
    """Where in a whole buffer this rank's block begins."""
    return buffers.rank * buffers.block


OPERATIONS = {
    row.name: row
    for row in (
        Operation(
            "all_reduce",
            SizeOf.TENSOR,
            _nothing,
            _tensor,
            in_place=True,
            expected=lambda b: b.sums(0, b.count),
            torch=torch_call("all_reduce", lambda b: (b.recv,)),
            mpi=mpi_call("Allreduce", lambda b: (b.mpi.IN_PLACE, b.recv)),
        ),
        Operation(
            "reduce",
            SizeOf.TENSOR,
            _nothing,
            _tensor,
            in_place=True,
            expected=lambda b: b.sums(0, b.count) if b.rank == ROOT else None,
            torch=torch_call("reduce", lambda b: (b.recv,), dst=ROOT),
            mpi=mpi_call(
                "Reduce",  # MPI_IN_PLACE is for the root alone
                lambda b: (*((b.mpi.IN_PLACE, b.recv) if b.rank == ROOT else (b.recv, None)), b.mpi.SUM, ROOT),
            ),
        ),
        Operation(
            "broadcast",
            SizeOf.TENSOR,
            _nothing,
            _tensor,
            in_place=True,
            expected=lambda b: b.values(ROOT, 0, b.count),
            torch=torch_call("broadcast", lambda b: (b.recv,), src=ROOT),
            mpi=mpi_call("Bcast", lambda b: (b.recv, ROOT)),
        ),
        Operation(
            "all_gather",
            SizeOf.BLOCKS,
            _block,
            _blocks,
            expected=lambda b: b.joined(0),
            torch=torch_call("all_gather", lambda b: (b.blocks(b.recv), b.send)),
            mpi=mpi_call("Allgather", lambda b: (b.send, b.recv)),
        ),
        Operation(
            "all_gather_single",
            SizeOf.BLOCKS,
            _block,
            _blocks,
            expected=lambda b: b.joined(0),
            torch=torch_call("all_gather_single", lambda b: (b.recv, b.send)),
            mpi=mpi_call("Allgather", lambda b: (b.send, b.recv)),
        ),
        Operation(
            "gather",
            SizeOf.BLOCKS,
            _block,
            _blocks_on_root,
            expected=lambda b: b.joined(0) if b.rank == ROOT else None,
            torch=torch_call("gather", lambda b: (b.send, b.blocks(b.recv) or None), dst=ROOT),
            mpi=mpi_call("Gather", lambda b: (b.send, b.recv, ROOT)),
        ),
        Operation(
            "gather_single",
            SizeOf.BLOCKS,
            _block,
            _blocks_on_root,
            expected=lambda b: b.joined(0) if b.rank == ROOT else None,
            torch=torch_gather_single(ROOT),
            mpi=mpi_call("Gather", lambda b: (b.send, b.recv, ROOT)),
        ),
        Operation(
            "scatter",
            SizeOf.BLOCKS,
            _blocks_on_root,
            _block,
            expected=lambda b: b.values(ROOT, _own_start(b), b.block),
            torch=torch_call("scatter", lambda b: (b.recv, b.blocks(b.send) or None), src=ROOT),
            mpi=mpi_call("Scatter", lambda b: (b.send, b.recv, ROOT)),
        ),
        Operation(
            "reduce_scatter",
            SizeOf.BLOCKS,
            _blocks,
            _block,
            expected=lambda b: b.sums(_own_start(b), b.block),
            torch=torch_call("reduce_scatter", lambda b: (b.recv, b.blocks(b.send))),
            mpi=mpi_call("Reduce_scatter_block", lambda b: (b.send, b.recv)),
        ),
        Operation(
            "reduce_scatter_single",
            SizeOf.BLOCKS,
            _blocks,
            _block,
            expected=lambda b: b.sums(_own_start(b), b.block),
            torch=torch_call("reduce_scatter_single", lambda b: (b.recv, b.send)),
            mpi=mpi_call("Reduce_scatter_block", lambda b: (b.send, b.recv)),
        ),
        Operation(
            "all_to_all",
            SizeOf.BLOCKS,
            _blocks,
            _blocks,
            expected=lambda b: b.joined(_own_start(b)),
            torch=torch_call("all_to_all", lambda b: (b.blocks(b.recv), b.blocks(b.send))),
            mpi=mpi_call("Alltoall", lambda b: (b.send, b.recv)),
        ),
        Operation(
            "all_to_all_single",
            SizeOf.BLOCKS,
            _blocks,
            _blocks,
            expected=lambda b: b.joined(_own_start(b)),
            torch=torch_call("all_to_all_single", lambda b: (b.recv, b.send)),
            mpi=mpi_call("Alltoall", lambda b: (b.send, b.recv)),
        ),
        Operation(
            "send_recv",  # a ping-pong of ranks 0 and 1, 2 and 3, … at the same time
            SizeOf.TENSOR,
            _ball,
            _caught,
            messages=2,
            expected=lambda b: b.values(b.rank & ~1, 0, b.count) if b.recv is not None else None,
            torch=torch_ping_pong,
            mpi=mpi_ping_pong,
        ),
        Operation(
            "barrier",
            SizeOf.NOTHING,
            _nothing,
            _nothing,
            expected=lambda b: None,
            torch=torch_call("barrier", lambda b: ()),
            mpi=mpi_call("Barrier", lambda b: ()),
        ),
    )
}
