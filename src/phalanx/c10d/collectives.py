"""The collectives and messages of c10d over a communicator: the front of each call, and its body.

The front goes straight to the body if the call is a plain one, else through torch's dispatcher, which comes back to the
body (``dispatcher.py``). The body takes all arguments by position, and plain tensors. It unpacks torch's
options and tensor lists, makes buffers contiguous, and hands a blocking call to a ``Communicator``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler

from phalanx.c10d.arguments import SUM, Checks, as_it_is, as_real, dense, in_place, moving
from phalanx.c10d.dispatcher import OPERATIONS, DispatchedCall, begin, tensors_in
from phalanx.c10d.messages import Messages
from phalanx.c10d.progress import Progress
from phalanx.c10d.torch_versions import method_name, uncompiled
from phalanx.c10d.work import DoneWork
from phalanx.errors import ArgumentError
from phalanx.transports.hierarchical.gloo import GlooOnDemand
from phalanx.transports.operands import split_counts

__all__ = ["Collectives", "front", "is_watched"]

Tensors = list[torch.Tensor]
Body = Callable[[Tensors, Tensors], None]


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, int))
_done = DoneWork([])
_number_of_modes = torch._C._len_torch_dispatch_stack

# -- the front -------------------------------------------------------------------------------------


def is_watched() -> bool:
    """Return whether a profiler or a dispatch mode of torch must see this thread's calls. Every call pays for it."""
    return profiler._is_profiler_enabled or _number_of_modes() > 0


def front(name: str, body: Callable[..., Any]) -> Callable[..., Any]:
    """The method ``name`` of a process group: ``body``, or torch's dispatcher, which comes back to ``body``.

    Args:
        name: of the method, one of ``OPERATIONS``.
        body: the method that does it for plain tensors, given all arguments by position, the options last.
    """
    known = OPERATIONS[name]
    options, from_cpp = known.options, known.from_cpp
    count = len(known.arguments) + (options is not None)
    torchs = getattr(dist.ProcessGroup, method_name(name), None) if known.operation else None

    def call(self: Any, *given: Any, **named: Any) -> Any:
        is_usual = len(given) == count and not named and (options is None or type(given[-1]) is options)
        if is_usual and not is_watched() and not self.hooked and _plain(given, options):
            work = body(self, *given)
            return _done if work is None and from_cpp else work
        if torchs is None:  # torch does not have the method yet, and so cannot dispatch it
            *tensors, opts = *given, *named.values()
            if not _plain([tensor for tensor in tensors if tensor is not None]):
                raise ArgumentError(f"{known.title}: takes tensors of torch's own types; unwrap subclasses first")
            return begin(self, name, body, tensors, opts)
        everything = (*given, *named.values())
        if nested := [tensor for tensor in tensors_in(everything) if tensor.is_nested]:
            self._check.on_cpu(nested)  # which refuses them: torch would speak of keys of its dispatcher
        with DispatchedCall(self, everything) as dispatched:
            # torch's method finds this frame by its name and its first argument, and then does not call it again.
            answer = torchs(self, *given, **named)
        # The last handle, since a group's operations end in their order.
        return dispatched.works[-1] if dispatched.works else answer

    call.__code__ = call.__code__.replace(co_name=method_name(name))
    call.__name__ = name
    call.__doc__ = body.__doc__
    call.__wrapped__ = body
    return call


def _plain(things: Sequence[Any], options: type | None = None) -> bool:
    """Return whether all tensors in it are torch's own, and all else is of the kinds that a call has."""
    for thing in things:
        kind = type(thing)
        if kind is list or kind is tuple:
            if not _plain(thing):
                return False
        elif kind not in _PLAIN and kind is not options:
            return False
    return True


# -- the bodies ------------------------------------------------------------------------------------


