"""The contract of communicators, on every transport that there is here, at several world sizes.

3 and 5 ranks catch power-of-two mistakes. Chunks of shared memory are set small, so that a few kilobytes go through
many of them. A new transport is one more entry of ``TRANSPORTS``.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.mpi.environments import MpiEnvironment, mpi_parameters, run
from tests.support.connecting import PLACEMENTS, needs_ucx, over_hosts, ucx_engine
from tests.support.contract import CHECKS, run_check
from tests.support.pool import Pool
from tests.support.ranks import Member
from torch._C._distributed_c10d import PrefixStore, Store

from phalanx.transports.contract import Communicator, Message
from phalanx.transports.shm.communicator import SharedMemoryCommunicator
from phalanx.transports.shm.tuning import Tuning
from phalanx.transports.solo import SoloCommunicator

PROGRAMS = Path(__file__).parents[1] / "mpi" / "programs"
TIMEOUT = timedelta(seconds=60)
MOST_BYTES = 600_000
# An operation that a rank gives up stays unanswered, and MPI cannot end: tests/mpi/test_backend.py has a job for it.
NOT_UNDER_MPI = ("a_rank_that_does_not_come_is_named",)


class DefaultsCommunicator(Communicator):
    """The least that a transport can be: the abstract methods of the contract, here by shared memory."""

    compares_calls = False  # a default is compared as what it is made of

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.rank, self.size = inner.rank, inner.size

    def can_reduce(self, dtype: torch.dtype, op: int) -> bool:
        return self._inner.can_reduce(dtype, op)

    def all_reduce(self, tensor: torch.Tensor, op: int) -> None:
        self._inner.all_reduce(tensor, op)

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        self._inner.all_to_all(outputs, inputs)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Message:
        return self._inner.send(tensor, peer, tag)

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Message:
        return self._inner.recv(tensor, peer, tag)

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)

    def end_messages(self) -> None:
        self._inner.end_messages()

    def abort(self, doing: str = "") -> None:
        self._inner.abort()

    def close(self) -> None:
        self._inner.close()


def over_shm(store: Store, rank: int, size: int, chunk_bytes: int) -> Communicator:
    # Outputs lie on both sides of every switch.
    return SharedMemoryCommunicator(store, rank, size, TIMEOUT, Tuning(chunk_bytes, stream_bytes=3000))


def alone(store: Store, rank: int, size: int) -> Communicator:
    return SoloCommunicator()


def by_defaults(store: Store, rank: int, size: int) -> Communicator:
    return DefaultsCommunicator(over_shm(store, rank, size, 4096))


Connect = Callable[[Store, int, int], Communicator]
# How a rank of each transport connects, the world sizes, and the largest tensor: small chunks make large ones slow.
TRANSPORTS: dict[str, tuple[Connect, tuple[int, ...], int]] = {
    "solo": (alone, (1,), MOST_BYTES),
    "shm in chunks of 64 B": (partial(over_shm, chunk_bytes=64), (2, 3, 5), 32_000),
    "shm in chunks of 4 KiB": (partial(over_shm, chunk_bytes=4096), (2, 3, 4, 5, 8), MOST_BYTES),
    "shm in chunks of 256 KiB": (partial(over_shm, chunk_bytes=256 * 1024), (2, 3, 5), MOST_BYTES),
    "defaults": (by_defaults, (2, 3, 5), 100_000),
    "two hosts": (partial(over_hosts, host_of=PLACEMENTS["two hosts"]), (2, 4, 5), 100_000),
    "two hosts, cyclic": (partial(over_hosts, host_of=PLACEMENTS["two hosts, cyclic"]), (3, 4), 100_000),
    "three hosts": (partial(over_hosts, host_of=PLACEMENTS["three hosts"]), (3, 5), 100_000),
}
# Engines between hosts are checked in fewer worlds than Gloo.
BETWEEN_HOSTS = {"two hosts": (2, 4), "two hosts, cyclic": (4,), "three hosts": (3, 5)}
for _name, _sizes in BETWEEN_HOSTS.items():
    _over_ucx = partial(over_hosts, host_of=PLACEMENTS[_name], engine=ucx_engine)
    TRANSPORTS[f"{_name} over UCX"] = _over_ucx, _sizes, 100_000
MPI_SIZES = (2, 3, 5)

Outcome = tuple[str, list[str]]


@dataclass
class PooledRanks:
    """Forked ranks that connect anew for each check."""

    pool: Pool
    transport: str
    turn: int = 0

    def run(self, name: str) -> list[Outcome]:
        self.turn += 1
        return self.pool.do(one_check, self.transport, self.turn, name)


def one_check(place: Member, transport: str, turn: int, name: str) -> Outcome:
    connect, _, most_bytes = TRANSPORTS[transport]
    communicator = connect(PrefixStore(str(turn), place.store()), place.rank, place.size)
    return run_check(name, communicator, most_bytes)


@dataclass
class MpiRanks:
    """Ranks of one mpiexec, which make all checks; each test then reads its own.

    With a placement, they are as if on several hosts with MPI between them; else MPI is the whole transport.
    """

    mpi: MpiEnvironment
    size: int
    placement: str = ""
    folder: Path = Path()

    @cached_property
    def _done(self) -> subprocess.CompletedProcess[str]:
        names = [name for name in CHECKS if name not in NOT_UNDER_MPI]
        if self.placement:
            return run(self.mpi, self.size, PROGRAMS / "between_hosts.py", self.folder, self.placement, *names)
        return run(self.mpi, self.size, PROGRAMS / "contract.py", *names)

    def run(self, name: str) -> list[Outcome]:
        if name in NOT_UNDER_MPI:
            return [("tests/mpi/test_backend.py has it", [])] * self.size
        lines = [line.split("|") for line in self._done.stdout.splitlines() if line.startswith(f"{name}|")]
        assert len(lines) == self.size, self._done.stdout + self._done.stderr
        return [(skipped, [wrong] if wrong else []) for _, skipped, wrong in lines]


def groups() -> Iterator[Any]:
    for transport, (_, sizes, _) in TRANSPORTS.items():
        for size in sizes:
            marks = needs_ucx if "UCX" in transport else ()
            yield pytest.param((transport, size, ""), id=f"{transport}, {size}", marks=marks)
    for environment in mpi_parameters():
        for size in MPI_SIZES:
            yield pytest.param(
                (environment.values[0], size, ""), id=f"{environment.id}, {size}", marks=environment.marks
            )
        for placement, sizes in BETWEEN_HOSTS.items():
            for size in sizes:
                yield pytest.param(
                    (environment.values[0], size, placement),
                    id=f"{placement} over {environment.id}, {size}",
                    marks=environment.marks,
                )


@pytest.fixture(scope="module", params=groups())
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PooledRanks | MpiRanks]:
    """The ranks of one group, as long as its checks last."""
    transport, size, placement = request.param
    if isinstance(transport, MpiEnvironment):
        yield MpiRanks(transport, size, placement, tmp_path_factory.mktemp("store"))
        return
    assert isinstance(transport, str)
    with Pool(size, lambda place: place) as pool:
        pool.do(nothing)  # now, and not in a test: what a test starts may not outlive it
        yield PooledRanks(pool, transport)


def nothing(place: Member) -> None:
    """The first job, for which the ranks are forked."""


@pytest.mark.parametrize("name", CHECKS)
def test_every_transport_keeps_the_contract(ranks: PooledRanks | MpiRanks, name: str) -> None:
    outcomes = ranks.run(name)
    assert [wrong for _, wrong in outcomes] == [[]] * len(outcomes)
    skipped = {reason for reason, _ in outcomes if reason}
    if skipped:
        pytest.skip(", ".join(skipped))
