"""The collectives and messages of c10d over a communicator.

Each method unpacks torch's options and tensor lists, makes buffers contiguous, and hands a blocking call to a
``Communicator``. It takes all arguments by position, plain tensors, and no timeout: ``dispatcher.py`` sees to that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from phalanx.c10d.arguments import (
    SUM,
    Checks,
    all_dense,
    apart,
    apart_from_whole,
    as_it_is,
    as_real,
    dense,
    disjoint,
    in_place,
    moving,
)
from phalanx.c10d.messages import Messages
from phalanx.c10d.progress import Progress, around
from phalanx.c10d.torch_versions import uncompiled
from phalanx.errors import ArgumentError
from phalanx.transports.contract import Communicator
from phalanx.transports.hierarchical.gloo import GlooOnDemand
from phalanx.transports.operands import split_counts

__all__ = ["Collectives"]


@uncompiled
class Collectives:
    """The operations of a process group, behind the fronts of ``dispatcher.py``.

    Attributes:
        _calls: the communicator, or what records its calls.
        _summed: the dtypes that it sums.
        _start: runs an operation, or queues it and returns its ``Work`` (``process_group.py``).
    """

    _rank: int
    _size: int
    _communicator: Communicator
    _calls: Any
    _check: Checks
    _gloo: GlooOnDemand
    _messages: Messages
    _progress: Progress
    _start: Callable[..., Any]
    _summed: frozenset[torch.dtype]
    _within: Callable[..., Any]

    def _plain(self, opts: Any, result: list[torch.Tensor], body: Callable[..., None], *arguments: Any) -> Any:
        """Run ``body`` on tensors that a communicator can take as they are, now or queued."""
        if opts.asyncOp or around.wraps:
            return self._start(opts.asyncOp, result, partial(body, *arguments))
        return self._progress.run(body, *arguments)

    # -- reductions --------------------------------------------------------------------------------

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        reduce_op = opts.reduceOp
        # The usual case comes first, in as few steps as possible: each of them is paid in every call.
        if reduce_op == dist.ReduceOp.SUM and len(tensors) == 1 and self._summable(tensors[0]):
            if opts.asyncOp or around.wraps:
                return self._start(opts.asyncOp, tensors, partial(self._calls.all_reduce, tensors[0], SUM))
            return self._sum_now(tensors[0])
        if any(tensor.is_sparse for tensor in tensors):
            return self._start(
                opts.asyncOp, tensors, lambda: self._gloo.get().allreduce(tensors, opts).wait(), urgent=True
            )
        op, factor = self._check.reduction("all_reduce", tensors, reduce_op)
        body = self._calls.all_reduce

        def reduce_each() -> None:
            for tensor in tensors:
                if factor is not None:
                    tensor.detach().mul_(factor)
                in_place(tensor, lambda buffer: body(as_real(buffer), op))

        return self._start(opts.asyncOp, tensors, reduce_each)

    def _sum_now(self, tensor: torch.Tensor) -> None:
        progress = self._progress
        state = progress.state
        with progress.running:
            if not state[0]:
                state[0] = True
                try:
                    if not progress.queue:
                        self._calls.all_reduce(tensor, SUM)
                        return
                finally:
                    state[0] = False
        progress.run(self._calls.all_reduce, tensor, SUM)

    def _summable(self, tensor: torch.Tensor) -> bool:
        """Whether the communicator can sum the tensor as it is."""
        # Others may not know whether they are contiguous.
        plain = tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested
        return plain and tensor.dtype in self._summed and tensor.is_contiguous() and not tensor.is_neg()

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        return Collectives.allreduce(self, tensors, opts)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        root = self._check.peer(opts.rootRank)
        if opts.reduceOp == dist.ReduceOp.SUM and len(tensors) == 1 and self._summable(tensors[0]):
            return self._plain(opts, tensors, self._calls.reduce, tensors[0], root, SUM)
        (tensor,) = self._check.one("reduce", tensors)
        op, factor = self._check.reduction("reduce", tensors, opts.reduceOp)

        def reduce_one() -> None:
            # A tensor that is scaled needs a stand-in: those of the ranks that are not the root stay as they are.
            source = dense(tensor, factor)
            self._calls.reduce(as_real(source), root, op)
            if self._rank == root and source.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(source)

        return self._start(opts.asyncOp, tensors, reduce_one)

    def reduce_scatter(self, outputs: list[torch.Tensor], input_lists: list[list[torch.Tensor]], opts: Any) -> Any:
        (output,), inputs = self._check.one("reduce_scatter", outputs), input_lists[0]
        op, factor = self._check.reduction("reduce_scatter", outputs, opts.reduceOp)
        self._check.one_per_rank("reduce_scatter", inputs, output)
        body = self._calls.reduce_scatter

        def reduce(to: list[torch.Tensor], given: list[torch.Tensor]) -> None:
            body(as_real(to[0]), [as_real(part) for part in given], op)

        return self._start(opts.asyncOp, outputs, moving(outputs, inputs, reduce, self._rank, factor))

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Any:
        usual = opts.reduceOp == dist.ReduceOp.SUM and self._summable(output) and self._summable(tensor)
        if usual and apart_from_whole(output, tensor, self._rank):
            self._check.multiple("reduce_scatter_single", tensor, output)
            return self._plain(opts, [output], self._calls.reduce_scatter_single, output, tensor, SUM)
        return Collectives.reduce_scatter_single_coalesced(self, [output], [tensor], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> Any:
        op, factor = self._check.reduction("reduce_scatter_single", outputs, opts.reduceOp)
        self._check.on_cpu(inputs)
        body = self._calls.reduce_scatter_single

        def reduce(to: list[torch.Tensor], given: list[torch.Tensor]) -> None:
            body(as_real(to[0]), as_real(given[0]), op)

        moves = []
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check.multiple("reduce_scatter_single", tensor, output)
            moves.append(moving([output], [tensor], reduce, self._rank, factor))
        return self._start(opts.asyncOp, outputs, _in_turn(moves))

    # -- copies ------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        body, root = self._calls.broadcast, self._check.peer(opts.rootRank)
        self._check.on_cpu(tensors)
        if len(tensors) == 1 and as_it_is(tensors[0]):
            return self._plain(opts, tensors, body, tensors[0], root)
        moves = [partial(in_place, tensor, lambda buffer: body(buffer, root)) for tensor in tensors]
        return self._start(opts.asyncOp, tensors, _in_turn(moves))

    def allgather(self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Any:
        (tensor,), outputs = self._check.one("all_gather", inputs), output_lists[0]
        self._check.on_cpu([tensor])
        ready = self._check.one_per_rank("all_gather", outputs, tensor)
        if ready and as_it_is(tensor) and apart(tensor, outputs, self._rank):
            return self._plain(opts, outputs, self._calls.all_gather, outputs, tensor)
        return self._start(opts.asyncOp, outputs, self._gathering(outputs, tensor))

    def allgather_coalesced(self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Any:
        moves = []
        for *outputs, tensor in zip(*output_lists, inputs, strict=True):
            self._check.on_cpu([tensor])
            self._check.one_per_rank("all_gather_coalesced", outputs, tensor)
            moves.append(self._gathering(outputs, tensor))
        whole = [tensor for outputs in output_lists for tensor in outputs]
        return self._start(opts.asyncOp, whole, _in_turn(moves))

    def _gathering(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Callable[[], None]:
        return moving(outputs, [tensor], lambda to, given: self._calls.all_gather(to, given[0]), self._rank)

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Any:
        return Collectives.all_gather_single_coalesced(self, [output], [tensor], opts)

    all_gather_single = _allgather_base

    def all_gather_single_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> Any:
        self._check.on_cpu([*outputs, *inputs])
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check.multiple("all_gather_single", output, tensor)
        body = self._calls.all_gather_single
        if len(outputs) == 1 and all_dense((outputs[0], inputs[0])):
            output, tensor = outputs[0], inputs[0]
            if apart_from_whole(tensor, output, self._rank):
                return self._plain(opts, outputs, body, output, tensor)
        moves = [
            moving([output], [tensor], lambda to, given: body(to[0], given[0]), self._rank)
            for output, tensor in zip(outputs, inputs, strict=True)
        ]
        return self._start(opts.asyncOp, outputs, _in_turn(moves))

    def gather(self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Any:
        (tensor,), root, body = self._check.one("gather", inputs), self._check.peer(opts.rootRank), self._calls.gather
        self._check.on_cpu([tensor])
        outputs, ready = output_lists[0] if output_lists else [], True
        if self._rank == root:
            ready = self._check.one_per_rank("gather", outputs, tensor)
        elif output_lists:
            raise ArgumentError("gather: only the destination rank gives a list to gather into")
        if ready and as_it_is(tensor) and apart(tensor, outputs, root):
            return self._plain(opts, outputs, body, outputs or None, tensor, root)
        move = moving(outputs, [tensor], lambda to, given: body(to or None, given[0], root), root)
        return self._start(opts.asyncOp, outputs, move)

    def gather_single(self, output: torch.Tensor | None, tensor: torch.Tensor, opts: Any) -> Any:
        """``gather`` into one tensor, as of torch 2.15. The ``output`` of ranks other than the root is ignored."""
        root, body, ready = self._check.peer(opts.rootRank), self._calls.gather_single, as_it_is(tensor)
        self._check.on_cpu([tensor])
        if self._rank != root:
            output = None
        elif output is None:
            raise ArgumentError("gather_single: the destination rank must give a tensor to gather into")
        else:
            self._check.on_cpu([output])
            self._check.multiple("gather_single", output, tensor)
            ready = ready and as_it_is(output) and apart_from_whole(tensor, output, root)
        outputs = [] if output is None else [output]
        if ready:
            return self._plain(opts, outputs, body, output, tensor, root)
        move = moving(outputs, [tensor], lambda to, given: body(to[0] if to else None, given[0], root), root)
        return self._start(opts.asyncOp, outputs, move)

    def scatter(self, outputs: list[torch.Tensor], input_lists: list[list[torch.Tensor]], opts: Any) -> Any:
        root, body = self._check.peer(opts.rootRank), self._calls.scatter
        (output,) = self._check.one("scatter", outputs)
        self._check.on_cpu([output])
        inputs, ready = input_lists[0] if input_lists else [], as_it_is(output)
        if self._rank == root:
            ready &= self._check.one_per_rank("scatter", inputs, output)
        elif input_lists:
            raise ArgumentError("scatter: only the source rank gives a list to scatter")
        if ready and apart(output, inputs, root):
            return self._plain(opts, outputs, body, output, inputs or None, root)
        move = moving(outputs, inputs, lambda to, given: body(to[0], given or None, root), root)
        return self._start(opts.asyncOp, outputs, move)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> Any:
        self._check.exchange(outputs, inputs)
        body = self._calls.all_to_all
        if all_dense(outputs) and all_dense(inputs) and disjoint(outputs, inputs):
            return self._plain(opts, outputs, body, outputs, inputs)
        return self._start(opts.asyncOp, outputs, moving(outputs, inputs, body, None))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any,
    ) -> Any:
        self._check.on_cpu([output, tensor])
        if output.dtype != tensor.dtype:
            raise ArgumentError(f"all_to_all_single: the output is {output.dtype}, the input {tensor.dtype}")
        size, body = self._size, self._calls.all_to_all_single
        sent = split_counts("all_to_all_single input", tensor, input_splits, size)
        expected = split_counts("all_to_all_single output", output, output_splits, size)
        self._check.own_part("all_to_all_single", sent, expected)
        if all_dense((output, tensor)) and apart_from_whole(output, tensor, None):
            return self._plain(opts, [output], body, output, tensor, expected, sent)
        move = moving([output], [tensor], lambda to, given: body(to[0], given[0], expected, sent), None)
        return self._start(opts.asyncOp, [output], move)

    def barrier(self, opts: Any) -> Any:
        return self._plain(opts, [], self._calls.barrier)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier with a timeout of its own, under Gloo's name for it; every barrier here names the missing rank.

        torch's own method, in C++, would ask the attached Gloo, which waits without end for a rank that does not come.

        Args:
            timeout: for this barrier alone; the group's by default.
            wait_all_ranks: has no effect: the first missing rank is named, on every rank that has come.

        Raises:
            CollectiveTimeout: a rank did not come in time. The group cannot be used afterwards.
        """
        if timeout is None or timeout == self._gloo.timeout:
            self._progress.run(self._calls.barrier)
        else:
            self._progress.run(self._within(timeout, self._calls.barrier))

    # -- point to point ----------------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Any:
        (tensor,) = self._check.one("send", tensors)
        self._check.on_cpu(tensors)
        self._messages.refuse_if_closed()
        self._check.peer(dst)
        return self._messages.begin(self._calls.send, "send to", dense(tensor), dst, tag, tensors, [])

    def recv(self, tensors: list[torch.Tensor], src: int | None, tag: int = 0) -> Any:
        (tensor,) = self._check.one("recv", tensors)
        self._check.on_cpu(tensors)
        self._messages.refuse_if_closed()
        self._check.peer(src)
        self._check.can_be_written("recv", tensor)
        buffer = tensor if as_it_is(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype)
        write_back = [] if buffer is tensor else [tensor, buffer]
        return self._messages.begin(self._calls.recv, "recv from", buffer, src, tag, tensors, write_back)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Any:
        return Collectives.recv(self, tensors, None, tag)


def _in_turn(moves: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """One function that does all of them."""

    def move_each() -> None:
        for move in moves:
            move()

    return moves[0] if len(moves) == 1 else move_each
