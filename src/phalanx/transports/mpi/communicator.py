"""The communicator over MPI, by way of mpi4py: any MPI library, on one host or many.

Every collective is MPI's own blocking one, on the tensors' memory, after the ranks have compared what they call
(``agreement.py``). Asynchronous operations use the blocking forms too, on the group's progress thread: MPI moves a
non-blocking collective only while some thread is in a call of MPI, so a thread is needed in any case, and libraries
have their quicker algorithms in the blocking forms (docs/mpi.md has figures). The order of sums is the library's.
Messages are MPI_Isend and MPI_Irecv (``messages.py``).
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx.errors import CollectiveMismatch, PhalanxError
from phalanx.native.core import library
from phalanx.transports.contract import Communicator, Message
from phalanx.transports.fingerprints import fingerprint
from phalanx.transports.mpi.agreement import Agreement
from phalanx.transports.mpi.messages import Mail
from phalanx.transports.mpi.runtime import Runtime
from phalanx.transports.mpi.types import HALVES, Types, span

__all__ = ["MpiCommunicator"]

_AVG = dist.ReduceOp.AVG.value
REST_S = 0.0005
MOST_PREPARED = 1024  # kinds of all_reduce; a program that never repeats a shape must not fill the memory
LIMIT = 2**31  # MPI's classic calls cannot count as many elements as this, or more


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
        self._runtime, self._comm = runtime, comm
        self._in_place = runtime.mpi.IN_PLACE
        self._failure = runtime.mpi.Exception
        self._types = Types(runtime.mpi)
        self._address = runtime.mpi.buffer.fromaddress
        self._reductions = self._types.reductions
        self._agreement = Agreement(runtime, comm, members, key, timeout.total_seconds())
        self._compare = self._agreement.compare
        # The all_reduces that the core makes by itself, by dtype, operation and shape: the address of an MpiReduction,
        # and the MpiReduction, which must live as long as its address is used.
        self._prepared: dict[tuple[torch.dtype, int, torch.Size], tuple[int, Any]] = {}
        self._core_all_reduce = library().phx_mpi_all_reduce
        self._mail = Mail(runtime, comm, self._types, self._agreement)
        self._closed = False

    def can_reduce(self, dtype: torch.dtype, op: int) -> bool:
        return (dtype, op) in self._reductions

    # -- reductions --------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: int) -> None:
        # The usual call, in as few steps as it can be: compare and reduce in one call of the core.
        prepared = self._prepared.get((tensor.dtype, op, tensor.shape)) or self._prepare(tensor, op)
        if prepared is not None:
            agreement = self._agreement
            if agreement.broken is not None:
                raise agreement.broken
            try:
                status = self._core_all_reduce(prepared[0], tensor.data_ptr())
                if status:
                    agreement.conclude(status, "all_reduce", tensor, op, -1)
                    self._all_reduce(tensor, tensor, op)
                    agreement.check.done()
            except BaseException as error:
                # A signal handler raised. The operation that it interrupted may have ended all the same.
                if agreement.check.under_way:
                    agreement.interrupted(error, "all_reduce", tensor, op, -1)
                raise
            return
        self._compare("all_reduce", tensor, op)
        if tensor.dtype in HALVES:
            wide = tensor.float()
            self._all_reduce(wide, tensor, op)
            tensor.copy_(wide)
        else:
            self._all_reduce(tensor, tensor, op)

    def _prepare(self, tensor: torch.Tensor, op: int) -> tuple[int, Any] | None:
        """Have an all_reduce of such tensors made by the core from now on; None if it takes more than MPI's call."""
        check, count = self._agreement.check, tensor.numel()
        if not (self._agreement.checks and check.direct) or op == _AVG or tensor.dtype in HALVES or count >= LIMIT:
            return None
        kind, mpi_op = self._reductions[tensor.dtype, op]
        call = fingerprint("all_reduce", tensor, op, -1)
        reduction = check.prepare(call, count, self._runtime.mpi._handleof(kind), self._runtime.mpi._handleof(mpi_op))
        if len(self._prepared) >= MOST_PREPARED:
            self._prepared.clear()
        prepared = ctypes.addressof(reduction), reduction
        self._prepared[tensor.dtype, op, tensor.shape] = prepared
        return prepared

    def _all_reduce(self, buffer: torch.Tensor, tensor: torch.Tensor, op: int) -> None:
        kind, mpi_op = self._reductions[buffer.dtype, op]
        numbers = [self._address(buffer.data_ptr(), buffer.nbytes), buffer.numel(), kind]
        try:
            self._comm.Allreduce(self._in_place, numbers, mpi_op)
        except self._failure as error:
            raise self._agreement.failed(error, "all_reduce", tensor, op) from None
        if op == _AVG:
            buffer.div_(self.size)

    def reduce(self, tensor: torch.Tensor, root: int, op: int) -> None:
        self._compare("reduce", tensor, op, root)
        kind, mpi_op = self._reductions[tensor.dtype, op]
        wide = tensor.float() if tensor.dtype in HALVES else tensor
        numbers = self._types.numbers(wide, kind)
        send, receive = (self._in_place, numbers) if self.rank == root else (numbers, None)
        try:
            self._comm.Reduce(send, receive, mpi_op, root)
        except self._failure as error:
            raise self._agreement.failed(error, "reduce", tensor, op, root) from None
        if self.rank == root:
            self._finish(tensor, wide, op)

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: int) -> None:
        self._compare("reduce_scatter", output, op)
        at, _kept = _joined(inputs)
        self._reduce_scatter(output, at, op)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, op: int) -> None:
        self._compare("reduce_scatter", output, op)
        self._reduce_scatter(output, tensor.data_ptr(), op)

    def _reduce_scatter(self, output: torch.Tensor, at: int, op: int) -> None:
        """The blocks of all ranks, of ``output``'s dtype, are contiguous from ``at`` on."""
        kind, mpi_op = self._reductions[output.dtype, op]
        nbytes = output.nbytes * self.size
        source = self._address(at, nbytes)
        target = output
        if output.dtype in HALVES:
            sent = torch.frombuffer(source, dtype=output.dtype).float() if nbytes else output.float()
            source = self._address(sent.data_ptr(), sent.nbytes)
            target = torch.empty(output.shape, dtype=torch.float32)
        elif at <= output.data_ptr() < at + nbytes:
            target = torch.empty_like(output)  # MPI's buffers must not overlap, and it may be this rank's own block
        try:
            self._comm.Reduce_scatter_block([source, output.numel(), kind], self._types.numbers(target, kind), mpi_op)
        except self._failure as error:
            raise self._agreement.failed(error, "reduce_scatter", output, op) from None
        self._finish(output, target, op)

    def _finish(self, tensor: torch.Tensor, reduced: torch.Tensor, op: int) -> None:
        if op == _AVG:
            reduced.div_(self.size)
        if reduced is not tensor:
            tensor.copy_(reduced)

    # -- copies ------------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self._compare("broadcast", tensor, -1, root)
        try:
            self._comm.Bcast(self._types.tensor(tensor), root)
        except self._failure as error:
            raise self._agreement.failed(error, "broadcast", tensor, -1, root) from None

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        self._compare("all_gather", tensor)
        at = span(outputs)
        if at is not None:
            self._all_gather(at, tensor)
            return
        whole = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype)
        self._all_gather(whole.data_ptr(), tensor)
        _hand_out(whole, outputs)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        self._compare("all_gather", tensor)
        self._all_gather(output.data_ptr(), tensor)

    def _all_gather(self, at: int, tensor: torch.Tensor) -> None:
        own, nbytes = tensor.data_ptr(), tensor.nbytes
        send: Any = self._in_place if own == at + nbytes * self.rank else self._types.tensor(tensor)
        try:
            self._comm.Allgather(send, self._types.memory(at, nbytes * self.size, self.size))
        except self._failure as error:
            raise self._agreement.failed(error, "all_gather", tensor) from None

    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> None:
        self._compare("gather", tensor, -1, root)
        receive, whole, nbytes = None, None, tensor.nbytes
        send: Any = self._types.tensor(tensor)
        if outputs is not None:
            at = span(outputs)
            if at is None:
                whole = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype)
                at = whole.data_ptr()
            if tensor.data_ptr() == at + nbytes * root:
                send = self._in_place
            receive = self._types.memory(at, nbytes * self.size, self.size)
        try:
            self._comm.Gather(send, receive, root)
        except self._failure as error:
            raise self._agreement.failed(error, "gather", tensor, -1, root) from None
        if whole is not None and outputs is not None:
            _hand_out(whole, outputs)

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> None:
        self._compare("scatter", output, -1, root)
        send, kept = None, None
        receive: Any = self._types.tensor(output)
        if inputs is not None:
            at, kept = _joined(inputs)
            send = self._types.memory(at, output.nbytes * self.size, self.size)
            if output.data_ptr() == at + output.nbytes * root:
                receive = self._in_place
        try:
            self._comm.Scatter(send, receive, root)
        except self._failure as error:
            raise self._agreement.failed(error, "scatter", output, -1, root) from None
        del kept  # MPI has read it

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        sent, expected = [t.numel() for t in inputs], [t.numel() for t in outputs]
        sample = outputs[0]
        source, _kept = _joined(inputs)
        target = span(outputs)
        if target is not None:
            self._all_to_all(target, source, expected, sent, sample)
            return
        whole = torch.empty(sum(expected), dtype=sample.dtype)
        self._all_to_all(whole.data_ptr(), source, expected, sent, sample)
        for output, piece in zip(outputs, whole.split(expected), strict=True):
            output.view(-1).copy_(piece)

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
        """From ``source`` to ``target``, where the pieces are contiguous; counts in elements of ``like``'s dtype."""
        none = like.new_empty(0)  # the ranks must agree on the dtype alone
        self._compare("all_to_all", none)
        self._agreement.balance(sent, expected, like.dtype)
        size, kind = like.element_size(), self._types.items(like.element_size())
        try:
            self._comm.Alltoallv(
                [self._address(source, sum(sent) * size), (sent, _offsets(sent)), kind],
                [self._address(target, sum(expected) * size), (expected, _offsets(expected)), kind],
            )
        except self._failure as error:
            raise self._agreement.failed(error, "all_to_all", none) from None

    def barrier(self) -> None:
        self._compare("barrier")  # comparing is a barrier of its own
        if self._agreement.checks:
            return
        try:
            self._comm.Barrier()
        except self._failure as error:
            raise self._agreement.failed(error, "barrier", None) from None

    # -- point to point ----------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Message:
        return self._mail.send(tensor, peer, tag)

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Message:
        return self._mail.recv(tensor, peer, tag)

    def rest(self) -> None:
        time.sleep(REST_S)

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
        in_step = self._agreement.broken is None or isinstance(self._agreement.broken, CollectiveMismatch)
        try:
            self._agreement.close()
            if in_step and not self._agreement.aborted:
                self._comm.Free()
        except self._failure as error:
            raise PhalanxError(f"MPI failed in freeing a group's communicator: {error}") from None


def _joined(tensors: Sequence[torch.Tensor]) -> tuple[int, torch.Tensor | None]:
    """The address at which the tensors are contiguous, and the copy that lies there; None if it is their own memory."""
    at = span(tensors)
    if at is not None:
        return at, None
    copy = torch.cat([t.reshape(-1) for t in tensors])
    return copy.data_ptr(), copy


def _hand_out(whole: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    for output, piece in zip(outputs, whole.unbind(), strict=True):
        output.view(-1).copy_(piece.view(-1))


def _offsets(counts: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(counts)][:-1]
