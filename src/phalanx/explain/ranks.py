"""Make a real call as a rank of the small job that ``phalanx explain`` runs, and note what that moves.

The core tells of every copy into, out of and inside the shared memory (``native/csrc/segment/copy.h``), and the engine
of what it carries between hosts. Every element says where it comes from: rank r gives ``(i + 2**22 << 20) + (1 << r)``
as its element i. So a value, a sum too, shows which element it is and which ranks have contributed to it.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from phalanx.diagnosis.recorder import open_recorder
from phalanx.membership.abort import GroupAbort
from phalanx.membership.liveness import Membership
from phalanx.native.core import Tracer, library
from phalanx.transports.contract import Communicator
from phalanx.transports.hierarchical.communicator import HierarchicalCommunicator
from phalanx.transports.hierarchical.engine import Engine, Transfer
from phalanx.transports.hierarchical.frames import HEAD_BYTES
from phalanx.transports.hierarchical.layout import Layout
from phalanx.transports.operands import SUM
from phalanx.transports.shm.communicator import SharedMemoryCommunicator

#: What the engine between hosts tells, beside ``Traced`` of the core.
SENT, RECEIVED = 10, 11
#: Operations in which a rank gives, or gets, a block for each rank.
BLOCKWISE = ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")
_TIMEOUT = timedelta(seconds=60)
_SHIFT = 20  # bits for the ranks that have contributed
_FIRST = 1 << 22  # the number of the first element, so large that no counter or hash of a call looks like one
_SAMPLES = 2048

Cell = tuple[int, int]  # the number of a block, and a bit for each rank that has contributed to it
Kept = tuple[tuple[Cell, ...], ...]  # what lies in each block of a tensor


@dataclass(frozen=True)
class Plan:
    """The call: so many bytes are the whole tensor, or all blocks of a rank together. Rank 0 is the root."""

    operation: str
    hosts: tuple[int, ...]
    nbytes: int

    @property
    def ranks(self) -> int:
        return sum(self.hosts)

    @property
    def host_of(self) -> list[int]:
        return [host for host, count in enumerate(self.hosts) for _ in range(count)]

    @property
    def edges(self) -> list[int]:
        """Return the bounds of blocks, in elements: at cache lines, as the core cuts."""
        count = self.nbytes // 8
        if self.operation in BLOCKWISE:
            return [rank * (count // self.ranks) for rank in range(self.ranks + 1)]
        lines = -(-count // 8)
        return [min(count, lines * rank // self.ranks * 8) for rank in range(self.ranks + 1)]


class Event(NamedTuple):
    """Something that a rank did.

    Attributes:
        what: ``Traced``, or one of the above.
        at: a place in the shared memory, or a rank.
        kept: what lies in the result thereafter.
        turn: tells messages between two ranks apart.
        into: the blocks of the result into which a message comes.
    """

    time_ns: int
    rank: int
    what: int
    at: int
    nbytes: int
    cells: tuple[Cell, ...]
    kept: Kept
    turn: tuple[int, int] = (0, 0)
    into: tuple[int, ...] = ()


class TracedRank(NamedTuple):
    """A rank's input, its steps, and its result."""

    given: Kept
    events: list[Event]
    result: Kept


