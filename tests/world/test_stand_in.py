"""Scripts that ask for gloo, unmodified, under ``phalanx run --replace gloo`` and under torchrun with the variable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist
from tests.launch_support import Launcher, launcher
from tests.support.ranks import Member, on_ranks

from phalanx.c10d.process_group import PhalanxProcessGroup
from phalanx.transports.shm.communicator import SharedMemoryCommunicator

__all__ = ["launcher"]

# Asks for groups in the ways that scripts do, and says what it was given.
ASK = """
import json, sys, torch, torch.distributed as dist
name = sys.argv[1]
dist.init_process_group() if name == "default" else dist.init_process_group(name)
size = dist.get_world_size()
second, third = dist.new_group(backend="gloo"), dist.new_group()
sums = []
for group in (None, second, third):
    tensor = torch.full((1000,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor, group=group)
    sums.append(tensor.unique().tolist())
    if dist.get_backend(group) in ("gloo", "phalanx"):
        dist.monitored_barrier(group, wait_all_ranks=True)
own = dist.ProcessGroupGloo(dist.PrefixStore("own", dist.distributed_c10d._get_default_store()), dist.get_rank(), size)
sys.stdout.write(json.dumps(dict(
    sums=sums,
    kinds=[type(group).__name__ for group in (dist.group.WORLD, second, third)],
    names=[dist.get_backend(group) for group in (None, second)],
    own=own.name(),
)) + "\\n")  # at once, so that torchrun does not mix the ranks' lines
dist.barrier()
dist.destroy_process_group()
"""
OURS = "PhalanxProcessGroup"


def check(lines: list[str], size: int, name: str) -> None:
    assert len(lines) == size
    for line in lines:
        told = json.loads(line)
        assert told["sums"] == [[size * (size + 1) / 2]] * 3
        assert told["kinds"] == [OURS] * 3
        assert told["names"] == [name, "phalanx"]
        assert told["own"] == "gloo"  # whoever makes Gloo itself gets Gloo


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("gloo", "phalanx"),
        ("cpu:gloo,cuda:nccl", "cpu:phalanx,cuda:nccl"),
        # torch's default, of which torch itself says no more than this.
        ("default", "undefined"),
    ],
)
def test_whoever_asks_for_gloo_gets_phalanx(launcher: Launcher, asked: str, name: str, size: int) -> None:
    ended = launcher.run("-q", "--no-prefix", "-n", str(size), "--replace", "gloo", launcher.script(ASK), asked)
    assert ended.code == 0, ended.err_text
    check(ended.out_lines, size, name)


def test_without_it_gloo_is_gloo(launcher: Launcher) -> None:
    ended = launcher.run("-q", "--no-prefix", "-n", "2", launcher.script(ASK), "gloo")
    assert ended.code == 0, ended.err_text
    assert [json.loads(line)["kinds"] for line in ended.out_lines] == [["ProcessGroup"] * 3] * 2


def test_a_script_that_asks_for_mpi_runs_without_mpi(launcher: Launcher) -> None:
    ended = launcher.run("-q", "--no-prefix", "-n", "3", "--replace", "mpi,gloo", launcher.script(ASK), "mpi")
    assert ended.code == 0, ended.err_text
    check(ended.out_lines, 3, "phalanx")


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_the_variable_holds_under_torchrun(launcher: Launcher, size: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), launcher.script(ASK), "gloo"],
        env={**os.environ, "PHALANX_REPLACE": "gloo", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check([line for line in done.stdout.splitlines() if line.startswith("{")], size, "phalanx")


def test_a_rank_that_misses_a_monitored_barrier_is_named(launcher: Launcher) -> None:
    script = launcher.script(
        "import torch.distributed as dist\n"
        "from datetime import timedelta\n"
        "dist.init_process_group('gloo')\n"
        "store = dist.distributed_c10d._get_default_store()\n"
        "if dist.get_rank() == 0:\n"
        "    try:\n"
        "        dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=True)\n"
        "    except RuntimeError as error:\n"
        "        print(type(error).__name__, error)\n"
        "    store.set('done', '1')\n"
        "store.get('done')\n"
    )
    ended = launcher.run("-q", "--no-prefix", "-n", "3", "--replace", "gloo", script)
    assert ended.code == 0, ended.err_text
    assert "CollectiveTimeout rank 1 of the group" in ended.out.decode()
    assert "did not come within 1 s" in ended.out.decode()


@pytest.mark.parametrize("size", [2, 3])
def test_a_monitored_barrier_has_its_timeout_for_itself(size: int) -> None:
    def body(place: Member) -> tuple[list[float], float]:
        place.join(timeout_s=60)
        group = dist.group.WORLD
        assert isinstance(group, PhalanxProcessGroup)
        communicator = group._communicator
        assert isinstance(communicator, SharedMemoryCommunicator)
        seen, barrier = [], communicator.barrier

        def watched() -> None:
            seen.append(communicator._timeout_s)
            barrier()

        communicator.barrier = watched  # type: ignore[method-assign]
        group.monitored_barrier(timedelta(seconds=30), wait_all_ranks=True)
        group.monitored_barrier()
        left = communicator._timeout_s
        dist.destroy_process_group()
        return seen, left

    assert on_ranks(body, size) == [([30.0, 60.0], 60.0)] * size
