"""What people have at hand when they try MPI with torch: a tutorial's script, unchanged, under MPI's own launcher."""

from __future__ import annotations

from pathlib import Path

from tests.mpi.environments import MpiEnvironment, run

# No rank, no world size, no address: MPI knows them all. The older spelling of the sum, as the first tutorials have it.
SCRIPT = """
import torch
import torch.distributed as dist

def run(rank, size):
    tensor = torch.tensor([[1., 2., -3.][rank]])
    dist.all_reduce(tensor, op=dist.reduce_op.SUM)
    if rank == 0:
        dist.send(tensor=tensor, dst=1)
    elif rank == 1:
        dist.recv(tensor=tensor, src=0)
    print('Rank {} has {}'.format(rank, tensor))

if __name__ == "__main__":
    dist.init_process_group(backend='mpi')
    run(dist.get_rank(), dist.get_world_size())
"""


def test_script_of_the_tutorials_runs_as_it_is(mpi: MpiEnvironment, tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(SCRIPT)
    ended = run(mpi, 3, tmp_path / "run.py")
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [f"Rank {rank} has tensor([0.])" for rank in range(3)]
