"""Random programs of communication: the calls of a rank, step by step, the same on every rank.

A program is plain data, so it can be printed, shrunk, pickled and run by any backend. ``oracle.py`` computes its
results, ``replay.py`` runs it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st

__all__ = ["COLLECTIVES", "GROUPS", "REDUCTIONS", "Group", "Program", "Step", "perturbed", "programs", "steps"]

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
    """Its members, and the sizes at which its algorithms change: with small ones few bytes fill many chunks."""

    members: tuple[int, ...]
    chunk_bytes: int = 256 * 1024
    small_bytes: int = 16 * 1024


def _small(*members: int) -> Group:
    return Group(members, chunk_bytes=1024, small_bytes=256)


# By world size; the first is the world.
GROUPS = {
    2: (Group((0, 1)), _small(0, 1), _small(1)),
    3: (Group((0, 1, 2)), _small(0, 1, 2), Group((0, 2)), _small(1, 2), _small(1)),
    5: (
        Group((0, 1, 2, 3, 4)),
        _small(0, 1, 2, 3, 4),
        _small(0, 1, 2),
        Group((2, 3, 4)),
        _small(1, 4),
        Group((0, 2, 3, 4)),
        _small(3),
    ),
}


@dataclass(frozen=True)
class Step:
    """One call on every rank of a group.

    Attributes:
        kind: which call; ``batch`` is one ``batch_isend_irecv`` of ``pairs``.
        group: an index into the world size's ``GROUPS``.
        dtype, op: names in ``torch`` and in ``dist.ReduceOp``.
        count: elements of one rank's part.
        root: the root, or the sender of a message, by its place in the group.
        splits: the elements that rank r sends rank q are ``splits[(r * size + q) % len(splits)]``; else ``count``.
        pairs: sender and receiver of each message of a batch.
        tag: of messages.
        layouts: where what is read, and what is written, lies in memory.
        waits: for each rank of the world 0 for a synchronous call, else before which later step it is waited for.
        delays_ms: how long each rank of the world sleeps before the call. Empty for no delays, as ``waits``.
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
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

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
    """Counts of elements: none, a few, many, and those around the sizes at which an algorithm changes.

    ``many`` is True for a call with a part for every rank, whose total is limited.
    """
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


def programs(
    size: int, exact: bool = False, most: int = 8, only: st.SearchStrategy[Step] | None = None
) -> st.SearchStrategy[Program]:
    """Programs for a world of ``size``, of up to ``most`` steps, drawn from ``only`` those if given."""
    some = st.lists(steps(size) if only is None else only, min_size=1, max_size=most)
    return st.builds(Program, st.just(size), some.map(tuple), st.integers(0, 1000), st.just(exact))


@st.composite
def perturbed(draw: st.DrawFn, size: int) -> tuple[Program, int, int, Step]:
    """A program, and a rank that calls something else in one step: (program, which step, which rank, what instead)."""
    program = draw(programs(size, most=5))
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
