"""Whether the others live: processes that see each other in part, jobs that stand still, calls beside the end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.islands import pretend_host
from tests.support.ports import held_port
from tests.support.ranks import Member, fork_rank, on_ranks, run_ranks, values
from tests.support.ranks import _collect as collect
from tests.support.waiting import soon
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _set_pg_timeout

from phalanx.errors import ClosedError, PeerLost
from phalanx.place.place import Place
from phalanx.rendezvous.meet import leave, meet
from phalanx.transports.hosts.lookout import lookout
from phalanx.transports.shm.communicator import SharedMemoryCommunicator

# -- namespaces --------------------------------------------------------------------------------------------------------

libc = ctypes.CDLL(None, use_errno=True)
NEW_TIME, NEW_MOUNTS, NEW_PIDS = 0x80, 0x20000, 0x20000000  # clone(2)
NAMESPACES = {"pid": NEW_PIDS, "time": NEW_TIME, "pid and proc": NEW_PIDS | NEW_MOUNTS}


def in_namespace(name: str, function: Callable[[], str]) -> str:
    """Run a function in a child that has its own pids, clocks or /proc; what it returned, "" if it has ended before."""
    if libc.unshare(NAMESPACES[name]) != 0:
        return f"not permitted: {os.strerror(ctypes.get_errno())}"
    if name == "time":
        Path("/proc/self/timens_offsets").write_text("boottime 1000000 0")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if name == "pid and proc":
                subprocess.run(["mount", "--make-rprivate", "/"], check=True)
                subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)
            os.write(write, function().encode())
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


def two_ranks(name: str, inside: int, body: Callable[[Member], str]) -> list[str]:
    """Run two ranks, one of them in a namespace of its own; what each returned."""
    said = on_ranks(lambda m: in_namespace(name, lambda: body(m)) if m.rank == inside else body(m), 2)
    if said[inside].startswith("not permitted"):
        pytest.skip(said[inside])
    return said


def engine() -> str:
    return dist.group.WORLD._communicator.engine or "shared memory"  # type: ignore[union-attr]


@pytest.mark.parametrize("inside", [0, 1])
@pytest.mark.parametrize("name", ["pid", "time"])
def test_rank_in_another_namespace_is_waited_for_until_it_dies(name: str, inside: int) -> None:
    """It reads a pid and a start time of itself that the others do not."""

    def body(member: Member) -> str:
        member.join()
        tensor = torch.ones(1)
        for late in range(2):
            if member.rank == late:
                time.sleep(0.3)
            dist.all_reduce(tensor)
        assert tensor.item() == 4.0
        dist.barrier()
        member.meet("waited")
        if member.rank == inside:
            os._exit(0)
        with pytest.raises(PeerLost) as caught:
            dist.all_reduce(torch.ones(1))
        return f"{engine()}: {caught.value}"

    said = two_ranks(name, inside, body)
    assert said[inside] == ""
    assert said[1 - inside].startswith(f"shared memory: rank {inside} of the group")
    assert f"has ended while rank {1 - inside} was in all_reduce" in said[1 - inside]


@pytest.mark.parametrize("inside", [0, 1])
def test_ranks_that_cannot_see_each_other_use_an_engine_and_say_why(
    inside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_ENGINE", "gloo")  # where there is UCX, it may be quicker

    def body(member: Member) -> str:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            member.join()
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        reasons = [str(warning.message) for warning in caught if "share no memory" in str(warning.message)]
        return f"{engine().partition(' (')[0]} {tensor.item()} {reasons[0] if reasons else ''}"

    said = two_ranks("pid and proc", inside, body)
    assert said[1] == "Gloo 2.0 "
    assert "2 ranks share no memory (rank 1: " in said[0]
    assert said[0].endswith("; they communicate as between hosts")


def test_a_rank_that_one_other_does_not_see_makes_all_use_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when rank 1 sees the process of rank 0, but rank 2 does not see that of rank 1."""
    monkeypatch.setenv("PHALANX_ENGINE", "gloo")

    def body(member: Member) -> str:
        if member.rank == 2:
            real = SharedMemoryCommunicator.__init__.__globals__["join_segment"].__globals__["library"]()

            class Blind:
                def __getattr__(self, name: str) -> Any:
                    return getattr(real, name)

                def phx_look(self, comm: int, descriptor: int) -> None:
                    other = os.memfd_create("another")
                    real.phx_look(comm, other)
                    os.close(other)

            monkeypatch.setattr("phalanx.transports.shm.segment.library", Blind)
        member.join()
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 3
        return str(dist.group.WORLD._communicator.engine)  # type: ignore[union-attr]

    assert on_ranks(body, 3) == ["Gloo (as PHALANX_ENGINE says)"] * 3


# -- jobs that stand still ---------------------------------------------------------------------------------------------

# A rank that runs on a busy machine comes in far less than the timeout; the jobs are stopped for longer than that.
TIMEOUT_S, STOPPED_S = 10, 12

OPERATIONS: dict[str, Callable[[Member], object]] = {
    "all_reduce": lambda member: dist.all_reduce(torch.ones(1)),
    "message": lambda member: (
        dist.send(torch.ones(1), 1 - member.rank) if member.rank else dist.recv(torch.ones(1), 1 - member.rank)
    ),
    "any source": lambda member: dist.send(torch.ones(1), 0) if member.rank else dist.recv(torch.ones(1)),
    "future": lambda member: (
        dist.send(torch.ones(1), 0) if member.rank else dist.irecv(torch.ones(1), 1).get_future().wait()  # type: ignore[union-attr]
    ),
}


