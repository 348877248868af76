"""Random programs of communication: the calls of a rank, step by step, the same on every rank.

A program is plain data, so it can be printed, shrunk, pickled and run by any backend (``Run``). What it must leave in
memory is computed plainly (``buffers``): every rank's part is known, so nothing is communicated. Reductions are bit for
bit those of the ranks in order, 16-bit floats being added in 32 bits and rounded once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.ranks import Member
from torch._C._distributed_c10d import GatherOptions

from phalanx.c10d.torch_versions import function
from phalanx.errors import CollectiveMismatch
from phalanx.transports.shm.tuning import Tuning, tuning_in_force

EXAMPLES = int(os.environ.get("PHALANX_EXAMPLES", "0"))

FLOATS = ("float32", "float64", "float16", "bfloat16")
DTYPES = (*FLOATS, "uint8", "int8", "int16", "int32", "int64", "bool", "complex64")
FLOAT_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
INTEGER_OPS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
LAYOUTS = ("plain", "offset", "strided")

# Both calls of a pair move the same bytes in the same way, so ranks may mix them.
COLLECTIVES = {
    "all_reduce": "all_reduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "all_gather": "all_gather",
    "all_gather_single": "all_gather",
    "gather": "gather",
    "gather_single": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "barrier": "barrier",
}
KINDS = (*COLLECTIVES, "send", "send to any", "batch")
REDUCTIONS = frozenset(("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single"))
ROOTED = frozenset(("reduce", "broadcast", "gather", "gather_single", "scatter"))
MANY_BLOCKS = frozenset(kind for kind in KINDS if kind not in ("all_reduce", "reduce", "broadcast", "send"))


@dataclass(frozen=True)
class Group:
    """Members, and the sizes at which algorithms change: with small ones few bytes fill many chunks."""

    members: tuple[int, ...]
    chunk_bytes: int = 256 * 1024
    small_bytes: int = 16 * 1024


def _small(*members: int) -> Group:
    return Group(members, chunk_bytes=1024, small_bytes=256)


# By world size; the first is the world.
GROUPS = {
    2: (Group((0, 1)), _small(0, 1), _small(1)),
    3: (Group((0, 1, 2)), _small(0, 1, 2), Group((0, 2)), _small(1, 2), _small(1)),
    5: (Group((0, 1, 2, 3, 4)), _small(0, 1, 2, 3, 4), _small(0, 1, 2), Group((2, 3, 4)), _small(1, 4), _small(3)),
}


@dataclass(frozen=True)
class Step:
    """One call on every rank of a group, which is an index into the world size's ``GROUPS``.

    ``kind`` may be a ``batch``, one ``batch_isend_irecv`` of ``pairs`` (sender, receiver). ``count`` is of elements of
    one rank's part; those that rank r sends rank q are ``splits[(r * size + q) % len(splits)]`` if there are any.
    ``root`` is a place in the group, also of a message's sender. ``layouts`` say where what is read, and what is
    written, lies in memory. Each rank of the world waits before which later step (``waits``; 0: it calls
    synchronously), and sleeps before it calls (``delays_ms``); neither if empty.
    """

    kind: str
    group: int = 0
    dtype: str = "float32"
    count: int = 1
    op: str = "SUM"
    root: int = 0
    splits: tuple[int, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    tag: int = 0
    layouts: tuple[str, str] = ("plain", "plain")
    waits: tuple[int, ...] = ()
    delays_ms: tuple[int, ...] = ()

    def sent(self, size: int, sender: int, receiver: int) -> int:
        """How many elements ``sender`` gives ``receiver`` in an all-to-all."""
        return self.splits[(sender * size + receiver) % len(self.splits)] if self.splits else self.count

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    @property
    def reduce_op(self) -> Any:
        return getattr(dist.ReduceOp, self.op)


@dataclass(frozen=True)
class Program:
    """Steps, and the seed of the ranks' values; ``exact`` for values whose sums and products need no rounding."""

    size: int
    steps: tuple[Step, ...]
    seed: int = 0
    exact: bool = False

    def members(self, step: Step) -> tuple[int, ...]:
        return GROUPS[self.size][step.group].members


def ops_of(dtype: str) -> tuple[str, ...]:
    if dtype == "complex64":
        return ("SUM", "AVG")
    return FLOAT_OPS if dtype in FLOATS else INTEGER_OPS


