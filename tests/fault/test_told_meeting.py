"""What the ranks say when they cannot meet, held word for word against golden texts."""

from __future__ import annotations

import contextlib
import io
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from textwrap import dedent

import pytest
from tests.support.golden import check_told
from tests.support.ranks import Member, on_ranks

import phalanx
from phalanx.errors import InitializationError
from phalanx.rendezvous import opening

PATIENCE_S = 100.0  # of a rank that another one is to answer
GIVEN_UP_S = 15.0  # the timeout of a rank 0 that waits in vain; the others must have been heard a second before
Told = tuple[str, str]  # an error, and what was printed
KNOWN = {"host": platform.node()}

# How launchers tell three ranks their places, each with what follows from the places of two for that of the third.
BY_HAND: list[dict[str, object]] = [{}, {}, {}]
SLURM: list[dict[str, object]] = [
    {
        "SLURM_JOB_ID": 7,
        "SLURM_STEP_ID": 0,
        "SLURM_PROCID": rank,
        "SLURM_STEP_NUM_TASKS": 3,
        "SLURM_LOCALID": 0,
        "SLURM_NODEID": rank,
        "SLURM_STEP_NUM_NODES": 3,
        "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
        "SLURM_STEP_NODELIST": "h[0-2]",
        "PHALANX_HOST": f"h{rank}",
    }
    for rank in range(3)
]
MPIEXEC: list[dict[str, object]] = [
    {
        "PMI_RANK": rank,
        "PMI_SIZE": 3,
        "MPI_LOCALRANKID": local_rank,
        "MPI_LOCALNRANKS": beside,
        "PHALANX_HOST": host,
    }
    for rank, (host, local_rank, beside) in enumerate([("h0", 0, 2), ("h1", 0, 1), ("h0", 1, 2)])
]
TORCHRUN: list[dict[str, object]] = [
    {
        "TORCHELASTIC_RUN_ID": "job",
        "RANK": rank,
        "WORLD_SIZE": 3,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": 1 + (host == "h1"),
        "GROUP_RANK": int(host == "h1"),
        "GROUP_WORLD_SIZE": 2,
        "PHALANX_HOST": host,
    }
    for rank, (host, local_rank) in enumerate([("h0", 0), ("h1", 0), ("h1", 1)])
]


_ports = count()


def port() -> int:
    """Another one in each test, also of those that run beside this one; below those that the kernel gives out."""
    return 14_000 + (os.getpid() * 8 + next(_ports)) % 8_000


def joining(
    rank: int,
    size: int,
    at_port: int,
    timeout_s: float,
    address: str = "127.0.0.1",
    by: Mapping[str, object] | None = None,
) -> Told:
    """Join as this rank, as a launcher that sets these variables has it; what the user reads if that fails."""
    place = {**(by or {"RANK": rank, "WORLD_SIZE": size}), "MASTER_ADDR": address, "MASTER_PORT": at_port}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as printed:
        for name, value in place.items():
            patch.setenv(name, str(value))
        try:
            phalanx.init(timeout_s=timeout_s, device="cpu")
        except InitializationError as error:
            return f"{type(error).__module__}.{type(error).__qualname__}: {error}", printed.getvalue()
    return "", printed.getvalue()


def wait_for(path: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("places", "where", "host"),
    [
        pytest.param(BY_HAND, "", platform.node(), id="by hand"),
        pytest.param(SLURM, " (h2, local rank 0)", "h0", id="srun"),
        pytest.param(MPIEXEC, " (h0, local rank 1)", "h0", id="mpiexec"),
        pytest.param(TORCHRUN, " (h1, local rank 1)", "h0", id="torchrun"),
    ],
)
def test_the_rank_that_does_not_come_is_named_while_the_others_wait_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, places: list[dict[str, object]], where: str, host: str
) -> None:
    monkeypatch.setattr(opening, "REMIND_S", GIVEN_UP_S - 1)
    at_port = port()

    def body(member: Member) -> Told:
        if member.rank == 0:
            wait_for(member.folder / "searches")
            return joining(0, 3, at_port, GIVEN_UP_S, by=places[0])
        if member.rank == 1:
            (member.folder / "searches").touch()
            return joining(1, 3, at_port, PATIENCE_S, by=places[1])
        return "", ""

    (of_rank_0, printed), (of_rank_1, _), _ = on_ranks(body, 3)
    known = {"host": host, "where": where}
    check_told("missing", of_rank_0, known)
    check_told("missing.rank-1", of_rank_1, known)
    check_told("missing.meanwhile", printed, known)


