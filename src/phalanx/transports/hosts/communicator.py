"""The communicator for a group over several hosts: shared memory inside, an engine between.

A *host* is a set of ranks that share memory; so the processes of two containers of one machine may be two. Each has a
*leader*, its lowest rank. The ranks at the same place of their hosts are a *lane*: they exchange one slice of what has
to travel, so all ranks of a host use its link, and every byte crosses it once.

Every collective begins with the leaders' frames (``frames.py``), which compare the calls, and carry the data as well if
it is small. Sums are added in the order of the ranks within a host, and in that of the hosts between them, so the bits
are the same on every rank and in every run.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from phalanx.transports.contract import Communicator, Message
from phalanx.transports.fingerprints import fingerprint
from phalanx.transports.hosts.breaking import Differs, Reason
from phalanx.transports.hosts.bulk import Bulk
from phalanx.transports.hosts.combining import combine
from phalanx.transports.hosts.frames import SMALL_BYTES, Frames
from phalanx.transports.hosts.lane import Engine
from phalanx.transports.hosts.layout import Layout
from phalanx.transports.layout import even_pieces
from phalanx.transports.reductions import AVG, SUM, reducible
from phalanx.transports.shm.communicator import SharedMemoryCommunicator, text_of_call
from phalanx.watch.call_site import call_site
from phalanx.watch.calls import exchange_text

__all__ = ["HostsCommunicator"]

_CALL = struct.Struct("<q")
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
    ) -> None:
        self.rank, self.size = messages.rank, messages.size
        self.engine = engine.name if len(layout.hosts) == self.size else f"shared memory and {engine.name}"
        self._layout = layout
        self._local = local
        self._engine = engine
        self._messages = messages
        self._frames = Frames(engine, layout.leaders, layout.host) if layout.leader else None
        self._bulk = Bulk(layout, local, engine)
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
            reduced = tensor if self.rank == root else tensor.clone()
            self._all_reduce(reduced.view(-1), op, fingerprint("reduce", tensor, op, root))

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: int) -> None:
        with self._call.named("reduce_scatter", output, op):
            call = fingerprint("reduce_scatter", output, op, -1)
            if output.nbytes * self.size > SMALL_BYTES:
                self._agree(call)
                summed = SUM if op == AVG else op
                self._bulk.reduce_scatter(output.view(-1), [part.view(-1) for part in inputs], summed)
                if op == AVG:
                    output.div_(self.size)
                return
            whole = torch.cat([part.view(-1) for part in inputs])
            self._all_reduce(whole, op, call)
            output.view(-1).copy_(even_pieces(whole, self.size)[self.rank])

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        with self._call.named("broadcast", tensor, root=root):
            call, flat = fingerprint("broadcast", tensor, -1, root), tensor.view(-1)
            if tensor.nbytes > SMALL_BYTES:
                self._agree(call)
                self._bulk.broadcast(flat, root)
                return
            host, place = self._layout.place(root)
            mine = host == self._layout.host
            if mine and place:  # the leader has to have it
                self._local.broadcast(flat, place)
            found = self._meet(call, flat if mine else None, lambda parts: parts[host][: flat.nbytes], flat.nbytes)
            if self.rank != root:
                flat.copy_(found.view(flat.dtype))

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        with self._call.named("all_gather", tensor):
            self._gather(fingerprint("all_gather", tensor, -1, -1), outputs, tensor.view(-1), -1)

    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> None:
        with self._call.named("gather", tensor, root=root):
            self._gather(fingerprint("gather", tensor, -1, root), outputs, tensor.view(-1), root)

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> None:
        with self._call.named("scatter", output, root=root):
            self._agree(fingerprint("scatter", output, -1, root))
            self._bulk.scatter(output.view(-1), None if inputs is None else [part.view(-1) for part in inputs], root)

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        with self._call.exchanging(outputs, inputs):
            self._agree(fingerprint("all_to_all", outputs[0].new_empty(0), -1, -1))
            self._bulk.all_to_all([part.view(-1) for part in outputs], [part.view(-1) for part in inputs])

    def barrier(self) -> None:
        with self._call.named("barrier", None):
            self._local.barrier()
            self._agree(fingerprint("barrier", None, -1, -1))

    def _all_reduce(self, flat: torch.Tensor, op: int, call: int) -> None:
        if op == AVG:
            self._all_reduce(flat, SUM, call)
            flat.div_(self.size)
            return
        if flat.nbytes > SMALL_BYTES:
            self._agree(call)
            self._bulk.all_reduce(flat, op)
            return
        self._local.reduce(flat, 0, op)

        def combined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
            combine(flat, [part[: flat.nbytes].view(flat.dtype) for part in parts], op)
            return flat

        flat.copy_(self._meet(call, flat, combined, flat.nbytes).view(flat.dtype))

    def _gather(self, call: int, outputs: Sequence[torch.Tensor] | None, flat: torch.Tensor, root: int) -> None:
        hosts = self._layout.hosts
        if flat.nbytes * max(map(len, hosts)) > SMALL_BYTES:
            self._agree(call)
            given = None if outputs is None else [out.view(-1) for out in outputs]
            if root < 0:
                self._bulk.all_gather(given or [], flat)
            else:
                self._bulk.gather(given, flat, root)
            return
        together = flat.new_empty((len(self._layout.here), flat.numel()))
        self._local.gather(list(together) if self._layout.leader else None, flat, 0)

        def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
            return torch.cat([part[: len(ranks) * flat.nbytes] for part, ranks in zip(parts, hosts, strict=True)])

        everything = self._meet(call, together.view(-1), joined, self.size * flat.nbytes)
        if outputs is not None and flat.numel():
            rows = everything.view(flat.dtype).view(self.size, -1)
            for rank, row in zip((rank for ranks in hosts for rank in ranks), rows, strict=True):
                outputs[rank].view(-1).copy_(row)

    # -- the leaders' frames -----------------------------------------------------------------------

    def _agree(self, call: int) -> None:
        """Return when the leaders have made this call, and this rank its leader's.

        Raises:
            Differs: another rank has made another.
        """
        self._meet(call, None, lambda parts: parts[0], 0)

    def _meet(
        self,
        call: int,
        data: torch.Tensor | None,
        make: Callable[[Sequence[torch.Tensor]], torch.Tensor],
        nbytes: int,
    ) -> torch.Tensor:
        """Exchange frames, and give every rank of this host what its leader makes of the hosts' data.

        Args:
            call: this rank's call.
            data: this host's data, on its leader; flat.
            make: makes of the data of all hosts, on the leader, a flat tensor of ``nbytes``.
            nbytes: how much all ranks of this host get.

        Returns:
            That many bytes.

        Raises:
            Differs: see :meth:`_agree`.
        """
        news = torch.empty(_CALL.size + nbytes, dtype=torch.uint8)
        memory = memoryview(news.numpy())  # type: ignore[arg-type]
        if self._frames is not None:
            calls, parts = self._frames.exchange(call, data)
            same = all(other == call for other in calls.values())
            _CALL.pack_into(memory, 0, call if same else ~call)
            if same and nbytes:
                news[_CALL.size :] = make(parts).view(torch.uint8)
        self._local.broadcast(news, 0)
        if _CALL.unpack_from(memory)[0] != call:
            raise Differs
        return news[_CALL.size :]

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
