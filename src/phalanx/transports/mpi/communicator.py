"""The communicator over MPI, by way of mpi4py: any MPI library, on one host or many.

Every collective is MPI's own blocking one, on the tensors' memory, after the ranks have compared what they call
(``agreement.py``). Asynchronous operations use the blocking forms too, on the group's progress thread: MPI moves a
non-blocking collective only while some thread is in a call of MPI, so a thread is needed in any case, and libraries
have their quicker algorithms in the blocking forms (docs/design/mpi.md has figures). The order of sums is the
library's. Messages are MPI_Isend and MPI_Irecv (``messages.py``).

MPI has no 16-bit floats that every library knows. They are reduced as float32: one rounding, at the end, as in the
shared-memory transport, for twice the bytes. A custom MPI operation on 16 bits would round at every step, in an order
that depends on the library. bool is reduced as bytes of 0 and 1, where "or" is a maximum.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx.errors import ArgumentError, PhalanxError
from phalanx.transports.contract import Communicator, Message
from phalanx.transports.mpi.agreement import Agreement
from phalanx.transports.mpi.messages import Mail
from phalanx.transports.mpi.runtime import Runtime
from phalanx.transports.operands import AVG, reducible

__all__ = ["MpiCommunicator"]

_HALVES = frozenset((torch.float16, torch.bfloat16))
_NAMES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.float16: "FLOAT",
    torch.bfloat16: "FLOAT",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.bool: "UINT8_T",
}
_OPS = {
    "SUM": "SUM",
    "AVG": "SUM",  # and a division
    "PRODUCT": "PROD",
    "MIN": "MIN",
    "MAX": "MAX",
    "BAND": "BAND",
    "BOR": "BOR",
    "BXOR": "BXOR",
}
_ITEMS = {1: "BYTE", 2: "UINT16_T", 4: "UINT32_T", 8: "UINT64_T", 16: "C_DOUBLE_COMPLEX"}  # elements to be copied
_BOOL_OPS = _OPS | {"SUM": "MAX", "PRODUCT": "MIN"}
_LARGEST = 2**31 - 1  # the largest count that a call of MPI 3 takes


class MpiCommunicator(Communicator):
    """One group over an MPI communicator of its own.

    Args:
        runtime: MPI under way.
        comm: the group's communicator of MPI; this object frees it.
        members: the group's ranks in the world, in the group's order.
        key: the group's name in notices, equal on every member.
        timeout: how long to wait for other ranks.
    """

    rank_order_sums = False

    def __init__(self, runtime: Runtime, comm: Any, members: Sequence[int], key: str, timeout: timedelta) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._runtime, self._comm, self._mpi = runtime, comm, runtime.mpi
        self._in_place, self._byte = runtime.mpi.IN_PLACE, runtime.mpi.BYTE
        self._address = runtime.mpi.buffer.fromaddress
        self._reductions = _reductions(runtime.mpi)
        self._agreement = Agreement(runtime, comm, members, key, timeout.total_seconds())
        self._run = self._agreement.run
        self._mail = Mail(runtime, comm, self._agreement, self._tensor)
        self._closed = False

    def can_reduce(self, dtype: torch.dtype, op: int) -> bool:
        return (dtype, op) in self._reductions

    # -- reductions --------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: int) -> None:
        kind, mpi_op, is_half = self._reductions[tensor.dtype, op]
        wide = tensor.float() if is_half else tensor
        numbers = [self._address(wide.data_ptr(), wide.nbytes), wide.numel(), kind]
        self._run(self._comm.Allreduce, (self._in_place, numbers, mpi_op), "all_reduce", tensor, op)
        if is_half or op == AVG:
            self._finish(tensor, wide, op)

    def reduce(self, tensor: torch.Tensor, root: int, op: int) -> None:
        kind, mpi_op, is_half = self._reductions[tensor.dtype, op]
        wide = tensor.float() if is_half else tensor
        numbers = [self._address(wide.data_ptr(), wide.nbytes), wide.numel(), kind]
        send, receive = (self._in_place, numbers) if self.rank == root else (numbers, None)
        self._run(self._comm.Reduce, (send, receive, mpi_op, root), "reduce", tensor, op, root)
        if self.rank == root:
            self._finish(tensor, wide, op)

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: int) -> None:
        at, kept = _joined(inputs)
        self._reduce_scatter(output, at, op)
        del kept  # MPI has read it

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, op: int) -> None:
        self._reduce_scatter(output, tensor.data_ptr(), op)

    def _reduce_scatter(self, output: torch.Tensor, at: int, op: int) -> None:
        """Reduce the blocks of all ranks, of ``output``'s dtype, which are contiguous from ``at`` on."""
        kind, mpi_op, is_half = self._reductions[output.dtype, op]
        nbytes, count = output.nbytes * self.size, output.numel()
        source, target = self._address(at, nbytes), output
        if is_half:
            sent = torch.frombuffer(source, dtype=output.dtype).float() if nbytes else output.float()
            source = self._address(sent.data_ptr(), sent.nbytes)
            target = torch.empty(output.shape, dtype=torch.float32)
        elif at <= output.data_ptr() < at + nbytes:
            target = torch.empty_like(output)  # MPI's buffers must not overlap, and it may be this rank's own block
        received = [self._address(target.data_ptr(), target.nbytes), count, kind]
        arguments = [source, count, kind], received, mpi_op
        self._run(self._comm.Reduce_scatter_block, arguments, "reduce_scatter", output, op)
        self._finish(output, target, op)

    def _finish(self, tensor: torch.Tensor, reduced: torch.Tensor, op: int) -> None:
        if op == AVG:
            reduced.div_(self.size)
        if reduced is not tensor:
            tensor.copy_(reduced)

    # -- copies ------------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self._run(self._comm.Bcast, (self._tensor(tensor), root), "broadcast", tensor, root=root)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        at = _span(outputs)
        if at is not None:
            self._all_gather(at, tensor)
            return
        whole = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype)
        self._all_gather(whole.data_ptr(), tensor)
        _hand_out(whole, outputs)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        self._all_gather(output.data_ptr(), tensor)

    def _all_gather(self, at: int, tensor: torch.Tensor) -> None:
        nbytes = tensor.nbytes
        send: Any = self._in_place if tensor.data_ptr() == at + nbytes * self.rank else self._tensor(tensor)
        self._run(self._comm.Allgather, (send, self._memory(at, nbytes, self.size)), "all_gather", tensor)

    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> None:
        receive, whole, send = None, None, self._tensor(tensor)
        if outputs is not None:
            at = _span(outputs)
            if at is None:
                whole = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype)
                at = whole.data_ptr()
            if tensor.data_ptr() == at + tensor.nbytes * root:
                send = self._in_place
            receive = self._memory(at, tensor.nbytes, self.size)
        self._run(self._comm.Gather, (send, receive, root), "gather", tensor, root=root)
        if whole is not None and outputs is not None:
            _hand_out(whole, outputs)

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> None:
        send, kept, receive = None, None, self._tensor(output)
        if inputs is not None:
            at, kept = _joined(inputs)
            send = self._memory(at, output.nbytes, self.size)
            if output.data_ptr() == at + output.nbytes * root:
                receive = self._in_place
        self._run(self._comm.Scatter, (send, receive, root), "scatter", output, root=root)
        del kept  # MPI has read it

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        sent, expected = [t.numel() for t in inputs], [t.numel() for t in outputs]
        sample = outputs[0]
        source, kept = _joined(inputs)
        target = _span(outputs)
        if target is not None:
            self._all_to_all(target, source, expected, sent, sample)
        else:
            whole = torch.empty(sum(expected), dtype=sample.dtype)
            self._all_to_all(whole.data_ptr(), source, expected, sent, sample)
            for output, piece in zip(outputs, whole.split(expected), strict=True):
                output.view(-1).copy_(piece)
        del kept  # MPI has read it

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_counts: Sequence[int],
        input_counts: Sequence[int],
    ) -> None:
        self._all_to_all(output.data_ptr(), tensor.data_ptr(), output_counts, input_counts, output)

    def _all_to_all(
        self, target: int, source: int, expected: Sequence[int], sent: Sequence[int], like: torch.Tensor
    ) -> None:
        """Copy from ``source`` to ``target``, where the pieces are contiguous; counts are in elements of ``like``."""
        size = like.element_size()
        kind = getattr(self._mpi, _ITEMS[size])

        def exchange() -> None:
            self._agreement.balance(sent, expected, like.dtype)
            self._comm.Alltoallv(
                [self._address(source, sum(sent) * size), (sent, _offsets(sent)), kind],
                [self._address(target, sum(expected) * size), (expected, _offsets(expected)), kind],
            )

        self._run(exchange, (), "all_to_all", like.new_empty(0))  # the ranks must agree on the dtype alone

    def barrier(self) -> None:
        # To compare calls is a barrier of its own.
        self._run(_nothing if self._agreement.checks else self._comm.Barrier, (), "barrier")

    # -- point to point ----------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Message:
        return self._mail.send(tensor, peer, tag)

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Message:
        return self._mail.recv(tensor, peer, tag)

    def end_messages(self) -> None:
        self._mail.ended = True

    # -- lifetime ----------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta, of_messages: timedelta | None = None) -> None:
        self._agreement.timeout_s = timeout.total_seconds()
        self._agreement.message_timeout_s = (of_messages or timeout).total_seconds()

    def abort(self, doing: str = "") -> None:
        self._agreement.abort()

    def give_up(self, tensor: torch.Tensor, doing: str) -> None:
        self._runtime.keep(tensor)  # MPI has the request, and takes none back
        self._agreement.abort(interrupted_in=doing)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._mail.ended = True
        if not self._runtime.usable:
            return
        try:
            self._agreement.close()
            if self._agreement.in_step:
                self._comm.Free()
        except self._mpi.Exception as error:
            raise PhalanxError(f"MPI failed in freeing a group's communicator: {error}") from None

    # -- memory in MPI's terms ---------------------------------------------------------------------

    def _tensor(self, tensor: torch.Tensor) -> list[Any]:
        """A contiguous tensor's memory, to be copied."""
        return self._memory(tensor.data_ptr(), tensor.nbytes)

    def _memory(self, address: int, nbytes: int, parts: int = 1) -> list[Any]:
        """Memory to be copied: ``parts`` parts of ``nbytes``, of which each is sent or received.

        Raises:
            ArgumentError: more than some MPI libraries can count.
        """
        count, kind = nbytes, self._byte
        if count > _LARGEST:
            if count % 8 or count // 8 > _LARGEST:
                raise ArgumentError(
                    f"{count} bytes in one call are more than MPI libraries count; send the tensor in parts"
                )
            count, kind = count // 8, self._mpi.UINT64_T
        return [self._address(address, nbytes * parts), count, kind]


