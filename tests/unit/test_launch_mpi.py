"""What `--mpi` needs no MPI for: recognising launchers, their flags, the table, what is removed."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.errors import LaunchError
from phalanx.launch.job.hosts import HostSlots
from phalanx.launch.job.job import Job, make_job
from phalanx.launch.job.mpi_launcher import (
    Abort,
    MpiLauncher,
    carried_environment,
    find_abort,
    find_mpi_launcher,
    place_of,
    unbound_environment,
)
from phalanx.launch.job.options import LaunchOptions
from phalanx.launch.job.target import Target
from phalanx.launch.protocol import Here
from phalanx.launch.starters import start_agent
from phalanx.launch.starters.mpi import place_ranks

HYDRA = "HYDRA build details:\\n    Version:                                 4.3.1\\n"
TARGET = Target("program", "true", "/bin/true", ("true",))
HOSTS = [HostSlots("b", 1), HostSlots("a", 2)]


def program(folder: Path, said: str, name: str = "mpiexec") -> str:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\nprintf '{said}\\n'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("said", "kind", "title"),
    [
        (HYDRA, "mpich", "Hydra (MPICH) 4.3.1"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.14 Build 1", "intel", "Intel MPI 2021.14"),
        ("mpiexec (Open MPI) 5.0.11", "openmpi", "Open MPI 5.0.11"),
        ("slurm-wlm 23.02.5", "slurm", "slurm-wlm 23.02.5"),
    ],
)
def test_launchers_are_recognised_by_what_they_say(tmp_path: Path, said: str, kind: str, title: str) -> None:
    path = program(tmp_path, said, "anything")
    found = find_mpi_launcher(f"{path} -iface 'ib 0'")
    assert (found.kind, found.title, found.path, found.options) == (kind, title, path, ("-iface", "ib 0"))


def test_others_are_refused_with_what_to_do(tmp_path: Path) -> None:
    for said in ("mpiexec (Open MPI) 3.1.6", "OSC mpiexec 0.84"):
        with pytest.raises(LaunchError, match=r"not a launcher that Phalanx knows.*Supported are.*-n 4 python"):
            find_mpi_launcher(program(tmp_path, said))
    for command, words in (("no-such-mpiexec", "pip install mpich"), ("", "needs the name"), ("'mpiexec", "quotation")):
        with pytest.raises(LaunchError, match=words):
            find_mpi_launcher(command)


def test_program_beside_this_python_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside, other = program(tmp_path / "venv", HYDRA), program(tmp_path / "other", HYDRA)
    monkeypatch.setenv("PATH", f"{tmp_path}/other:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/venv/python")
    assert find_mpi_launcher("mpiexec").path == beside
    os.unlink(beside)
    assert find_mpi_launcher("mpiexec").path == other


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("mpich", "-hosts b:1,a:2 -n 3 rank"),
        ("intel", "-machinefile FILE -n 3 rank"),
        ("openmpi", "-x PHALANX_MPI_JOIN --host b:1,a:2 --map-by slot:OVERSUBSCRIBE -n 3 rank"),
    ],
)
def test_hosts_become_flags(kind: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        monkeypatch.delenv(name, raising=False)
    made = MpiLauncher(kind, kind, "/bin/mpiexec", ("-own",)).command(3, HOSTS, ["rank"], "FILE")
    assert " ".join(made) == f"/bin/mpiexec -own {expected}"


def test_srun_places_equally_many_on_each_and_open_mpi_runs_as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    srun = MpiLauncher("slurm", "slurm", "/bin/srun")
    made = srun.command(3, [HostSlots("a", 2), HostSlots("b", 1)], ["rank"])
    assert made[-6:] == ["--nodes=2", "--ntasks-per-node=2", "--distribution=block", "-n", "3", "rank"]
    with pytest.raises(LaunchError, match="equally many"):
        srun.command(3, HOSTS, ["rank"])
    openmpi = MpiLauncher("openmpi", "Open MPI", "/bin/mpiexec")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert openmpi.environment()["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in openmpi.environment()
    unbound = unbound_environment()  # no launcher binds or refuses ranks of a measurement
    assert (unbound["I_MPI_PIN"], unbound["PRTE_MCA_hwloc_default_binding_policy"]) == ("0", "none")


def test_place_of_a_process_and_the_environment_that_is_the_users() -> None:
    own = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2", "OMPI_COMM_WORLD_RANK": "7"}
    assert place_of("mpich", own) == (2, 4)
    assert place_of("slurm", {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}) == (1, 2)
    with pytest.raises(LaunchError, match="did not set OMPI_COMM_WORLD_SIZE"):
        place_of("openmpi", own)
    user = {"A": "1", "PATH": "/mine", "HOSTNAME": "h0", "PMI_RANK": "9", "OMPI_MCA_btl": "self", "SAME": "x"}
    here = {"PATH": "/usr/bin", "HOSTNAME": "h1", "PMI_RANK": "0", "SAME": "x", "PMI_FD": "7"}
    assert carried_environment(user, here) == {"A": "1", "PATH": "/mine", "OMPI_MCA_btl": "self"}


def test_rank_that_called_mpi_abort_is_known_by_what_it_printed() -> None:
    line = "Abort(5) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 5)"
    said = f"some warning\n{line}\n".encode()
    assert find_abort("mpich", said) == Abort(line, 5, by_mpi=False)
    assert find_abort("intel", b"Abort(0)\n") == Abort("Abort(0)", 1, by_mpi=False)  # it did not end well
    error = "Abort(745090447) on node 0 (rank 0 in comm 496): Fatal error in internal_Allreduce_c: Other MPI error"
    assert find_abort("mpich", f"{error}\nMPIC_Wait(99): \n".encode()) == Abort(error, 745090447 & 0xFF, by_mpi=True)
    assert find_abort("slurm", b"I said Abort(5)\n") is None
    assert find_abort("openmpi", said) is None


def test_shim_finds_the_package_by_its_own_path(tmp_path: Path) -> None:
    """Without the site module nothing else leads to it. The working directory has modules of the same names."""
    for name in ("phalanx.py", "signal.py"):
        (tmp_path / name).write_text("raise ImportError('from the working directory')")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PHALANX_MPI_JOIN")}
    command = [sys.executable, "-S", start_agent.__file__, "mpi", "mpich"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "phalanx: this program is for `phalanx run --mpi` to start; start your script with that\n"


def job(ranks: int, **changes: object) -> Job:
    made = make_job(LaunchOptions(ranks=ranks, mpi=MpiLauncher("mpich", "Hydra", "/bin/mpiexec")), TARGET, {})
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def said(host: str, cpus: list[int]) -> Here:
    return Here(agent=0, pid=1, machine="same", name=host, cpus=[tuple(cpus)])


def test_hosts_are_numbered_by_their_first_rank_and_cores_are_shared() -> None:
    here = [said("b", [0, 1, 2, 3]), said("a", [0, 1]), said("b", [0, 1, 2, 3]), said("a", [2, 3])]
    rows = place_ranks(job(4), here)
    places = [(row.node_rank, row.host, row.local_rank) for row in rows]
    assert places == [(0, "b", 0), (1, "a", 0), (0, "b", 1), (1, "a", 1)]
    assert [(row.cores, row.threads) for row in rows] == [(4, 2), (2, 2), (4, 2), (2, 2)]
    assert [row.threads for row in place_ranks(job(4, threads="3,1"), here)] == [3, 3, 3, 3]
    own = job(4).environment(2, port=5, rows=rows)
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "OMP_NUM_THREADS")
    assert [own[name] for name in names] == ["1", "2", "0", "2", "2"]
