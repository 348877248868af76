"""Under ``phalanx run`` processes meet at a port of their own, beside the group (test_falls.py: the ranks do)."""

from __future__ import annotations

import pytest
from tests.launch_support import Launcher, launcher
from tests.support.ports import held_port

__all__ = ["launcher"]

SPAWNED = """
    import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp

    def work(local, port, ranks):
        rank, size = int(os.environ["RANK"]) * 2 + local, 2 * ranks
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
        dist.all_reduce(total := torch.tensor([float(rank + 1)]))
        if local == 0:
            print(total.item())
        dist.destroy_process_group()

    if __name__ == "__main__":
        mp.spawn(work, (sys.argv[1], int(os.environ["WORLD_SIZE"])), nprocs=2)
"""
RPC = """
    import os, sys, torch, torch.distributed as dist, torch.distributed.rpc as rpc

    def add(a, b):
        return a + b

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{sys.argv[1]}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    dist.barrier()
    print(sum(rpc.rpc_sync(f"worker{other}", add, (other, 1)) for other in range(size)) / 1)
    rpc.shutdown()
    dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "text", "total"),
    [(1, SPAWNED, 3.0), (2, RPC, 3.0)],
    ids=["spawned by one", "RPC beside a group"],
)
def test_rank_0_listens_where_the_launcher_does_not(launcher: Launcher, ranks: int, text: str, total: float) -> None:
    with held_port() as port:
        outcome = launcher.run("-n", str(ranks), "-q", "--no-prefix", launcher.script(text), str(port))
    assert (outcome.code, outcome.out_lines) == (0, [str(total)] * ranks), outcome.err_text
