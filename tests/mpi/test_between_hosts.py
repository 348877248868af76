"""Jobs that mpiexec starts on two hosts: shared memory inside, MPI between them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from tests.mpi.environments import ROOT, SETTINGS, MpiEnvironment
from tests.support.hosts import TestHosts, running_hosts, why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

# Two hosts for ranks, and one for mpiexec alone, which starts its part on the others by what stands in for ssh.
COMPUTE, FRONT = (0, 1), 2

SCRIPT = """
    import os, signal, sys, torch, phalanx
    from phalanx.errors import CollectiveMismatch

    world = phalanx.init(timeout_s=120)
    for count in (1, 1000, 3_000_000):
        x = torch.full((count,), 10.0 ** world.rank)
        world.all_reduce(x)
        assert x.eq(sum(10.0 ** rank for rank in range(world.world_size))).all()
    y = torch.ones(5)
    world.peers_group.all_reduce(y)
    assert y.eq(2).all()
    end = sys.argv[1]
    if end == "killed" and world.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "mismatch":
        try:
            world.all_reduce(torch.ones(world.rank + 1))
        except CollectiveMismatch as error:
            sys.stdout.write(f"rank {world.rank} on {os.uname().nodename}: {str(error).splitlines()[0]}\\n")
    else:
        world.all_reduce(y)
        sys.stdout.write(f"rank {world.rank} on {os.uname().nodename} is done\\n")
    phalanx.close()
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHosts]:
    with running_hosts(3, tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


def run(hosts: TestHosts, mpi: MpiEnvironment, folder: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """Run the script with two ranks on each host: the code of mpiexec, and what was printed."""
    script, shell = folder / "script.py", folder / "shell"
    script.write_text(dedent(SCRIPT))
    cases = "\n".join(f'{hosts.address(host)}) exec {" ".join(hosts.entry(host))} sh -c "$*" ;;' for host in COMPUTE)
    shell.write_text(
        f'#!/bin/sh\nwhile [ "${{1#-}}" != "$1" ]; do shift; done\nhost=$1; shift\ncase $host in\n{cases}\nesac\n'
    )
    shell.chmod(0o755)
    addresses = [hosts.address(host) for host in COMPUTE]
    if mpi.is_openmpi:
        hosts_of_two = ",".join(f"{address}:2" for address in addresses)
        where = ["--host", hosts_of_two, "--map-by", "ppr:2:node:oversubscribe"]
    else:
        where = ["-hosts", ",".join(addresses), "-ppn", "2"]
    own = {
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": str(shell),
        "I_MPI_HYDRA_BOOTSTRAP": "ssh",
        "I_MPI_HYDRA_BOOTSTRAP_EXEC": str(shell),
        "I_MPI_FABRICS": "ofi",
        "PRTE_MCA_plm_ssh_agent": str(shell),
        "FI_PROVIDER": "tcp",
        # MPICH's UCX takes hosts of one machine for one host, whose memory and loopback it could use.
        "UCX_TLS": "tcp",
        "UCX_NET_DEVICES": "eth0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
    }
    command = [mpi.mpiexec, *where, "-n", "4", mpi.python, "-W", "ignore", str(script), *arguments]
    started = subprocess.run(
        [*hosts.network(FRONT), *command],
        env={**os.environ, **SETTINGS, **own, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=300,
        check=False,
    )
    return started.returncode, started.stdout


def test_collectives_go_over_mpi(hosts: TestHosts, mpi: MpiEnvironment, tmp_path: Path) -> None:
    code, out = run(hosts, mpi, tmp_path, "done", PHALANX_ENGINE="mpi")
    assert code == 0, out
    for rank in range(4):
        assert f"rank {rank} on h{rank // 2} is done" in out
    assert "phalanx over shared memory and MPI (as PHALANX_ENGINE says)" in out


def test_a_measurement_knows_mpi(hosts: TestHosts, mpi: MpiEnvironment, tmp_path: Path) -> None:
    code, out = run(hosts, mpi, tmp_path, "done", PHALANX_ENGINE="auto")
    assert code == 0, out
    title = next(line for line in out.splitlines() if "started by" in line)
    assert "measured with 64 B" in title
    assert "MPI " in title
    assert "Gloo " in title


def test_calls_that_differ_are_an_error_on_every_rank(hosts: TestHosts, mpi: MpiEnvironment, tmp_path: Path) -> None:
    _, out = run(hosts, mpi, tmp_path, "mismatch", PHALANX_ENGINE="mpi")
    for rank in range(4):
        assert f"rank {rank} on h{rank // 2}: " in out, out


def test_a_rank_that_is_killed_ends_the_job(hosts: TestHosts, mpi: MpiEnvironment, tmp_path: Path) -> None:
    code, out = run(hosts, mpi, tmp_path, "killed", PHALANX_ENGINE="mpi")
    assert code != 0
    assert "is done" not in out


def sent(hosts: TestHosts, interface: str) -> list[int]:
    """The bytes that each host with ranks has sent over an interface."""
    counters = [Path(f"/proc/{hosts.holder(host)}/net/dev").read_text().splitlines() for host in COMPUTE]
    return [int(line.split()[9]) for lines in counters for line in lines if line.split()[0] == f"{interface}:"]


def test_mpi_keeps_to_the_interface_that_the_user_chose(hosts: TestHosts, mpi: MpiEnvironment, tmp_path: Path) -> None:
    """MPI's messages go over the second network, and what starts the ranks over the first."""
    hosts.add_network("fast0", "10.213.78")
    try:
        before = sent(hosts, "fast0")
        # By libfabric: UCX reads /sys, in which these hosts see this machine's interfaces.
        own = {"MPIR_CVAR_CH4_NETMOD": "ofi", "PHALANX_ENGINE": "mpi", "PHALANX_INTERFACE": "fast0"}
        code, out = run(hosts, mpi, tmp_path, "done", **own)
        assert code == 0, out
        # Each host's half of the result of the largest all_reduce has to reach the other one.
        for now, then in zip(sent(hosts, "fast0"), before, strict=True):
            assert now - then > 3_000_000 * 4 / 2, out
    finally:
        hosts.remove_network("fast0")