def in_operation(member: Member, woken: Path, ready: Path) -> None:
    """Rank 0 waits for rank 1."""
    member.join()
    dist.barrier()
    member.say(f"joined-{member.rank}")
    assert soon(ready.exists, 300)
    _set_pg_timeout(timedelta(seconds=TIMEOUT_S))  # for the operation, and not for the pairs to come one by one
    member.say(f"begins-{member.rank}")
    while member.rank == 1 and not woken.exists():
        time.sleep(0.01)
    OPERATIONS[member.folder.name](member)


def in_store(member: Member, woken: Path, ready: Path) -> None:
    """Rank 1 waits for a key that rank 0 sets when it is told that all have been woken."""
    at = {"master_addr": "127.0.0.1", "master_port": int(ready.with_name("port").read_text())}
    place = Place("env", member.rank, 2, None, None, None, None, **at)  # type: ignore[arg-type]
    store = meet(place, 60.0, 1)
    member.say(f"joined-{member.rank}")
    assert soon(ready.exists, 300)
    member.say(f"begins-{member.rank}")
    if member.rank == 0:
        store.wait(["asked"], timedelta(seconds=TIMEOUT_S))
        store.set("answer", "here")
        return
    threading.Thread(target=late, args=(store, woken)).start()
    store.set_timeout(timedelta(seconds=TIMEOUT_S))
    assert store.get("answer") == b"here"


def late(store: Store, woken: Path) -> None:
    while not woken.exists():
        time.sleep(0.01)
    store.set("asked", "")


def in_search(member: Member, woken: Path, ready: Path) -> None:
    """Rank 1 searches for rank 0, which begins when it is told that all have been woken."""
    job = f"suspended {member.folder}"
    place = Place("slurm", member.rank, 2, member.rank, 2, 0, 1, master_addr="127.0.0.1", job=job)
    member.say(f"joined-{member.rank}")
    assert soon(ready.exists, 300)
    member.say(f"begins-{member.rank}")
    while member.rank == 0 and not woken.exists():
        time.sleep(0.01)
    store = meet(place, TIMEOUT_S if member.rank else 60.0, 0)
    if member.rank:
        store.set("read", "")
    else:
        store.wait(["read"])
    leave(store)


def test_jobs_that_were_suspended_go_on_where_they_were(tmp_path: Path) -> None:
    """Both ranks of a pair are stopped for longer than the timeout for which one waits for the other."""
    woken, ready = tmp_path / "woken", tmp_path / "ready"
    jobs = {**dict.fromkeys(OPERATIONS, in_operation), "store": in_store, "search": in_search}
    pairs: dict[Path, list[int]] = {}
    with held_port() as port:
        (tmp_path / "port").write_text(str(port))
        for name, body in jobs.items():
            folder = tmp_path / name
            folder.mkdir()
            of_pair = partial(body, woken=woken, ready=ready)
            pairs[folder] = [fork_rank(of_pair, Member(rank, 2, folder)) for rank in range(2)]
        for what in ("joined", "begins"):
            names = [folder / f"{what}-{rank}" for folder in pairs for rank in range(2)]
            assert soon(lambda names=names: all(name.exists() for name in names), 300)  # type: ignore[misc]
            ready.touch()
        time.sleep(0.3)  # those that wait do so
        for signum, pause_s in ((signal.SIGSTOP, STOPPED_S), (signal.SIGCONT, 0.5)):
            for child in (child for children in pairs.values() for child in children):
                os.kill(child, signum)
            time.sleep(pause_s)
        woken.touch()
        for folder, children in pairs.items():
            values(collect(children, folder, 120))


# -- calls beside the end ----------------------------------------------------------------------------------------------


def test_any_call_may_come_while_another_thread_closes_the_group() -> None:
    """A call that reads the group's handle uses memory that the close unmaps, or of the next group at its address."""

    def body(member: Member) -> bool:
        for turn in range(60):
            name = f"store-{turn}"
            communicator = SharedMemoryCommunicator(member.store(name), member.rank, 2, timedelta(seconds=60))
            go = threading.Barrier(5)

            def beside(call: Any, go: threading.Barrier = go) -> None:
                go.wait()
                for _ in range(300):
                    with contextlib.suppress(ClosedError, PeerLost):
                        call()

            calls = [
                communicator.abort,
                lambda c=communicator: c.set_timeout(timedelta(seconds=30)),
                lambda c=communicator: (c.rest(), c.compare_rest(0.0), c.end_messages()),
                lambda c=communicator: c.recv(torch.zeros(1), 1 - member.rank, 0).test(),
            ]
            threads = [threading.Thread(target=beside, args=(call,)) for call in calls]
            for thread in threads:
                thread.start()
            go.wait()
            closers = [threading.Thread(target=communicator.close) for _ in range(2)]
            for thread in closers:
                thread.start()
            for thread in closers + threads:
                thread.join()
        return True

    for outcome in run_ranks(body, 2):
        assert outcome.value is True, (outcome.signal, outcome.traceback)


def test_rank_whose_connection_has_ended_is_dialled_again_and_not_lost() -> None:
    def body(member: Member) -> None:
        pretend_host(member.rank)
        member.join()
        dist.barrier()
        here = lookout()
        assert soon(lambda: bool(here._contacts))
        before = dict(here._contacts)
        member.meet("connected")
        for contact in before.values() if member.rank == 0 else ():
            contact.sock.shutdown(socket.SHUT_RDWR)  # as the network may
        assert soon(lambda: here._contacts.keys() == before.keys() and here._contacts != before, 20)
        member.meet("connected again")

    on_ranks(body, 2)
