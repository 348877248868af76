"""Ranks that are forked by a process with torch in it: their first operations with gradients may run in two threads.

torch then makes its autograd engine anew, and is not safe against two threads that do so. A library that is loaded
before torch counts how often that happens, and makes it take long.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

SOURCE = Path(__file__).parents[1] / "native/engine_ends.c"

TWO_THREADS = """
    import ctypes, threading
    import torch

    def ends():
        return ctypes.CDLL(None).engine_ends()

    def compute(together):
        values = torch.ones(3, requires_grad=True)
        together.wait()
        (values * 2).exp()

    def in_two_threads():
        together = threading.Barrier(2)
        threads = [threading.Thread(target=compute, args=(together,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
"""
# How often the engine has been made anew, before and after, in ranks of a function, and in processes that a program
# forks itself, which Phalanx sees when they join.
FORKED = """
    import sys
    import torch.multiprocessing
    import torch.distributed as dist
    import phalanx
    from phalanx import rpc

    def counted():
        before = ends()
        in_two_threads()
        return before, ends()

    def of_group(rank):
        dist.init_process_group("phalanx", init_method="file://" + sys.argv[1], rank=rank, world_size=3)
        assert counted() == (1, 1)
        dist.destroy_process_group()

    def of_workers(rank):
        dist.init_process_group("gloo", init_method="file://" + sys.argv[1] + "-rpc", rank=rank, world_size=3)
        rpc.init()
        assert counted() == (1, 1)
        rpc.shutdown()
        dist.destroy_process_group()

    in_two_threads()
    assert phalanx.launch(counted, n=3) == [(1, 1)] * 3
    torch.multiprocessing.start_processes(of_group, nprocs=3, start_method="fork")
    torch.multiprocessing.start_processes(of_workers, nprocs=3, start_method="fork")
"""


@pytest.mark.long
def test_engine_is_made_anew_once_in_every_forked_process(tmp_path: Path) -> None:
    library = tmp_path / "engine_ends.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(library), "-ldl"], check=True)
    path = tmp_path / "program.py"
    path.write_text(dedent(TWO_THREADS) + dedent(FORKED))
    done = subprocess.run(
        [sys.executable, str(path), str(tmp_path / "store")],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
