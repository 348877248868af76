"""Gloo, torch's own engine: the network transport of groups that do not live on one host.

Every process group also has one attached, for sparse tensors and for the C++ virtuals that cannot be overridden from
Python. It connects to a peer when it first has something to send to it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    GatherOptions,
    ProcessGroupGloo,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from phalanx.errors import ClosedError, PhalanxError, RankError
from phalanx.transports.contract import Communicator, Message
from phalanx.transports.reductions import FLOATS, OP_NAMES, reducible

__all__ = ["GlooCommunicator"]

_OPS = {value: getattr(dist.ReduceOp, name) for value, name in OP_NAMES.items()}
_AVG = dist.ReduceOp.AVG.value
_SERVED = frozenset((*FLOATS, torch.uint8, torch.int8, torch.int32, torch.int64))


class GlooCommunicator(Communicator):
    """Gloo's TCP connections as a communicator, for ranks that share no memory. Sums are in Gloo's order."""

    engine = "Gloo"

    def __init__(self, gloo: ProcessGroupGloo) -> None:
        self.rank = gloo.rank()
        self.size = gloo.size()
        self._gloo = gloo
        self._ended = False

    def can_reduce(self, dtype: torch.dtype, op: int) -> bool:
        return dtype in _SERVED and reducible(dtype, op)

    def all_reduce(self, tensor: torch.Tensor, op: int) -> None:
        options = AllreduceOptions()
        options.reduceOp = _OPS[_sum_for(op)]
        self._gloo.allreduce([tensor], options).wait()
        self._average(tensor, op)

    def reduce(self, tensor: torch.Tensor, root: int, op: int) -> None:
        options = ReduceOptions()
        options.reduceOp, options.rootRank = _OPS[_sum_for(op)], root
        # Gloo uses the tensors of the other ranks as scratch.
        buffer = tensor if self.rank == root else tensor.clone()
        self._gloo.reduce([buffer], options).wait()
        if self.rank == root:
            self._average(tensor, op)

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: int) -> None:
        options = ReduceScatterOptions()
        options.reduceOp = _OPS[_sum_for(op)]
        self._gloo.reduce_scatter([output], [[t.view_as(output) for t in inputs]], options).wait()
        self._average(output, op)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        options = BroadcastOptions()
        options.rootRank = root
        self._gloo.broadcast([tensor], options).wait()

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        self._gloo.allgather([[t.view(-1) for t in outputs]], [tensor.view(-1)]).wait()

    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> None:
        options = GatherOptions()
        options.rootRank = root
        self._gloo.gather([] if outputs is None else [list(outputs)], [tensor], options).wait()

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> None:
        options = ScatterOptions()
        options.rootRank = root
        self._gloo.scatter([output], [] if inputs is None else [list(inputs)], options).wait()

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        received = torch.cat([t.view(-1) for t in outputs])
        sizes = [[t.numel() for t in tensors] for tensors in (outputs, inputs)]
        self._gloo.alltoall_base(received, torch.cat([t.view(-1) for t in inputs]), *sizes).wait()
        for output, piece in zip(outputs, received.split(sizes[0]), strict=True):
            output.view(-1).copy_(piece)

    def set_timeout(self, timeout: timedelta) -> None:
        self._gloo._set_default_timeout(timeout)

    def barrier(self) -> None:
        self._gloo.barrier().wait()

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Message:
        self._refuse_itself(peer)
        return _GlooMessage(self, self._gloo.send([tensor], peer, tag), tensor, peer, sending=True)

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Message:
        if peer is None:
            return _GlooMessage(self, self._gloo.recv_anysource([tensor], tag), tensor, None)
        self._refuse_itself(peer)
        return _GlooMessage(self, self._gloo.recv([tensor], peer, tag), tensor, peer)

    def rest(self) -> None:
        time.sleep(0.01)

    def end_messages(self) -> None:
        self._ended = True

    def _refuse_itself(self, peer: int) -> None:
        if peer == self.rank:
            raise RankError(f"rank {peer} is this process itself; over Gloo a message needs another rank")

    def abort(self) -> None:
        self._gloo.abort()

    def close(self) -> None:
        """Nothing of its own: the group that owns the engine shuts it down."""

    def _average(self, tensor: torch.Tensor, op: int) -> None:
        if op == _AVG:
            tensor.div_(self.size)


class _GlooMessage(Message):
    """Gloo's own handle. Gloo moves messages by itself, but can only be asked about one by waiting for it.

    One completion wakes one waiter only, so waiting takes a lock. A wait of Gloo's that times out closes its
    connections, so one with a timeout, or none at all, is left to a thread that waits without.
    """

    def __init__(
        self,
        communicator: GlooCommunicator,
        work: dist.Work,
        tensor: torch.Tensor,
        peer: int | None,
        sending: bool = False,
    ) -> None:
        self._communicator = communicator
        self._work = work
        self._tensor: torch.Tensor | None = tensor
        self._peer = peer
        self._sending = sending
        self._error: PhalanxError | None = None
        self._lock = threading.Lock()
        self._watched = False
        self._done = threading.Event()

    def test(self, watch: bool = True) -> bool:
        # A receive that nobody asks for is left alone: what waits for it would time out one day. A send ends soon.
        if (watch or self._sending) and not self._communicator._ended:
            self._watch()
        return self._outcome()

    def wait(self, timeout_s: float | None = None) -> bool:
        if not timeout_s:
            self._settle()
        elif not self._done.is_set():
            self._watch()
            self._done.wait(timeout_s)
        return self._outcome()

    def expect(self) -> None:
        self._watch()

    def _watch(self) -> None:
        if self._watched or self._done.is_set():
            return
        self._watched = True  # should two threads come here at once, the second new one finds the message done
        threading.Thread(target=self._settle, name="phalanx-gloo-message", daemon=True).start()

    def _settle(self) -> None:
        with self._lock:
            if self._done.is_set():
                return
            try:
                self._work.wait()
                if self._peer is None:
                    self._peer = self._work._source_rank()
            except RuntimeError as error:
                self._error = ClosedError(str(error)) if self._communicator._ended else PhalanxError(str(error))
            self._tensor = None
            self._done.set()

    def _outcome(self) -> bool:
        if not self._done.is_set():
            if self._communicator._ended:
                raise ClosedError("a message of a process group was used after the group had been destroyed")
            return False
        if self._error is not None:
            raise self._error
        return True

    @property
    def source(self) -> int:
        return -1 if self._peer is None else self._peer


def _sum_for(op: int) -> int:
    return int(dist.ReduceOp.SUM.value) if op == _AVG else op
