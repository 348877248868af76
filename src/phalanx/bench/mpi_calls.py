"""The same operations through mpi4py, on the same buffers: what MPI itself takes.

The list forms of torch have no counterpart in MPI; their buffers are one piece of memory here, so MPI's own form
stands beside them. Collectives without async_op are MPI's blocking ones; with it, its non-blocking ones and
``Wait``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from phalanx.bench.operations import Operation

__all__ = ["left_out", "mpi_call"]

_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
}
# The name of mpi4py's method, and the order of its arguments: s and r the buffers, i MPI.IN_PLACE, 0 the root.
_METHODS = {
    "all_reduce": ("Allreduce", "ir"),
    "broadcast": ("Bcast", "r0"),
    "all_gather": ("Allgather", "sr"),
    "all_gather_single": ("Allgather", "sr"),
    "gather": ("Gather", "sr0"),
    "scatter": ("Scatter", "sr0"),
    "reduce_scatter": ("Reduce_scatter_block", "sr"),
    "reduce_scatter_single": ("Reduce_scatter_block", "sr"),
    "all_to_all": ("Alltoall", "sr"),
    "all_to_all_single": ("Alltoall", "sr"),
    "barrier": ("Barrier", ""),
}


def left_out(operation: Operation) -> str:
    """Why MPI cannot be measured on this operation; empty if it can."""
    if operation.dtype not in _TYPES:
        return f"MPI has no datatype for {str(operation.dtype).removeprefix('torch.')} that every library knows"
    return ""


def mpi_call(name: str, operation: Operation, mpi: Any, asynchronous: bool) -> Callable[[], Any]:
    """What is timed: one call of mpi4py, complete when it returns.

    Args:
        name: of the operation.
        operation: whose buffers are used.
        mpi: the module ``mpi4py.MPI``.
        asynchronous: the non-blocking form, and ``Wait``.
    """
    world = mpi.COMM_WORLD
    kind = getattr(mpi, _TYPES[operation.dtype])
    sent = None if operation.send is None else [operation.send.numpy(), kind]
    received = None if operation.recv is None else [operation.recv.numpy(), kind]
    if name == "send_recv":
        return _ping_pong(world, operation, sent, received, asynchronous)
    if name == "reduce":  # in place on the root only
        method = "Reduce"
        arguments = (mpi.IN_PLACE, received) if operation.rank == 0 else (received, None)
        arguments = (*arguments, mpi.SUM, 0)
    else:
        method, order = _METHODS[name]
        arguments = tuple({"s": sent, "r": received, "i": mpi.IN_PLACE, "0": 0}[letter] for letter in order)
    if not asynchronous:
        call = getattr(world, method)
        return lambda: call(*arguments)
    start = getattr(world, f"I{method.lower()}")
    return lambda: start(*arguments).Wait()


def _ping_pong(world: Any, operation: Operation, sent: Any, received: Any, asynchronous: bool) -> Callable[[], Any]:
    if received is None:
        return lambda: None
    partner = operation.rank ^ 1
    send, recv = (world.Isend, world.Irecv) if asynchronous else (world.Send, world.Recv)
    steps = [(recv, received), (send, received)] if sent is None else [(send, sent), (recv, received)]
    (first, one), (second, other) = steps

    def play() -> None:
        first(one, partner)
        second(other, partner)

    def play_waiting() -> None:
        first(one, partner).Wait()
        second(other, partner).Wait()

    return play_waiting if asynchronous else play
