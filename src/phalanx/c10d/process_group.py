"""torch's side of a backend: the one class that speaks c10d.

A Python subclass of ``ProcessGroup``, because ``Backend`` cannot be subclassed from Python and this costs less
per call than a C++ backend behind the dispatcher. It unpacks options and tensor lists, makes buffers
contiguous, keeps the order of operations, and hands blocking calls to a :class:`Communicator`.

An attached Gloo group serves sparse tensors, and the C++ virtuals that cannot be overridden from Python.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ProcessGroupGloo,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch.distributed.distributed_c10d import GroupName

from phalanx.c10d.messages import DoneWork, Messages, MessageWork
from phalanx.c10d.progress import Progress
from phalanx.c10d.stand_ins import (
    all_dense,
    apart,
    apart_from_whole,
    dense,
    disjoint,
    in_place,
    into,
    separate,
)
from phalanx.c10d.work import PhalanxWork
from phalanx.errors import ArgumentError, DeviceMismatch, RankError
from phalanx.transports.contract import Communicator, Message
from phalanx.transports.layout import DTYPES, same_size, split_counts

__all__ = ["PhalanxProcessGroup"]

SMALL_BYTES = 64 * 1024  # up to here an asynchronous operation takes less time than waking a thread for it

_SUM = dist.ReduceOp.SUM.value
_PREMUL_SUM = dist.ReduceOp.PREMUL_SUM.value
_OP_NAMES = {op.value: name for name, op in dist.ReduceOp.RedOpType.__members__.items()}


class PhalanxProcessGroup(dist.ProcessGroup):
    """A process group over a communicator. Made by ``init_process_group`` and ``new_group``, not by hand.

    Args:
        name: the backend's name, for ``dist.get_backend`` and messages.
        communicator: what moves the bytes.
        gloo: what serves the rest; shut down with the group.
        group_name: torch's name for the group.
    """

    def __init__(self, name: str, communicator: Communicator, gloo: ProcessGroupGloo, group_name: str) -> None:
        super().__init__(communicator.rank, communicator.size)  # type: ignore[call-arg]
        self._backend_name = name
        self._communicator = communicator
        self._rank, self._size = communicator.rank, communicator.size
        self._progress = Progress(group_name)
        self._messages = Messages(group_name, communicator)
        self._gloo = gloo
        self._summed = frozenset(dtype for dtype in DTYPES if communicator.can_reduce(dtype, _SUM))
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._set_group_name(GroupName(group_name))

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return self._backend_name

    def name(self) -> str:
        return self._backend_name

    @property
    def engine(self) -> str:
        """What carries the bytes, where that is not the backend itself: ``Gloo``; else empty."""
        return self._communicator.engine

    # -- reductions --------------------------------------------------------------------------------

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        if opts is None:
            opts = AllreduceOptions()
        reduce_op = opts.reduceOp
        # The usual case first, in as few steps as it can be: every one of them is paid in each call.
        usual = reduce_op == dist.ReduceOp.SUM and len(tensors) == 1 and not opts.asyncOp
        if usual and self.sum_in_place(tensors[0]):
            return None
        if any(tensor.layout != torch.strided for tensor in tensors):
            return self._start(opts.asyncOp, tensors, lambda: self._gloo.allreduce(tensors, opts).wait())
        reals, op, factor = self._reduction("all_reduce", tensors, reduce_op)
        body = self._communicator.all_reduce

        def reduce_each() -> None:
            for tensor in reals:
                if factor is not None:
                    tensor.detach().mul_(factor)
                in_place(tensor, lambda buffer: body(buffer, op))

        return self._start(opts.asyncOp, tensors, reduce_each)

    def sum_in_place(self, tensor: torch.Tensor) -> bool:
        """All-reduce one tensor here and now, if it is of the usual kind: True. Else do nothing: False.

        What ``allreduce`` does for most calls, and ``Group.all_reduce`` without the way through torch's checks.
        """
        if not self._summable(tensor):
            return False
        progress = self._progress
        with progress.running:
            if not progress.busy:
                progress.busy = True
                try:
                    if not progress.queue:
                        self._communicator.all_reduce(tensor, _SUM)
                        return True
                finally:
                    progress.busy = False
        progress.run(self._communicator.all_reduce, tensor, _SUM)
        return True

    def _summable(self, tensor: torch.Tensor) -> bool:
        """Whether the communicator can sum the tensor as it is."""
        return tensor.dtype in self._summed and tensor.is_cpu and not tensor.is_sparse and tensor.is_contiguous()

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        return self.allreduce(tensors, AllreduceCoalescedOptions() if opts is None else opts)

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        if opts is None:
            opts = ReduceOptions()
        root = opts.rootRank
        if not opts.asyncOp and opts.reduceOp == dist.ReduceOp.SUM and len(tensors) == 1 and self._summable(tensors[0]):
            return self._progress.run(self._communicator.reduce, tensors[0], root, _SUM)
        (tensor,), op, factor = self._reduction("reduce", self._one("reduce", tensors), opts.reduceOp)

        def reduce_one() -> None:
            # A stand-in where it is scaled: the tensors of the other ranks stay as they are.
            source = dense(tensor) if factor is None else dense(tensor) * factor
            self._communicator.reduce(source, root, op)
            if self._rank == root and source.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(source)

        return self._start(opts.asyncOp, tensors, reduce_one)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], input_lists: list[list[torch.Tensor]], opts: Any = None
    ) -> Any:
        if opts is None:
            opts = ReduceScatterOptions()
        (output,), op, factor = self._reduction("reduce_scatter", self._one("reduce_scatter", outputs), opts.reduceOp)
        inputs = [torch.view_as_real(t) if t.is_complex() else t for t in input_lists[0]]
        self._require_list("reduce_scatter", inputs, output)
        return self._start(opts.asyncOp, outputs, lambda: self._reduce_blocks(output, inputs, op, factor))

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        if opts is None:
            opts = ReduceScatterOptions()
        usual = opts.reduceOp == dist.ReduceOp.SUM and not opts.asyncOp
        if usual and self._summable(output) and self._summable(tensor) and apart_from_whole(output, tensor, self._rank):
            self._require_multiple("reduce_scatter_single", tensor, output)
            return self._progress.run(self._communicator.reduce_scatter_single, output, tensor, _SUM)
        return self.reduce_scatter_tensor_coalesced([output], [tensor], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        if opts is None:
            opts = ReduceScatterOptions()
        name = "reduce_scatter_single"
        reals, op, factor = self._reduction(name, outputs, opts.reduceOp)
        sources = [torch.view_as_real(t) if t.is_complex() else t for t in inputs]
        self._require_cpu(sources)
        for output, source in zip(reals, sources, strict=True):
            self._require_multiple(name, source, output)

        def reduce_each() -> None:
            for output, source in zip(reals, sources, strict=True):
                self._reduce_parts(output, source, op, factor)

        return self._start(opts.asyncOp, outputs, reduce_each)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce_blocks(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: int, factor: float | None
    ) -> None:
        blocks = [dense(t) if factor is None else dense(t) * factor for t in inputs]

        def reduce(buffers: Sequence[torch.Tensor]) -> None:
            given = blocks if apart(buffers[0], blocks, self._rank) else [block.clone() for block in blocks]
            self._communicator.reduce_scatter(buffers[0], given, op)

        into([output], reduce)

    def _reduce_parts(self, output: torch.Tensor, whole: torch.Tensor, op: int, factor: float | None) -> None:
        given = dense(whole) if factor is None else dense(whole) * factor

        def reduce(buffers: Sequence[torch.Tensor]) -> None:
            parts = given if apart_from_whole(buffers[0], given, self._rank) else given.clone()
            self._communicator.reduce_scatter_single(buffers[0], parts, op)

        into([output], reduce)

    # -- copies ------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        if opts is None:
            opts = BroadcastOptions()
        body, root = self._communicator.broadcast, opts.rootRank
        self._require_cpu(tensors)
        if not opts.asyncOp and len(tensors) == 1 and tensors[0].is_contiguous():
            return self._progress.run(body, tensors[0], root)

        def broadcast_each() -> None:
            for tensor in tensors:
                in_place(tensor, lambda buffer: body(buffer, root))

        return self._start(opts.asyncOp, tensors, broadcast_each)

    def allgather(self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        if opts is None:
            opts = AllgatherOptions()
        (tensor,), outputs = self._one("all_gather", inputs), output_lists[0]
        self._require_cpu([tensor])
        ready = self._require_list("all_gather", outputs, tensor)
        if ready and not opts.asyncOp and tensor.is_contiguous() and apart(tensor, outputs, self._rank):
            return self._progress.run(self._communicator.all_gather, outputs, tensor)
        return self._start(opts.asyncOp, outputs, lambda: self._gather_into(outputs, tensor))

    def allgather_coalesced(
        self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        if opts is None:
            opts = AllgatherOptions()
        columns = [list(column) for column in zip(*output_lists, strict=True)]
        for outputs, tensor in zip(columns, inputs, strict=True):
            self._require_cpu([tensor])
            self._require_list("all_gather_coalesced", outputs, tensor)

        def gather_each() -> None:
            for outputs, tensor in zip(columns, inputs, strict=True):
                self._gather_into(outputs, tensor)

        return self._start(opts.asyncOp, [t for outputs in output_lists for t in outputs], gather_each)

    def _gather_into(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int | None = None) -> None:
        """All-gather, or gather to ``root``, which this rank then is."""
        source = dense(tensor)

        def gather(buffers: Sequence[torch.Tensor]) -> None:
            given = source if apart(source, buffers, self._rank) else source.clone()
            if root is None:
                self._communicator.all_gather(buffers, given)
            else:
                self._communicator.gather(buffers, given, root)

        into(outputs, gather)

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        return self.allgather_into_tensor_coalesced([output], [tensor], opts)

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        if opts is None:
            opts = AllgatherOptions()
        self._require_cpu([*outputs, *inputs])
        for output, tensor in zip(outputs, inputs, strict=True):
            self._require_multiple("all_gather_single", output, tensor)
        body = self._communicator.all_gather_single
        if not opts.asyncOp and len(outputs) == 1 and all_dense((outputs[0], inputs[0])):
            output, tensor = outputs[0], inputs[0]
            if apart_from_whole(tensor, output, self._rank):
                return self._progress.run(body, output, tensor)

        def gather_one(whole: torch.Tensor, source: torch.Tensor) -> None:
            body(whole, source if apart_from_whole(source, whole, self._rank) else source.clone())

        def gather_each() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                in_place(output, partial(gather_one, source=dense(tensor)))

        return self._start(opts.asyncOp, outputs, gather_each)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def gather(self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        if opts is None:
            opts = GatherOptions()
        (tensor,), root, body = self._one("gather", inputs), opts.rootRank, self._communicator.gather
        self._require_cpu([tensor])
        if self._rank != root:
            if output_lists:
                raise ArgumentError("gather: only the destination rank gives a list to gather into")
            if not opts.asyncOp and tensor.is_contiguous():
                return self._progress.run(body, None, tensor, root)
            return self._start(opts.asyncOp, [], lambda: body(None, dense(tensor), root))
        outputs = output_lists[0] if output_lists else []
        ready = self._require_list("gather", outputs, tensor)
        if ready and not opts.asyncOp and tensor.is_contiguous() and apart(tensor, outputs, self._rank):
            return self._progress.run(body, outputs, tensor, root)
        return self._start(opts.asyncOp, outputs, lambda: self._gather_into(outputs, tensor, root))

    def scatter(self, outputs: list[torch.Tensor], input_lists: list[list[torch.Tensor]], opts: Any = None) -> Any:
        if opts is None:
            opts = ScatterOptions()
        (output,), root, body = self._one("scatter", outputs), opts.rootRank, self._communicator.scatter
        inputs: list[torch.Tensor] | None = None
        self._require_cpu([output])
        ready = output.is_contiguous()
        if self._rank == root:
            inputs = input_lists[0] if input_lists else []
            ready &= self._require_list("scatter", inputs, output)
        elif input_lists:
            raise ArgumentError("scatter: only the source rank gives a list to scatter")
        if ready and not opts.asyncOp and (inputs is None or apart(output, inputs, root)):
            return self._progress.run(body, output, inputs, root)

        def scatter_one(buffers: Sequence[torch.Tensor]) -> None:
            sources = None if inputs is None else [dense(t) for t in inputs]
            if sources is not None and not apart(buffers[0], sources, root):
                sources = [source.clone() for source in sources]
            body(buffers[0], sources, root)

        return self._start(opts.asyncOp, outputs, lambda: into([output], scatter_one))

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        if opts is None:
            opts = AllToAllOptions()
        self._require_cpu([*outputs, *inputs])
        for name, tensors in (("output", outputs), ("input", inputs)):
            if len(tensors) != self._size:
                raise ArgumentError(f"all_to_all: {len(tensors)} {name} tensors, but the group has {self._size} ranks")
            for tensor in tensors:
                if tensor.dtype != outputs[0].dtype:
                    raise ArgumentError("all_to_all: the tensors differ in dtype")
        own = self._rank
        if outputs[own].numel() != inputs[own].numel():
            raise ArgumentError("all_to_all: what this rank sends itself is not what it expects from itself")
        body = self._communicator.all_to_all
        if not opts.asyncOp and all_dense(outputs) and all_dense(inputs) and disjoint(outputs, inputs):
            return self._progress.run(body, outputs, inputs)

        def exchange(buffers: Sequence[torch.Tensor]) -> None:
            sources = [dense(t) for t in inputs]
            body(buffers, sources if disjoint(buffers, sources) else [source.clone() for source in sources])

        return self._start(opts.asyncOp, outputs, lambda: into(outputs, exchange))

    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> Any:
        if opts is None:
            opts = AllToAllOptions()
        self._require_cpu([output, tensor])
        if output.dtype != tensor.dtype:
            raise ArgumentError(f"all_to_all_single: the output is {output.dtype}, the input {tensor.dtype}")
        size, body, own = self._size, self._communicator.all_to_all_single, self._rank
        sent = split_counts("all_to_all_single input", tensor, input_splits, size)
        expected = split_counts("all_to_all_single output", output, output_splits, size)
        if sent[own] != expected[own]:
            raise ArgumentError("all_to_all_single: what this rank sends itself is not what it expects from itself")
        if not opts.asyncOp and all_dense((output, tensor)) and separate(output, tensor):
            return self._progress.run(body, output, tensor, expected, sent)

        def exchange(whole: torch.Tensor) -> None:
            source = dense(tensor)
            body(whole, source if separate(whole, source) else source.clone(), expected, sent)

        return self._start(opts.asyncOp, [output], lambda: in_place(output, exchange))

    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> Any:
        if opts is None:
            opts = BarrierOptions()
        if not opts.asyncOp:
            return self._progress.run(self._communicator.barrier)
        return self._start(True, [], self._communicator.barrier)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier with a timeout of its own, in Gloo's words; every barrier here says who is missing.

        C++ would ask the attached Gloo, which waits for ever to connect to a rank that does not come.

        Args:
            timeout: for this barrier alone; the group's by default.
            wait_all_ranks: of no effect: the first rank that is missing is named, on every rank that has come.

        Raises:
            CollectiveTimeout: a rank did not come in time. The group cannot be used afterwards.
        """
        own = self._gloo.options._timeout
        if timeout is None or timeout == own:
            self._progress.run(self._communicator.barrier)
        else:
            self._progress.run(self._barrier_within, timeout, own)

    def _barrier_within(self, timeout: timedelta, own: timedelta) -> None:
        self._communicator.set_timeout(timeout)
        try:
            self._communicator.barrier()
        finally:
            self._communicator.set_timeout(own)

    # -- point to point ----------------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Any:
        (tensor,) = self._one("send", tensors)
        self._require_cpu(tensors)
        self._require_peer(dst)
        return self._message(self._communicator.send(dense(tensor), dst, tag), tensors, [])

    def recv(self, tensors: list[torch.Tensor], src: int | None, tag: int = 0) -> Any:
        (tensor,) = self._one("recv", tensors)
        self._require_cpu(tensors)
        self._require_peer(src)
        buffer = tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype)
        write_back = [] if buffer is tensor else [tensor, buffer]
        return self._message(self._communicator.recv(buffer, src, tag), tensors, write_back)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Any:
        return self.recv(tensors, None, tag)

    def _message(self, message: Message, tensors: list[torch.Tensor], write_back: list[torch.Tensor]) -> dist.Work:
        if message.done:
            return DoneWork(tensors)
        work = MessageWork(message, tensors, write_back)
        self._messages.look_after(work)
        return work

    # -- lifetime ----------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        """Nothing to do: operations of a group run behind each other anyway."""

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._start(True, [], _nothing)

    def shutdown(self) -> None:
        """Finish what is queued and give back the communicator. ``destroy_process_group`` calls it.

        From a signal handler that has interrupted an operation of this group: end that one with an error, and give
        back the communicator once it has left it. In a process that was forked from the group's own: do nothing.
        """
        if self._progress.inherited:
            # Gloo's destructor would wait for threads that are not in this process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))
            return
        if self._progress.interrupted():
            self.abort()
            # It waits for the group's lock, which the interrupted operation holds. No daemon: an exit waits for it.
            threading.Thread(target=self.shutdown, name="phalanx-closing").start()
            return
        self._progress.close()
        self._messages.close()
        self._communicator.close()
        self._gloo.shutdown()

    def abort(self) -> None:
        """End operations under way on every rank with an error; the group cannot be used afterwards."""
        self._communicator.abort()
        self._gloo.abort()

    # -- running and checking ----------------------------------------------------------------------

    def _start(self, asynchronous: bool, result: list[torch.Tensor], body: Callable[[], None]) -> Any:
        if not asynchronous:
            return self._progress.run(body)
        urgent = sum(tensor.nbytes for tensor in result) > SMALL_BYTES
        return PhalanxWork(self._progress, self._progress.submit(body, result, urgent))

    def _reduction(
        self, name: str, tensors: Sequence[torch.Tensor], reduce_op: Any
    ) -> tuple[list[torch.Tensor], int, float | None]:
        """The tensors as real numbers, the operation's number, and the factor of a pre-multiplied sum."""
        op, factor = int(reduce_op.op.value), None
        if op == _PREMUL_SUM:
            op, factor = _SUM, reduce_op.__getstate__()[1]
        self._require_cpu(tensors)
        reals = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
        for tensor, real in zip(tensors, reals, strict=True):
            sums = op in (_SUM, dist.ReduceOp.AVG.value)
            if not self._communicator.can_reduce(real.dtype, op) or (tensor.is_complex() and not sums):
                raise ArgumentError(
                    f"{name}: {_OP_NAMES.get(op, op)} of {tensor.dtype} is not supported by backend "
                    f"{self._backend_name!r}"
                )
            if factor is not None and torch.result_type(real, factor) != real.dtype:
                raise ArgumentError(
                    f"{name}: PREMUL_SUM of {tensor.dtype} with the factor {factor!r} gives "
                    f"{torch.result_type(real, factor)}, which the tensor cannot hold"
                )
        return reals, op, factor

    def _one(self, name: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if len(tensors) != 1:
            raise ArgumentError(f"{name}: takes one tensor per rank on the CPU; got {len(tensors)}")
        return tensors

    def _require_list(self, name: str, tensors: Sequence[torch.Tensor], like: torch.Tensor) -> bool:
        """Check a list with one tensor per rank; whether a communicator can take it as it is. One pass: a list is
        checked in every call.
        """
        dtype, count, fits, contiguous = like.dtype, like.numel(), len(tensors) == self._size, True
        for tensor in tensors:
            if not tensor.is_cpu:
                self._require_cpu(tensors)
            fits &= tensor.dtype == dtype and tensor.numel() == count
            contiguous &= tensor.is_contiguous()
        if not fits:
            same_size(name, tensors, like, self._size)
        return contiguous

    def _require_multiple(self, name: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        if whole.dtype != part.dtype or whole.numel() != part.numel() * self._size:
            raise ArgumentError(
                f"{name}: {whole.dtype}{list(whole.shape)} is not {self._size} times (one for each rank) "
                f"{part.dtype}{list(part.shape)}"
            )

    def _require_peer(self, rank: int | None) -> None:
        if self._messages.closed:
            self._messages.refuse_if_closed()
        if rank is not None and not 0 <= rank < self._size:
            raise RankError(f"rank {rank} is not in the group, which has ranks 0 to {self._size - 1}")

    def _require_cpu(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if not tensor.is_cpu:
                raise DeviceMismatch(
                    f"backend {self._backend_name!r} moves CPU tensors; rank {self._rank} gave one on "
                    f"{tensor.device}. Move it with .cpu(), or use the device's own backend"
                )


def _nothing() -> None:
    pass