@uncompiled
class Collectives:
    """The operations of a process group, behind their fronts."""

    _rank: int
    _size: int
    _calls: Any  # the communicator, or what records its calls
    _check: Checks
    _gloo: GlooOnDemand
    _messages: Messages
    _progress: Progress
    _start: Callable[..., Any]  # runs an operation, or queues it and returns its Work (process_group.py)
    _summed: frozenset[torch.dtype]  # the dtypes that the communicator sums
    _within: Callable[..., Any]

    def _move(self, opts: Any, outputs: Tensors, inputs: Tensors, body: Body, own: int | None) -> Any:
        """Run ``body(outputs, inputs)`` now or queued, with copies of tensors that a communicator cannot take.

        Args:
            opts: torch's options.
            outputs, inputs: either may be one tensor for each part of the other's.
            body: the collective.
            own: the part of the larger side that may be the same memory as the smaller side; None if none may.
        """
        return self._start(opts, outputs, moving(outputs, inputs, body, own))

    # -- reductions --------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any) -> Any:
        reduce_op = opts.reduceOp
        # The usual case comes first, in as few steps as possible: each of them is paid in every call.
        if reduce_op == dist.ReduceOp.SUM and len(tensors) == 1 and self._summable(tensors[0]):
            return self._start(opts, tensors, partial(self._calls.all_reduce, tensors[0], SUM))
        if any(tensor.is_sparse for tensor in tensors):
            return self._start(opts, tensors, lambda: self._gloo.get().allreduce(tensors, opts).wait(), urgent=True)
        op, factor = self._check.reduction("all_reduce", tensors, reduce_op)
        body = self._calls.all_reduce

        def reduce_each() -> None:
            for tensor in tensors:
                if factor is not None:
                    tensor.detach().mul_(factor)
                in_place(tensor, lambda buffer: body(as_real(buffer), op))

        return self._start(opts, tensors, reduce_each)

    def _summable(self, tensor: torch.Tensor) -> bool:
        """Return whether the communicator can sum the tensor as it is."""
        # Others may not know whether they are contiguous.
        plain = tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested
        return plain and tensor.dtype in self._summed and tensor.is_contiguous() and not tensor.is_neg()

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> Any:
        return Collectives.allreduce(self, tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any) -> Any:
        root = self._check.peer(opts.rootRank)
        (tensor,) = self._check.one("reduce", tensors)
        op, factor = self._check.reduction("reduce", tensors, opts.reduceOp)

        def reduce_one() -> None:
            # A tensor that is scaled needs a stand-in: those of the ranks that are not the root stay as they are.
            source = dense(tensor, factor)
            self._calls.reduce(as_real(source), root, op)
            if self._rank == root and source.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(source)

        return self._start(opts, tensors, reduce_one)

    def reduce_scatter(self, outputs: Tensors, input_lists: list[Tensors], opts: Any) -> Any:
        (output,), inputs, body = self._check.one("reduce_scatter", outputs), input_lists[0], self._calls.reduce_scatter
        op, factor = self._check.reduction("reduce_scatter", outputs, opts.reduceOp)
        self._check.one_per_rank("reduce_scatter", inputs, output)

        def reduce(to: Tensors, given: Tensors) -> None:
            body(as_real(to[0]), [as_real(part) for part in given], op)

        return self._start(opts, outputs, moving(outputs, inputs, reduce, self._rank, factor))

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Any:
        return Collectives.reduce_scatter_single_coalesced(self, [output], [tensor], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        op, factor = self._check.reduction("reduce_scatter_single", outputs, opts.reduceOp)
        self._check.on_cpu(inputs)
        body = self._calls.reduce_scatter_single

        def reduce(to: Tensors, given: Tensors) -> None:
            body(as_real(to[0]), as_real(given[0]), op)

        moves = []
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check.multiple("reduce_scatter_single", tensor, output)
            moves.append(moving([output], [tensor], reduce, self._rank, factor))
        return self._start(opts, outputs, _in_turn(moves))

    # -- copies ------------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any) -> Any:
        body, root = self._calls.broadcast, self._check.peer(opts.rootRank)
        self._check.on_cpu(tensors)
        moves = [partial(in_place, tensor, lambda buffer: body(buffer, root)) for tensor in tensors]
        return self._start(opts, tensors, _in_turn(moves))

    def allgather(self, output_lists: list[Tensors], inputs: Tensors, opts: Any) -> Any:
        (tensor,) = self._check.one("all_gather", inputs)
        self._check.on_cpu(inputs)
        self._check.one_per_rank("all_gather", output_lists[0], tensor)
        return self._move(opts, output_lists[0], inputs, self._gather_all, self._rank)

    def allgather_coalesced(self, output_lists: list[Tensors], inputs: Tensors, opts: Any) -> Any:
        self._check.on_cpu(inputs)
        moves = []
        for *outputs, tensor in zip(*output_lists, inputs, strict=True):
            self._check.one_per_rank("all_gather_coalesced", outputs, tensor)
            moves.append(moving(outputs, [tensor], self._gather_all, self._rank))
        return self._start(opts, [output for outputs in output_lists for output in outputs], _in_turn(moves))

    def _gather_all(self, to: Tensors, given: Tensors) -> None:
        self._calls.all_gather(to, given[0])

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Any:
        self._check.on_cpu((output, tensor))
        self._check.multiple("all_gather_single", output, tensor)
        return self._move(opts, [output], [tensor], self._gather_all_single, self._rank)

    all_gather_single = _allgather_base

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        self._check.on_cpu([*outputs, *inputs])
        moves = []
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check.multiple("all_gather_single", output, tensor)
            moves.append(moving([output], [tensor], self._gather_all_single, self._rank))
        return self._start(opts, outputs, _in_turn(moves))

    def _gather_all_single(self, to: Tensors, given: Tensors) -> None:
        self._calls.all_gather_single(to[0], given[0])

    def gather(self, output_lists: list[Tensors], inputs: Tensors, opts: Any) -> Any:
        (tensor,), root, body = self._check.one("gather", inputs), self._check.peer(opts.rootRank), self._calls.gather
        self._check.on_cpu(inputs)
        outputs = output_lists[0] if output_lists else []
        if self._rank == root:
            self._check.one_per_rank("gather", outputs, tensor)
        elif output_lists:
            raise ArgumentError("gather: only the destination rank gives a list to gather into")
        return self._move(opts, outputs, inputs, lambda to, given: body(to or None, given[0], root), root)

    def gather_single(self, output: torch.Tensor | None, tensor: torch.Tensor, opts: Any) -> Any:
        """``gather`` into one tensor, as of torch 2.14. The ``output`` of ranks other than the root is ignored."""
        root, body = self._check.peer(opts.rootRank), self._calls.gather_single
        outputs = [output] if self._rank == root and output is not None else []
        self._check.on_cpu([tensor, *outputs])
        if outputs:
            self._check.multiple("gather_single", outputs[0], tensor)
        elif self._rank == root:
            raise ArgumentError("gather_single: the destination rank must give a tensor to gather into")
        return self._move(opts, outputs, [tensor], lambda to, given: body(to[0] if to else None, given[0], root), root)

    def scatter(self, outputs: Tensors, input_lists: list[Tensors], opts: Any) -> Any:
        (output,), root = self._check.one("scatter", outputs), self._check.peer(opts.rootRank)
        self._check.on_cpu(outputs)
        inputs = input_lists[0] if input_lists else []
        if self._rank == root:
            self._check.one_per_rank("scatter", inputs, output)
        elif input_lists:
            raise ArgumentError("scatter: only the source rank gives a list to scatter")
        body = self._calls.scatter
        return self._move(opts, outputs, inputs, lambda to, given: body(to[0], given or None, root), root)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        self._check.exchange(outputs, inputs)
        return self._move(opts, outputs, inputs, self._calls.all_to_all, None)

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
        return self._move(opts, [output], [tensor], lambda to, given: body(to[0], given[0], expected, sent), None)

    def barrier(self, opts: Any) -> Any:
        return self._start(opts, [], self._calls.barrier)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier with a timeout of its own, under Gloo's name for it. It names the first missing rank in any case.

        torch's own method, in C++, would ask the attached Gloo, which waits without end for a rank that does not come.
        """
        self._progress.run(self._within(timeout or self._gloo.timeout, self._calls.barrier))

    # -- point to point ----------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Any:
        (tensor,) = self._check.one("send", tensors)
        self._check.on_cpu(tensors)
        self._messages.refuse_if_closed()
        self._check.peer(dst)
        return self._messages.begin(self._calls.send, "send to", dense(tensor), dst, tag, tensors, [])

    def recv(self, tensors: Tensors, src: int | None, tag: int = 0) -> Any:
        (tensor,) = self._check.one("recv", tensors)
        self._check.on_cpu(tensors)
        self._messages.refuse_if_closed()
        self._check.peer(src)
        self._check.can_be_written("recv", tensor)
        buffer = tensor if as_it_is(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype)
        write_back = [] if buffer is tensor else [tensor, buffer]
        return self._messages.begin(self._calls.recv, "recv from", buffer, src, tag, tensors, write_back)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        return Collectives.recv(self, tensors, None, tag)


def _in_turn(moves: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """One function that does all of them."""

    def move_each() -> None:
        for move in moves:
            move()

    return moves[0] if len(moves) == 1 else move_each
