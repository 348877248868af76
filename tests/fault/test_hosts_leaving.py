"""Scripts over several hosts that come to their end without destroying a group, also under Python 3.12 and later.

From 3.12 on no thread can be started when the interpreter ends; where Python starts one, the script forbids it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

SCRIPT = """
    import atexit, os, sys, threading
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore
    from tests.support.islands import pretend_host
    from phalanx.errors import PeerLost

    def forbid():
        def start(thread):
            raise RuntimeError("can't create new thread at interpreter shutdown")
        threading.Thread.start = start

    rank, size, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    pretend_host(rank * 2 // size)
    store = FileStore(file, size)
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=100))
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size] * 4
    if rank == 0:  # nothing was sent before, so no way between the two is open
        try:
            dist.recv(tensor, size - 1)
        except PeerLost as error:
            print("left in order" if "in order" in str(error) else error)
    atexit.register(forbid)
"""


@pytest.mark.parametrize("size", [2, 3])
def test_a_script_that_comes_to_its_end_has_left(size: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(dedent(SCRIPT))
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(size), tmp_path / "store"],
            env={"PYTHONPATH": ":".join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        ends = [(*rank.communicate(timeout=300), rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ends == [("left in order\n", "", 0), *[("", "", 0)] * (size - 1)]
