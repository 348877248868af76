"""torch's side of a backend: the one class that speaks c10d.

A Python subclass of ``ProcessGroup``, because ``Backend`` cannot be subclassed from Python and this costs less
per call than a C++ backend behind the dispatcher. It unpacks options and tensor lists, makes buffers
contiguous, keeps the order of operations, and hands blocking calls to a :class:`Communicator`.

What the communicator does not serve yet goes to an attached Gloo group, in the group's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    ProcessGroupGloo,
)
from torch.distributed.distributed_c10d import GroupName

from phalanx.backends.communicator import Communicator
from phalanx.backends.progress import Progress
from phalanx.backends.work import PhalanxWork
from phalanx.errors import DeviceMismatch

__all__ = ["PhalanxProcessGroup"]

_SUM = dist.ReduceOp.SUM.value


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
        self._progress = Progress(group_name)
        self._gloo = gloo
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._set_group_name(GroupName(group_name))

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return self._backend_name

    def name(self) -> str:
        return self._backend_name

    # -- collectives -------------------------------------------------------------------------------

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        if opts is None:
            opts = AllreduceOptions()
        op = _op_number(opts.reduceOp)
        if len(tensors) == 1:
            tensor = tensors[0]
            if self._communicator.can_all_reduce(tensor.dtype, op) and tensor.is_cpu:
                body = self._communicator.all_reduce
                if not opts.asyncOp and tensor.is_contiguous():
                    return self._progress.run(body, tensor, op)
                return self._start(opts.asyncOp, tensors, lambda: _in_place(tensor, lambda t: body(t, op)))
        return self._start(opts.asyncOp, tensors, self._by_gloo("allreduce", tensors, opts))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        if opts is None:
            opts = AllreduceCoalescedOptions()
        op = _op_number(opts.reduceOp)
        body = self._communicator.all_reduce
        if all(self._communicator.can_all_reduce(t.dtype, op) and t.is_cpu for t in tensors):
            return self._start(opts.asyncOp, tensors, lambda: _each(tensors, lambda t: body(t, op)))
        return self._start(opts.asyncOp, tensors, self._by_gloo("allreduce_coalesced", tensors, opts))

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        if opts is None:
            opts = BroadcastOptions()
        body, root = self._communicator.broadcast, opts.rootRank
        self._require_cpu(tensors)
        if not opts.asyncOp and len(tensors) == 1 and tensors[0].is_contiguous():
            return self._progress.run(body, tensors[0], root)
        return self._start(opts.asyncOp, tensors, lambda: _each(tensors, lambda t: body(t, root)))

    def allgather(
        self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        if opts is None:
            opts = AllgatherOptions()
        self._require_cpu(inputs)
        flat = [output for outputs in output_lists for output in outputs]
        sizes = {t.nbytes for t in inputs} | {t.nbytes for t in flat}
        same = len(inputs) == 1 and len(flat) == self.size() and len(sizes) == 1
        if not same or any(t.dtype != inputs[0].dtype for t in flat):
            return self._start(opts.asyncOp, flat, self._by_gloo("allgather", output_lists, inputs, opts))
        body = self._communicator.all_gather
        return self._start(opts.asyncOp, flat, lambda: _gather(body, flat, inputs[0]))

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        if opts is None:
            opts = AllgatherOptions()
        self._require_cpu([output, tensor])
        if output.dtype != tensor.dtype or output.numel() != tensor.numel() * self.size():
            return self._start(opts.asyncOp, [output], self._by_gloo("_allgather_base", output, tensor, opts))
        body = self._communicator.all_gather
        return self._start(opts.asyncOp, [output], lambda: _gather_into(body, output, tensor, self.size()))

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        if opts is None:
            opts = AllgatherOptions()
        self._require_cpu(outputs + inputs)
        body, size = self._communicator.all_gather, self.size()

        def gather_all() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                _gather_into(body, output, tensor, size)

        return self._start(opts.asyncOp, outputs, gather_all)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def barrier(self, opts: Any = None) -> Any:
        if opts is None:
            opts = BarrierOptions()
        if not opts.asyncOp:
            return self._progress.run(self._communicator.barrier)
        return self._start(True, [], self._communicator.barrier)

    # -- lifetime ----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Finish what is queued and give back the communicator. ``destroy_process_group`` calls it."""
        self._progress.close()
        self._communicator.close()
        self._gloo.shutdown()

    def abort(self) -> None:
        """End operations under way on every rank with an error; the group cannot be used afterwards."""
        self._communicator.abort()
        self._gloo.abort()

    # -- running -----------------------------------------------------------------------------------

    def _start(self, asynchronous: bool, result: list[torch.Tensor], body: Callable[[], None]) -> Any:
        if not asynchronous:
            return self._progress.run(body)
        return PhalanxWork(self._progress, self._progress.submit(body, result))

    def _by_gloo(self, method: str, *arguments: Any) -> Callable[[], None]:
        """The same call on the attached group, as a body: it keeps its place in this group's order."""
        return lambda: getattr(self._gloo, method)(*arguments).wait()

    def _require_cpu(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if not tensor.is_cpu:
                raise DeviceMismatch(
                    f"backend {self._backend_name!r} moves CPU tensors; rank {self.rank()} gave one on "
                    f"{tensor.device}. Move it with .cpu(), or use the device's own backend"
                )


def _op_number(op: Any) -> int:
    """Torch's ReduceOp as an integer, without the factor that a pre-multiplied sum carries."""
    return int(op.op.value)


def _in_place(tensor: torch.Tensor, body: Callable[[torch.Tensor], None]) -> None:
    """Run ``body`` on a contiguous stand-in and copy back, or on the tensor itself if it is contiguous."""
    if tensor.is_contiguous():
        body(tensor)
        return
    dense = tensor.detach().contiguous()
    body(dense)
    tensor.detach().copy_(dense)


def _each(tensors: Sequence[torch.Tensor], body: Callable[[torch.Tensor], None]) -> None:
    for tensor in tensors:
        _in_place(tensor, body)


def _gather(
    body: Callable[[Sequence[torch.Tensor], torch.Tensor], None],
    outputs: Sequence[torch.Tensor],
    tensor: torch.Tensor,
) -> None:
    dense = [
        output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)
        for output in outputs
    ]
    body(dense, tensor.detach().contiguous())
    for output, filled in zip(outputs, dense, strict=True):
        if output is not filled:
            output.detach().copy_(filled)


def _gather_into(
    body: Callable[[Sequence[torch.Tensor], torch.Tensor], None],
    output: torch.Tensor,
    tensor: torch.Tensor,
    size: int,
) -> None:
    dense = output.detach().contiguous()
    body(list(dense.view(-1).chunk(size)) if dense.numel() else [dense] * size, tensor.detach().contiguous())
    if dense.data_ptr() != output.data_ptr():
        output.detach().copy_(dense)
