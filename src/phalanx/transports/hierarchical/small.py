"""Collectives of small tensors over several hosts: the leaders' frames carry the data, so they take one way.

The ranks of a host bring together what others need from it on their leader, the leaders exchange their frames, and each
leader gives its host what came. Large collectives begin with frames that carry no data (:meth:`Small.agree`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence

import torch

from phalanx.transports.contract import Communicator
from phalanx.transports.hierarchical.calls import Differs
from phalanx.transports.hierarchical.combining import combine_at
from phalanx.transports.hierarchical.frames import Data, Frames
from phalanx.transports.hierarchical.layout import Layout

__all__ = ["Small"]

_CALL_BYTES = 64  # so that what follows is aligned

# Writes to an address what every rank of this host gets, made of what the other hosts have sent, of which it gets the
# addresses by their numbers.
Make = Callable[[Mapping[int, int], int], None]
_copy = ctypes.memmove


class Small:
    """The small collectives of one group; every rank of it calls the same method.

    In every method ``call`` is a number that is equal for equal calls, and tensors are flat. All raise
    :class:`~phalanx.transports.hierarchical.calls.Differs` if another rank has made another call.

    Args:
        layout, local: see :class:`~phalanx.transports.hierarchical.communicator.HierarchicalCommunicator`.
        frames: the leader's; None on other ranks.
    """

    def __init__(self, layout: Layout, local: Communicator, frames: Frames | None) -> None:
        self._layout = layout
        self._local = local
        self._frames = frames
        self._others = [host for host in range(len(layout.hosts)) if host != layout.host]
        self._memory: dict[str, torch.Tensor] = {}

    def agree(self, call: int) -> None:
        """Return when the leaders have made this call, and this rank its leader's."""
        self.meet(call, {})

    def all_reduce(self, call: int, flat: torch.Tensor, op: int) -> None:
        self._local.reduce(flat, 0, op)
        own = flat.data_ptr()
        _copy(
            own,
            self.meet(call, self._for_all(own, flat.nbytes), self._combining(own, flat, op), flat.nbytes),
            flat.nbytes,
        )

    def reduce(self, call: int, flat: torch.Tensor, root: int, op: int) -> None:
        host, place = self._layout.place(root)
        here = host == self._layout.host
        partial = flat
        if self._layout.leader:
            partial = self._room("partial", flat.nbytes).view(flat.dtype)
            _copy(partial.data_ptr(), flat.data_ptr(), flat.nbytes)
        self._local.reduce(partial, 0, op)
        own = partial.data_ptr()
        data = {} if here else {host: (own, flat.nbytes)}
        found = self.meet(call, data, self._combining(own, flat, op), flat.nbytes if here else 0)
        if here and place == self._layout.local:
            _copy(flat.data_ptr(), found, flat.nbytes)

    def broadcast(self, call: int, flat: torch.Tensor, root: int) -> None:
        host, place = self._layout.place(root)
        own, nbytes = flat.data_ptr(), flat.nbytes
        if host == self._layout.host:
            self._local.broadcast(flat, place)
            self.meet(call, self._for_all(own, nbytes))
            return
        _copy(own, self.meet(call, {}, lambda parts, to: _copied(to, parts[host], nbytes), nbytes), nbytes)

    def gather(self, call: int, outputs: Sequence[torch.Tensor] | None, flat: torch.Tensor, root: int) -> None:
        """The root alone gives ``outputs``; if ``root`` is -1, all ranks do, and it is an all_gather."""
        layout, nbytes = self._layout, flat.nbytes
        to_host = None if root < 0 else layout.place(root)[0]
        together = self._room("together", len(layout.here) * nbytes).view(flat.dtype) if layout.leader else None
        self._local.gather_single(together, flat, 0)
        own = 0 if together is None else together.data_ptr()

        def join(parts: Mapping[int, int], to: int) -> None:
            for host, ranks in enumerate(layout.hosts):
                _copy(to, parts.get(host, own), len(ranks) * nbytes)
                to += len(ranks) * nbytes

        data = {host: (own, len(layout.here) * nbytes) for host in self._others if to_host in (None, host)}
        size = sum(map(len, layout.hosts)) * nbytes
        found = self.meet(call, data, join, size if to_host in (None, layout.host) else 0)
        if outputs is not None:
            for rank in (rank for ranks in layout.hosts for rank in ranks):
                _copy(outputs[rank].data_ptr(), found, nbytes)
                found += nbytes

    def scatter(self, call: int, flat: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> None:
        layout, nbytes = self._layout, flat.nbytes
        host, place = layout.place(root)
        if layout.host == host:
            self.meet(call, self._packed(self._on_leader(flat, inputs, place), nbytes))
            self._local.scatter(flat, None if inputs is None else [inputs[rank] for rank in layout.here], place)
            return
        size = len(layout.here) * nbytes
        found = self.meet(call, {}, lambda parts, to: _copied(to, parts[host], size), size)
        _copy(flat.data_ptr(), found + layout.local * nbytes, nbytes)

    def _on_leader(self, flat: torch.Tensor, inputs: Sequence[torch.Tensor] | None, place: int) -> Sequence[int]:
        """Where on the leader the parts are that the rank at a place of this host scatters; nothing on other ranks."""
        if not place:
            return [part.data_ptr() for part in inputs or ()]
        none = flat[:0]
        given, taken = [none] * len(self._layout.here), [none] * len(self._layout.here)
        if inputs is not None:
            given[0] = torch.cat([*inputs])
        if not self._layout.leader:
            self._local.all_to_all(taken, given)
            return []
        size = sum(map(len, self._layout.hosts))
        taken[place] = self._room("parts", size * flat.nbytes).view(flat.dtype)
        self._local.all_to_all(taken, given)
        return [taken[place].data_ptr() + rank * flat.nbytes for rank in range(size)]

    def _packed(self, parts: Sequence[int], nbytes: int) -> dict[int, Data]:
        """On the leader, the parts of the ranks of each other host, one behind the other."""
        if not parts:
            return {}
        at, data = self._room("packed", len(parts) * nbytes).data_ptr(), dict[int, Data]()
        for host in self._others:
            data[host] = at, len(self._layout.hosts[host]) * nbytes
            for rank in self._layout.hosts[host]:
                _copy(at, parts[rank], nbytes)
                at += nbytes
        return data

    def meet(self, call: int, data: Mapping[int, Data], make: Make | None = None, nbytes: int = 0) -> int:
        """Exchange frames, and give every rank of this host what its leader makes of the other hosts' data.

        Args:
            call: this rank's call.
            data: what this host has for others, by their numbers; only the leader's counts.
            make: called on the leader; not given if the ranks of this host get nothing.
            nbytes: how much it makes, and every rank of this host gets.

        Returns:
            Where that much lies, until the next call.
        """
        news = self._room("news", _CALL_BYTES + nbytes)
        address = news.data_ptr()
        verdict = ctypes.c_int64.from_address(address)
        if self._frames is not None:
            same, parts = self._frames.exchange(call, data)
            verdict.value = call if same else ~call
            if same and make is not None and nbytes:
                make(parts, address + _CALL_BYTES)
        self._local.broadcast(news, 0)
        if verdict.value != call:
            raise Differs
        return address + _CALL_BYTES

    def _room(self, name: str, nbytes: int) -> torch.Tensor:
        """So much memory, which is kept, and used again for the next thing of that name."""
        memory = self._memory.get(name)
        if memory is None or memory.numel() < nbytes:
            memory = self._memory[name] = torch.empty(nbytes, dtype=torch.uint8)
        return memory[:nbytes]

    def _for_all(self, address: int, nbytes: int) -> dict[int, Data]:
        """The same data for every other host."""
        return dict.fromkeys(self._others, (address, nbytes))

    def _combining(self, own: int, like: torch.Tensor, op: int) -> Make:
        """Combines what the other hosts have sent with what this one has, in the order of the hosts."""
        hosts = range(len(self._layout.hosts))
        return lambda parts, to: combine_at(to, [parts.get(host, own) for host in hosts], like, op)


def _copied(to: int, source: int, nbytes: int) -> None:
    _copy(to, source, nbytes)