class _Notes:
    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.edges = np.array(plan.edges)
        self.events: list[Event] = []
        self.result: torch.Tensor | None = None
        self.head = 0  # how many bytes before the data say what it is; what is unused of them may look like data
        self.tracer = Tracer(self.told)

    def told(self, what: int, at: int, data: int | None, nbytes: int, *of_message: Any) -> None:
        """Note what has just been moved; the core calls it on the thread that moved it."""
        now = time.monotonic_ns()
        cells = self.cells_at(data + self.head, nbytes - self.head) if data else ()
        self.events.append(Event(now, self.rank, what, at, nbytes, cells, self.kept(), *of_message))

    def blocks_of_result(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """List the blocks of the result in which a tensor lies."""
        if self.result is None:
            return ()
        begin = (tensor.data_ptr() - self.result.data_ptr()) // 8
        if not 0 <= begin < self.result.numel():
            return ()
        within = self.edges if self.result.numel() == self.edges[-1] else self.edges[:2]
        last = begin + tensor.nbytes // 8
        return tuple(number for number, edge in enumerate(within[:-1]) if edge < last and within[number + 1] > begin)

    def cells_at(self, address: int, nbytes: int) -> tuple[Cell, ...]:
        """List the blocks that lie there, and of whom; nothing of what is not data."""
        count = nbytes // 8
        if count < 1 or self.plan.operation == "barrier":
            return ()
        words = np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address))
        step = max(1, count // _SAMPLES)
        some = np.append(words[::step], words[-1])
        mask = some & ((1 << _SHIFT) - 1)
        ranks = sum(mask >> bit & 1 for bit in range(_SHIFT))
        index, rest = np.divmod(some >> _SHIFT, np.maximum(ranks, 1))
        index = index - _FIRST
        good = (rest == 0) & (ranks > 0) & (mask < 1 << self.plan.ranks) & (index >= 0) & (index < self.edges[-1])
        blocks = np.searchsorted(self.edges, index[good], "right") - 1
        return tuple(sorted(set(zip(blocks.tolist(), mask[good].tolist(), strict=True))))

    def kept(self, tensor: torch.Tensor | None = None) -> Kept:
        """List what lies in each block of a tensor; by default of the result."""
        tensor = self.result if tensor is None else tensor
        if tensor is None:
            return ()
        sizes = np.diff(self.edges)
        if tensor.numel() < self.edges[-1]:
            sizes = sizes[:1]
        found, address = [], tensor.data_ptr()
        for count in sizes.tolist():
            found.append(self.cells_at(address, count * 8))
            address += count * 8
        return tuple(found)


class _Inside(SharedMemoryCommunicator):
    """Of the ranks of one of several hosts. What their leader has heard begins with a line about the call."""

    notes: _Notes

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self.notes.head = HEAD_BYTES if tensor.dtype == torch.uint8 else 0
        super().broadcast(tensor, root)
        self.notes.head = 0


class _TracedEngine(Engine):
    """Tell what it carries. The leaders' frames, which have the tag 0, begin with a line about the call."""

    notes: _Notes

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        turn = tag, self._turn("send", peer, tag)
        self.notes.head = 0 if tag else HEAD_BYTES
        self.notes.told(SENT, peer, tensor.data_ptr(), tensor.nbytes, turn)
        self.notes.head = 0
        return super().send(tensor, peer, tag)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        turn, into = (tag, self._turn("recv", peer, tag)), self.notes.blocks_of_result(tensor)
        tell = partial(self.notes.told, RECEIVED, peer, None, tensor.nbytes, turn, into)
        return _TracedTransfer(super().recv(tensor, peer, tag), tell)

    def _turn(self, *way: object) -> int:
        turns: dict[object, int] = vars(self).setdefault("turns", {})
        turns[way] = turns.get(way, -1) + 1
        return turns[way]


class _TracedTransfer(Transfer):
    """A receive that tells when it is done."""

    def __init__(self, transfer: Transfer, tell: Callable[[], None]) -> None:
        self._transfer, self._tell = transfer, tell

    def wait(self) -> None:
        self._transfer.wait()
        self._tell()


def run_rank(plan: Plan, folder: str) -> TracedRank:
    """Make the call once as a rank of the job, and return what it did."""
    rank = int(os.environ["RANK"])
    notes = _Notes(plan, rank)
    open_recorder()
    communicator = _join(plan, rank, FileStore(os.path.join(folder, "store"), plan.ranks), notes)
    _call(plan, rank, communicator, notes)[1]()  # connects the hosts: the call that is shown is not the first one
    given, call = _call(plan, rank, communicator, notes)
    before = () if given is None else notes.kept(given)
    communicator.barrier()
    notes.events.clear()
    library().phx_trace(notes.tracer)
    call()
    library().phx_trace(Tracer())
    traced = TracedRank(before, notes.events[:], notes.kept())
    communicator.barrier()
    communicator.close()
    return traced


def _join(plan: Plan, rank: int, store: Store, notes: _Notes) -> Communicator:
    def part(name: str) -> Store:
        return PrefixStore(name, store)

    layout = Layout(plan.host_of, rank)
    if len(plan.hosts) == 1:
        return SharedMemoryCommunicator(part("memory"), rank, plan.ranks, _TIMEOUT)
    own = part(f"memory {layout.host}")
    local = _Inside(own, layout.local, len(layout.here), _TIMEOUT, names=layout.here)
    local.notes = notes

    def engine(*arguments: Any) -> Engine:
        traced = _TracedEngine(*arguments)
        traced.notes = notes
        return traced

    names = [f"host {host}" for host in plan.host_of]
    membership = Membership.meet(part("membership"), rank, plan.host_of, names, _TIMEOUT)
    members = GroupAbort(membership, "explained", range(plan.ranks))
    return HierarchicalCommunicator(layout, rank, local, members, _TIMEOUT, engine=engine)


def _call(plan: Plan, rank: int, group: Communicator, notes: _Notes) -> tuple[torch.Tensor | None, Callable[[], None]]:
    """Make what a rank gives, and its call. The memory for the result becomes that of the notes."""
    total, size, is_root = plan.edges[-1], plan.ranks, rank == 0
    each = total // size
    numbers = (torch.arange(_FIRST, _FIRST + total) << _SHIFT) + (1 << rank)
    whole, empty = numbers.clone(), torch.zeros(total, dtype=torch.int64)
    block, space = numbers[rank * each : (rank + 1) * each].clone(), torch.zeros(each, dtype=torch.int64)
    inputs, outputs = (tensor[: each * size].view(size, -1).unbind() for tensor in (whole, empty))
    calls: dict[str, tuple[torch.Tensor | None, torch.Tensor | None, Callable[[], Any]]] = {
        "all_reduce": (whole, whole, lambda: group.all_reduce(whole, SUM)),
        "reduce": (whole, whole, lambda: group.reduce(whole, 0, SUM)),
        "broadcast": (whole, whole, lambda: group.broadcast(whole, 0)),
        "all_gather": (block, empty, lambda: group.all_gather(outputs, block)),
        "gather": (block, empty if is_root else None, lambda: group.gather(outputs if is_root else None, block, 0)),
        "scatter": (whole if is_root else None, space, lambda: group.scatter(space, inputs if is_root else None, 0)),
        "reduce_scatter": (whole, space, lambda: group.reduce_scatter(space, inputs, SUM)),
        "all_to_all": (whole, empty, lambda: group.all_to_all(outputs, inputs)),
        "barrier": (None, None, group.barrier),
    }
    given, notes.result, call = calls[plan.operation]
    return given, call
