"""The MPIs that the tests run with: virtual environments, each with an MPI library, mpi4py, torch and Phalanx.

``make mpi`` makes them and names them in PHALANX_MPI_VENVS, a list of directories separated by colons. Without it the
tests that need an MPI are skipped.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.hosts import TestHosts

ROOT = Path(__file__).parents[2]
VARIABLE = "PHALANX_MPI_VENVS"
# Each library reads its own and ignores the rest: more ranks than cores, no binding, root in a container.
SETTINGS = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "I_MPI_PIN": "0",
}


@dataclass(frozen=True)
class MpiEnvironment:
    """One virtual environment."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def mpiexec(self) -> str:
        return str(self.folder / "bin" / "mpiexec")

    @property
    def is_mpich(self) -> bool:
        return (self.folder / "bin" / "mpichversion").exists()

    @property
    def is_openmpi(self) -> bool:
        return (self.folder / "bin" / "ompi_info").exists()


def mpi_parameters() -> list[Any]:
    """A parameter for each environment; one that is skipped, with the reason, if there is none."""
    listed = [Path(folder) for folder in os.environ.get(VARIABLE, "").split(":") if folder]
    if not listed:
        reason = f"no MPI to test with; make mpi sets some up, or name virtual environments in {VARIABLE}"
        return [pytest.param(None, id="no-mpi", marks=pytest.mark.skip(reason=reason))]
    parameters: list[Any] = []
    for folder in listed:
        environment = MpiEnvironment(folder)
        present = os.access(environment.mpiexec, os.X_OK) and os.access(environment.python, os.X_OK)
        marks = () if present else (pytest.mark.skip(reason=f"{folder} has no python and mpiexec"),)
        parameters.append(pytest.param(environment, id=environment.name, marks=marks))
    return parameters


def run(
    mpi: MpiEnvironment, ranks: int | None, *command: str | Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python on so many ranks, or without mpiexec (None)."""
    return _run([] if ranks is None else [mpi.mpiexec, "-n", str(ranks)], mpi, command, variables)


def run_on_two_hosts(
    mpi: MpiEnvironment, ranks: int, hosts: TestHosts, folder: Path, *command: str | Path
) -> subprocess.CompletedProcess[str]:
    """The same on the first two hosts, in equal numbers; mpiexec is on the third, and ``folder`` gets its ssh."""
    start = [*hosts.network(2), mpi.mpiexec, *_on_two_hosts(mpi, ranks, hosts), "-n", str(ranks)]
    return _run(start, mpi, command, _between(hosts, folder))


def _run(
    start: Sequence[str], mpi: MpiEnvironment, command: Sequence[str | Path], variables: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    # Buffered, each rank's words are written at once, and mpiexec does not mix them.
    own = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [*start, mpi.python, "-W", "ignore", *map(str, command)],
        env={**own, **SETTINGS, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=300,
        check=False,
    )


def _on_two_hosts(mpi: MpiEnvironment, ranks: int, hosts: TestHosts) -> list[str]:
    each, addresses = -(-ranks // 2), [hosts.address(host) for host in (0, 1)]
    if mpi.is_openmpi:
        slots = ",".join(f"{address}:{each}" for address in addresses)
        return ["--host", slots, "--map-by", f"ppr:{each}:node:oversubscribe"]
    return ["-hosts", ",".join(addresses), "-ppn", str(each)]


def _between(hosts: TestHosts, folder: Path) -> dict[str, str]:
    """The variables by which mpiexec reaches the hosts."""
    shell = folder / "shell"
    cases = "\n".join(f'{hosts.address(host)}) exec {" ".join(hosts.entry(host))} sh -c "$*" ;;' for host in (0, 1))
    shell.write_text(
        f'#!/bin/sh\nwhile [ "${{1#-}}" != "$1" ]; do shift; done\nhost=$1; shift\ncase $host in\n{cases}\nesac\n'
    )
    shell.chmod(0o755)
    return {**by_shell(shell), "I_MPI_FABRICS": "ofi"}


def by_shell(shell: Path) -> dict[str, str]:
    """The variables by which mpiexec starts its parts on other hosts with this program, and by TCP."""
    return {
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": str(shell),
        "I_MPI_HYDRA_BOOTSTRAP": "ssh",
        "I_MPI_HYDRA_BOOTSTRAP_EXEC": str(shell),
        "PRTE_MCA_plm_ssh_agent": str(shell),
        "FI_PROVIDER": "tcp",
        # MPICH's UCX takes hosts of one machine for one host, whose memory and loopback it could use.
        "UCX_TLS": "tcp",
        "UCX_NET_DEVICES": "eth0",
    }