def _reductions(mpi: Any) -> dict[tuple[torch.dtype, int], tuple[Any, Any, bool]]:
    """MPI's type and operation for each of torch's that it can reduce, and whether a copy as float32 is reduced."""
    found = {}
    for dtype, name in _NAMES.items():
        for torch_name, mpi_name in (_BOOL_OPS if dtype == torch.bool else _OPS).items():
            op = getattr(dist.ReduceOp, torch_name).value
            if reducible(dtype, op):
                found[dtype, op] = getattr(mpi, name), getattr(mpi, mpi_name), dtype in _HALVES
    return found


def _span(tensors: Sequence[torch.Tensor]) -> int | None:
    """Return where the tensors begin, if they are contiguous, in order and without gaps; else None."""
    first = at = tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != at:
            return None
        at += tensor.nbytes
    return first


def _joined(tensors: Sequence[torch.Tensor]) -> tuple[int, torch.Tensor | None]:
    """The address at which the tensors are contiguous, and the copy that lies there; None if it is their own memory."""
    at = _span(tensors)
    if at is not None:
        return at, None
    copy = torch.cat([t.reshape(-1) for t in tensors])
    return copy.data_ptr(), copy


def _hand_out(whole: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    for output, piece in zip(outputs, whole.unbind(), strict=True):
        output.view(-1).copy_(piece.view(-1))


def _offsets(counts: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(counts)][:-1]


def _nothing() -> None:
    pass
