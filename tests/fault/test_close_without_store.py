"""Groups are closed after the host of rank 0, with the job's store, has been cut off: nothing raises, and ranks end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from tests.support.hosts import running_hosts, why_no_hosts
from tests.support.waiting import soon

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

PATIENCE_S = 300.0  # no busy machine needs as long
SIZE = 3
SCRIPT = """
    import os, sys, time
    from pathlib import Path
    import torch, torch.distributed as dist, phalanx

    world = phalanx.init(timeout_s=120)
    folder = Path(sys.argv[1])
    groups = [dist.new_group() for _ in range(2)]
    for group in groups:
        dist.all_reduce(torch.ones(4), group=group)
    groups[1].attach()
    groups[1]._gloo.get().allreduce([torch.ones(4)]).wait()  # its address is in the store
    dist.barrier()
    (folder / f"ready-{world.rank}").touch()
    while not (folder / "go-on").exists():
        time.sleep(0.01)
    for group in groups:
        dist.destroy_process_group(group)
    dist.destroy_process_group()
    print("closed")
"""


def test_ranks_whose_store_is_cut_off_close_their_groups_and_end_well(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(dedent(SCRIPT))
    with running_hosts(2, tmp_path) as hosts:
        place = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29563", "PHALANX_KEY": "a key of this test"}
        ranks: list[subprocess.Popen[bytes]] = []
        for rank in range(SIZE):
            host, local = (0, 0) if rank == 0 else (1, rank - 1)
            own = {"RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(host), "WORLD_SIZE": str(SIZE)}
            own |= {"LOCAL_WORLD_SIZE": str(1 + host), "OMP_NUM_THREADS": "1"}
            with open(tmp_path / f"out-{rank}", "wb") as out:
                streams = {"stdout": out, "stderr": subprocess.STDOUT}
                ranks.append(hosts.start(host, [sys.executable, str(script), str(tmp_path)], place | own, **streams))

        def said() -> str:
            return "\n".join((tmp_path / f"out-{rank}").read_text() for rank in range(SIZE))

        try:
            assert soon(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(SIZE)), PATIENCE_S), said()
            hosts.cut(0)
            (tmp_path / "go-on").touch()
            assert [rank.wait(PATIENCE_S) for rank in ranks[1:]] == [0] * (SIZE - 1), said()
            for rank in range(1, SIZE):
                assert (tmp_path / f"out-{rank}").read_text() == "closed\n"
        finally:
            for host in range(2):
                hosts.end_host(host)
            for process in ranks:
                process.wait(PATIENCE_S)
