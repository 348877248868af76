"""The communicator for a group over several hosts: shared memory inside, TCP between.

A *host* is a set of ranks that share memory; so the processes of two containers of one machine may be two. Each has a
*leader*, its lowest rank. The ranks at the same place of their hosts are a *lane*: they exchange one slice of what has
to travel, so all ranks of a host use its link, and every byte crosses it once.

Every collective begins with the leaders' frames (``frames.py``), which compare the calls, and carry the data as well if
it is small. Sums are added in the order of the ranks within a host, and in that of the hosts between them, so the bits
are the same on every rank and in every run.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta

import torch

from phalanx.diagnosis.ends import tell_of_failure
from phalanx.membership.abort import GroupAbort
from phalanx.membership.liveness import Gone
from phalanx.transports.contract import Communicator, Message
from phalanx.transports.hierarchical.copies import Copies
from phalanx.transports.hierarchical.engine import Engine
from phalanx.transports.hierarchical.exchanges import Exchanges, Parts
from phalanx.transports.hierarchical.frames import Frames
from phalanx.transports.hierarchical.layout import Layout, Sizes
from phalanx.transports.hierarchical.messages import HierarchicalMessages
from phalanx.transports.hierarchical.reason import Reason
from phalanx.transports.hierarchical.reductions import Reductions
from phalanx.transports.operands import AVG, SUM, reducible
from phalanx.transports.shm.communicator import SharedMemoryCommunicator

__all__ = ["HierarchicalCommunicator"]

_LEADERS_GRACE = timedelta(seconds=5)


class HierarchicalCommunicator(Communicator):
    """Collectives over several hosts.

    Args:
        layout: where the ranks are.
        rank: this process's rank in the group.
        local: a communicator of the ranks of this host, in their order; its methods are used by this one alone.
        group: what this rank knows of the group.
        timeout: how long every operation waits for other ranks.
        sizes: at which algorithms change, equal on all ranks; small ones make tests reach many chunks cheaply.
        engine: makes what carries bytes between hosts.
    """

    rank_order_sums = False

    def __init__(
        self,
        layout: Layout,
        rank: int,
        local: Communicator,
        group: GroupAbort,
        timeout: timedelta,
        sizes: Sizes | None = None,
        engine: Callable[[Layout, GroupAbort, timedelta], Engine] = Engine,
    ) -> None:
        self.rank, self.size = rank, sum(map(len, layout.hosts))
        self._layout, self._local, self._group = layout, local, group
        self._engine = engine(layout, group, timeout)
        self.engine = self._engine.name if len(layout.hosts) == self.size else f"shared memory and {self._engine.name}"
        self._frames = frames = Frames(layout, local, self._engine, sizes or Sizes.among(len(layout.hosts)))
        self._reductions, self._copies, self.exchanges = Reductions(frames), Copies(frames), Exchanges(frames)
        try:
            self.messages = HierarchicalMessages(layout, local, group, timeout)
        except BaseException:
            self._engine.close()
            raise
        self._reason = reason = Reason(group, layout, local, timeout, abort=self._wake)
        self._call = reason.call
        try:
            self.messages.begin(reason, self._call.error_of_message)
            reason.attend(self.messages)
            if isinstance(local, SharedMemoryCommunicator):
                local.part_of = self._call.text
                local.outer_error = self.messages.explain
            self._set_local_timeout(timeout, timeout)
            reason.join(timeout.total_seconds())
            tell_of_failure(reason)
        except BaseException:
            group.close()
            self.messages.give_up()
            self._engine.close()
            raise

    def can_reduce(self, dtype: torch.dtype, op: int) -> bool:
        return reducible(dtype, op)

    # -- collectives -------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: int) -> None:
        with self._call.named("all_reduce", tensor, op) as call:
            flat = tensor.view(-1)
            self._reductions.all_reduce(call, flat, SUM if op == AVG else op)
            if op == AVG:
                flat.div_(self.size)

    def reduce(self, tensor: torch.Tensor, root: int, op: int) -> None:
        with self._call.named("reduce", tensor, op, root) as call:
            flat = tensor.view(-1)
            self._reductions.reduce(call, flat, root, SUM if op == AVG else op)
            if op == AVG and self.rank == root:
                flat.div_(self.size)

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: int) -> None:
        with self._call.named("reduce_scatter", output, op) as call:
            flat, summed = output.view(-1), SUM if op == AVG else op
            self._reductions.reduce_scatter(call, flat, _flat(inputs), summed)
            if op == AVG:
                flat.div_(self.size)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        with self._call.named("broadcast", tensor, root=root) as call:
            self._copies.broadcast(call, tensor.view(-1), root)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        with self._call.named("all_gather", tensor) as call:
            self._copies.all_gather(call, _flat(outputs), tensor.view(-1))

    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> None:
        with self._call.named("gather", tensor, root=root) as call:
            parts = None if outputs is None else _flat(outputs)
            self._copies.gather(call, parts, tensor.view(-1), root)

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> None:
        with self._call.named("scatter", output, root=root) as call:
            parts = None if inputs is None else _flat(inputs)
            self._copies.scatter(call, output.view(-1), parts, root)

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        self._exchange_parts(Parts(outputs), Parts(inputs))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_counts: Sequence[int],
        input_counts: Sequence[int],
    ) -> None:
        self._exchange_parts(Parts(output, output_counts), Parts(tensor, input_counts))

    def _exchange_parts(self, outputs: Parts, inputs: Parts) -> None:
        with self._call.exchanging(outputs.dtype, inputs.nbytes, outputs.nbytes) as call:
            self.exchanges.all_to_all(call, outputs, inputs)

    def barrier(self) -> None:
        with self._call.named("barrier", None) as call:
            self._local.barrier()
            self._frames.meet(call)

    # -- messages and life -------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Message:
        return self.messages.mailbox.send(tensor, peer, tag)

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Message:
        return self.messages.mailbox.recv(tensor, peer, tag)

    def rest(self) -> None:
        self.messages.mailbox.rest()

    def end_messages(self) -> None:
        self.messages.end()

    def compare_rest(self, patience_s: float) -> bool:
        self._call.compare_last(patience_s)
        return True

    def gone(self, ranks: Collection[int]) -> dict[int, Gone]:
        """Find those of these ranks that have gone (``membership/liveness.py``)."""
        found = self._reason.gone([rank for rank in ranks if rank not in self._layout.here])
        if isinstance(self._local, SharedMemoryCommunicator):
            places = [place for place, rank in enumerate(self._layout.here) if rank in ranks]
            found |= {self._layout.here[place]: gone for place, gone in self._local.gone(places).items()}
        return found

    def set_timeout(self, timeout: timedelta, of_messages: timedelta | None = None) -> None:
        self._set_local_timeout(timeout, of_messages or timeout)
        self._engine.set_timeout(timeout)
        self.messages.set_timeout(of_messages or timeout)
        self._call.timeout_s = timeout.total_seconds()

    def _set_local_timeout(self, timeout: timedelta, of_messages: timedelta) -> None:
        # In a collective, a rank that waits for its leader waits longer than that one waits for another host.
        if isinstance(self._local, SharedMemoryCommunicator):
            self._local.set_timeout(timeout + _LEADERS_GRACE, of_messages=of_messages)

    def leave(self) -> list[threading.Thread]:
        self.messages.end()
        self._engine.stop(in_order=not self._reason.fails)
        return self.messages.threads() + self._engine.threads()

    def give_back(self) -> None:
        self._group.close()

    def group_fails(self, error: BaseException, cause: str) -> None:
        self._reason.script_fails(error, cause)
        self._local.group_fails(error, cause)

    def abort(self, doing: str = "") -> None:
        if doing:
            self._local.abort(doing)
        self._wake()

    def _wake(self) -> None:
        """End every wait of other ranks for this one."""
        with contextlib.ExitStack() as each:  # what fails must not keep the others from it
            each.callback(self.messages.abort)
            each.callback(self._engine.abort)
            each.callback(self._local.abort)

    def close(self) -> None:
        self.messages.close()
        self._engine.close(in_order=not self._reason.fails)
        self._local.close()
        self._group.close()


def _flat(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.view(-1) for tensor in tensors]
