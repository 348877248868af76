"""``phalanx run`` in a Slurm allocation of two nodes: ranks run on both, and no host is named."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from tests.support.hosts import TestHosts, running_hosts, why_no_hosts
from tests.support.slurm import running_slurm, why_no_slurm

WHY_NOT = why_no_hosts() or why_no_slurm()
pytestmark = [pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there is Slurm"), pytest.mark.long]
SCRIPT = """
    import os, socket, sys, torch, phalanx
    world = phalanx.init()
    total = world.all_reduce(torch.tensor([1.0 + world.rank]))
    print(world.rank, world.local_rank, socket.gethostname(), os.getcwd(), sys.argv[1:])
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestHosts, dict[str, str]]]:
    folder = tmp_path_factory.mktemp("slurm")
    with (
        running_hosts(2, tmp_path_factory.mktemp("hosts")) as hosts,
        running_slurm(folder, hosts) as environment,
    ):
        yield hosts, environment


def allotted(
    cluster: tuple[TestHosts, dict[str, str]], folder: Path, allocation: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Call ``phalanx run`` in an allocation of Slurm's, on h0."""
    hosts, environment = cluster
    words = ["env", "-C", str(folder), "salloc", "-Q", *allocation.split(), sys.executable, "-m", "phalanx", "run"]
    process = hosts.start(0, [*words, *arguments], environment, stdin=-3, stdout=-1, stderr=-1)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(words, process.returncode, out.decode(), err.decode())


def test_ranks_run_on_the_nodes_of_the_allocation(cluster: tuple[TestHosts, dict[str, str]], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(dedent(SCRIPT))
    done = allotted(cluster, tmp_path, "-N 2 -n 3", "script.py", "a b")
    assert done.returncode == 0, done
    assert sorted(done.stdout.splitlines()) == [
        f"[rank {where.split()[0]}] {where} {tmp_path} ['a b']" for where in ("0 0 h0", "1 1 h0", "2 0 h1")
    ], done
    assert "note: ranks run on 2 hosts of Slurm's job" in done.stderr


def test_rank_that_fails_ends_the_job_of_an_allocation(
    cluster: tuple[TestHosts, dict[str, str]], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text("import os, time\nif os.environ['RANK'] == '1': os._exit(9)\ntime.sleep(600)\n")
    done = allotted(cluster, tmp_path, "-N 2 -n 2", "--no-preload", "-q", "script.py")
    assert done.returncode == 9, done
    assert done.stderr.startswith("phalanx: rank 1 of 2 failed\n  host h1, pid "), done


def test_signal_of_slurm_to_all_processes_of_the_job_stops_it_in_step(
    cluster: tuple[TestHosts, dict[str, str]], tmp_path: Path
) -> None:
    """To agents and ranks alike, each of which passes it on."""
    (tmp_path / "script.py").write_text(
        "import os, subprocess, time, phalanx\n"
        "world = phalanx.init(quiet=True)\n"
        "calls = 1\n"
        "world.should_stop()\n"
        "world.barrier()\n"
        "if world.rank == 0:\n"
        "    subprocess.run(['scancel', '-s', 'TERM', os.environ['SLURM_JOB_ID']], check=True)\n"
        "while not world.should_stop():\n"
        "    time.sleep(0.001)\n"
        "    calls += 1\n"
        "print(calls, flush=True)\n"
    )
    done = allotted(cluster, tmp_path, "-N 2 -n 3", "-q", "--no-prefix", "script.py")
    assert done.returncode == 0, done
    left = done.stdout.split()
    assert len(left) == 3
    assert len(set(left)) == 1
    assert "phalanx: stopped after step" in done.stderr
    assert "on request (SIGTERM at " in done.stderr
