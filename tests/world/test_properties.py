"""Random programs of communication: against a plain oracle, against Gloo, and with one rank that calls something else.

Programs are the same in every run. More of them, and others each time: ``PHALANX_EXAMPLES=2000``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.pool import Pool
from tests.support.ranks import Member, on_ranks
from tests.world.random_programs import (
    REDUCTIONS,
    Perturbed,
    Program,
    Rank,
    Run,
    Step,
    complaints,
    drawn,
    join,
    perturbed,
    programs,
    steps,
)

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


def worlds_and_examples(some: dict[int, int], more: dict[int, int]) -> pytest.MarkDecorator:
    """So many examples for each size; and more, for which ``make test`` has no time."""
    longer = [pytest.param(*each, marks=pytest.mark.long) for each in more.items()]
    return pytest.mark.parametrize(("size", "examples"), [*some.items(), *longer])


def differences(rank: Rank, program: Program) -> list[str]:
    return Run(rank.rank, rank.groups, program).wrong


@worlds_and_examples({3: 60, 5: 40}, {2: 150, 3: 150, 5: 150})
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


@worlds_and_examples({3: 25}, {2: 60, 3: 60})
def test_every_program_gives_what_gloo_gives(size: int, examples: int) -> None:
    """With whole numbers, since Gloo adds in another order."""
    both = steps(size).filter(lambda step: not any(refuses(step) for refuses in NOT_WITH_GLOO.values()))
    with Pool(size, join_both) as pool:

        def check(program: Program) -> None:
            assert pool.do(differences_from_gloo, program) == [[]] * size

        drawn(programs(size, exact=True, only=both), examples, check)


@worlds_and_examples({3: 8}, {2: 25, 3: 25, 5: 25})
def test_a_rank_that_calls_something_else_is_told_to_its_group(size: int, examples: int) -> None:
    def check(example: Perturbed) -> None:
        def body(member: Member) -> list[str]:
            rank = join(member, timeout_s=60)
            found = complaints(member.rank, rank.groups, example)
            member.meet("through")  # a receive from any rank fails if a rank of its group ends meanwhile
            return found

        assert on_ranks(body, size) == [[]] * size

    drawn(perturbed(size), examples, check)
