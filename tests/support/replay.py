"""Run a program on the ranks of a pool, with any backend, and compare what it leaves in memory with the oracle."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GatherOptions

from phalanx.transports.shm.tuning import Tuning, tuning_in_force
from tests.support.oracle import FILL, buffers
from tests.support.programs import GROUPS, Group, Program, Step
from tests.support.ranks import Member

__all__ = ["Rank", "Run", "join"]

Tensors = list[torch.Tensor]


@dataclass
class Rank:
    """One rank of a pool: its number, and its groups in the order of ``GROUPS`` (None where it is not a member)."""

    rank: int
    groups: list[dist.ProcessGroup | None]
    gloo: list[dist.ProcessGroup | None]


def join(member: Member, gloo: bool = False, timeout_s: float = 300.0) -> Rank:
    """Join a world and make its groups; with ``gloo`` the same groups once more over torch's own backend."""
    with _tuned(GROUPS[member.size][0]):
        member.join(timeout_s=timeout_s)
    groups: list[dist.ProcessGroup | None] = [dist.group.WORLD]
    for group in GROUPS[member.size][1:]:
        with _tuned(group):
            made = dist.new_group(list(group.members))
        groups.append(made if member.rank in group.members else None)
    twins: list[dist.ProcessGroup | None] = []
    for group in GROUPS[member.size] if gloo else ():
        made = dist.new_group(list(group.members), backend="gloo")
        twins.append(made if member.rank in group.members else None)
    return Rank(member.rank, groups, twins)


def _tuned(group: Group) -> AbstractContextManager[None]:
    """The sizes of the group, and a ``stream_bytes`` that some outputs of the tests exceed and others do not."""
    return tuning_in_force(Tuning(group.chunk_bytes, group.small_bytes, stream_bytes=3000))


