"""Gloo, which torch brings: the network transport of groups that do not live on one host.

Every process group also has one attached, for sparse tensors and for the C++ virtuals that cannot be overridden from
Python. It is made when it is first used, and connects to a peer when it first has something to send to it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
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
from phalanx.system.awake import wait_awake
from phalanx.transports.contract import Communicator, Message
from phalanx.transports.reductions import FLOATS, OP_NAMES, reducible

__all__ = ["GlooCommunicator"]

_OPS = {value: getattr(dist.ReduceOp, name) for value, name in OP_NAMES.items()}
_AVG = dist.ReduceOp.AVG.value
_SERVED = frozenset((*FLOATS, torch.uint8, torch.int8, torch.int32, torch.int64))


class GlooCommunicator(Communicator):
    """Gloo's TCP connections as a communicator, for ranks that share no memory. Sums are in Gloo's order."""

    engine = "Gloo"
    rank_order_sums = False
    compares_calls = False
    compares_messages = False
    names_missing_ranks = False
    messages_to_itself = False

    def __init__(self, gloo: ProcessGroupGloo) -> None:
        self.rank = gloo.rank()
        self.size = gloo.size()
        self._gloo = gloo
        self._ways = [_Way() for _ in range(gloo.size())]
        self.ended = False  # set by end_messages, read by every thread that asks about a message

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
        flat = [] if outputs is None else [[t.view(-1) for t in outputs]]
        self._gloo.gather(flat, [tensor.view(-1)], options).wait()

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> None:
        options = ScatterOptions()
        options.rootRank = root
        flat = [] if inputs is None else [[t.view(-1) for t in inputs]]
        self._gloo.scatter([output.view(-1)], flat, options).wait()

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
        message = _GlooMessage(self, tensor, "send to", peer)
        self._ways[peer].begin(message, lambda: self._gloo.send([tensor], peer, tag))
        return message

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Message:
        if peer is None:
            # Gloo refuses an empty buffer for a message from any rank, and takes a shorter message than the buffer.
            buffer = tensor if tensor.numel() else tensor.new_empty(1)
            message = _GlooMessage(self, tensor, "recv from", None)
            message.begin(self._gloo.recv_anysource([buffer], tag))
            return message
        self._refuse_itself(peer)
        message = _GlooMessage(self, tensor, "recv from", peer)
        self._ways[peer].begin(message, lambda: self._gloo.recv([tensor], peer, tag))
        return message

    def rest(self) -> None:
        time.sleep(0.01)

    def end_messages(self) -> None:
        self.ended = True
        for way in self._ways:
            way.end()

    def _refuse_itself(self, peer: int) -> None:
        if peer == self.rank:
            raise RankError(f"rank {peer} is this process itself; over Gloo a message needs another rank")

    def abort(self) -> None:
        self._gloo.abort()

    def close(self) -> None:
        """Do nothing: the process group that owns the Gloo group shuts it down."""

    def _average(self, tensor: torch.Tensor, op: int) -> None:
        if op == _AVG:
            tensor.div_(self.size)


class _Way:
    """The messages between this rank and another.

    The first of them connects the two, and Gloo may wait then until the other rank has a message for this one. Nobody
    who starts a message may wait so long, so that one has a thread of its own; those that follow wait for it, in order.

    ``_open`` and ``_waiting`` are changed under the lock. ``_open`` is also read without it: once it is True, it stays
    so, and nothing waits.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = False
        self._waiting: deque[tuple[_GlooMessage, Callable[[], dist.Work]]] = deque()

    def begin(self, message: _GlooMessage, start: Callable[[], dist.Work]) -> None:
        """Hand a message to Gloo by ``start``: now, or after those that wait."""
        if not self._open:
            with self._lock:
                if not self._open:
                    self._waiting.append((message, start))
                    if len(self._waiting) == 1:
                        threading.Thread(target=self._run, name="phalanx-gloo-connect", daemon=True).start()
                    return
        message.begin(start())

    def end(self) -> None:
        """End the wait for messages that Gloo does not have yet."""
        with self._lock:
            for message, _ in self._waiting:
                message.fail(ClosedError.of_message())

    def _run(self) -> None:
        while True:
            message, start = self._waiting[0]
            connected = True
            try:
                message.begin(start())
            except Exception as error:
                connected = False
                message.fail(PhalanxError(str(error)))
            with self._lock:
                self._waiting.popleft()
                if not self._waiting:
                    self._open = connected
                    return


class _GlooMessage(Message):
    """A message of Gloo's. Gloo moves messages by itself, but a thread can only learn about one by waiting for it.

    A wait of Gloo's that times out closes its connections, so a test, or a wait with a timeout, starts a thread of
    the message's own that waits without one. Beside the fields of :class:`Message`:

    - ``_waiting`` is held by the thread that waits inside Gloo: one completion wakes one waiter only. It is taken
      before ``_lock`` and never while that is held.
    - ``_watched`` says that the message has its thread; it is read and written under ``_lock``.
    - ``_done`` is set when the message is settled, for waits with a timeout.
    - ``_work`` is Gloo's handle; it is set before ``_begun``, or never, if the message failed before Gloo had it.
    """

    def __init__(self, communicator: GlooCommunicator, tensor: torch.Tensor, verb: str, peer: int | None) -> None:
        super().__init__(tensor, verb, peer)
        self._communicator = communicator
        self._work: dist.Work | None = None
        self._begun = threading.Event()
        self._waiting = threading.Lock()
        self._watched = False
        self._done = threading.Event()

    def begin(self, work: dist.Work) -> None:
        """Gloo has the message."""
        self._work = work
        self._begun.set()

    def fail(self, error: PhalanxError) -> None:
        """Gloo does not get the message."""
        with self._lock:
            if not self._settled:
                self._settle(error)
        self._begun.set()

    def _poll(self, watch: bool) -> None:
        if self._communicator.ended:
            self._settle(ClosedError.of_message())
        elif watch or self._verb == "send to":
            # A receive that nobody waits for gets no thread: its wait would pass Gloo's own timeout one day, and Gloo
            # would close the connection. A send ends soon.
            self._expect()

    def _await(self, timeout_s: float | None) -> None:
        if timeout_s:
            self.expect()
            wait_awake(self._done.wait, timeout_s)
        else:
            self._wait_inside()

    def _expect(self) -> None:
        if not self._watched:
            self._watched = True
            threading.Thread(target=self._wait_inside, name="phalanx-gloo-message", daemon=True).start()

    def _wait_inside(self) -> None:
        with self._waiting:
            self._begun.wait()
            if self._settled or self._work is None:
                return
            error: PhalanxError | None = None
            source = -1
            try:
                self._work.wait()
                source = self._work._source_rank() if self._peer is None else self._peer
            except RuntimeError as reason:
                error = ClosedError.of_message() if self._communicator.ended else PhalanxError(str(reason))
            with self._lock:
                if not self._settled:  # a test may have found the group destroyed meanwhile
                    self._settle(error, source)

    def _settle(self, error: Exception | None, source: int = -1) -> None:
        super()._settle(error, source)
        self._done.set()


def _sum_for(op: int) -> int:
    return int(dist.ReduceOp.SUM.value) if op == _AVG else op