def _counts(group: Group, itemsize: int, many: bool) -> st.SearchStrategy[int]:
    """None, a few, many, and those around the sizes at which an algorithm changes; the sum of ``many`` is limited."""
    size = len(group.members)
    chunk = group.chunk_bytes
    edges = (64, group.small_bytes // size, chunk, chunk // max(1, size - 1), 2 * chunk, 5 * chunk)
    edge = st.builds(
        lambda nbytes, more: max(0, nbytes // itemsize + more),
        st.sampled_from([edge for edge in edges if edge * (size if many else 1) <= 2_000_000]),
        st.integers(-1, 1),
    )
    most = 32_000 if chunk < 10_000 else 2_000_000
    any_size = st.integers(0, most // (itemsize * (size if many else 1)))
    return st.one_of(st.integers(0, 40), st.integers(0, 3000), edge, any_size)


@st.composite
def steps(draw: st.DrawFn, size: int) -> Step:
    number = draw(st.integers(0, len(GROUPS[size]) - 1))
    group = GROUPS[size][number]
    n = len(group.members)
    kind = draw(st.sampled_from(KINDS if n > 1 else tuple(COLLECTIVES)))
    dtype = draw(st.sampled_from(DTYPES))
    counts = _counts(group, getattr(torch, dtype).itemsize, kind in MANY_BLOCKS)
    step = Step(
        kind,
        number,
        waits=draw(st.just(()) | st.tuples(*[st.sampled_from((0, 1, 2, 9))] * size)),
        delays_ms=draw(st.just(()) | st.just(()) | st.tuples(*[st.sampled_from((0, 0, 1, 3))] * size)),
    )
    if kind == "barrier":
        return step
    step = replace(
        step,
        dtype=dtype,
        count=draw(counts),
        layouts=draw(st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS))),
    )
    if kind in REDUCTIONS:
        step = replace(step, op=draw(st.sampled_from(ops_of(dtype))))
    if kind in ROOTED or kind.startswith("send"):
        step = replace(step, root=draw(st.integers(0, n - 1)))
    if kind in ("all_to_all", "all_to_all_single"):
        step = replace(step, splits=tuple(draw(st.lists(counts, max_size=4))))
    if kind.startswith("send"):
        receiver = draw(st.sampled_from([rank for rank in range(n) if rank != step.root]))
        step = replace(step, pairs=((step.root, receiver),), tag=draw(st.integers(0, 2)))
    if kind == "batch":
        pair = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda pair: pair[0] != pair[1])
        step = replace(step, pairs=tuple(draw(st.lists(pair, min_size=1, max_size=2 * n))))
    return step


def drawn(strategy: st.SearchStrategy[Any], examples: int, check: Callable[[Any], None]) -> None:
    """Call ``check`` with so many examples, or with ``PHALANX_EXAMPLES``; the smallest that fails is told."""

    @settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def every(example: Any) -> None:
        check(example)

    every()


def programs(
    size: int, exact: bool = False, most: int = 8, only: st.SearchStrategy[Step] | None = None
) -> st.SearchStrategy[Program]:
    """Programs for a world of ``size``, of up to ``most`` steps, drawn from ``only`` those if given."""
    some = st.lists(steps(size) if only is None else only, min_size=1, max_size=most)
    return st.builds(Program, st.just(size), some.map(tuple), st.integers(0, 1000), st.just(exact))


# A program, and a rank that calls something else in one step: the step's index, the rank, and what it calls.
Perturbed = tuple[Program, int, int, Step]


@st.composite
def perturbed(draw: st.DrawFn, size: int, exact: bool = False) -> Perturbed:
    program = draw(programs(size, exact, most=5))
    step = draw(steps(size).filter(lambda step: step.kind in COLLECTIVES and len(GROUPS[size][step.group].members) > 1))
    at = draw(st.integers(0, len(program.steps)))
    program = replace(program, steps=(*program.steps[:at], step, *program.steps[at:]))
    odd = draw(st.sampled_from(program.members(step)))
    return program, at, odd, draw(st.sampled_from(_others(step, len(program.members(step)))))


def _others(step: Step, size: int) -> list[Step]:
    """Steps that differ from ``step`` in one respect on which ranks must agree."""
    others = [
        replace(step, kind=kind, op="SUM", root=0, splits=())
        for kind, same in COLLECTIVES.items()
        if same != COLLECTIVES[step.kind]
    ]
    if step.kind == "barrier":
        return others
    others += [replace(step, dtype=dtype, op="SUM") for dtype in DTYPES if dtype != step.dtype]
    more = replace(step, count=step.count + 1, splits=tuple(count + 1 for count in step.splits))
    others += [more] * 4
    if step.kind in REDUCTIONS:
        others += [replace(step, op=op) for op in ops_of(step.dtype) if op != step.op]
    if step.kind in ROOTED:
        others += [replace(step, root=root) for root in range(size) if root != step.root] * 2
    return others


