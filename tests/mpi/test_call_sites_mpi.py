"""Equal calls over MPI that do not belong together, because a rank swaps two or leaves one out. And right programs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from tests.mpi.environments import MpiEnvironment, run
from tests.support.call_programs import MISTAKES, RIGHT

PROGRAM = Path(__file__).with_name("programs") / "lines.py"
MISTAKEN = [program.__name__ for program in MISTAKES]
CORRECT = [program.__name__ for program in RIGHT]
WAS_CALL = re.compile(r"call_programs\.py:\d+ was call #\d+ of rank \d and #\d+ of rank \d")


SWAPS = """
import torch, torch.distributed as dist
dist.init_process_group("mpi")
def first(x):
    dist.all_reduce(x)
def second(x):
    dist.all_reduce(x)
try:
    for task in (first, second) if dist.get_rank() else (second, first):
        task(torch.ones(2))
except RuntimeError as error:
    print(type(error).__name__, error, flush=True)
dist.destroy_process_group()
"""


class Ran(NamedTuple):
    """What one rank said and raised in one program."""

    said: str
    error: str


def ran(mpi: MpiEnvironment, size: int, folder: Path, *arguments: str, **variables: str) -> list[dict[str, Ran]]:
    """By rank what came of each program."""
    done = run(mpi, size, PROGRAM, folder, *arguments, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)]
    return [{name: Ran(result["said"], result["error"]) for name, result in of_rank.items()} for of_rank in results]


def test_a_mistake_is_warned_of_once(mpi: MpiEnvironment, tmp_path: Path) -> None:
    results = ran(mpi, 3, tmp_path, *MISTAKEN)
    for name in MISTAKEN:
        told = [of_rank[name].said for of_rank in results if of_rank[name].said]
        assert len(told) == 1, (name, told)
        assert told[0].startswith("phalanx: warning: ranks 0 and ")
        assert "one has left out a call" in told[0]
        assert told[0].count("call_programs.py:") == 2
        assert told[0].count("\n") <= 12


def test_a_mistake_is_an_error_on_all_ranks_if_the_user_wants_that(mpi: MpiEnvironment, tmp_path: Path) -> None:
    results = ran(mpi, 3, tmp_path, *MISTAKEN, PHALANX_CALL_SITES="error")
    for name in MISTAKEN:
        errors = {of_rank[name].error for of_rank in results}
        assert len(errors) == 1, (name, errors)
        (error,) = errors
        assert error.startswith("CollectiveMismatch: the ranks of a group called different operations")
        assert WAS_CALL.search(error), error
        assert error.count("\n") <= 12
        assert not any(of_rank[name].said for of_rank in results)


def test_a_program_that_is_right_is_not_warned_of(mpi: MpiEnvironment, tmp_path: Path) -> None:
    results = ran(mpi, 3, tmp_path, *CORRECT, PHALANX_CALL_SITES="error")
    for name in CORRECT:
        assert [(of_rank[name].said, of_rank[name].error) for of_rank in results] == [("", "")] * 3, name


def test_mpi4py_alone_compares_lines_too(mpi: MpiEnvironment, tmp_path: Path) -> None:
    results = ran(mpi, 3, tmp_path, "--by-mpi4py", "swapped_functions", "a_branch_by_rank", PHALANX_CALL_SITES="error")
    for of_rank in results:
        assert WAS_CALL.search(of_rank["swapped_functions"].error)
        assert of_rank["a_branch_by_rank"].error == ""


def test_calls_of_every_kind_and_groups_are_compared(mpi: MpiEnvironment, tmp_path: Path) -> None:
    results = ran(mpi, 3, tmp_path, "swapped_of_every_kind", "swapped_in_a_group")
    warnings = [of_rank["swapped_of_every_kind"].said.count("warning: ranks 0 and 2") for of_rank in results]
    assert warnings == [0, 0, 8]
    assert [of_rank["swapped_in_a_group"].said.count("warning: ranks 0 and 1") for of_rank in results] == [0, 0, 1]


def test_the_setting_of_rank_0_holds(mpi: MpiEnvironment, tmp_path: Path) -> None:
    """A rank that would warn beside one that raises would wait for it without end."""
    script = tmp_path / "settings.py"
    script.write_text(
        "import os\n"
        "rank = os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK'))\n"
        "os.environ['PHALANX_CALL_SITES'] = {'0': 'error', '1': 'ignore'}.get(rank, 'warn')\n" + SWAPS
    )
    done = run(mpi, 3, script)
    assert done.stdout.count("CollectiveMismatch") == 3, done.stdout + done.stderr
