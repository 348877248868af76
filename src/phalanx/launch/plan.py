"""What is to be started, decided before anything is: pure values, so that a dry run prints the truth."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.errors import LaunchError
from phalanx.launch.limits import usable_cores
from phalanx.launch.target import Target
from phalanx.topology.table import RankRow

__all__ = ["Plan", "make_plan", "threads_per_rank"]

MASTER_ADDR = "127.0.0.1"


@dataclass(frozen=True)
class Plan:
    """A job on this host.

    Attributes:
        ranks: how many processes to start.
        target: what each of them runs.
        run_id: a name no other job has; ``PHALANX_RUN_ID`` in the ranks.
        host: this machine's name.
        cores: cores the job may use, all ranks together.
        threads: ``OMP_NUM_THREADS`` of each rank.
        grace_s: seconds a rank is given to end after it was asked to.
        quiet: print neither the table nor notices.
        prefix: write ``[rank 3]`` before each line of output.
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

    def rows(self) -> list[RankRow]:
        """The rank table of this job."""
        threads = int(self.threads.partition(",")[0])
        return [RankRow(rank, 0, self.host, rank, "cpu", None, self.cores, threads) for rank in range(self.ranks)]

    def environment(self, rank: int, *, port: int) -> dict[str, str]:
        """What is added to the environment of ``rank``: everything torchrun sets, and Phalanx's own.

        Args:
            rank: the process, from 0 to ``ranks - 1``.
            port: where the store listens, or will be opened by rank 0 of a program that is not Python.
        """
        world = str(self.ranks)
        # A Python target's streams are set to line buffering directly; its own children are left alone.
        unbuffered = {} if self.target.is_python else {"PYTHONUNBUFFERED": "1"}
        return {
            **unbuffered,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_RANK": str(rank),
            "ROLE_NAME": "default",
            "ROLE_WORLD_SIZE": world,
            "MASTER_ADDR": MASTER_ADDR,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": self.run_id,
            # "True": the launcher hosts the store, so every rank is a client and rank 0 may leave first.
            "TORCHELASTIC_USE_AGENT_STORE": str(self.target.is_python),
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            "OMP_NUM_THREADS": self.threads,
            "PHALANX_RUN_ID": self.run_id,
            # So that phalanx.init() does not print the table a second time.
            "PHALANX_TABLE_SHOWN": "1",
        }

    def warnings(self) -> list[str]:
        """What the user should know before the job runs, one line each."""
        if self.ranks > self.cores:
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
    ranks: int,
    target: Target,
    *,
    grace_s: float = 1.0,
    quiet: bool = False,
    prefix: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Plan:
    """Lay out ``ranks`` processes on this host.

    Args:
        ranks: how many; at least 1.
        target: what each runs.
        grace_s: seconds between asking a rank to end and killing it.
        quiet: print neither the table nor notices.
        prefix: write ``[rank 3]`` before each line of output.
        environment: where the user's own settings are read; ``os.environ`` by default.

    Raises:
        LaunchError: the number of ranks or of threads makes no sense.
    """
    if ranks < 1:
        raise LaunchError(f"-n {ranks}: a job has at least one rank")
    cores = usable_cores()
    return Plan(
        ranks=ranks,
        target=target,
        run_id=f"phalanx-{secrets.token_hex(6)}",
        host=socket.gethostname(),
        cores=cores,
        threads=threads_per_rank(ranks, cores, os.environ if environment is None else environment),
        grace_s=grace_s,
        quiet=quiet,
        prefix=prefix,
    )
