"""Random programs of communication: against a plain oracle, against Gloo, and with one rank that calls something else.

Programs are the same in every run. More of them, and others each time: ``PHALANX_EXAMPLES=2000``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.pool import Pool
from tests.support.programs import Program, Step, perturbed, programs, steps
from tests.support.ranks import Place, on_ranks
from tests.support.replay import Rank, Run, join

from phalanx.errors import CollectiveMismatch

EXAMPLES = int(os.environ.get("PHALANX_EXAMPLES", "0"))


def drawn(strategy: st.SearchStrategy[Any], examples: int, check: Callable[[Any], None]) -> None:
    """Call ``check`` with so many examples, or with ``PHALANX_EXAMPLES``; a failing one is made as small as it can be."""

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


def differences(rank: Rank, program: Program) -> list[str]:
    return Run(rank.rank, rank.groups, program).wrong


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_program_leaves_what_the_oracle_says(size: int) -> None:
    """Bit for bit, and nothing around it: sums in rank order, inputs as they were."""
    with Pool(size, join) as pool:

        def check(program: Program) -> None:
            assert pool.do(differences, program) == [[]] * size

        drawn(programs(size), 150, check)