# -- what a program must leave --------------------------------------------------------------------------

LONGEST_BYTES = 2_100_000
OFFSETS = 4099  # a prime: the parts of the ranks begin at different places of one table
FILL = 77  # the value that memory has beforehand where a result belongs, and around it


@cache
def _table(dtype: torch.dtype, exact: bool) -> torch.Tensor:
    """Random values that every part is cut from: drawing anew for each would take longer than communicating."""
    generator = torch.Generator().manual_seed(7)
    length = LONGEST_BYTES // dtype.itemsize + OFFSETS
    if dtype == torch.bool:
        return torch.randint(0, 3, (length,), generator=generator) > 0
    if exact:
        # Products of five such are whole numbers of at most eight bits, up to a power of two: exact in every dtype.
        return torch.randint(0 if dtype == torch.uint8 else -4, 5, (length,), generator=generator).to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        # Of different magnitudes, so that the order of addition shows.
        scale = 10.0 ** torch.randint(0, 3, (length,), generator=generator)
        kind = torch.complex64 if dtype.is_complex else torch.float32
        return (torch.randn(length, dtype=kind, generator=generator) * scale).to(dtype)
    return torch.randint(-(2**62), 2**62, (length,), generator=generator).to(dtype)


_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def reduced(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """The parts, combined in their order."""
    dtype = parts[0].dtype
    if dtype.is_complex:
        return torch.view_as_complex(reduced([torch.view_as_real(part) for part in parts], op))
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = _COMBINE[op](total, part.to(wide))
    return (total / len(parts) if op == "AVG" else total).to(dtype)


@dataclass(frozen=True)
class Buffer:
    """A tensor of a call: what it holds before, what it must hold after, and whether the call writes it."""

    before: torch.Tensor
    after: torch.Tensor
    written: bool = True


def buffers(program: Program, index: int, rank: int, step: Step | None = None) -> list[Buffer]:
    """The tensors of a step, or of another one in its place, on a rank of its group: those that are written first."""
    step = program.steps[index] if step is None else step
    n = len(program.members(step))
    ranks = range(n)

    def part_of(sender: int, part: int = 0, count: int = step.count) -> torch.Tensor:
        """What a rank gives in this step, as its part-th part."""
        offset = (((program.seed * 31 + index) * 31 + sender) * 31 + part) * 101 % OFFSETS
        return _table(step.torch_dtype, program.exact)[offset : offset + count].clone()

    def written(results: list[torch.Tensor]) -> list[Buffer]:
        return [Buffer(torch.full_like(result, FILL), result) for result in results]

    def read(parts: list[torch.Tensor]) -> list[Buffer]:
        return [Buffer(part, part, written=False) for part in parts]

    def messages(pairs: tuple[tuple[int, int], ...]) -> list[Buffer]:
        found = []
        for number, (sender, receiver) in enumerate(pairs):
            if rank in (sender, receiver):
                part = part_of(sender, number)
                found += read([part]) if rank == sender else written([part])
        return found

    def packed(parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat(parts)] if step.kind.endswith("_single") else parts

    kind, root, own = COLLECTIVES.get(step.kind, ""), step.root, part_of(rank)
    everybodys = [part_of(each) for each in ranks]
    if kind == "barrier":
        return []
    if kind == "all_reduce":
        return [Buffer(own, reduced(everybodys, step.op))]
    if kind == "reduce":
        return [Buffer(own, reduced(everybodys, step.op) if rank == root else own)]
    if kind == "broadcast":
        return [Buffer(own, part_of(root))]
    if kind in ("all_gather", "gather"):
        return written(packed(everybodys) if kind == "all_gather" or rank == root else []) + read([own])
    if kind == "scatter":
        return written([part_of(root, rank)]) + read([part_of(root, each) for each in ranks] if rank == root else [])
    if kind == "reduce_scatter":
        result = reduced([part_of(each, rank) for each in ranks], step.op)
        return written([result]) + read(packed([part_of(rank, each) for each in ranks]))
    if kind == "all_to_all":
        received = [part_of(each, rank, step.sent(n, each, rank)) for each in ranks]
        sent = [part_of(rank, each, step.sent(n, rank, each)) for each in ranks]
        return written(packed(received)) + read(packed(sent))
    return messages(step.pairs)


# -- running it ----------------------------------------------------------------------------------------

Tensors = list[torch.Tensor]

# A busy machine may need this long for what takes milliseconds. The groups' timeout is a minute.
TOLD_S = 30.0


Groups = list[dist.ProcessGroup | None]


def join(member: Member, timeout_s: float = 300.0) -> tuple[int, Groups]:
    """Join a world; the rank's number, and its groups in the order of ``GROUPS`` (None where it is not a member)."""
    with _tuned(GROUPS[member.size][0]):
        member.join(timeout_s=timeout_s)
    groups: Groups = [dist.group.WORLD]
    for group in GROUPS[member.size][1:]:
        with _tuned(group):
            made = dist.new_group(list(group.members))
        groups.append(made if member.rank in group.members else None)
    return member.rank, groups


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


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8)) if one.numel() else not other.numel()


