"""The backend ``mpi``: ranks started by each MPI's own mpiexec, and by nobody."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.mpi.conftest import LIBRARIES_NAMES
from tests.mpi.environments import MpiEnvironment, run
from tests.mpi.programs import checks
from tests.support.ranks import Member, on_ranks
from tests.support.worlds import Ranks, in_worlds
from tests.world.random_programs import GROUPS, Perturbed, Program, Run, complaints, drawn, perturbed, programs

from phalanx.c10d.mpi_slot import fill_mpi_slot
from phalanx.errors import CollectiveMismatch

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("programs")
CHECKS = [name for name in vars(checks) if name.startswith("check_")]
# With one rank there is nobody to send to, or to miss.
ALONE = [name for name in CHECKS if not re.match("check_(messages|groups|a_missing)", name)]
# From a rank's failure to the end of mpiexec. It is to be a second; a job that waited for the thread would take a
# minute, one that waited for the other ranks half an hour.
END_S = 20.0


def ran(done: subprocess.CompletedProcess[str], *, code: int = 0) -> str:
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@in_worlds(backend="mpi")
def test_random_programs_leave_what_the_oracle_says(world: Ranks) -> None:
    """With whole numbers: MPI adds in an order of its own."""
    examples: list[Program] = []
    drawn(programs(3, exact=True), 50, examples.append)

    def body(member: Member) -> list[str]:
        groups: list[dist.ProcessGroup | None] = [dist.group.WORLD]
        for group in GROUPS[3][1:]:
            made = dist.new_group(list(group.members))
            groups.append(made if member.rank in group.members else None)
        return [wrong for program in examples for wrong in Run(member.rank, groups, program).wrong]

    assert world.run(body) == [[]] * 3


@in_worlds(backend="mpi")
def test_a_rank_that_calls_something_else_is_told_to_its_group(world: Ranks) -> None:
    """With whole numbers, as above."""
    examples: list[Perturbed] = []
    drawn(perturbed(3, exact=True), 25, examples.append)

    def body(member: Member) -> list[str]:
        found = []
        for example in examples:
            # Groups of their own for each: one whose ranks were out of step stays broken, the world does not.
            made = [dist.new_group(list(group.members)) for group in GROUPS[3]]
            inside = zip(made, GROUPS[3], strict=True)
            groups = [own if member.rank in group.members else None for own, group in inside]
            found += complaints(member.rank, groups, example)
            dist.barrier()
            for own in groups:
                if own is not None:
                    dist.destroy_process_group(own)
        return found

    assert world.run(body) == [[]] * 3


@in_worlds(backend="mpi")
def test_a_mismatch_names_both_calls_and_their_lines(world: Ranks) -> None:
    def body(member: Member) -> tuple[str, dict[int, str]]:
        with pytest.raises(CollectiveMismatch) as caught:
            if member.rank == 1:
                dist.broadcast(torch.ones(2, 3), src=1)
            else:
                dist.all_reduce(torch.ones(4))
        return str(caught.value), caught.value.calls

    for text, calls in world.run(body, leaves=False):
        assert re.search(r"rank 1: broadcast\(float32\[2, 3\], src=1\) at \S*test_backend\.py:\d+", text)
        assert re.search(r"ranks 0, 2: all_reduce\(float32\[4\], sum\) at \S*test_backend\.py:\d+", text)
        assert all(call in text for call in calls.values())
        assert [calls[rank].partition("(")[0] for rank in range(3)] == ["all_reduce", "broadcast", "all_reduce"]


def test_the_check_can_be_switched_off(mpi: MpiEnvironment, tmp_path: Path) -> None:
    """Rank 0's setting holds for all."""
    script = tmp_path / "off.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "rank = os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK'))\n"
        "os.environ['PHALANX_MPI_CHECK'] = '0' if rank == '0' else '1'\n"
        "dist.init_process_group('mpi')\n"
        "dist.all_reduce(tensor := torch.ones((2, 3) if dist.get_rank() else (3, 2)))\n"
        "dist.barrier()\n"
        "print(tensor.sum().item())\n"
        "dist.destroy_process_group()\n"
    )
    assert ran(run(mpi, 2, script)).split() == ["12.0", "12.0"]


@pytest.mark.parametrize("size", [None, 3])
def test_what_users_rely_on(mpi: MpiEnvironment, size: int | None) -> None:
    names = ALONE if size is None else [name for name in CHECKS if name != "check_a_missing_rank_is_named"]
    out = ran(run(mpi, size, PROGRAMS / "checks.py", *names))
    assert [line.split()[0] for line in out.splitlines()] == [*names, "done"]


def test_a_rank_that_does_not_come_is_named(mpi: MpiEnvironment) -> None:
    """And the job cannot end as if nothing had happened: an operation is still unanswered."""
    done = run(mpi, 3, PROGRAMS / "checks.py", "check_a_missing_rank_is_named")
    assert "check_a_missing_rank_is_named" in ran(done, code=1)
    assert "MPI cannot end in order" in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("raise with a thread", 1, "ValueError: rank one broke"),
        ("raise and clean up", 1, "ValueError: rank one broke"),
        ("exit 3", 3, ""),
        ("exit 0", 1, ") has left the group (the end of its program)"),
        ("destroy", 1, ") has left the group (destroy_process_group() at"),
    ],
)
def test_a_rank_that_leaves_ends_the_job(mpi: MpiEnvironment, how: str, code: int, said: str) -> None:
    done = run(mpi, 3, PROGRAMS / "ends.py", how)
    ended = time.time()
    out = ran(done, code=code) + done.stderr
    at = re.search(r"at (\d+\.\d+)", out)
    assert at is not None
    assert ended - float(at[1]) < END_S
    assert said in out
    if how.startswith("raise"):
        assert out.count("Traceback") == 1, out
    listed = " ".join(re.findall(r"mapped (.*)", out)).split()
    mapped = {name for name in listed if LIBRARIES_NAMES.match(name)}
    assert mapped  # the libraries share memory in a host
    if how == "exit 3":
        ran(run(mpi, None, PROGRAMS / "checks.py", ALONE[0]))  # the next to start MPI removes it
        assert not [name for name in mapped if Path("/dev/shm", name).exists()]


