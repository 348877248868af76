"""Whether the others live: processes that see each other in part, jobs that stand still, calls beside the end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ports import held_port
from tests.support.ranks import Member, fork_rank, on_ranks, run_ranks
from tests.support.ranks import _collect as collect
from tests.support.waiting import await_stop, soon
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _set_pg_timeout

from phalanx.errors import ClosedError, CollectiveTimeout, PeerLost
from phalanx.place.place import Place
from phalanx.rendezvous.meet import meet
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
def test_the_death_of_a_rank_in_another_namespace_is_seen(name: str, inside: int) -> None:
    """It reads a pid and a start time of itself that the others do not."""

    def body(member: Member) -> str:
        member.join()
        dist.barrier()
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
@pytest.mark.parametrize("name", ["pid", "time"])
def test_a_living_rank_in_another_namespace_is_not_taken_for_dead(name: str, inside: int) -> None:
    def body(member: Member) -> str:
        member.join()
        tensor = torch.ones(1)
        for late in range(2):
            if member.rank == late:
                time.sleep(0.3)
            dist.all_reduce(tensor)
        return f"{engine()}: {tensor.item()}"

    assert two_ranks(name, inside, body) == ["shared memory: 4.0"] * 2


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

# A rank that runs on a busy machine comes in far less than the timeout; the job is stopped for longer than that.
TIMEOUT_S, STOPPED_S = 10, 12

OPERATIONS = {
    "all_reduce": lambda member: dist.all_reduce(torch.ones(1)),
    "message": lambda member: (
        dist.send(torch.ones(1), 1 - member.rank) if member.rank else dist.recv(torch.ones(1), 1 - member.rank)
    ),
    "any source": lambda member: dist.send(torch.ones(1), 0) if member.rank else dist.recv(torch.ones(1)),
    "future": lambda member: (
        dist.send(torch.ones(1), 0) if member.rank else dist.irecv(torch.ones(1), 1).get_future().wait()  # type: ignore[union-attr]
    ),
}


def test_a_job_that_was_suspended_goes_on_where_it_was(tmp_path: Path) -> None:
    """Both ranks are stopped for longer than the timeout, while rank 0 waits for rank 1; a pair for each operation."""
    woken, all_joined = tmp_path / "woken", tmp_path / "all-joined"

    def body(member: Member) -> bool:
        member.join()
        dist.barrier()
        member.say(f"joined-{member.rank}")
        assert soon(all_joined.exists, 300)
        _set_pg_timeout(
            timedelta(seconds=TIMEOUT_S)
        )  # which is for the operation, and not for the pairs to come one by one
        member.say(f"begins-{member.rank}")
        while member.rank == 1 and not woken.exists():
            time.sleep(0.01)
        OPERATIONS[member.folder.name](member)
        return True

    pairs: dict[Path, list[int]] = {}
    for operation in OPERATIONS:
        folder = tmp_path / operation
        folder.mkdir()
        pairs[folder] = [fork_rank(body, Member(rank, 2, folder)) for rank in range(2)]
    for what in ("joined", "begins"):
        names = [folder / f"{what}-{rank}" for folder in pairs for rank in range(2)]
        assert soon(lambda names=names: all(name.exists() for name in names), 300)  # type: ignore[misc]
        all_joined.touch()
    time.sleep(0.3)  # the ranks 0 wait
    for signum, pause_s in ((signal.SIGSTOP, STOPPED_S), (signal.SIGCONT, 0.5)):
        for child in (child for children in pairs.values() for child in children):
            os.kill(child, signum)
        time.sleep(pause_s)
    woken.touch()
    for folder, children in pairs.items():
        for outcome in collect(children, folder, 120):
            assert outcome.value is True, outcome.traceback


def test_a_store_that_was_suspended_with_its_ranks_waits_on(tmp_path: Path) -> None:
    """Rank 1 waits for a key that rank 0 sets after both were stopped for longer than the wait's timeout."""

    def body(member: Member) -> str:
        at = {"master_addr": "127.0.0.1", "master_port": port}
        place = Place("env", member.rank, 2, None, None, None, None, **at)  # type: ignore[arg-type]
        store = meet(place, 60.0, 1)
        if member.rank == 0:
            store.wait(["asked"], timedelta(seconds=TIMEOUT_S))
            store.set("answer", "here")
            return ""
        threading.Thread(target=late, args=(store, member.folder / "woken")).start()
        store.set_timeout(timedelta(seconds=TIMEOUT_S))
        (member.folder / "waits").touch()
        return store.get("answer").decode()

    def late(store: Store, woken: Path) -> None:
        while not woken.exists():
            time.sleep(0.01)
        store.set("asked", "")

    with held_port() as port:
        children = [fork_rank(body, Member(rank, 2, tmp_path)) for rank in range(2)]
        while not (tmp_path / "waits").exists():
            time.sleep(0.01)
        time.sleep(0.3)
        for signum, pause_s in ((signal.SIGSTOP, STOPPED_S), (signal.SIGCONT, 0.5)):
            for child in children:
                os.kill(child, signum)
            time.sleep(pause_s)
        (tmp_path / "woken").touch()
        outcomes = collect(children, tmp_path, 120)
    assert [outcome.value for outcome in outcomes] == ["", "here"], [outcome.traceback for outcome in outcomes]


def test_a_rank_that_is_stopped_alone_is_named_at_the_timeout() -> None:
    def body(member: Member) -> str:
        member.join_patiently(2)
        if member.rank == 1:
            (member.folder / "pid.part").write_text(str(os.getpid()))
            (member.folder / "pid.part").rename(member.folder / "pid")
            os.kill(os.getpid(), signal.SIGSTOP)
            return ""
        member.await_said("pid")
        pid = int((member.folder / "pid").read_text())
        await_stop(pid)  # else it may stop when it has been told to go on
        try:
            with pytest.raises(CollectiveTimeout) as caught:
                dist.all_reduce(torch.ones(1))
        finally:
            os.kill(pid, signal.SIGCONT)
        return str(caught.value)

    assert "rank 1 of the group" in run_ranks(body, 2)[0].value


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
