"""The communicator for a group over several hosts: shared memory inside, an engine between.

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
from functools import partial

import torch
from torch._C._distributed_c10d import Store

from phalanx.diagnosis.ends import tell_of_failure
from phalanx.transports.contract import Communicator, Message
from phalanx.transports.gone import Gone
from phalanx.transports.hierarchical.breaking import Reason
from phalanx.transports.hierarchical.bulk import Bulk
from phalanx.transports.hierarchical.crossing import Lines
from phalanx.transports.hierarchical.early_receives import EarlyReceives
from phalanx.transports.hierarchical.exchanging import Exchanging
from phalanx.transports.hierarchical.first_contact import FirstContact
from phalanx.transports.hierarchical.frames import Frames
from phalanx.transports.hierarchical.lane import Engine
from phalanx.transports.hierarchical.last_calls import LastCalls, forget
from phalanx.transports.hierarchical.layout import Layout
from phalanx.transports.hierarchical.messages import HierarchicalMessages
from phalanx.transports.hierarchical.parts import Parts, PartsOfWhole
from phalanx.transports.hierarchical.present_call import PresentCall
from phalanx.transports.hierarchical.reducing import Reducing
from phalanx.transports.hierarchical.sizes import Sizes
from phalanx.transports.hierarchical.small import Small
from phalanx.transports.reductions import AVG, SUM, reducible
from phalanx.transports.shm.communicator import SharedMemoryCommunicator

__all__ = ["HierarchicalCommunicator"]

_LEADERS_GRACE = timedelta(seconds=5)


class HierarchicalCommunicator(Communicator):
    """Collectives over several hosts.

    Args:
        layout: where the ranks are.
        rank: this process's rank in the group.
        local: a communicator of the ranks of this host, in their order; its methods are used by this one alone.
        engine: carries bytes between hosts.
        store: the group's own part of the job's store, for the reason why it broke.
        timeout: how long every operation waits for other ranks.
        sizes: at which algorithms change, equal on all ranks; small ones make tests reach many chunks cheaply.
        world: this is the world, which is asked for ranks that have gone.
        forget_gone: deletes what a rank has written into the store beside this group; it does so itself unless it dies.
    """

    rank_order_sums = False

    def __init__(
        self,
        layout: Layout,
        rank: int,
        local: Communicator,
        engine: Engine,
        store: Store,
        timeout: timedelta,
        sizes: Sizes | None = None,
        *,
        world: bool = False,
        forget_gone: Callable[[int], None] = lambda rank: None,
    ) -> None:
        self.rank, self.size = rank, sum(map(len, layout.hosts))
        self.engine = engine.name if len(layout.hosts) == self.size else f"shared memory and {engine.name}"
        self._layout = layout
        self._local = local
        self._engine = engine
        sizes = sizes or Sizes.among(len(layout.hosts))
        self._frames = frames = self._make_frames(sizes.frame_bytes) if layout.leader else None
        self._frame_bytes = sizes.frame_bytes
        self._small = Small(layout, local, frames)
        early = EarlyReceives(engine)
        self._bulk = Bulk(layout, local, engine, early, sizes.chunk_bytes)
        self._reducing = Reducing(layout, local, engine, early, sizes.chunk_bytes)
        self.exchanging = Exchanging(layout, local, engine, early, frames, sizes)
        self.messages = HierarchicalMessages(layout, rank, local, store, timeout)
        try:
            self._reason = reason = Reason(
                store,
                self.rank,
                layout,
                local,
                abort=self._wake,
                aborted=lambda: isinstance(local, SharedMemoryCommunicator) and local.aborted,
                timeout=timeout,
                world=world,
            )
        except BaseException:
            self.messages.give_up()
            raise
        self.questions = reason.questions
        self._depart = partial(reason.depart, partial(_forget, engine, self.messages, store, layout), forget_gone)
        self._last_calls = LastCalls(store, layout, local, reason)
        try:
            self._call = PresentCall(reason, timeout, local)
            reason.history = self._call
            self.messages.begin(reason, self._call.error_of_message)
            reason.attend(self.messages)
            engine.first_contact = FirstContact(store, rank, self.size, reason)
            if isinstance(local, SharedMemoryCommunicator):
                local.part_of = self._call.text
                local.outer_error = self.messages.explain
            self._set_local_timeout(timeout)
            reason.watch()
            tell_of_failure(reason)
        except BaseException:
            reason.close()
            self.messages.give_up()
            raise

    def _make_frames(self, nbytes: int) -> Frames:
        layout, local = self._layout, self._local
        tells = local.tells_crossing if isinstance(local, SharedMemoryCommunicator) else lambda: True
        others = {host: members[0] for host, members in enumerate(layout.hosts) if host != layout.host}
        lines = Lines(self.rank, {} if layout.host else others, tells)
        return Frames(self._engine, layout.hosts, layout.host, nbytes, lines)

    def can_reduce(self, dtype: torch.dtype, op: int) -> bool:
        return reducible(dtype, op)

    # -- collectives -------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: int) -> None:
        with self._call.named("all_reduce", tensor, op) as call:
            self._all_reduce(tensor.view(-1), op, call)

    def reduce(self, tensor: torch.Tensor, root: int, op: int) -> None:
        with self._call.named("reduce", tensor, op, root) as call:
            flat, summed = tensor.view(-1), SUM if op == AVG else op
            if flat.nbytes > self._frame_bytes:
                self._reducing.reduce(flat, root, summed, self._agree(call))
            else:
                self._small.reduce(call, flat, root, summed)
                self._call.is_compared = True
            if op == AVG and self.rank == root:
                flat.div_(self.size)

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: int) -> None:
        with self._call.named("reduce_scatter", output, op) as call:
            if output.nbytes * self.size > self._frame_bytes:
                summed = SUM if op == AVG else op
                self._reducing.reduce_scatter(output.view(-1), _flat(inputs), summed, self._agree(call))
                if op == AVG:
                    output.div_(self.size)
                return
            whole = torch.cat([part.view(-1) for part in inputs])
            self._all_reduce(whole, op, call)
            count = output.numel()
            output.view(-1).copy_(whole[self.rank * count : (self.rank + 1) * count])

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        with self._call.named("broadcast", tensor, root=root) as call:
            flat = tensor.view(-1)
            if flat.nbytes > self._frame_bytes:
                self._bulk.broadcast(flat, root, self._agree(call))
            else:
                self._small.broadcast(call, flat, root)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        with self._call.named("all_gather", tensor) as call:
            flat, parts = tensor.view(-1), _flat(outputs)
            if self._fits_frames(flat):
                self._small.gather(call, parts, flat, -1)
                self._call.is_compared = True
            else:
                self._bulk.all_gather(parts, flat, self._agree(call))

    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> None:
        with self._call.named("gather", tensor, root=root) as call:
            flat = tensor.view(-1)
            parts = None if outputs is None else _flat(outputs)
            if self._fits_frames(flat):
                self._small.gather(call, parts, flat, root)
                self._call.is_compared = True
            else:
                self._bulk.gather(parts, flat, root, self._agree(call))

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> None:
        with self._call.named("scatter", output, root=root) as call:
            flat = output.view(-1)
            parts = None if inputs is None else _flat(inputs)
            if self._fits_frames(flat):
                self._small.scatter(call, flat, parts, root)
            else:
                self._bulk.scatter(flat, parts, root, self._agree(call))

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        self._exchange_parts(Parts(outputs), Parts(inputs))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_counts: Sequence[int],
        input_counts: Sequence[int],
    ) -> None:
        self._exchange_parts(PartsOfWhole(output, output_counts), PartsOfWhole(tensor, input_counts))

    def _exchange_parts(self, outputs: Parts, inputs: Parts) -> None:
        dtype = outputs.dtype
        with self._call.exchanging(dtype, inputs.nbytes, outputs.nbytes) as call:
            self.exchanging.all_to_all(call, outputs, inputs)
            self._call.is_compared = True

    def barrier(self) -> None:
        with self._call.named("barrier", None) as call:
            self._local.barrier()
            self._small.agree(call)
            self._call.is_compared = True

    def _all_reduce(self, flat: torch.Tensor, op: int, call: int) -> None:
        summed = SUM if op == AVG else op
        if flat.nbytes > self._frame_bytes:
            self._reducing.all_reduce(flat, summed, self._agree(call))
        else:
            self._small.all_reduce(call, flat, summed)
            self._call.is_compared = True
        if op == AVG:
            flat.div_(self.size)

    def _agree(self, call: int) -> Callable[[], None]:
        """Compares this call with the other ranks', which large collectives do once their receives have begun."""
        return partial(self._small.agree, call)

    def _fits_frames(self, flat: torch.Tensor) -> bool:
        """Whether a frame can carry so much of every rank of a host."""
        return flat.nbytes * max(map(len, self._layout.hosts)) <= self._frame_bytes

    # -- messages and life -------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Message:
        return self.messages.send(tensor, peer, tag)

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Message:
        return self.messages.recv(tensor, peer, tag)

    def rest(self) -> None:
        self.messages.mailbox.rest()

    def end_messages(self) -> None:
        self.messages.end()

    def compare_rest(self, patience_s: float) -> bool:
        self._call.compare_last(self._last_calls, patience_s)
        return True

    def gone(self, ranks: Collection[int]) -> dict[int, Gone]:
        """See ``transports/gone.py``."""
        found = self._reason.gone([rank for rank in ranks if rank not in self._layout.here])
        if isinstance(self._local, SharedMemoryCommunicator):
            places = [place for place, rank in enumerate(self._layout.here) if rank in ranks]
            found |= {self._layout.here[place]: gone for place, gone in self._local.gone(places).items()}
        return found

    def set_timeout(self, timeout: timedelta) -> None:
        self._set_local_timeout(timeout)
        self._engine.set_timeout(timeout)
        self.messages.set_timeout(timeout)
        self._call.timeout_s = timeout.total_seconds()

    def _set_local_timeout(self, timeout: timedelta) -> None:
        # In a collective, a rank that waits for its leader waits longer than that one waits for another host.
        if isinstance(self._local, SharedMemoryCommunicator):
            self._local.set_timeout(timeout + _LEADERS_GRACE, of_messages=timeout)

    def leave(self) -> list[threading.Thread]:
        return self.messages.leave()

    def give_back(self) -> None:
        if self._frames is not None:
            self._frames.release()
        self._engine.give_back()
        self._depart(at_exit=True)

    def group_fails(self, error: BaseException, cause: str) -> None:
        self._reason.about_to_fail(error)
        self._reason.script_fails(cause)
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
        self._reason.close()
        self._local.close()
        if self._frames is not None:
            self._frames.release()
        self._engine.close()
        self.exchanging.let_go()
        if self._frames is not None:
            self._frames.let_go()
        self._depart()


def _forget(engine: Engine, messages: HierarchicalMessages, store: Store, layout: Layout, rank: int) -> None:
    engine.forget(rank)
    messages.forget(rank)
    forget(store, layout, rank)


def _flat(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.view(-1) for tensor in tensors]
