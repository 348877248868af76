"""all_to_all over several hosts: the leaders carry what is small, and ranks send each other what is large.

How much one rank sends another is known to these two alone, so both know how it goes:

1. Each rank puts its sizes, and its small parts for other hosts, into memory that its host shares.
2. The ranks of a host exchange their own parts, by the core. Whoever returns knows that all have put theirs.
3. The leaders compare the calls and the sizes in their frames. What one host has for another goes in the frame if it
   fits there, else as one message for each rank that sends, from the memory of one host into that of the other.
4. The leaders let their hosts read; ranks take what has come, and send what is large straight to its receivers.

The memory of a host, for one group. Nobody writes it again before all ranks have come to step 2 of the next call:

========  ===============================  ===================================================
area      written by                       read by
========  ===============================  ===================================================
sizes     their rank, in step 1            the leader in step 3; ranks of the host in step 4.
                                           So there are two, which take turns
outgoing  the rank that sends, in step 1   the leader and the engine, until step 3 is over
incoming  the engine, or the leader from   the ranks of the host, in step 4
          a frame, in step 3
========  ===============================  ===================================================

If a rank dies before step 2 is over, the others raise in it. What is read later is whole.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from phalanx.transports.hierarchical.frames import ENTRY_BYTES, Data, Frames
from phalanx.transports.hierarchical.layout import Scratch
from phalanx.transports.shm.communicator import SharedMemoryCommunicator
from phalanx.transports.shm.segment import share_memory

__all__ = ["Exchanges", "Parts"]

_TAG, _LED_TAG = 1, 1 << 12  # of ranks; and of leaders, from there on one for each rank of a host
_LINE_BYTES = 64  # areas begin at cache lines
_copy = ctypes.memmove


class Parts:
    """The parts that one rank sends, or the places of those that it gets: one for each rank.

    ``whole`` is a contiguous tensor with all of them, of ``counts`` elements each, or a list. Most are copied by their
    ``addresses`` and ``nbytes``: to make a tensor of a part takes longer than to copy a small one.
    """

    def __init__(self, whole: torch.Tensor | Sequence[torch.Tensor], counts: Sequence[int] | None = None) -> None:
        self._whole, self._counts = whole, counts
        if isinstance(whole, torch.Tensor):
            assert counts is not None
            self.dtype, itemsize, at = whole.dtype, whole.itemsize, whole.data_ptr()
            self.nbytes = [count * itemsize for count in counts]
            self.addresses = [at := at + nbytes for nbytes in (0, *self.nbytes[:-1])]
        else:
            self.dtype = whole[0].dtype
            self.nbytes = [tensor.nbytes for tensor in whole]
            self.addresses = [tensor.data_ptr() for tensor in whole]

    def tensor(self, rank: int) -> torch.Tensor:
        """A part as a flat tensor."""
        if isinstance(self._whole, torch.Tensor) and self._counts is not None:
            return self._whole.view(-1).narrow(0, sum(self._counts[:rank]), self._counts[rank])
        return self._whole[rank].view(-1)


class Exchanges:
    """The exchanges of one group. ``memory`` is that of the host, which the first exchange makes."""

    def __init__(self, frames: Frames) -> None:
        self._frames, self._local, self._engine, sizes = frames, frames.local, frames.engine, frames.sizes
        self._layout = layout = frames.layout
        self._hosts = [host for host in range(len(layout.hosts)) if host != layout.host]
        self._others = [other for host in self._hosts for other in layout.hosts[host]]
        self._scratch = Scratch()
        self._turn = 0
        # Of one host's data for another; and the largest part that leaders carry. Where each host has one rank, that
        # has nobody for whom to carry more than a frame has room for.
        most = max(map(len, layout.hosts))
        self._frame_bytes = sizes.exchange_bytes // len(self._hosts)
        self._led_bytes = max(self._frame_bytes // most**2, sizes.shared_bytes // most**2 if most > 1 else 0)
        self._entries_bytes = ENTRY_BYTES * len(layout.hosts)
        self.memory: torch.Tensor | None = None

    def all_to_all(self, call: int, outputs: Parts, inputs: Parts) -> None:
        """Copy part r of ``inputs`` into part ``rank`` of the ``outputs`` of rank r; or raise CallsDiffer."""
        given, expected = inputs.nbytes, outputs.nbytes
        sources = [rank for rank in self._others if expected[rank] > self._led_bytes]
        targets = [rank for rank in self._others if given[rank] > self._led_bytes]
        self._put(given, expected, inputs.addresses)
        self._exchange_inside(outputs, inputs)
        if self._layout.leader:
            self._lead(call)
        else:
            self._frames.meet(call)
        transfers = [self._engine.recv(outputs.tensor(rank), rank, _TAG) for rank in sources]
        transfers += [self._engine.send(inputs.tensor(rank), rank, _TAG) for rank in targets]
        self._take(expected, outputs.addresses)
        self._engine.wait(transfers)

    # -- what every rank does ----------------------------------------------------------------------

    def _put(self, given: Sequence[int], expected: Sequence[int], addresses: Sequence[int]) -> None:
        """Write down what this rank sends and expects, and put what the leader carries where that finds it."""
        if self.memory is None:
            self._make_memory()
        self._turn = 1 - self._turn
        self._given[self._turn][self._layout.local][:] = [*given]
        self._expected[self._turn][self._layout.local][:] = [*expected]
        for host in self._hosts:
            at = self._address + self._outgoing[host][self._layout.local]
            for rank in self._layout.hosts[host]:
                if given[rank] <= self._led_bytes:
                    _copy(at, addresses[rank], given[rank])
                    at += given[rank]

    def _exchange_inside(self, outputs: Parts, inputs: Parts) -> None:
        if isinstance(self._local, SharedMemoryCommunicator):
            to, given = (
                [(parts.addresses[rank], parts.nbytes[rank]) for rank in self._layout.here]
                for parts in (outputs, inputs)
            )
            self._local.all_to_all_at(to, given, inputs.dtype)
        else:
            own = self._layout.here[0]
            _copy(outputs.addresses[own], inputs.addresses[own], inputs.nbytes[own])

    def _take(self, expected: Sequence[int], addresses: Sequence[int]) -> None:
        """Copy what the leader has got for this rank into its tensors."""
        before = self._expected[self._turn][: self._layout.local]
        for host in self._hosts:
            for place, rank in enumerate(self._layout.hosts[host]):
                if 0 < expected[rank] <= self._led_bytes:
                    at = self._address + self._incoming[host][place] + sum(self._led(each[rank]) for each in before)
                    _copy(addresses[rank], at, expected[rank])

    def _led(self, nbytes: int) -> int:
        """Return how much of a part of so many bytes the leaders carry."""
        return nbytes if nbytes <= self._led_bytes else 0

    # -- the leader's part -------------------------------------------------------------------------

    def _lead(self, call: int) -> None:
        """Compare the calls and sizes with those of the other leaders, and exchange what the leaders carry."""
        given = [words[:] for words in self._given[self._turn]]
        expected = [words[:] for words in self._expected[self._turn]]
        # By host: what each rank here sends there, and what each rank there sends here.
        sent, due = dict[int, list[int]](), dict[int, list[int]]()
        for host in self._hosts:
            there = self._layout.hosts[host]
            sent[host] = [sum(self._led(sizes[rank]) for rank in there) for sizes in given]
            due[host] = [sum(self._led(sizes[rank]) for sizes in expected) for rank in there]
        outgoing, incoming = self._messages(self._outgoing, sent), self._messages(self._incoming, due)

        def end(frames: Sequence[int], _to: int) -> bool:
            if not self._unpack(frames, expected, due):
                return False
            transfers = [self._engine.recv(part, leader, tag) for leader, tag, part in incoming]
            transfers += [self._engine.send(part, leader, tag) for leader, tag, part in outgoing]
            self._engine.wait(transfers)
            return True

        self._frames.meet(call, self._pack(given, sent), end)

    def _messages(
        self, areas: dict[int, list[int]], nbytes: dict[int, list[int]]
    ) -> list[tuple[int, int, torch.Tensor]]:
        """List the messages of leaders: of each the other leader, the tag, and where it lies."""
        assert self.memory is not None
        return [
            (self._layout.leaders[host], _LED_TAG + place, self.memory[at : at + each])
            for host in self._hosts
            if not self._in_frame(nbytes[host])
            for place, (at, each) in enumerate(zip(areas[host], nbytes[host], strict=True))
            if each
        ]

    def _pack(self, given: Sequence[Sequence[int]], sent: dict[int, list[int]]) -> Data:
        """The frame: an entry for each host, and then what goes to other hosts in it, in their order."""
        small = sum(sum(nbytes) for nbytes in sent.values() if self._in_frame(nbytes))
        frame = self._scratch.take_bytes("frame", self._entries_bytes + small)
        begin, at = frame.data_ptr(), self._entries_bytes
        words = (ctypes.c_int64 * (at // 8)).from_address(begin)
        for host in self._hosts:
            words[2 * host] = hash(tuple(sizes[rank] for sizes in given for rank in self._layout.hosts[host]))
            words[2 * host + 1] = at
            if self._in_frame(sent[host]):
                for source, nbytes in zip(self._outgoing[host], sent[host], strict=True):
                    _copy(begin + at, self._address + source, nbytes)
                    at += nbytes
        return begin, frame.nbytes

    def _unpack(self, frames: Sequence[int], expected: Sequence[Sequence[int]], due: dict[int, list[int]]) -> bool:
        """Put what has come in the frames where ranks find it; False if other sizes have come than are expected."""
        for host in self._hosts:
            words = (ctypes.c_int64 * (self._entries_bytes // 8)).from_address(frames[host])
            wanted = hash(tuple(sizes[rank] for rank in self._layout.hosts[host] for sizes in expected))
            if words[2 * self._layout.host] != wanted:
                return False
            at = frames[host] + words[2 * self._layout.host + 1]
            if self._in_frame(due[host]):
                for to, nbytes in zip(self._incoming[host], due[host], strict=True):
                    _copy(self._address + to, at, nbytes)
                    at += nbytes
        return True

    def _in_frame(self, nbytes: Sequence[int]) -> bool:
        """Return whether what the ranks of one host have for another goes in the frame."""
        return sum(nbytes) <= self._frame_bytes

    # -- the memory --------------------------------------------------------------------------------

    def _make_memory(self) -> None:
        layout, end = self._layout, 0
        here, size, most = len(layout.here), sum(map(len, layout.hosts)), max(map(len, layout.hosts))

        def areas(count: int, nbytes: int) -> list[int]:
            """Add so many areas of so many bytes; return where they begin."""
            nonlocal end
            begin, each = end, -(-nbytes // _LINE_BYTES) * _LINE_BYTES
            end += count * each
            return [begin + number * each for number in range(count)]

        given, expected = ([areas(here, 8 * size) for _ in range(2)] for _ in range(2))
        # By host, and by the rank that sends: all it sends to the ranks of one other host.
        self._outgoing = {host: areas(here, most * self._led_bytes) for host in self._hosts}
        self._incoming = {host: areas(len(layout.hosts[host]), most * self._led_bytes) for host in self._hosts}
        self.memory = share_memory(self._local, end)
        self._address = self.memory.data_ptr()
        # By turn, and by rank of this host: how many bytes it sends to, and expects of, each rank.
        self._given, self._expected = (
            [[(ctypes.c_int64 * size).from_address(self._address + at) for at in turn] for turn in words]
            for words in (given, expected)
        )
