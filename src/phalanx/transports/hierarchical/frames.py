"""The agreement that every collective over several hosts begins with, and small data that travels with it.

The *leader* of a host is its lowest rank. Each leader writes a frame: a number that is equal for equal calls, the line
of the program, and a little data. An all-gather brings all frames to all leaders. Then each leader tells its host
whether the calls are equal, and what it makes of the data. Small collectives need nothing else. What is large is sent
when the calls have been compared, so nobody is sent much that it does not expect.

The all-gather is Bruck's (IEEE Transactions on Parallel and Distributed Systems, 1997), with three partners a round. In
round k a leader has the frames of 4^k hosts, its own and those after it. It sends them to the leaders 1, 2 and 3 times
4^k hosts before its own, and gets as many from those after. So up to four hosts exchange all frames at once, and more
take ceil(log4 hosts) rounds. All leaders have all frames then, so all come to the same verdict, and add in the order of
the hosts.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from phalanx.native.core import library
from phalanx.transports.call_check import LinePairs, Wish
from phalanx.transports.contract import Communicator
from phalanx.transports.hierarchical.engine import FRAMES, Engine, Transfer
from phalanx.transports.hierarchical.layout import Layout, Scratch, Sizes
from phalanx.transports.hierarchical.reason import CallsDiffer, Crossed, PresentCall
from phalanx.transports.shm.communicator import SharedMemoryCommunicator

__all__ = ["HEAD_BYTES", "NOTHING", "Data", "Frames", "Make", "Schedules"]

HEAD_BYTES = 64  # before each frame's data and each verdict, so that what follows is aligned
# The number of the call, the bytes of data, and the line of the program that makes the call.
_HEAD = struct.Struct("<qQH")
_RADIX = 4  # a message costs a leader about as much as the way of one takes in a local network

Data = tuple[int, int]  # where it lies, and how many bytes it has
NOTHING = (0, 0)
# Writes to an address what every rank of this host gets, made of what the hosts have sent, whose addresses it is given
# in the order of the hosts. False if what they have sent does not fit together.
Make = Callable[[Sequence[int], int], bool]
_copy = ctypes.memmove


class Schedules(Communicator):
    """Fields of a communicator over several hosts that its collectives use."""

    layout: Layout
    local: SharedMemoryCommunicator  # of the ranks of this host
    remote: Engine
    frames: Frames
    sizes: Sizes
    scratch: Scratch
    others: Sequence[int]  # ranks of other hosts, beginning after this one, so that not all begin with the same
    call: PresentCall


class Frames:
    """The agreement of one group. Every rank of it calls the same method.

    Args:
        layout: where the ranks are.
        local: a communicator of the ranks of this host.
        engine: carries bytes between hosts.
        nbytes: the most data of a frame.
    """

    def __init__(self, layout: Layout, local: SharedMemoryCommunicator, engine: Engine, nbytes: int) -> None:
        self._local = local
        self._all_gather: _AllGather | None = None
        if layout.leader:
            peers = {} if layout.host else dict(enumerate(layout.leaders))
            lines = _Lines(layout.here[0], peers, local.tells_crossing)
            self._all_gather = _AllGather(layout, engine, nbytes, lines)
        self._news = torch.empty(HEAD_BYTES, dtype=torch.uint8)

    def meet(self, call: int, data: Data = NOTHING, make: Make | None = None, nbytes: int = 0) -> int:
        """Compare the calls, and give every rank of this host what its leader makes of the hosts' data.

        Args:
            call: this rank's call, a number that is equal for equal calls.
            data: what this host has for others; only the leader's counts.
            make: makes ``nbytes`` of the data of all hosts, on the leader, if the calls are equal.

        Returns:
            The address of what was made, until the next call.

        Raises:
            CallsDiffer: another rank makes another call, or the data does not fit together.
            Crossed: the calls are equal, and their lines show that they do not belong together.
        """
        if self._news.numel() < HEAD_BYTES + nbytes:
            self._news = torch.empty(HEAD_BYTES + nbytes, dtype=torch.uint8)
        address = self._news.data_ptr()
        verdict = ctypes.c_int64.from_address(address)
        if self._all_gather is not None:
            frames = self._all_gather.exchange(call, data)
            right = frames is not None and (make is None or make(frames, address + HEAD_BYTES))
            verdict.value = call if right else ~call
        self._local.broadcast(self._news[: HEAD_BYTES + nbytes], 0)
        if verdict.value != call:
            raise CallsDiffer
        return address + HEAD_BYTES


@dataclass(frozen=True)
class _Partners:
    """A part of a round of the all-gather: so many frames go to one leader, and come from another into this memory."""

    to: int
    source: int
    frames: int
    memory: torch.Tensor


class _AllGather:
    """The leader's part: brings all leaders' frames to all of them."""

    def __init__(self, layout: Layout, engine: Engine, nbytes: int, lines: _Lines) -> None:
        self._engine, self._lines = engine, lines
        count = len(layout.hosts)
        # By host, which of the frames in the order in which they come is its one.
        self._turns = [(host - layout.host) % count for host in range(count)]
        most = _padded(HEAD_BYTES + nbytes)
        self._memory = torch.empty(count * most, dtype=torch.uint8)
        self._head = memoryview(self._memory.numpy())  # type: ignore[arg-type]
        self._rounds: list[list[_Partners]] = []
        step = 1
        while step < count:
            partners = []
            for distance in range(step, min(_RADIX * step, count), step):
                to, source = (layout.leaders[(layout.host + at) % count] for at in (-distance, distance))
                frames = min(step, count - distance)
                partners.append(_Partners(to, source, frames, torch.empty(frames * most, dtype=torch.uint8)))
            self._rounds.append(partners)
            step *= _RADIX

    def exchange(self, call: int, data: Data) -> list[int] | None:
        """Compare the calls; return where the data of each host lies until the next one, or None if they differ."""
        begin, line = self._memory.data_ptr(), self._lines.own()
        _HEAD.pack_into(self._head, 0, call, data[1], line)
        _copy(begin + HEAD_BYTES, *data)
        begins = [0, _padded(HEAD_BYTES + data[1])]  # of the frames of this host and of those after it, one by one
        same, lines, sent = True, [line], list[Transfer]()
        for partners in self._rounds:
            coming = [self._engine.recv(each.memory, each.source, FRAMES) for each in partners]
            sent += [self._engine.send(self._memory[: begins[each.frames]], each.to, FRAMES) for each in partners]
            for each, transfer in zip(partners, coming, strict=True):
                transfer.wait()
                source = each.memory.data_ptr() - begins[-1]
                for _ in range(each.frames):
                    at = begins[-1]
                    _copy(begin + at, source + at, HEAD_BYTES)
                    its_call, nbytes, its_line = _HEAD.unpack_from(self._head, at)
                    _copy(begin + at + HEAD_BYTES, source + at + HEAD_BYTES, nbytes)
                    same = same and its_call == call
                    begins.append(at + _padded(HEAD_BYTES + nbytes))
                    lines.append(its_line)
        if not same:  # then a connection may have ended for want of what was expected, and that is no loss of a rank
            return None
        self._engine.wait(sent)  # all have come, so they take what they are sent
        self._lines.meet(line, [lines[turn] for turn in self._turns])
        return [begin + HEAD_BYTES + begins[turn] for turn in self._turns]


class _Lines:
    """The lines of the program that the leaders' equal calls come from: two that were called in different orders.

    The first host's leader compares: whoever is out of order is so against that one, or against a rank of its own host.

    Args:
        rank: this leader's rank in the group.
        peers: the leaders' ranks by their hosts, if this one compares; else nothing.
        tells: whether this host is still to tell the user.
    """

    def __init__(self, rank: int, peers: Mapping[int, int], tells: Callable[[], bool]) -> None:
        self._tells, self._wish = tells, Wish.read()
        compared = {} if self._wish == Wish.IGNORE else peers
        self._pairs = {host: LinePairs(rank, peer, self._wish) for host, peer in compared.items() if peer != rank}

    def own(self) -> int:
        """Return the number of the line that calls this thread's collective; 0 if it is not known."""
        return 0 if self._wish == Wish.IGNORE else int(library().phx_line_now())

    def meet(self, mine: int, theirs: Sequence[int]) -> None:
        """Compare the line of this leader's call with those of equal calls, by host; may raise Crossed."""
        for host, pairs in self._pairs.items():
            crossed = pairs.meet(mine, theirs[host])
            if crossed is None:
                continue
            if self._wish == Wish.ERROR:
                raise Crossed(crossed.briefly())
            if self._tells():
                crossed.warn()
            self._pairs = {}
            return


def _padded(nbytes: int) -> int:
    return -(-nbytes // HEAD_BYTES) * HEAD_BYTES
