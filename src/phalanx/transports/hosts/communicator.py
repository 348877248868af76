"""The communicator for a group over several hosts: shared memory inside, an engine between.

A *host* is a set of ranks that share memory; so the processes of two containers of one machine may be two. Each has a
*leader*, its lowest rank. The ranks at the same place of their hosts are a *lane*: they exchange one slice of what has
to travel, so all ranks of a host use its link, and every byte crosses it once.

Every collective begins with the leaders' frames (``frames.py``), which compare the calls, and carry the data as well if
it is small. Sums are added in the order of the ranks within a host, and in that of the hosts between them, so the bits
are the same on every rank and in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from phalanx.transports.contract import Communicator, Message
from phalanx.transports.fingerprints import fingerprint
from phalanx.transports.hosts.breaking import Differs, Reason
from phalanx.transports.hosts.bulk import Bulk
from phalanx.transports.hosts.exchanging import Exchanging
from phalanx.transports.hosts.frames import Frames
from phalanx.transports.hosts.lane import Engine
from phalanx.transports.hosts.layout import Layout
from phalanx.transports.hosts.reducing import Reducing
from phalanx.transports.hosts.sizes import Sizes
from phalanx.transports.hosts.small import Small
from phalanx.transports.hosts.ways import Ways
from phalanx.transports.layout import even_pieces
from phalanx.transports.reductions import AVG, SUM, reducible
from phalanx.transports.shm.communicator import SharedMemoryCommunicator, text_of_call
from phalanx.watch.call_site import call_site
from phalanx.watch.calls import exchange_text

__all__ = ["HostsCommunicator"]

_LEADERS_GRACE = timedelta(seconds=5)


class HostsCommunicator(Communicator):
    """Collectives over several hosts.

    Args:
        layout: where the ranks are.
        local: a communicator of the ranks of this host, in their order; its methods are used by this one alone.
        engine: carries bytes between hosts.
        messages: a communicator of all ranks, for messages.
        store: the group's own part of the job's store, for the reason why it broke.
        timeout: how long every operation waits for other ranks.
        sizes: at which algorithms change, equal on all ranks; small ones make tests reach many chunks cheaply.
    """

    rank_order_sums = False
    compares_messages = False
    names_missing_ranks = False
    messages_to_itself = False

    def __init__(
        self,
        layout: Layout,
        local: Communicator,
        engine: Engine,
        messages: Communicator,
        store: Store,
        timeout: timedelta,
        sizes: Sizes | None = None,
    ) -> None:
        self.rank, self.size = messages.rank, messages.size
        self.engine = engine.name if len(layout.hosts) == self.size else f"shared memory and {engine.name}"
        self._layout = layout
        self._local = local
        self._engine = engine
        self._messages = messages
        sizes = sizes or Sizes.among(len(layout.hosts))
        frames = Frames(engine, layout.hosts, layout.host, sizes.frame_bytes) if layout.leader else None
        self._frame_bytes = sizes.frame_bytes
        self._small = Small(layout, local, frames)
        ways = Ways(engine)
        self._bulk = Bulk(layout, local, engine, ways, sizes.chunk_bytes)
        self._reducing = Reducing(layout, local, engine, ways, sizes.chunk_bytes)
        self._exchanging = Exchanging(layout, local, engine, ways, frames, sizes.frame_bytes)
        reason = Reason(
            store,
            self.rank,
            layout,
            abort=self._wake,
            aborted=lambda: isinstance(local, SharedMemoryCommunicator) and local.aborted,
        )
        self._call = _Call(reason, timeout)
        if isinstance(local, SharedMemoryCommunicator):
            local.part_of = self._call.text
        local.set_timeout(timeout + _LEADERS_GRACE)

    def can_reduce(self, dtype: torch.dtype, op: int) -> bool:
        return reducible(dtype, op)

    # -- collectives -------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: int) -> None:
        with self._call.named("all_reduce", tensor, op):
            self._all_reduce(tensor.view(-1), op, fingerprint("all_reduce", tensor, op, -1))

    def reduce(self, tensor: torch.Tensor, root: int, op: int) -> None:
        with self._call.named("reduce", tensor, op, root):
            call, flat, summed = fingerprint("reduce", tensor, op, root), tensor.view(-1), SUM if op == AVG else op
            if flat.nbytes > self._frame_bytes:
                self._reducing.reduce(flat, root, summed, self._agree(call))
            else:
                self._small.reduce(call, flat, root, summed)
            if op == AVG and self.rank == root:
                flat.div_(self.size)

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: int) -> None:
        with self._call.named("reduce_scatter", output, op):
            call = fingerprint("reduce_scatter", output, op, -1)
            if output.nbytes * self.size > self._frame_bytes:
                summed = SUM if op == AVG else op
                self._reducing.reduce_scatter(output.view(-1), _flat(inputs), summed, self._agree(call))
                if op == AVG:
                    output.div_(self.size)
                return
            whole = torch.cat([part.view(-1) for part in inputs])
            self._all_reduce(whole, op, call)
            output.view(-1).copy_(even_pieces(whole, self.size)[self.rank])

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        with self._call.named("broadcast", tensor, root=root):
            call, flat = fingerprint("broadcast", tensor, -1, root), tensor.view(-1)
            if flat.nbytes > self._frame_bytes:
                self._bulk.broadcast(flat, root, self._agree(call))
            else:
                self._small.broadcast(call, flat, root)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        with self._call.named("all_gather", tensor):
            call, flat, parts = fingerprint("all_gather", tensor, -1, -1), tensor.view(-1), _flat(outputs)
            if self._fits_frames(flat):
                self._small.gather(call, parts, flat, -1)
            else:
                self._bulk.all_gather(parts, flat, self._agree(call))

    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> None:
        with self._call.named("gather", tensor, root=root):
            call, flat = fingerprint("gather", tensor, -1, root), tensor.view(-1)
            parts = None if outputs is None else _flat(outputs)
            if self._fits_frames(flat):
                self._small.gather(call, parts, flat, root)
            else:
                self._bulk.gather(parts, flat, root, self._agree(call))

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> None:
        with self._call.named("scatter", output, root=root):
            call, flat = fingerprint("scatter", output, -1, root), output.view(-1)
            parts = None if inputs is None else _flat(inputs)
            if self._fits_frames(flat):
                self._small.scatter(call, flat, parts, root)
            else:
                self._bulk.scatter(flat, parts, root, self._agree(call))

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        with self._call.exchanging(outputs, inputs):
            call = fingerprint("all_to_all", outputs[0].new_empty(0), -1, -1)
            self._exchanging.all_to_all(call, _flat(outputs), _flat(inputs))

    def barrier(self) -> None:
        with self._call.named("barrier", None):
            self._local.barrier()
            self._small.agree(fingerprint("barrier", None, -1, -1))

    def _all_reduce(self, flat: torch.Tensor, op: int, call: int) -> None:
        summed = SUM if op == AVG else op
        if flat.nbytes > self._frame_bytes:
            self._reducing.all_reduce(flat, summed, self._agree(call))
        else:
            self._small.all_reduce(call, flat, summed)
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
        return self._messages.send(tensor, peer, tag)

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Message:
        return self._messages.recv(tensor, peer, tag)

    def rest(self) -> None:
        self._messages.rest()

    def end_messages(self) -> None:
        self._messages.end_messages()

    def set_timeout(self, timeout: timedelta) -> None:
        # A rank that waits for its leader waits longer than that one waits for another host.
        self._local.set_timeout(timeout + _LEADERS_GRACE)
        self._engine.set_timeout(timeout)
        self._messages.set_timeout(timeout)
        self._call.timeout_s = timeout.total_seconds()

    def abort(self) -> None:
        self._wake()
        self._messages.abort()

    def _wake(self) -> None:
        """End every wait of other ranks for this one."""
        self._local.abort()
        self._engine.abort()

    def close(self) -> None:
        self._local.close()
        self._engine.close()
        self._messages.close()


def _flat(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.view(-1) for tensor in tensors]


class _Call:
    """The collective that this rank is in, for errors. Used in a ``with``: what is raised there breaks the group.

    It is written by the thread that makes the call, of which there is one at a time.
    """

    def __init__(self, reason: Reason, timeout: timedelta) -> None:
        self._reason = reason
        self.timeout_s = timeout.total_seconds()
        self._text: tuple[Callable[..., str], tuple[Any, ...]] = (str, ())
        self._error: BaseException | None = None

    def named(self, name: str, tensor: torch.Tensor | None, op: int | None = None, root: int | None = None) -> _Call:
        """The call of a collective."""
        dtype, shape = (None, ()) if tensor is None else (tensor.dtype, tensor.shape)
        self._text = text_of_call, (name, dtype, shape, op, root)
        return self

    def exchanging(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> _Call:
        """The call of an all_to_all."""
        sizes = [[part.numel() for part in parts] for parts in (inputs, outputs)]
        self._text = exchange_text, (outputs[0].dtype, *sizes)
        return self

    def text(self) -> str:
        """The call, with its line."""
        make, arguments = self._text
        site = call_site()
        return f"{make(*arguments)} at {site}" if site else make(*arguments)

    def __enter__(self) -> None:
        if self._error is not None:
            raise self._error

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and error is not self._error:
            self._error = self._reason.error(error, self.text(), self.timeout_s)
            if self._error is not error:
                raise self._error from (None if isinstance(error, Differs) else error)
