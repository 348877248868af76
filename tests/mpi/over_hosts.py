"""``phalanx run --mpi mpiexec`` over two test hosts, started beside them, as on a cluster's login node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.mpi.environments import SETTINGS, MpiEnvironment, by_shell
from tests.support.hosts import NET, TestHosts
from tests.support.remote import RemoteLauncher, reachable_hosts

__all__ = ["hosts", "remote"]

# What stands in for ssh gets its options first, and then the host and the words of a command for a shell. As by ssh, no
# descendant of the launcher, which ends its own, runs on a host: what has lost its parent there belongs to the host.
SHELL = """#!/bin/sh
while :; do case $1 in -o|-l|-p) shift 2 ;; -*) shift ;; *) break ;; esac; done
host=$1; shift
{starter} "$host" setsid --fork sh -c "$*" | cat
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHosts]:
    with reachable_hosts(2, tmp_path_factory.mktemp("hosts")) as made:
        for host in range(made.count):
            # An MPI launcher tells its part on a host the name of its own host, and not the address.
            names = {f"h{other}": made.address(other) for other in range(made.count)}
            made.set_names(host, {**names, "login": f"{NET}.254"})
        yield made


@pytest.fixture
def remote(hosts: TestHosts, mpi: MpiEnvironment, tmp_path: Path) -> Iterator[RemoteLauncher]:
    """Starts launches, which must leave nothing behind on the hosts."""
    made = RemoteLauncher(hosts, tmp_path)
    shell = tmp_path / "shell"
    shell.write_text(SHELL.format(starter=made.starter_path))
    shell.chmod(0o755)
    made.python, made.starter = mpi.python, ["--mpi", "mpiexec"]
    made.environment = {**SETTINGS, **by_shell(shell)}
    try:
        yield made
        made.check()
    finally:
        made.clear()
