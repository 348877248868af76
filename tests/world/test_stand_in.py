"""Scripts that ask for gloo, unmodified, under ``phalanx run --replace gloo`` and under torchrun with the variable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launch_support import Launcher, launcher

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
    if dist.get_backend(group) == "gloo":
        dist.monitored_barrier(group, wait_all_ranks=True)
own = dist.ProcessGroupGloo(dist.PrefixStore("own", dist.distributed_c10d._get_default_store()), dist.get_rank(), size)
sys.stdout.write(json.dumps(dict(
    sums=sums,
    kinds=[type(group).__name__ for group in (dist.group.WORLD, second, third)],
    names=[dist.get_backend(group) for group in (None, second, third)],
    own_names=[group._get_backend_name() for group in (dist.group.WORLD, second)],
    configs=[dist.get_backend_config(group) for group in (None, second)],
    equal=dist.get_backend() is dist.Backend.GLOO,
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
        assert told["names"] == [name, "gloo", name]
        assert told["own_names"] == ["mpi" if name == "mpi" else "gloo", "gloo"]
        assert "phalanx" not in "".join(told["configs"])
        assert told["equal"] == (name == "gloo")
        assert told["own"] == "gloo"  # a program that makes Gloo itself gets Gloo


@pytest.mark.parametrize("size", [3])
@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("gloo", "gloo"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
        # torch's default, of which torch itself says no more than this.
        ("default", "undefined"),
    ],
)
def test_a_script_that_asks_for_gloo_gets_phalanx_and_reads_gloo(
    launcher: Launcher, asked: str, name: str, size: int
) -> None:
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
    check(ended.out_lines, 3, "mpi")


def test_the_variable_holds_under_torchrun(launcher: Launcher) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", launcher.script(ASK), "gloo"],
        env={**os.environ, "PHALANX_REPLACE": "gloo", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check([line for line in done.stdout.splitlines() if line.startswith("{")], 2, "gloo")


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


def test_the_table_and_the_world_say_what_serves_a_replaced_backend(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import phalanx, torch.distributed as dist
        world = phalanx.init(backend="gloo")
        print(world.backend, dist.get_backend())
        """
    )
    ended = launcher.run("--no-prefix", "-n", "2", "--replace", "gloo", script)
    assert ended.code == 0, ended.err_text
    assert ended.out_lines == ["phalanx gloo"] * 2
    assert "phalanx in place of gloo" in ended.err_text.splitlines()[0]


# Decides by the backend's name, as PyTorch-Ignite's auto_model and torch's ShardedTensor do.
BRANCH = """
import torch, torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1, bias=False)
if dist.get_backend() in ("nccl", "gloo", "mpi"):
    model = torch.nn.parallel.DistributedDataParallel(model)
model(torch.full((1, 4), float(dist.get_rank()))).sum().backward()
size = dist.get_world_size()
spec = ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in range(size)])
sharded = sharded_tensor.rand(spec, 2 * size, 3)
print([parameter.grad.tolist() for parameter in model.parameters()], sharded._get_preferred_device(), flush=True)
dist.destroy_process_group()
"""


def test_programs_that_branch_on_the_name_train_one_model(launcher: Launcher, tmp_path: Path) -> None:
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}  # which importing ShardedTensor makes
    script = launcher.script(BRANCH)
    ended = launcher.run("-q", "--no-prefix", "-n", "3", "--replace", "gloo", script, environment=cache)
    assert ended.code == 0, ended.err_text
    assert ended.out_lines == ["[[[1.0, 1.0, 1.0, 1.0]]] cpu"] * 3
