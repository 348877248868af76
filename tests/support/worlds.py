"""Worlds in which a test runs: a backend, a place (one host or two), and so many ranks.

``every_rank`` makes a test of what each rank of such a world does; one that compares what the ranks return takes the
fixture ``world``, with the worlds of ``in_worlds``, and calls ``world.run``. The hosts are made once for each process
of pytest; where none can be made, the ranks take themselves for ranks of two.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.c10d.register import replace_as_asked
from phalanx.group import Session
from phalanx.settings import REPLACE
from phalanx.topology.place import Place
from phalanx.topology.topology import Node, Topology
from tests.mpi.environments import MpiEnvironment, mpi_parameters, run, run_on_two_hosts
from tests.support.hosts import TestHosts, running_hosts, why_no_hosts
from tests.support.islands import pretend_host
from tests.support.ranks import TIMEOUT_S, Member, Outcome, outcome_of, run_rank, run_ranks, values

# The host of each rank, given the world's size.
PLACES: dict[str, Callable[[int, int], int]] = {
    "one host": lambda rank, size: 0,
    "two hosts": lambda rank, size: rank * 2 // size,
    "two hosts, in turn": lambda rank, size: rank % 2,
}
BETWEEN = ("two hosts", "two hosts, in turn")
ANYWHERE = ("one host", *BETWEEN)

# What a test of all backends asks of one. "replaced" is Phalanx for a program that has asked for gloo.
_PHALANX = frozenset({"rank order", "compared calls", "any source", "messages fail alone"})
PROMISES: dict[str, frozenset[str]] = {
    "phalanx": _PHALANX,
    "replaced": _PHALANX,
    "gloo": frozenset({"any source"}),
    "mpi": frozenset({"compared calls", "any source"}),
}

Body = Callable[[Member], Any]
Names = str | Sequence[str]


@dataclass(frozen=True)
class Ranks:
    """A world that is not there before something is run in it."""

    backend: str
    place: str
    size: int
    hosts: TestHosts | None = None
    mpi: MpiEnvironment | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Ranks, (self.backend, self.place, self.size)  # as the ranks of mpiexec get it

    def run(self, body: Body, **how: Any) -> list[Any]:
        """What ``body`` returned on each rank; the test fails with the first rank's traceback if it raised."""
        return values(self.outcomes(body, **how))

    def outcomes(
        self, body: Body, *, joins: bool = True, leaves: bool = True, timeout_s: float = TIMEOUT_S
    ) -> list[Outcome]:
        """How ``body`` ended on each rank, which ``joins`` the group before, and ``leaves`` it unless it is broken."""
        pretends = self.place != "one host" and self.hosts is None

        def whole(member: Member) -> Any:
            member = replace(member, promises=PROMISES[self.backend])
            if pretends:
                pretend_host(self.host_of(member.rank))
            if self.backend == "replaced":
                os.environ[REPLACE] = "gloo"
                replace_as_asked()
            if joins:
                member.join("gloo" if self.backend == "replaced" else self.backend)
            value = body(member)
            if leaves and dist.is_initialized():
                dist.barrier()
                dist.destroy_process_group()
            return value

        if self.mpi is not None:
            return self._over_mpi(whole)
        inside = [self.hosts.inside[self.host_of(rank)] for rank in range(self.size)] if self.hosts else ()
        return run_ranks(whole, self.size, timeout_s, inside)

    def host_of(self, rank: int) -> int:
        return PLACES[self.place](rank, self.size)

    def _over_mpi(self, body: Body) -> list[Outcome]:
        assert self.mpi is not None
        with tempfile.TemporaryDirectory(prefix="phalanx-test-") as name:
            folder, command = Path(name), ["-m", "tests.support.worlds", name, str(self.size)]
            (folder / "body").write_bytes(cloudpickle.dumps(body))
            if self.hosts is None:
                ended = run(self.mpi, self.size, *command)
            else:
                ended = run_on_two_hosts(self.mpi, self.size, self.hosts, folder, *command)
            found = [outcome_of(rank, 0, folder) for rank in range(self.size)]
            assert ended.returncode == 0 or any(one.traceback for one in found), ended.stdout + ended.stderr
            return found


def _each(value: Any) -> Sequence[Any]:
    return [value] if isinstance(value, (str, int)) else value


def in_worlds(
    size: int | Sequence[int] = 3, place: Names = "one host", backend: Names = "phalanx"
) -> pytest.MarkDecorator:
    """The worlds of a test that takes ``world``."""
    found = []
    for name, here, count in itertools.product(_each(backend), _each(place), _each(size)):
        if name != "mpi":
            found.append(pytest.param((name, here, count, None), id=f"{name}, {here}, {count}"))
        elif here != "two hosts, in turn":  # mpiexec fills hosts
            for mpi in mpi_parameters():
                what = (name, here, count, mpi.values[0])
                found.append(pytest.param(what, id=f"{mpi.id}, {here}, {count}", marks=mpi.marks))
    return pytest.mark.parametrize("world", found, indirect=True)


def every_rank(
    size: int | Sequence[int] = 3, place: Names = "one host", backend: Names = "phalanx", **how: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """A test that every rank of such worlds runs, and that succeeds on all of them. Other arguments are the test's.

    ``how`` are those of ``Ranks.outcomes``.
    """

    def decorated(test: Callable[..., Any]) -> Callable[..., None]:
        def in_world(world: Ranks, **arguments: Any) -> None:
            world.run(lambda member: test(member, **arguments), **how)

        first, *others = inspect.signature(test).parameters.values()
        own = first.replace(name="world", annotation=Ranks)
        in_world.__signature__ = inspect.Signature([own, *others])  # type: ignore[attr-defined]
        in_world.__name__, in_world.__doc__, in_world.__module__ = test.__name__, test.__doc__, test.__module__
        in_world.pytestmark = list(getattr(test, "pytestmark", []))  # type: ignore[attr-defined]
        return in_worlds(size, place, backend)(in_world)  # type: ignore[no-any-return]

    return decorated


@pytest.fixture(scope="session")
def workers_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHosts | None]:
    """Three hosts, as long as this process of pytest lives; None where none can be made."""
    if why_no_hosts():
        yield None
        return
    with running_hosts(3, tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


@pytest.fixture
def world(request: pytest.FixtureRequest, workers_hosts: TestHosts | None) -> Ranks:
    """The world of ``in_worlds`` in which the test runs now."""
    backend, place, size, mpi = request.param
    return Ranks(backend, place, size, None if place == "one host" else workers_hosts, mpi)


def join_world(member: Member, backend: str = "phalanx", hosts: int = 1) -> phalanx.World:
    """What ``phalanx.init()`` returns, without a launcher, to ranks that count as ranks of so many hosts, in a row."""
    if not dist.is_initialized():
        member.join(backend)
    local = member.size // hosts
    place = Place("phalanx", member.rank, member.size, member.rank % local, local)
    nodes = tuple(Node(node, f"h{node}", tuple(range(node * local, (node + 1) * local))) for node in range(hosts))
    session = Session(frozenset({"cpu"}), timedelta(seconds=60))
    return phalanx.World(place, Topology(nodes), torch.device("cpu"), session)


def main() -> None:
    """Be a rank that mpiexec has started."""
    folder, size = Path(sys.argv[1]), int(sys.argv[2])
    sys.path += [str(Path(__file__).parents[1] / name) for name in ("world", "mpi")]  # as pytest imports tests
    rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
    run_rank(cloudpickle.loads((folder / "body").read_bytes()), Member(int(rank), size, folder))


if __name__ == "__main__":
    main()
