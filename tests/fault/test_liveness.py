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
from tests.fault.test_deaths import await_naps
from tests.support.islands import pretend_host
from tests.support.ports import held_port
from tests.support.ranks import Member, fork_rank, on_ranks, run_ranks, values
from tests.support.ranks import _collect as collect
from tests.support.waiting import soon, stop
from torch.distributed.distributed_c10d import _set_pg_timeout

from phalanx.diagnosis import ends
from phalanx.errors import ClosedError, PeerLost
from phalanx.membership.rendezvous import leave, meet
from phalanx.topology.place import Place
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


def say_when_waiting(member: Member, name: str) -> None:
    """Say so when the main thread, which is about to call, has slept and looked for the others a few times."""

    def look() -> None:
        await_naps("self")  # which number it has there, it does not know
        member.say(name)

    threading.Thread(target=look).start()


def engine() -> str:
    return dist.group.WORLD._communicator.engine or "shared memory"  # type: ignore[union-attr]


@pytest.mark.parametrize(("name", "inside"), [("pid", 0), ("time", 1)])
def test_rank_in_another_namespace_is_waited_for_until_it_dies(name: str, inside: int) -> None:
    """It reads a pid and a start time of itself that the others do not."""

    def body(member: Member) -> str:
        member.join()
        tensor = torch.ones(1)
        for late in range(2):
            if member.rank == late:
                member.await_said(f"waits-{late}")
            else:
                say_when_waiting(member, f"waits-{late}")
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


def test_ranks_that_cannot_see_each_other_use_tcp_and_say_why() -> None:
    def body(member: Member) -> str:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            member.join()
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        reasons = [str(warning.message) for warning in caught if "share no memory" in str(warning.message)]
        return f"{engine().partition(' (')[0]} {tensor.item()} {reasons[0] if reasons else ''}"

    said = two_ranks("pid and proc", 1, body)
    assert said[1] == "TCP 2.0 "
    assert "2 ranks share no memory (rank 1: " in said[0]
    assert said[0].endswith("; they communicate as between hosts")


# -- jobs that stand still ---------------------------------------------------------------------------------------------

# The jobs are stopped for longer than the timeout, in which a rank that runs comes also on a busy machine.
TIMEOUT_S, STOPPED_S = 5, 6
TIMEOUT = timedelta(seconds=TIMEOUT_S)

OPERATIONS: dict[str, Callable[[int], object]] = {
    "all_reduce": lambda rank: dist.all_reduce(torch.ones(1)),
    "any source": lambda rank: dist.send(torch.ones(1), 0) if rank else dist.recv(torch.ones(1)),
}


def begin(member: Member) -> None:
    """Come here, and go on when all ranks of all jobs have."""
    member.say(f"here-{member.rank}")
    member.await_said("ready")


def in_operation(member: Member) -> None:
    """Rank 0 waits for rank 1, which comes when it is told that all have been woken."""
    member.join()
    dist.barrier()
    begin(member)
    _set_pg_timeout(TIMEOUT)  # for the operation, and not for the pairs to come one by one
    if member.rank:
        member.await_said("woken")
    OPERATIONS[member.folder.name](member.rank)


def in_store(member: Member) -> None:
    """Rank 1 waits for a key that rank 0 sets then."""
    at = {"master_addr": "127.0.0.1", "master_port": int((member.folder / "port").read_text())}
    store = meet(Place("env", member.rank, 2, None, None, None, None, **at), 60.0, 1)  # type: ignore[arg-type]
    begin(member)
    if member.rank:
        store.set_timeout(TIMEOUT)
        assert store.get("answer") == b"here"
        return
    member.await_said("woken")
    store.set("answer", "here")


def in_search(member: Member) -> None:
    """Rank 1 searches for rank 0, which begins then."""
    job = f"suspended {member.folder}"
    place = Place("slurm", member.rank, 2, member.rank, 2, 0, 1, master_addr="127.0.0.1", job=job)
    begin(member)
    if member.rank == 0:
        member.await_said("woken")
    store = meet(place, TIMEOUT_S if member.rank else 60.0, 0)
    if member.rank:
        store.set("read", "")
    else:
        store.wait(["read"])
    leave(store)


def is_asleep(pid: int) -> bool:
    """Whether a process sleeps whenever one looks."""
    looks = set()
    for _ in range(5):
        looks.add(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
        time.sleep(0.01)
    return looks == {"S"}


def test_jobs_that_were_suspended_go_on_where_they_were(tmp_path: Path) -> None:
    """Both ranks of a pair are stopped for longer than the timeout for which one waits for the other."""
    jobs: dict[str, Callable[[Member], None]] = dict.fromkeys(OPERATIONS, in_operation)
    jobs |= {"store": in_store, "search": in_search}
    pairs: dict[Path, list[int]] = {}

    def say(what: str) -> None:
        for folder in pairs:
            (folder / what).touch()

    with held_port() as port:
        for name, body in jobs.items():
            folder = tmp_path / name
            folder.mkdir()
            (folder / "port").write_text(str(port))
            pairs[folder] = [fork_rank(body, Member(rank, 2, folder)) for rank in range(2)]
        everybody = [child for children in pairs.values() for child in children]
        try:
            here = [folder / f"here-{rank}" for folder in pairs for rank in range(2)]
            assert soon(lambda: all(path.exists() for path in here), 300)
            say("ready")
            for child in everybody:
                assert soon(lambda child=child: is_asleep(child))  # type: ignore[misc]  # those that wait do so
                stop(child)
            time.sleep(STOPPED_S)
            for child in everybody:
                os.kill(child, signal.SIGCONT)
            say("woken")
        finally:
            found = [collect(children, folder, 120) for folder, children in pairs.items()]
    for outcomes in found:
        values(outcomes)


# -- calls beside the end ----------------------------------------------------------------------------------------------


def test_any_call_may_come_while_another_thread_closes_the_group() -> None:
    """A call that reads the group's handle uses memory that the close unmaps, or of the next group at its address."""

    def body(member: Member) -> None:
        for turn in range(20):
            store = member.store(f"store-{turn}")
            communicator = SharedMemoryCommunicator(store, member.rank, 2, timedelta(seconds=60))
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

    on_ranks(body, 2)


def test_rank_that_a_signal_ended_is_told_in_one_way_on_both_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank beside it knows the signal, as under ``phalanx run``."""
    monkeypatch.setattr(ends, "_look", lambda pid: ends.Ending("by signal 9 (SIGKILL)", 9))

    def body(member: Member) -> str:
        pretend_host(min(member.rank, 1))
        member.join()
        dist.all_reduce(torch.ones(3))
        if member.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost, match=r"^rank 2 of the group \(pid \d+ on h1\) has ended") as caught:
            dist.all_reduce(torch.ones(3))
        return str(caught.value)

    assert all("rank 2" in told for told in values(run_ranks(body, 3)[:2]))