def test_a_script_that_has_started_mpi_keeps_it(mpi: MpiEnvironment, tmp_path: Path) -> None:
    """It may make and destroy the world several times, and ends MPI itself."""
    script = tmp_path / "own.py"
    script.write_text(
        "from mpi4py import MPI\n"
        "import torch, torch.distributed as dist\n"
        "for turn in range(3):\n"
        "    dist.init_process_group('mpi')\n"
        "    group = dist.new_group([0, 1])\n"
        "    tensor = torch.ones(2)\n"
        "    dist.all_reduce(tensor, group=group)\n"
        "    assert tensor.tolist() == [2, 2]\n"
        "    dist.destroy_process_group()\n"
        "assert not MPI.Is_finalized()\n"
        "print(MPI.COMM_WORLD.allreduce(1))\n"
    )
    assert ran(run(mpi, 2, script)).split() == ["2", "2"]


def test_mpi_starts_with_the_group_and_ends_with_it(mpi: MpiEnvironment, tmp_path: Path) -> None:
    script = tmp_path / "life.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "assert dist.is_mpi_available()\n"
        "assert not any(name.startswith('mpi4py') for name in sys.modules)\n"
        "dist.init_process_group('mpi')\n"
        "from mpi4py import MPI\n"
        "assert MPI.Is_initialized() and not MPI.Is_finalized()\n"
        "assert MPI.Query_thread() == MPI.THREAD_MULTIPLE\n"
        "dist.destroy_process_group()\n"
        "assert MPI.Is_finalized()\n"
        "try:\n"
        "    dist.init_process_group('mpi')\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    out = ran(run(mpi, 2, script))
    assert out.count("cannot be started twice in a process") == 2
    assert out.count("from mpi4py import MPI") == 2


def test_mpi_ends_in_silence_where_its_messages_go_over_a_network(mpi: MpiEnvironment, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"localhost\n{socket.gethostname()}\n")  # two for Hydra, with a rank each
    script = tmp_path / "silent.py"
    script.write_text(
        "import torch.distributed as d; d.init_process_group('mpi'); d.barrier(); d.destroy_process_group()"
    )
    done = run(mpi, 2, script, HYDRA_HOST_FILE=str(tmp_path / "hosts"))
    assert ran(done) == done.stderr == ""


def test_too_few_threads_are_refused(mpi: MpiEnvironment) -> None:
    script = (
        "import mpi4py; mpi4py.rc.thread_level = 'funneled'\n"
        "from mpi4py import MPI\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('mpi')\n"
    )
    done = run(mpi, None, "-c", script)
    assert "needs MPI_THREAD_MULTIPLE, and this MPI gives MPI_THREAD_FUNNELED" in ran(done, code=1) + done.stderr


def test_an_mpiexec_of_another_library_is_noticed(mpi: MpiEnvironment) -> None:
    told = {"PMI_SIZE": "4"} if mpi.is_openmpi else {"OMPI_COMM_WORLD_SIZE": "4"}
    done = run(mpi, None, "-c", "import torch.distributed as dist; dist.init_process_group('mpi')", **told)
    assert "mpiexec started 4 ranks" in ran(done, code=1) + done.stderr


# -- without any MPI -----------------------------------------------------------------------------------


def python(script: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    own = {**os.environ, "PYTHONPATH": ":".join(map(str, (*paths, ROOT / "src")))}
    return subprocess.run([sys.executable, "-c", script], env=own, capture_output=True, text=True, timeout=600)


ASK = (
    "import torch.distributed as dist\n"
    "print(dist.is_mpi_available())\n"
    "try:\n"
    "    dist.init_process_group('mpi')\n"
    "except RuntimeError as error:\n"
    "    print(error)\n"
)


def test_without_mpi4py_torch_imports_silently_and_says_what_to_install() -> None:
    done = python("import sys; sys.modules['mpi4py'] = None\n" + ASK)
    available, message = done.stdout.splitlines()
    assert available == "False"
    assert "pip install mpi4py" in message
    assert done.stderr == ""


def test_without_a_library_torch_imports_silently_and_says_what_to_install(tmp_path: Path) -> None:
    """mpi4py raises a RuntimeError then, and not an ImportError."""
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("import types\nrc = types.SimpleNamespace(initialize=True, finalize=None)\n")
    (package / "MPI.py").write_text("raise RuntimeError('cannot load MPI library\\nlibmpi.so.12: not found')\n")
    done = python(ASK, tmp_path)
    available, message = done.stdout.splitlines()
    assert available == "True"
    assert "cannot load MPI library" in message
    assert "pip install mpich" in message
    assert done.stderr == ""


def test_a_torch_with_its_own_mpi_is_left_alone() -> None:
    def body(member: Member) -> bool:
        c10d: Any = dist.distributed_c10d
        own = c10d.ProcessGroupMPI = type("Own", (), {})
        c10d._MPI_AVAILABLE = True
        fill_mpi_slot()
        return c10d.ProcessGroupMPI is own

    assert on_ranks(body, 1) == [True]
