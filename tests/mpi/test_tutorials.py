"""What people have at hand when they try MPI with torch: tutorials' scripts, unchanged, and the example."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.mpi.environments import SETTINGS, MpiEnvironment

# No rank, no world size, no address: MPI knows them all.
SEND = '''
"""run.py:"""
#!/usr/bin/env python
import os
import torch
import torch.distributed as dist

def run(rank, size):
    tensor = torch.zeros(2)
    if rank == 0:
        tensor += torch.tensor([1., -1.])
        # Send the tensor to process 1
        dist.send(tensor=tensor, dst=1)
        print('Rank ', rank, ' has data ', tensor)
    elif rank == 1:
        # Receive tensor from process 0
        dist.recv(tensor=tensor, src=0)
        print('Rank ', rank, ' has data ', tensor)

def init_process(fn, backend='mpi'):
    """ Initialize the distributed environment. """
    dist.init_process_group(backend=backend)
    fn(dist.get_rank(), dist.get_world_size())

if __name__ == "__main__":
    init_process(run)
'''
# The older spelling of the operation, as the first tutorials have it.
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
RUN = ("-m", "phalanx", "run", "--mpi", "mpiexec", "--no-prefix", "-q")


def start(
    mpi: MpiEnvironment, launcher: str, ranks: int, folder: Path, script: Path | str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run a script as a user would: by the MPI's own mpiexec, or by ``phalanx run --mpi``."""
    begin = (
        [mpi.mpiexec, "-n", str(ranks), mpi.python] if launcher == "mpiexec" else [mpi.python, *RUN, "-n", str(ranks)]
    )
    # Buffered, each rank's words are written at once, and mpiexec does not mix them.
    own = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [*begin, str(script), *arguments],
        cwd=folder,
        env={**own, **SETTINGS, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def run(mpi: MpiEnvironment, launcher: str, ranks: int, folder: Path, text: str) -> list[str]:
    script = folder / "run.py"
    script.write_text(text)
    ended = start(mpi, launcher, ranks, folder, script)
    assert ended.returncode == 0, ended.stderr
    return sorted(ended.stdout.splitlines())


@pytest.mark.parametrize("launcher", ["mpiexec", "phalanx run --mpi"])
def test_send_and_receive(mpi: MpiEnvironment, launcher: str, tmp_path: Path) -> None:
    lines = run(mpi, launcher, 2, tmp_path, SEND)
    assert lines == [f"Rank  {rank}  has data  tensor([ 1., -1.])" for rank in (0, 1)]


@pytest.mark.parametrize("launcher", ["mpiexec", "phalanx run --mpi"])
def test_all_reduce_with_the_older_name_of_the_sum(mpi: MpiEnvironment, launcher: str, tmp_path: Path) -> None:
    lines = run(mpi, launcher, 3, tmp_path, REDUCE)
    assert lines == [f"Rank {rank} has tensor([0.])" for rank in range(3)]


@pytest.mark.parametrize("launcher", ["mpiexec", "phalanx run --mpi"])
def test_the_example_trains(mpi: MpiEnvironment, launcher: str, tmp_path: Path) -> None:
    pytest.importorskip("snownlp")
    options = ("--backend", "mpi", "--epochs", "1", "--limit", "512", "--batch-size", "64")
    ended = start(mpi, launcher, 2, tmp_path, EXAMPLE, *options)
    assert ended.returncode == 0, ended.stderr
    results = json.loads(ended.stdout.splitlines()[-1])
    assert (results["ranks"], results["backend"], results["held_out"]) == (2, "mpi", 512)
