"""Scripts that ask for gloo, unmodified, under ``phalanx run --replace gloo`` and under torchrun with the variable."""

from __future__ import annotations

import json
import os
import subprocess
import sys

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
"""
# Then a rank misses a monitored barrier.
MISSED = """
from datetime import timedelta
store = dist.distributed_c10d._get_default_store()
if dist.get_rank() == 0:
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=0.5), wait_all_ranks=True)
    except RuntimeError as error:
        print(type(error).__name__, error)
    store.set('done', '1')
store.get('done')
dist.destroy_process_group()
import phalanx
world = phalanx.init(backend="gloo")
print(world.backend, dist.get_backend())
"""
OURS = "PhalanxProcessGroup"


def check(lines: list[str], size: int, name: str) -> None:
    answers = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(answers) == size
    for told in answers:
        assert told["sums"] == [[size * (size + 1) / 2]] * 3
        assert told["kinds"] == [OURS] * 3
        assert told["names"] == [name, "gloo", name]
        assert told["own_names"] == ["mpi" if name == "mpi" else "gloo", "gloo"]
        assert "phalanx" not in "".join(told["configs"])
        assert told["equal"] == (name == "gloo")
        assert told["own"] == "gloo"  # a program that makes Gloo itself gets Gloo


def test_script_that_asks_for_gloo_gets_phalanx_and_reads_gloo(launcher: Launcher) -> None:
    """The table and the world say what serves it; a rank that misses a monitored barrier is named."""
    ended = launcher.run("--no-prefix", "-n", "3", "--replace", "gloo", launcher.script(ASK + MISSED), "gloo")
    assert ended.code == 0, ended.err_text
    assert "phalanx in place of gloo" in ended.err_text.splitlines()[0]
    check(ended.out_lines, 3, "gloo")
    said = ended.out.decode()
    assert "CollectiveTimeout rank 1 of the group" in said
    assert "did not come within 0.5 s" in said
    assert ended.out_lines.count("phalanx gloo") == 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("asked", "name", "replaced"),
    [
        ("mpi", "mpi", "mpi,gloo"),
        ("default", "undefined", "gloo"),  # torch's default, of which torch itself says no more than this
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl", "gloo"),
        ("gloo", "gloo", ""),
    ],
)
def test_other_names_of_backends_are_replaced_alike(launcher: Launcher, asked: str, name: str, replaced: str) -> None:
    options = ["--replace", replaced] if replaced else []
    ended = launcher.run("-q", "--no-prefix", "-n", "2", *options, launcher.script(ASK), asked)
    assert ended.code == 0, ended.err_text
    if replaced:
        check(ended.out_lines, 2, name)
    else:
        assert [json.loads(line)["kinds"] for line in ended.out_lines] == [["ProcessGroup"] * 3] * 2


@pytest.mark.long
def test_variable_holds_under_torchrun(launcher: Launcher) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", launcher.script(ASK), "gloo"]
    variables = {**os.environ, "PHALANX_REPLACE": "gloo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    check(done.stdout.splitlines(), 2, "gloo")
