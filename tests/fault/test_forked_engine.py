"""Ranks that are forked by a process with torch in it: their first operations with gradients may run in two threads.

torch then makes its autograd engine anew, and is not safe against two threads that do so. A library that is loaded
before torch counts how often that happens, and makes it take long.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

NATIVE = Path(__file__).parents[1] / "native"
TIMEOUT_S = 300

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
# How often the engine has been made anew, before and after.
SCRIPT = """
    before = ends()
    in_two_threads()
    assert (before, ends()) == (1, 1), (before, ends())
"""
FUNCTION = """
    import phalanx

    def rank():
        before = ends()
        in_two_threads()
        return before, ends()

    in_two_threads()
    assert phalanx.launch(rank, n=3) == [(1, 1)] * 3
"""
# A program that forks its processes itself: Phalanx sees them when they join.
FORKED = """
    import sys
    import torch.multiprocessing
    import torch.distributed as dist
    from phalanx import rpc

    def rank(rank):
        {join}
        before = ends()
        in_two_threads()
        assert (before, ends()) == (1, 1), (before, ends())
        {leave}
        dist.destroy_process_group()

    in_two_threads()
    torch.multiprocessing.start_processes(rank, nprocs=3, start_method="fork")
"""
JOIN = "dist.init_process_group({!r}, init_method='file://' + sys.argv[1], rank=rank, world_size=3)"


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a program whose engines are counted."""
    library = tmp_path_factory.mktemp("engine") / "engine_ends.so"
    source = NATIVE / "engine_ends.c"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"], check=True)
    return {**os.environ, "LD_PRELOAD": str(library)}


@pytest.fixture
def run(counting: dict[str, str], tmp_path: Path) -> Callable[..., None]:
    """Runs a program, in which two threads may compute, and which must succeed."""

    def run(program: str, *arguments: str) -> None:
        path = tmp_path / "program.py"
        path.write_text(dedent(TWO_THREADS) + dedent(program))
        command = [sys.executable, *arguments, str(path), str(tmp_path / "store")]
        done = subprocess.run(command, env=counting, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


def test_ranks_of_a_script(run: Callable[..., None]) -> None:
    run(SCRIPT, "-m", "phalanx", "run", "-n", "3")


def test_ranks_of_a_function(run: Callable[..., None]) -> None:
    run(FUNCTION)


def test_group_of_forked_processes(run: Callable[..., None]) -> None:
    run(FORKED.format(join=JOIN.format("phalanx"), leave=""))


def test_workers_of_forked_processes(run: Callable[..., None]) -> None:
    run(FORKED.format(join=JOIN.format("gloo") + "; rpc.init()", leave="rpc.shutdown()"))