@dataclass
class _Call:
    """A call that was made, the memory that it used, and what that must hold afterwards."""

    index: int
    due: int
    works: list[Any] = field(default_factory=list)
    memory: list[torch.Tensor] = field(default_factory=list)
    expected: list[torch.Tensor] = field(default_factory=list)
    failed: bool = False
    checked: bool = True


class Run:
    """One run of a program on one rank.

    The rank calls what is given ``instead`` of a step, whose result is not checked. Errors of the kind ``catch`` are
    kept, with the index of their step, and the program goes on.
    """

    def __init__(
        self,
        rank: int,
        groups: Groups,
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
            works = _CALLS[step.kind](_Asked(step, group, members, place, bool(wait), index), written, read)
            call.works = works if isinstance(works, list) else [works]
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
            if not same(memory, expected):
                call.checked = False
                at = int((memory != expected).nonzero()[0]) if bool((memory != expected).any()) else -1
                self.wrong.append(
                    f"rank {self._rank}, step {call.index} {self._program.steps[call.index].kind}, {when}: tensor "
                    f"{number} of {memory.dtype}, element {at}: {memory[at]}, must be {expected[at]}"
                )


def complaints(rank: int, groups: Groups, example: Perturbed) -> list[str]:
    """What is wrong on this rank of a world in which one calls something else.

    Every rank of the group must be told, at a later call at the latest, and in time; the other groups go on.
    """
    program, at, odd, other = example
    last = Step("barrier", program.steps[at].group)
    program = replace(program, steps=(*program.steps, last))
    began = time.monotonic()
    run = Run(rank, groups, program, (at, other) if rank == odd else None, catch=Exception)
    elapsed_s = time.monotonic() - began
    found = list(run.wrong)
    if elapsed_s > TOLD_S:
        found.append(f"told only after {elapsed_s:.1f} s")
    told = {program.steps[index].group for index, _ in run.errors}
    if told != ({last.group} if rank in program.members(last) else set()):
        found.append(f"errors in groups {told}, not in {last.group}")
    found += [repr(error) for _, error in run.errors if not isinstance(error, CollectiveMismatch)]
    return found


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


_CALLS: dict[str, Callable[[_Asked, Tensors, Tensors], Any]] = {
    "all_reduce": lambda ask, out, _: dist.all_reduce(out[0], ask.step.reduce_op, **ask.how),
    "reduce": lambda ask, out, _: dist.reduce(out[0], ask.root, ask.step.reduce_op, **ask.how),
    "broadcast": lambda ask, out, _: dist.broadcast(out[0], ask.root, **ask.how),
    "all_gather": lambda ask, out, given: dist.all_gather(out, given[0], **ask.how),
    "all_gather_single": lambda ask, out, given: function("all_gather_single")(out[0], given[0], **ask.how),
    "gather": lambda ask, out, given: dist.gather(given[0], out if ask.is_root else None, ask.root, **ask.how),
    "gather_single": _gather_single,
    "scatter": lambda ask, out, given: dist.scatter(out[0], given if ask.is_root else None, ask.root, **ask.how),
    "reduce_scatter": lambda ask, out, given: dist.reduce_scatter(out[0], given, ask.step.reduce_op, **ask.how),
    "reduce_scatter_single": lambda ask, out, given: function("reduce_scatter_single")(
        out[0], given[0], ask.step.reduce_op, **ask.how
    ),
    "all_to_all": lambda ask, out, given: dist.all_to_all(out, given, **ask.how),
    "all_to_all_single": _all_to_all_single,
    "barrier": lambda ask, *_: dist.barrier(**ask.how),
    "send": _send,
    "send to any": _send,
    "batch": _batch,
}