def test_a_second_process_of_a_rank_is_refused_and_both_are_named() -> None:
    at_port = port()

    def body(member: Member) -> tuple[Told, int]:
        if member.rank == 3:  # it comes when one of the two has been refused, and completes the world
            wait_for(member.folder / "refused")
        told = joining((0, 1, 1, 2)[member.rank], 3, at_port, PATIENCE_S)
        if told[0]:
            (member.folder / "refused").touch()
        else:
            phalanx.close()
        return told, os.getpid()

    first, *both, _ = on_ranks(body, 4)
    ((_, accepted),) = [(told, pid) for told, pid in both if not told[0]]
    ((told, refused),) = [(told, pid) for told, pid in both if told[0]]
    hosts = {"host accepted": platform.node(), "host refused": platform.node()}
    known = {**hosts, "rank": 1, "pid accepted": accepted, "pid refused": refused}
    check_told("twice", told[0], known)
    check_told("twice.rank-0", first[0][1].partition("\n")[0], known)


def test_ranks_that_were_started_for_worlds_of_different_sizes_say_both() -> None:
    at_port = port()

    def body(member: Member) -> tuple[Told, int]:
        if member.rank == 0:
            wait_for(member.folder / "searches")
            return joining(0, 2, at_port, GIVEN_UP_S), os.getpid()
        (member.folder / "searches").touch()
        return joining(1, 3, at_port, PATIENCE_S), os.getpid()

    (of_rank_0, pid_0), (of_rank_1, pid_1) = on_ranks(body, 2)
    known = {**KNOWN, "host 1": platform.node(), "pid 0": pid_0, "pid 1": pid_1}
    check_told("world-sizes", of_rank_1[0], known)
    check_told("world-sizes.rank-0", of_rank_0[0], known)


SERVER = dedent("""
    import socket
    server = socket.create_server(("127.0.0.1", 0))
    print(server.getsockname()[1])
    while True:
        line, _ = server.accept()
        line.sendall(b"HTTP/1.1 400 Bad Request")
        line.close()
""")


@contextlib.contextmanager
def something_that_is_not_rank_0() -> Iterator[tuple[int, str]]:
    """A server of another protocol: its port, and what is said of its process."""
    server = [sys.executable, "-S", "-u", "-c", SERVER]
    with subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline()), f"pid {process.pid} ({' '.join(server[:4])})"
        finally:
            process.kill()


def test_a_port_that_another_program_has_is_said_by_both_ranks() -> None:
    with something_that_is_not_rank_0() as (at_port, holder):
        told = on_ranks(lambda member: joining(member.rank, 2, at_port, PATIENCE_S)[0], 2)
    known = {"address": "127.0.0.1", "name": "127.0.0.1", "port": at_port, "holder": holder}
    check_told("port-taken.rank-0", told[0], known)
    check_told("port-taken.rank-1", told[1], known)


def test_a_name_that_does_not_resolve_is_said_by_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    at_port = port()
    told = on_ranks(lambda member: joining(member.rank, 2, at_port, PATIENCE_S, "no-such-host")[0], 2)
    for rank, text in enumerate(told):
        check_told("unresolved", text, {**KNOWN, "name": "no-such-host", "port": at_port, "rank": rank})
