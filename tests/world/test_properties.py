"""Random programs of communication: against a plain oracle, against Gloo, and with one rank that calls something else.

Programs are the same in every run. More of them, and others each time: ``PHALANX_EXAMPLES=2000``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.pool import Pool
from tests.support.programs import REDUCTIONS, Program, Step, perturbed, programs, steps
from tests.support.ranks import Member, on_ranks
from tests.support.replay import Rank, Run, join
from tests.support.waiting import soon

from phalanx.errors import CollectiveMismatch

EXAMPLES = int(os.environ.get("PHALANX_EXAMPLES", "0"))

# A busy machine may need this long for what takes milliseconds. The groups' timeout is a minute.
TOLD_S = 30.0

# What Gloo refuses, or answers with garbage.
NOT_WITH_GLOO: dict[str, Callable[[Step], bool]] = {
    "dtypes that it does not know": lambda step: step.dtype == "int16",
    "tensors with gaps": lambda step: "strided" in step.layouts,
    "lists of different lengths": lambda step: step.kind == "all_to_all" and len(set(step.splits)) > 1,
    "empty messages from any rank": lambda step: step.kind == "send to any" and not step.count,
    "gathering into one tensor": lambda step: step.kind == "gather_single",
    "averages": lambda step: step.op == "AVG",
    "reductions of bool, whose true it makes a 2": lambda step: step.kind in REDUCTIONS and step.dtype == "bool",
    "gathered complex numbers": lambda step: step.kind == "gather" and step.dtype == "complex64",
}


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


def some_or_more(some: int, more: int) -> pytest.MarkDecorator:
    """So many examples; and more, for which ``make test`` has no time."""
    return pytest.mark.parametrize("examples", [some, pytest.param(more, marks=pytest.mark.long)])


def differences(rank: Rank, program: Program) -> list[str]:
    return Run(rank.rank, rank.groups, program).wrong


@some_or_more(60, 150)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_program_leaves_what_the_oracle_says(size: int, examples: int) -> None:
    """Bit for bit, and nothing around it: sums in rank order, inputs as they were."""
    with Pool(size, join) as pool:

        def check(program: Program) -> None:
            assert pool.do(differences, program) == [[]] * size

        drawn(programs(size), examples, check)


def differences_from_gloo(rank: Rank, program: Program) -> list[str]:
    ours = Run(rank.rank, rank.groups, program).calls
    gloos = Run(rank.rank, rank.gloo, program).calls
    different = []
    for one, other in zip(ours, gloos, strict=True):
        step = program.steps[one.index]
        # Where it is not the root of a reduce, Gloo leaves what it happened to have.
        if step.kind == "reduce" and program.members(step)[step.root] != rank.rank:
            continue
        if not all(torch.equal(a, b) for a, b in zip(one.memory, other.memory, strict=True)):
            different.append(f"rank {rank.rank}, step {one.index}: {one.memory}, with Gloo {other.memory}")
    return different


def join_both(member: Member) -> Rank:
    return join(member, gloo=True)


@some_or_more(25, 60)
@pytest.mark.parametrize("size", [2, 3])
def test_every_program_gives_what_gloo_gives(size: int, examples: int) -> None:
    """With whole numbers, since Gloo adds in another order."""
    both = steps(size).filter(lambda step: not any(refuses(step) for refuses in NOT_WITH_GLOO.values()))
    with Pool(size, join_both) as pool:

        def check(program: Program) -> None:
            assert pool.do(differences_from_gloo, program) == [[]] * size

        drawn(programs(size, exact=True, only=both), examples, check)


@some_or_more(8, 25)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_rank_that_calls_something_else_is_told_on_every_rank_of_the_group(size: int, examples: int) -> None:
    """Each raises in time, at a later call at the latest; what a rank was given without an error is right."""

    def check(example: tuple[Program, int, int, Step]) -> None:
        program, at, odd, other = example
        members = program.members(program.steps[at])
        last = Step("barrier", program.steps[at].group)
        program = replace(program, steps=(*program.steps, last))

        def body(member: Member) -> tuple[list[str], list[tuple[int, str]], float]:
            rank = join(member, timeout_s=60)
            started = time.monotonic()
            instead = (at, other) if member.rank == odd else None
            run = Run(rank.rank, rank.groups, program, instead, catch=Exception)
            told = [(index, f"{type(error).__name__}: {error}") for index, error in run.errors]
            elapsed_s = time.monotonic() - started
            # A receive from any rank fails if a rank of its group ends meanwhile, so nobody ends before the others.
            (member.folder / f"through-{member.rank}").touch()
            assert soon(lambda: all((member.folder / f"through-{other}").exists() for other in range(size)))
            return run.wrong, told, elapsed_s

        for rank, (wrong, told, elapsed_s) in enumerate(on_ranks(body, size)):
            assert not wrong
            assert elapsed_s < TOLD_S
            assert {program.steps[index].group for index, _ in told} == ({last.group} if rank in members else set())
            assert all(text.startswith(CollectiveMismatch.__name__) for _, text in told), told

    drawn(perturbed(size), examples, check)
