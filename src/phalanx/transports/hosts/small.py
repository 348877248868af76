"""Collectives of small tensors over several hosts: the leaders' frames carry the data, so they take one way.

The ranks of a host bring together what others need from it on their leader, the leaders exchange their frames, and each
leader gives its host what came. Large collectives begin with frames that carry no data (:meth:`Small.agree`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence

import torch

from phalanx.transports.contract import Communicator
from phalanx.transports.hosts.breaking import Differs
from phalanx.transports.hosts.combining import combine
from phalanx.transports.hosts.frames import Frames
from phalanx.transports.hosts.layout import Layout

__all__ = ["Small"]

_CALL = struct.Struct("<q")
_CALL_BYTES = 16  # so that what follows is aligned for every dtype

# Makes of what the other hosts have sent, by their numbers and as bytes that are valid until the next exchange, what
# every rank of this host gets.
Make = Callable[[Mapping[int, torch.Tensor]], torch.Tensor]


class Small:
    """The small collectives of one group; every rank of it calls the same method.

    In every method ``call`` is a number that is equal for equal calls, and tensors are flat. All raise
    :class:`~phalanx.transports.hosts.breaking.Differs` if another rank has made another call.

    Args:
        layout, local: see :class:`~phalanx.transports.hosts.communicator.HostsCommunicator`.
        frames: the leader's; None on other ranks.
    """

    def __init__(self, layout: Layout, local: Communicator, frames: Frames | None) -> None:
        self._layout = layout
        self._local = local
        self._frames = frames

    def agree(self, call: int) -> None:
        """Return when the leaders have made this call, and this rank its leader's."""
        self.meet(call, {})

    def all_reduce(self, call: int, flat: torch.Tensor, op: int) -> None:
        self._local.reduce(flat, 0, op)
        found = self.meet(call, self._for_all(flat), self._combining(flat, op), flat.nbytes)
        flat.copy_(found.view(flat.dtype))

    def reduce(self, call: int, flat: torch.Tensor, root: int, op: int) -> None:
        host, place = self._layout.place(root)
        here = host == self._layout.host
        partial = flat.clone() if self._layout.leader else flat
        self._local.reduce(partial, 0, op)
        data = {} if here else {host: partial}
        found = self.meet(call, data, self._combining(partial, op), flat.nbytes if here else 0)
        if here and place == self._layout.local:
            flat.copy_(found.view(flat.dtype))

    def broadcast(self, call: int, flat: torch.Tensor, root: int) -> None:
        host, place = self._layout.place(root)
        if host == self._layout.host:
            self._local.broadcast(flat, place)
            self.meet(call, self._for_all(flat))
            return
        found = self.meet(call, {}, lambda parts: parts[host][: flat.nbytes], flat.nbytes)
        flat.copy_(found.view(flat.dtype))

    def gather(self, call: int, outputs: Sequence[torch.Tensor] | None, flat: torch.Tensor, root: int) -> None:
        """The root alone gives ``outputs``; if ``root`` is -1, all ranks do, and it is an all_gather."""
        layout = self._layout
        to = None if root < 0 else layout.place(root)[0]
        together = flat.new_empty((len(layout.here), flat.numel()))
        self._local.gather(list(together) if layout.leader else None, flat, 0)
        own = together.view(-1)

        def joined(parts: Mapping[int, torch.Tensor]) -> torch.Tensor:
            every = {layout.host: own.view(torch.uint8), **parts}
            return torch.cat([every[host][: len(ranks) * flat.nbytes] for host, ranks in enumerate(layout.hosts)])

        data = {host: part for host, part in self._for_all(own).items() if to in (None, host)}
        size = sum(map(len, layout.hosts)) * flat.nbytes
        everything = self.meet(call, data, joined, size if to in (None, layout.host) else 0)
        if outputs is not None and flat.numel():
            rows = everything.view(flat.dtype).view(-1, flat.numel())
            for rank, row in zip((rank for ranks in layout.hosts for rank in ranks), rows, strict=True):
                outputs[rank].copy_(row)

    def scatter(self, call: int, flat: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> None:
        layout = self._layout
        host, place = layout.place(root)
        if layout.host == host:
            parts = self._on_leader(flat, inputs, place)
            others = [number for number in range(len(layout.hosts)) if number != host and parts]
            data = {number: torch.cat([parts[rank] for rank in layout.hosts[number]]) for number in others}
            self.meet(call, data)
            self._local.scatter(flat, None if inputs is None else [inputs[rank] for rank in layout.here], place)
            return
        nbytes = len(layout.here) * flat.nbytes
        found = self.meet(call, {}, lambda parts: parts[host][:nbytes], nbytes)
        if flat.numel():
            flat.copy_(found.view(flat.dtype).view(-1, flat.numel())[layout.local])

    def _on_leader(
        self, flat: torch.Tensor, inputs: Sequence[torch.Tensor] | None, place: int
    ) -> Sequence[torch.Tensor]:
        """The parts that the rank at a place of this host scatters, on the leader; nothing on other ranks."""
        if not place:
            return inputs or ()
        none = flat[:0]
        given, taken = [none] * len(self._layout.here), [none] * len(self._layout.here)
        together = flat.new_empty((sum(map(len, self._layout.hosts)) if self._layout.leader else 0, flat.numel()))
        if inputs is not None:
            given[0] = torch.cat([*inputs])
        if self._layout.leader:
            taken[place] = together.view(-1)
        self._local.all_to_all(taken, given)
        return list(together)

    def meet(
        self, call: int, data: Mapping[int, torch.Tensor], make: Make | None = None, nbytes: int = 0
    ) -> torch.Tensor:
        """Exchange frames, and give every rank of this host what its leader makes of the other hosts' data.

        Args:
            call: this rank's call.
            data: what this host has for others, by their numbers; only the leader's counts.
            make: called on the leader; not given if the ranks of this host get nothing.
            nbytes: how much it makes, and every rank of this host gets.

        Returns:
            That many bytes.
        """
        news = torch.empty(_CALL_BYTES + nbytes, dtype=torch.uint8)
        memory = memoryview(news.numpy())  # type: ignore[arg-type]
        if self._frames is not None:
            calls, parts = self._frames.exchange(call, data)
            same = all(other == call for other in calls.values())
            _CALL.pack_into(memory, 0, call if same else ~call)
            if same and make is not None and nbytes:
                news[_CALL_BYTES:] = make(parts).view(torch.uint8)
        self._local.broadcast(news, 0)
        if _CALL.unpack_from(memory)[0] != call:
            raise Differs
        return news[_CALL_BYTES:]

    def _for_all(self, data: torch.Tensor) -> dict[int, torch.Tensor]:
        """The same data for every other host."""
        return {host: data for host in range(len(self._layout.hosts)) if host != self._layout.host}

    def _combining(self, own: torch.Tensor, op: int) -> Make:
        """Combines what the other hosts have sent with what this one has, in the order of the hosts."""

        def combined(parts: Mapping[int, torch.Tensor]) -> torch.Tensor:
            sums, everyone = torch.empty_like(own), range(len(self._layout.hosts))
            each = [own if host not in parts else parts[host][: own.nbytes].view(own.dtype) for host in everyone]
            combine(sums, each, op)
            return sums

        return combined
