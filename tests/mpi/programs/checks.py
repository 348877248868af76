"""What a user relies on over MPI, checked by ranks that mpiexec (or nobody) has started. Prints what was checked.

Expected values are computed here, in this process alone.
"""

from __future__ import annotations

import re
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from phalanx.errors import ArgumentError, ClosedError, CollectiveMismatch, CollectiveTimeout
from phalanx.transports.mpi.communicator import MpiCommunicator
from phalanx.transports.mpi.runtime import running


def check_the_world_is_mpis(rank: int, size: int) -> None:
    from mpi4py import MPI

    assert (rank, size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert dist.is_mpi_available()
    assert dist.get_backend() == "mpi"


def check_sixteen_bits_are_rounded_once(rank: int, size: int) -> None:
    """A quarter of a unit in the last place each: rounded at every step, they would all be lost."""
    for dtype, ulp in ((torch.bfloat16, 2**-7), (torch.float16, 2**-10)):
        parts = [1.0] + [ulp / 4] * (size - 1)
        tensor = torch.tensor([parts[rank]]).to(dtype)
        dist.all_reduce(tensor)
        assert tensor.item() == torch.tensor(sum(parts)).to(dtype).item()


def check_operations_that_do_not_exist_are_refused(rank: int, size: int) -> None:
    with pytest.raises(ArgumentError, match=r"AVG of torch\.int32"):
        dist.all_reduce(torch.ones(1, dtype=torch.int32), op=dist.ReduceOp.AVG)
    with pytest.raises(ArgumentError, match=r"BXOR of torch\.float32"):
        dist.all_reduce(torch.ones(1), op=dist.ReduceOp.BXOR)


def check_sparse_sums(rank: int, size: int) -> None:
    tensor = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.tensor([float(rank + 1)]), (size,))
    dist.all_reduce(tensor)
    assert tensor.to_dense().tolist() == [r + 1.0 for r in range(size)]


def check_data_parallel_steps(rank: int, size: int) -> None:
    """Gradients are averages over all ranks' data, also where buckets are many."""
    torch.manual_seed(3)
    module, alone = (torch.nn.Linear(64, 64) for _ in range(2))
    alone.load_state_dict(module.state_dict())
    model = DistributedDataParallel(module, bucket_cap_mb=0.01)
    data = torch.randn(size, 8, 64, generator=torch.Generator().manual_seed(4))
    model(data[rank]).square().mean().backward()
    alone(data.flatten(0, 1)).square().mean().backward()
    for ours, expected in zip(alone.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)


def check_messages_of_other_lengths_are_told(rank: int, size: int) -> None:
    if rank == 0:
        for count in (3, 5):
            dist.send(torch.zeros(count), 1, tag=count)
        with pytest.raises(ArgumentError, match="takes tags from 0"):
            dist.send(torch.zeros(1), 1, tag=2**31)
    elif rank == 1:
        for count in (3, 5):
            with pytest.raises(CollectiveMismatch, match="is not of 16 bytes"):
                dist.recv(torch.zeros(4), 0, tag=count)


def check_a_group_of_another_backend_is_refused_on_all_ranks(rank: int, size: int) -> None:
    for backend in ("gloo", "phalanx", "cpu:gloo"):
        with pytest.raises(RuntimeError, match=f"has no store, .* with backend '{backend}': leave out"):
            dist.new_group([0], backend=backend)
    dist.destroy_process_group(dist.new_group(backend="mpi"))


def check_groups_of_the_same_members_have_names_of_their_own(rank: int, size: int) -> None:
    """And torch's, by which the functional collectives find them."""
    groups = [dist.new_group(list(range(size))) for _ in range(2)]
    assert len({group.group_name for group in groups}) == 2
    for group in groups:
        name = group.group_name
        assert name == dist.distributed_c10d._world.pg_names[group]
        dist.destroy_process_group(group)
        with pytest.raises(ClosedError, match=f"'{name}'"):
            group.barrier()


def check_more_communicators_come_and_go_than_mpi_has(rank: int, size: int) -> None:
    """MPICH has 2048 at a time."""
    runtime = running()
    assert runtime is not None
    for turn in range(2100):
        communicator = MpiCommunicator(runtime, runtime.world.Dup(), range(size), f"turn {turn}", timedelta(seconds=60))
        if turn % 100 == 0:
            communicator.barrier()
        communicator.close()


def check_a_missing_rank_is_named(rank: int, size: int) -> None:
    group = dist.new_group(list(range(size)), timeout=timedelta(seconds=0.5))
    missing = size - 1
    if rank != missing:
        began = time.monotonic()
        with pytest.raises(CollectiveTimeout, match=rf"^rank {missing} of the group \(.*\), which is ") as told:
            dist.all_reduce(torch.ones(2), group=group)
        # It waits in the world's barrier, which is a call of this program's as well.
        assert re.search(r"which is at \w+ \(\S*checks\.py:\d+\), did not come within 0\.5 s while ", str(told.value))
        assert "all_reduce(float32[2], sum) at" in str(told.value)
        assert "checks.py:" in str(told.value)
        assert time.monotonic() - began < 3
        with pytest.raises(CollectiveTimeout):  # the ranks are out of step now
            dist.barrier(group=group)
    dist.barrier()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("mpi")
    rank, size = dist.get_rank(), dist.get_world_size()
    for name in sys.argv[1:]:
        began = time.monotonic()
        globals()[name](rank, size)
        dist.barrier()
        if rank == 0:
            print(f"{name} {time.monotonic() - began:.2f} s", flush=True)
    dist.destroy_process_group()
    if rank == 0:
        print("done", flush=True)


if __name__ == "__main__":
    main()
