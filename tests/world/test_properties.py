"""Random programs of communication: against a plain oracle, and with one rank that calls something else.

Programs are the same in every run. More of them, and others each time: ``PHALANX_EXAMPLES=2000``.
"""

from __future__ import annotations

import pytest
from tests.support.pool import Pool
from tests.support.ranks import Member, on_ranks
from tests.world.random_programs import Groups, Perturbed, Program, Run, complaints, drawn, join, perturbed, programs


def worlds_and_examples(some: dict[int, int], more: dict[int, int]) -> pytest.MarkDecorator:
    """So many examples for each size; and more, for which ``make test`` has no time."""
    longer = [pytest.param(*each, marks=pytest.mark.long) for each in more.items()]
    return pytest.mark.parametrize(("size", "examples"), [*some.items(), *longer])


def differences(joined: tuple[int, Groups], program: Program) -> list[str]:
    return Run(*joined, program).wrong


@worlds_and_examples({3: 60, 5: 40}, {2: 150, 3: 150, 5: 150})
def test_every_program_leaves_what_the_oracle_says(size: int, examples: int) -> None:
    """Bit for bit, and nothing around it: sums in rank order, inputs as they were."""
    with Pool(size, join) as pool:

        def check(program: Program) -> None:
            assert pool.do(differences, program) == [[]] * size

        drawn(programs(size), examples, check)


@pytest.mark.long
@worlds_and_examples({3: 8}, {2: 25, 3: 25, 5: 25})
def test_a_rank_that_calls_something_else_is_told_to_its_group(size: int, examples: int) -> None:
    def check(example: Perturbed) -> None:
        def body(member: Member) -> list[str]:
            found = complaints(*join(member, timeout_s=60), example)
            member.meet("through")  # a receive from any rank fails if a rank of its group ends meanwhile
            return found

        assert on_ranks(body, size) == [[]] * size

    drawn(perturbed(size), examples, check)
