"""What is to be started, decided before anything is: pure values, so that a dry run prints the truth."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.errors import LaunchError
from phalanx.launch.hosts import HostSlots, address_towards, fill_hosts, own_address
from phalanx.launch.limits import usable_cores
from phalanx.launch.mpi.launchers import MpiLauncher
from phalanx.launch.target import Target
from phalanx.topology import interfaces
from phalanx.topology import key as keys
from phalanx.topology.table import RankRow

__all__ = ["Plan", "make_plan", "threads_per_rank"]

MASTER_ADDR = "127.0.0.1"


@dataclass(frozen=True)
class Plan:
    """A job, on this host unless an MPI launcher starts it.

    Attributes:
        ranks: how many processes to start.
        target: what each of them runs.
        run_id: a name no other job has; ``PHALANX_RUN_ID`` in the ranks.
        host: this machine's name.
        cores: cores the job may use, all ranks together.
        threads: ``OMP_NUM_THREADS`` of each rank; empty if its cores, which are not known yet, decide.
        grace_s: seconds a rank is given to end after it was asked to.
        quiet: print neither the table nor notices.
        prefix: write ``[rank 3]`` before each line of output.
        mpi: what starts the ranks; None for the built-in launcher.
        hosts: where they run, each with its number of ranks; empty for this host, or where the MPI launcher decides.
        address: where the ranks find the launcher, and the store.
        interface: the network interface that ranks use; empty for the one that routes to the others.
        key: what proves that a process is one of this job's ranks.
    """

    ranks: int
    target: Target
    run_id: str
    host: str
    cores: int
    threads: str
    grace_s: float = 1.0
    quiet: bool = False
    prefix: bool = True
    mpi: MpiLauncher | None = None
    hosts: tuple[HostSlots, ...] = ()
    address: str = MASTER_ADDR
    interface: str = ""
    key: str = field(default="", repr=False)

    def rows(self) -> list[RankRow]:
        """The rank table of this job, as far as it is known before anything has been started."""
        threads = int(self.threads.partition(",")[0]) if self.threads else None
        if self.mpi is not None:
            seats = [
                (node, host.name, local)
                for node, host in enumerate(self.hosts or [HostSlots(self.host, self.ranks)])
                for local in range(host.slots or 0)
            ]
            return [
                RankRow(rank, node, name, local, "cpu", None, None, threads)
                for rank, (node, name, local) in enumerate(seats)
            ]
        return [RankRow(rank, 0, self.host, rank, "cpu", None, self.cores, threads) for rank in range(self.ranks)]

    def environment(self, rank: int, *, port: int, rows: Sequence[RankRow] | None = None) -> dict[str, str]:
        """What is added to the environment of ``rank``: everything torchrun sets, and Phalanx's own.

        Args:
            rank: the process, from 0 to ``ranks - 1``.
            port: where the store listens, or will be opened by rank 0 of a program that is not Python.
            rows: where the ranks are, in their order; by default all on this host.
        """
        world = str(self.ranks)
        local_rank, node_rank, beside, nodes, threads = rank, 0, self.ranks, 1, self.threads
        if rows is not None:
            local_rank, node_rank = rows[rank].local_rank, rows[rank].node_rank
            beside = sum(row.node_rank == node_rank for row in rows)
            nodes = 1 + max(row.node_rank for row in rows)
            threads = self.threads or str(rows[rank].threads or 1)
        # A Python target's streams are set to line buffering directly; its own children are left alone.
        unbuffered = {} if self.target.is_python else {"PYTHONUNBUFFERED": "1"}
        own: dict[str, str] = {}
        if self.interface:
            own[interfaces.VARIABLE] = self.interface
            own["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME") or self.interface
        if self.key:
            own[keys.VARIABLE] = self.key
        return {
            **unbuffered,
            **own,
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": str(beside),
            "GROUP_RANK": str(node_rank),
            "GROUP_WORLD_SIZE": str(nodes),
            "ROLE_RANK": str(rank),
            "ROLE_NAME": "default",
            "ROLE_WORLD_SIZE": world,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": self.run_id,
            # "True": the launcher hosts the store, so every rank is a client and rank 0 may leave first.
            "TORCHELASTIC_USE_AGENT_STORE": str(self.target.is_python or self.mpi is not None),
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            "OMP_NUM_THREADS": threads,
            "PHALANX_RUN_ID": self.run_id,
            # So that phalanx.init() does not print the table a second time.
            "PHALANX_TABLE_SHOWN": "1",
        }

    def warnings(self) -> list[str]:
        """What the user should know before the job runs, one line each."""
        if self.mpi is None and self.ranks > self.cores:
            return [
                f"{self.ranks} ranks share {self.cores} cores; they will take turns, "
                f"and a timing says little about a machine with a core each"
            ]
        return []


def threads_per_rank(ranks: int, cores: int, environment: Mapping[str, str]) -> str:
    """``OMP_NUM_THREADS`` for each rank: the user's own value, or an equal share of the cores, at least 1.

    Raises:
        LaunchError: the user's value is not a number, or a list of numbers, of threads.
    """
    own = environment.get("OMP_NUM_THREADS", "")
    if not own:
        return str(max(1, cores // ranks))
    if not all(part.strip().isdigit() and int(part) > 0 for part in own.split(",")):
        raise LaunchError(f"OMP_NUM_THREADS is {own!r}, which is no number of threads; correct or unset it")
    return own


def make_plan(
    ranks: int | None,
    target: Target,
    *,
    grace_s: float = 1.0,
    quiet: bool = False,
    prefix: bool = True,
    mpi: MpiLauncher | None = None,
    hosts: Sequence[HostSlots] = (),
    ppn: int | None = None,
    address: str | None = None,
    interface: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Plan:
    """Lay out ``ranks`` processes.

    Args:
        ranks: how many; at least 1. None for one, or for as many as the hosts take.
        target: what each runs.
        grace_s: seconds between asking a rank to end and killing it.
        quiet: print neither the table nor notices.
        prefix: write ``[rank 3]`` before each line of output.
        mpi: what starts them; None for the built-in launcher, on this host.
        hosts: where they may run; only with ``mpi``.
        ppn: the most that a host takes.
        address: where ranks on other hosts reach this one; found out by default.
        interface: the network interface that ranks use; by default the one that routes to the others.
        environment: where the user's own settings are read; ``os.environ`` by default.

    Raises:
        LaunchError: the number of ranks or of threads makes no sense, or the hosts do not take them.
    """
    if environment is None:
        environment = os.environ
    if ranks is not None and ranks < 1:
        raise LaunchError(f"-n {ranks}: a job has at least one rank")
    if mpi is None and (hosts or ppn is not None or address is not None):
        raise LaunchError(
            "--hosts, --hostfile, --ppn and --address are for an MPI launcher to carry out; the built-in one starts "
            "ranks on this machine. Add --mpi mpiexec"
        )
    if ppn is not None and (ppn < 1 or not hosts):
        raise LaunchError(f"--ppn {ppn}: is how many ranks each host of --hosts or --hostfile takes, at least 1")
    if interface is not None and mpi is None and interface not in interfaces.interface_addresses():
        raise LaunchError(
            f"--interface {interface}: this host has none of that name; its interfaces are "
            f"{interfaces.describe_interfaces()}"
        )
    filled = tuple(fill_hosts(hosts, ranks, ppn)) if hosts else ()
    count = sum(host.slots or 0 for host in filled) if filled else ranks or 1
    cores = usable_cores()
    threads = threads_per_rank(count, cores, environment)
    if mpi is not None and not environment.get("OMP_NUM_THREADS"):
        threads = ""
    return Plan(
        ranks=count,
        target=target,
        run_id=f"phalanx-{secrets.token_hex(6)}",
        host=socket.gethostname(),
        cores=cores,
        threads=threads,
        grace_s=grace_s,
        quiet=quiet,
        prefix=prefix,
        mpi=mpi,
        hosts=filled,
        address=address or _address(mpi, filled, environment),
        interface=interface or "",
        key=keys.new_key(),
    )


def _address(mpi: MpiLauncher | None, hosts: Sequence[HostSlots], environment: Mapping[str, str]) -> str:
    """Loopback as long as every rank is here, so that nobody else can even connect."""
    if hosts:
        return address_towards(host.name for host in hosts)
    if mpi is not None and mpi.may_leave_this_host(environment):
        return own_address()
    return MASTER_ADDR
