"""A script that ends while a large message is on its way to or from a rank of another host."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fault.test_hosts_leaving import run_to_the_end

SCRIPT = """
    import sys
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore
    from tests.support.islands import pretend_host
    from phalanx.errors import PeerLost

    rank, size, file, leaver_sends = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "sends"
    pretend_host(rank)
    store = FileStore(file, size)
    # In vain, a rank would wait for longer than this test does.
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=900))
    leaves = rank == 1
    sends = leaves == leaver_sends
    tensor = torch.ones(50_000_000)  # so much that the rank leaves before it has gone
    for _ in range(2):  # from the second one on the receiver's memory is known before the message comes
        (dist.send if sends else dist.recv)(tensor, 1 - rank)
    dist.barrier()
    work = (dist.isend if sends else dist.irecv)(tensor, 1 - rank)
    if leaves:
        sys.exit(0)
    try:
        work.wait()
    except PeerLost:
        pass
    print("ended", flush=True)
"""


@pytest.mark.parametrize("leaver", ["sends", "receives"])
def test_it_ends_for_both_ranks(leaver: str, tmp_path: Path) -> None:
    ends = run_to_the_end(SCRIPT, 2, tmp_path, leaver)
    assert ends == [("ended\n", "", 0), ("", "", 0)]
