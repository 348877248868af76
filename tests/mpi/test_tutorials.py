"""What people have at hand when they try MPI with torch: tutorials' scripts, unchanged, and the example."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.mpi.environments import SETTINGS, MpiEnvironment

# No rank, no world size, no address: MPI knows them all. The older spelling, as the first tutorials have it.
REDUCE = """
import torch
import torch.distributed as dist

dist.init_process_group('mpi')
rank = dist.get_rank()
tensor = torch.tensor([[1., 2., -3.][rank]])
dist.all_reduce(tensor, op=dist.reduce_op.SUM)
print('Rank {} has {}'.format(rank, tensor))
"""
EXAMPLE = Path(__file__).parents[2] / "examples" / "text_classification.py"


@pytest.fixture(params=["mpiexec", "phalanx run --mpi"])
def run(mpi: MpiEnvironment, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., list[str]]:
    """Run a script as a user would: by the MPI's own mpiexec, or by ``phalanx run --mpi``; the lines it printed."""

    def started(ranks: int, script: Path | str, *arguments: str) -> list[str]:
        if isinstance(script, str):
            text, script = script, tmp_path / "run.py"
            script.write_text(text)
        ours = [mpi.python, "-m", "phalanx", "run", "--mpi", "mpiexec", "--no-prefix", "-q", "-n", str(ranks)]
        begin = [mpi.mpiexec, "-n", str(ranks), mpi.python] if request.param == "mpiexec" else ours
        # Buffered, each rank's words are written at once, and mpiexec does not mix them.
        own = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        ended = subprocess.run(
            [*begin, str(script), *arguments],
            cwd=tmp_path,
            env={**own, **SETTINGS, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.splitlines()

    return started


def test_tutorials_reduction_runs_as_it_is(run: Callable[..., list[str]]) -> None:
    assert sorted(run(3, REDUCE)) == [f"Rank {rank} has tensor([0.])" for rank in range(3)]


def test_the_example_trains(run: Callable[..., list[str]]) -> None:
    pytest.importorskip("snownlp")
    options = ("--backend", "mpi", "--epochs", "1", "--limit", "512", "--batch-size", "64")
    results = json.loads(run(2, EXAMPLE, *options)[-1])
    assert (results["ranks"], results["backend"], results["held_out"]) == (2, "mpi", 512)