def _laid(value: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A piece of memory and the view of it that holds ``value``; what is around the view may not be written."""
    n = value.numel()
    if layout == "plain":
        memory = value.clone()
        return memory, memory
    memory = torch.full((2 * n + 9,), FILL, dtype=value.dtype)
    view = memory[5 : 5 + n] if layout == "offset" else memory[3 : 3 + 2 * n : 2]
    view.copy_(value)
    return memory, view


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8)) if one.numel() else not other.numel()


@dataclass
class _Call:
    """A call that was made: the works to wait for, the memory that it used, and what that must hold afterwards."""

    index: int
    due: int
    works: list[Any] = field(default_factory=list)
    memory: list[torch.Tensor] = field(default_factory=list)
    expected: list[torch.Tensor] = field(default_factory=list)
    failed: bool = False
    checked: bool = True


class Run:
    """One run of a program on one rank.

    Args:
        rank: the number of this rank in the world.
        groups: the groups that the steps name.
        program: what to run.
        instead: a step's index and what this rank calls in its place. That call's own result is not checked.
        catch: errors of this kind are kept, with the index of their step, and the program goes on.
    """

    def __init__(
        self,
        rank: int,
        groups: list[dist.ProcessGroup | None],
        program: Program,
        instead: tuple[int, Step] | None = None,
        catch: type[Exception] | tuple[()] = (),
    ) -> None:
        self._rank, self._groups, self._program, self._instead, self._catch = rank, groups, program, instead, catch
        self.wrong: list[str] = []
        self.errors: list[tuple[int, Exception]] = []
        self.calls: list[_Call] = []
        for index in range(len(program.steps)):
            self._settle(index)
            self._step(index)
        self._settle(len(program.steps) + 99)
        # Once more: a later step may have written where it should not.
        for call in self.calls:
            self._check(call, "at the end")

    def _step(self, index: int) -> None:
        own = self._program.steps[index]
        if own.delays_ms:
            time.sleep(own.delays_ms[self._rank] / 1000)
        odd = self._instead is not None and self._instead[0] == index
        step = self._instead[1] if self._instead is not None and odd else own
        group, members = self._groups[step.group], self._program.members(step)
        if group is None:
            return
        place = members.index(self._rank)
        wait = step.waits[self._rank] if step.waits else 0
        call = _Call(index, index + wait, checked=not odd)
        self.calls.append(call)
        written: Tensors = []
        read: Tensors = []
        for buffer in buffers(self._program, index, place, step):
            layout = step.layouts[0 if buffer.written else 1]
            memory, view = _laid(buffer.before, layout)
            call.memory.append(memory)
            call.expected.append(_laid(buffer.after, layout)[0])
            (written if buffer.written else read).append(view)
        try:
            call.works = _CALLS[step.kind](_Asked(step, group, members, place, bool(wait), index), written, read)
            if not wait:
                self._done(call)
        except self._catch as error:
            self._failed(call, error)

    def _settle(self, index: int) -> None:
        for call in self.calls:
            if call.works and call.due <= index:
                try:
                    self._done(call)
                except self._catch as error:
                    self._failed(call, error)

    def _done(self, call: _Call) -> None:
        works, call.works = call.works, []
        for work in works:
            if work is not None:
                work.wait()
        self._check(call, "when it was done")

    def _failed(self, call: _Call, error: Exception) -> None:
        call.failed = True
        self.errors.append((call.index, error))

    def _check(self, call: _Call, when: str) -> None:
        if call.failed or not call.checked:
            return
        for number, (memory, expected) in enumerate(zip(call.memory, call.expected, strict=True)):
            if not _same(memory, expected):
                call.checked = False
                at = int((memory != expected).nonzero()[0]) if bool((memory != expected).any()) else -1
                self.wrong.append(
                    f"rank {self._rank}, step {call.index} {self._program.steps[call.index].kind}, {when}: tensor "
                    f"{number} of {memory.dtype}, element {at}: {memory[at]}, must be {expected[at]}"
                )


@dataclass
class _Asked:
    """A call as torch takes it: ranks of the world, not of the group."""

    step: Step
    group: dist.ProcessGroup
    members: tuple[int, ...]
    place: int
    asynchronous: bool
    index: int

    @property
    def how(self) -> dict[str, Any]:
        return {"group": self.group, "async_op": self.asynchronous}

    @property
    def root(self) -> int:
        return self.members[self.step.root]

    @property
    def is_root(self) -> bool:
        return self.place == self.step.root


def _all_to_all_single(ask: _Asked, out: Tensors, given: Tensors) -> Any:
    n, step = len(ask.members), ask.step
    received = [step.sent(n, rank, ask.place) for rank in range(n)]
    sent = [step.sent(n, ask.place, rank) for rank in range(n)]
    return dist.all_to_all_single(out[0], given[0], received, sent, **ask.how)


def _gather_single(ask: _Asked, out: Tensors, given: Tensors) -> Any:
    options = GatherOptions()  # torch has no function for it before 2.15
    options.rootRank, options.asyncOp = ask.step.root, ask.asynchronous
    group: Any = ask.group
    return group.gather_single(out[0] if ask.is_root else None, given[0], options)


def _send(ask: _Asked, out: Tensors, given: Tensors) -> Any:
    ((_, receiver),) = ask.step.pairs
    to_any = ask.step.kind == "send to any"
    # A receive from any rank must not take what belongs to another step.
    tag = 100 + ask.index if to_any else ask.step.tag
    if ask.is_root:
        send = dist.isend if ask.asynchronous else dist.send
        return send(given[0], ask.members[receiver], group=ask.group, tag=tag)
    if ask.place != receiver:
        return None
    if ask.asynchronous:
        return dist.irecv(out[0], None if to_any else ask.root, group=ask.group, tag=tag)
    source = dist.recv(out[0], None if to_any else ask.root, group=ask.group, tag=tag)
    if source != ask.root:
        raise AssertionError(f"received from rank {source}, not {ask.root}")
    return None


def _batch(ask: _Asked, out: Tensors, given: Tensors) -> list[Any]:
    outs, ins, operations = iter(out), iter(given), []
    for number, (sender, receiver) in enumerate(ask.step.pairs):
        tag = 1000 + 100 * ask.index + number
        if ask.place == sender:
            operations.append(dist.P2POp(dist.isend, next(ins), ask.members[receiver], ask.group, tag))
        if ask.place == receiver:
            operations.append(dist.P2POp(dist.irecv, next(outs), ask.members[sender], ask.group, tag))
    works: list[Any] = dist.batch_isend_irecv(operations) if operations else []
    return works


_PLAIN: dict[str, Callable[[_Asked, Tensors, Tensors], Any]] = {
    "all_reduce": lambda ask, out, _: dist.all_reduce(out[0], ask.step.reduce_op, **ask.how),
    "reduce": lambda ask, out, _: dist.reduce(out[0], ask.root, ask.step.reduce_op, **ask.how),
    "broadcast": lambda ask, out, _: dist.broadcast(out[0], ask.root, **ask.how),
    "all_gather": lambda ask, out, given: dist.all_gather(out, given[0], **ask.how),
    "all_gather_single": lambda ask, out, given: dist.all_gather_single(out[0], given[0], **ask.how),
    "gather": lambda ask, out, given: dist.gather(given[0], out if ask.is_root else None, ask.root, **ask.how),
    "gather_single": _gather_single,
    "scatter": lambda ask, out, given: dist.scatter(out[0], given if ask.is_root else None, ask.root, **ask.how),
    "reduce_scatter": lambda ask, out, given: dist.reduce_scatter(out[0], given, ask.step.reduce_op, **ask.how),
    "reduce_scatter_single": lambda ask, out, given: dist.reduce_scatter_single(
        out[0], given[0], ask.step.reduce_op, **ask.how
    ),
    "all_to_all": lambda ask, out, given: dist.all_to_all(out, given, **ask.how),
    "all_to_all_single": _all_to_all_single,
    "barrier": lambda ask, *_: dist.barrier(**ask.how),
    "send": _send,
    "send to any": _send,
}


def _one(call: Callable[[_Asked, Tensors, Tensors], Any]) -> Callable[[_Asked, Tensors, Tensors], list[Any]]:
    return lambda ask, out, given: [call(ask, out, given)]


_CALLS: dict[str, Callable[[_Asked, Tensors, Tensors], list[Any]]] = {
    **{kind: _one(call) for kind, call in _PLAIN.items()},
    "batch": _batch,
}
