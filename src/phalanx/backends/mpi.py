"""The communicator over MPI, by way of mpi4py: any MPI library, on one host or many.

Every collective is MPI's own blocking one, on the tensors' memory, after the ranks have compared what they call
(``mpi_check.py``). The blocking forms and not the non-blocking ones, also for asynchronous operations, which the group's
progress thread runs: MPI moves a non-blocking collective only while somebody is in a call of MPI, so a thread must be in
any case, and libraries have their quicker algorithms in the blocking forms (docs/mpi.md has figures). The order of sums is
the library's. Messages are MPI_Isend and MPI_Irecv (``mpi_messages.py``).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx.backends.communicator import Communicator, Message
from phalanx.backends.mpi_check import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    Agreement,
)
from phalanx.backends.mpi_messages import Mail
from phalanx.backends.mpi_runtime import Runtime
from phalanx.backends.mpi_types import HALVES, Types, span
from phalanx.errors import CollectiveMismatch, PhalanxError

__all__ = ["MpiCommunicator"]

_AVG = dist.ReduceOp.AVG.value
REST_S = 0.0005


class MpiCommunicator(Communicator):
    """One group over an MPI communicator of its own.

    Args:
        runtime: MPI under way.
        comm: the group's communicator, which becomes this one's to free.
        members: the group's ranks in the world, in the group's order.
        key: the group's name in notices, equal on every member.
        timeout: how long to wait for other ranks.
    """

    def __init__(self, runtime: Runtime, comm: Any, members: Sequence[int], key: str, timeout: timedelta) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._runtime, self._comm = runtime, comm
        self._in_place = runtime.mpi.IN_PLACE
        self._failure = runtime.mpi.Exception
        self._types = Types(runtime.mpi)
        self._reductions = self._types.reductions
        self._agreement = Agreement(runtime, comm, members, key, timeout.total_seconds())
        self._meet = self._agreement.meet
        self._mail = Mail(runtime, comm, self._types, self._agreement)
        self._closed = False

    def can_reduce(self, dtype: torch.dtype, op: int) -> bool:
        return (dtype, op) in self._reductions

    # -- reductions --------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: int) -> None:
        self._meet(ALL_REDUCE, tensor, op)
        dtype = tensor.dtype
        kind, mpi_op = self._reductions[dtype, op]
        wide = tensor.float() if dtype in HALVES else tensor
        try:
            self._comm.Allreduce(self._in_place, self._types.numbers(wide, kind), mpi_op)
        except self._failure as error:
            raise self._agreement.failed(error, ALL_REDUCE, tensor, op) from None
        self._finish(tensor, wide, op)

    def reduce(self, tensor: torch.Tensor, root: int, op: int) -> None:
        self._meet(REDUCE, tensor, op, root)
        kind, mpi_op = self._reductions[tensor.dtype, op]
        wide = tensor.float() if tensor.dtype in HALVES else tensor
        numbers = self._types.numbers(wide, kind)
        send, receive = (self._in_place, numbers) if self.rank == root else (numbers, None)
        try:
            self._comm.Reduce(send, receive, mpi_op, root)
        except self._failure as error:
            raise self._agreement.failed(error, REDUCE, tensor, op, root) from None
        if self.rank == root:
            self._finish(tensor, wide, op)

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: int) -> None:
        self._meet(REDUCE_SCATTER, output, op)
        kind, mpi_op = self._reductions[output.dtype, op]
        half = output.dtype in HALVES
        at = None if half else span(inputs)
        if at is None:
            sent = torch.cat([t.reshape(-1) for t in inputs])
            sent = sent.float() if half else sent
            source = self._types.numbers(sent, kind)
        else:
            nbytes = output.nbytes * self.size
            source = [self._types.memory(at, nbytes)[0], output.numel() * self.size, kind]
        # MPI's buffers must not overlap; `output` may be this rank's own input.
        aliased = at is not None and at <= output.data_ptr() < at + output.nbytes * self.size
        wide = torch.empty(output.shape, dtype=torch.float32 if half else output.dtype) if half or aliased else output
        try:
            self._comm.Reduce_scatter_block(source, self._types.numbers(wide, kind), mpi_op)
        except self._failure as error:
            raise self._agreement.failed(error, REDUCE_SCATTER, output, op) from None
        self._finish(output, wide, op)

    def _finish(self, tensor: torch.Tensor, reduced: torch.Tensor, op: int) -> None:
        if op == _AVG:
            reduced.div_(self.size)
        if reduced is not tensor:
            tensor.copy_(reduced)

    # -- copies ------------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self._meet(BROADCAST, tensor, -1, root)
        try:
            self._comm.Bcast(self._types.tensor(tensor), root)
        except self._failure as error:
            raise self._agreement.failed(error, BROADCAST, tensor, -1, root) from None

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        self._meet(ALL_GATHER, tensor)
        own, nbytes = tensor.data_ptr(), tensor.nbytes
        at = span(outputs)
        whole: torch.Tensor | None = None
        if at is None:
            whole = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype)
            at = whole.data_ptr()
        send: Any = self._types.tensor(tensor)
        if at <= own < at + nbytes * self.size:
            if own != at + nbytes * self.rank:
                outputs[self.rank].view(-1).copy_(tensor.reshape(-1))
            send = self._in_place
        try:
            self._comm.Allgather(send, self._types.memory(at, nbytes * self.size, self.size))
        except self._failure as error:
            raise self._agreement.failed(error, ALL_GATHER, tensor) from None
        if whole is not None:
            _hand_out(whole, outputs)

    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> None:
        self._meet(GATHER, tensor, -1, root)
        receive, whole = None, None
        send: Any = self._types.tensor(tensor)
        nbytes = tensor.nbytes
        if outputs is not None:
            at = span(outputs)
            if at is None or at <= tensor.data_ptr() < at + nbytes * self.size:
                whole = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype)
                at = whole.data_ptr()
            receive = self._types.memory(at, nbytes * self.size, self.size)
        try:
            self._comm.Gather(send, receive, root)
        except self._failure as error:
            raise self._agreement.failed(error, GATHER, tensor, -1, root) from None
        if whole is not None and outputs is not None:
            _hand_out(whole, outputs)

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> None:
        self._meet(SCATTER, output, -1, root)
        send, whole, target = None, None, output
        if inputs is not None:
            at = span(inputs)
            if at is None:
                whole = torch.cat([t.reshape(-1) for t in inputs])
                at = whole.data_ptr()
            send = self._types.memory(at, output.nbytes * self.size, self.size)
            if at <= output.data_ptr() < at + output.nbytes * self.size:
                target = torch.empty_like(output)
        try:
            self._comm.Scatter(send, self._types.tensor(target), root)
        except self._failure as error:
            raise self._agreement.failed(error, SCATTER, output, -1, root) from None
        if target is not output:
            output.copy_(target)

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        sample = outputs[0].new_empty(0)  # the sizes differ from rank to rank, the dtype must not
        self._meet(ALL_TO_ALL, sample)
        sent, expected = [t.numel() for t in inputs], [t.numel() for t in outputs]
        self._agreement.balance(sent, expected, outputs[0].dtype)
        source = _joined(inputs)
        at = span(outputs)
        whole = None if at is not None else torch.empty(sum(expected), dtype=outputs[0].dtype)
        target = outputs[0].data_ptr() if whole is None else whole.data_ptr()
        item = outputs[0].element_size()
        kind, total = self._types.items(item), sum(expected) * item
        try:
            self._comm.Alltoallv(
                [self._types.memory(source[0], sum(sent) * item)[0], (sent, _offsets(sent)), kind],
                [self._types.memory(target, total)[0], (expected, _offsets(expected)), kind],
            )
        except self._failure as error:
            raise self._agreement.failed(error, ALL_TO_ALL, sample) from None
        if whole is not None:
            for output, piece in zip(outputs, whole.split(expected), strict=True):
                output.view(-1).copy_(piece)

    def barrier(self) -> None:
        self._meet(BARRIER)  # comparing is a barrier of its own
        if self._agreement.checks:
            return
        try:
            self._comm.Barrier()
        except self._failure as error:
            raise self._agreement.failed(error, BARRIER, None) from None

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

    def set_timeout(self, timeout: timedelta) -> None:
        """How long every collective and message waits for another rank from now on."""
        self._agreement.timeout_s = timeout.total_seconds()

    def abort(self) -> None:
        self._agreement.abort()

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
    """Where the tensors lie behind each other: where they are, or in a copy, which must live as long as it is used."""
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
