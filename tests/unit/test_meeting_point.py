"""Where ranks meet when the launcher gives no address or no port: known on every rank without a word passing."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.waiting import soon
from torch._C._distributed_c10d import Store

from phalanx.errors import InitializationError
from phalanx.membership.meeting_point import HIGHEST, LOWEST, derived_ports, meeting_point
from phalanx.membership.rendezvous import Broadcast, leave, meet
from phalanx.topology.environment import place_with, read_environment
from phalanx.topology.place import Place
from phalanx.wire.proof import GREETING

SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[07,12]",
}
RECORDINGS = Path(__file__).parents[1] / "data" / "launchers"
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
# The ports of a job follow from its name: those of another process of these tests are other jobs.
OWN = f"of process {os.getpid()}"
# Flux writes its job ids with a letter beyond ASCII, which some locales cannot decode.
HERE = Place("slurm", 0, 2, 0, 2, 0, 1, master_addr="127.0.0.1", job=f"job \udcc6\udc92 {OWN}")


class Meetings:
    """Ranks as threads of this process, and what came of each."""

    def __init__(self) -> None:
        self.stores: dict[object, Store] = {}
        self.errors: dict[object, BaseException] = {}
        self.threads: list[threading.Thread] = []

    def start(self, place: Place, name: object = None, broadcast: Broadcast | None = None) -> None:
        """Have ``place`` meet the others, under its rank or another name."""
        name = place.rank if name is None else name

        def run() -> None:
            try:
                self.stores[name] = meet(place, 20.0, 0, broadcast)
            except BaseException as error:
                self.errors[name] = error

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def join(self) -> dict[object, Store]:
        for thread in self.threads:
            thread.join(30)
        assert not self.errors
        return self.stores

    def end(self) -> None:
        for thread in self.threads:
            thread.join(30)
        for store in reversed(list(self.stores.values())):
            leave(store)
        soon(lambda: all(thread.name != "phalanx-store" for thread in threading.enumerate()))


@pytest.fixture
def meetings() -> Iterator[Meetings]:
    them = Meetings()
    yield them
    them.end()


def where(environment: Mapping[str, str]) -> str | None:
    point = meeting_point(read_environment(environment, []).place())
    return None if point is None else point.address


def test_first_host_of_the_node_list_is_where_rank_0_is(tmp_path: Path) -> None:
    assert where(SLURM) == "node07"
    assert where({**HYDRA, "SLURM_JOB_NODELIST": "node[07,12]", "SLURM_JOB_ID": "77"}) == "node07"
    nodefile = tmp_path / "nodes"
    nodefile.write_text("pbs3\npbs3\npbs1\npbs1\n")
    assert where({**HYDRA, "PBS_NODEFILE": str(nodefile), "PBS_JOBID": "5.head"}) == "pbs3"
    assert where({**HYDRA, "LSB_MCPU_HOSTS": "n1 2 n2 2", "LSB_JOBID": "9"}) == "n1"
    assert where({**HYDRA, "LSB_MCPU_HOSTS": "launch 1 n1 2 n2 2", "LSB_JOBID": "9"}) == "n1"
    assert where({**SLURM, "MASTER_ADDR": "chosen"}) == "chosen"
    # The ranks are on one host, which need not be the first of the allocation, unless the list is of their own step.
    one_step = {**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "node09"}
    assert where({**one_step, "SLURM_PROCID": "1", "SLURM_NODEID": "0"}) == "node09"
    one_host = {**HYDRA, "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4", "SLURM_JOB_NODELIST": "node[07,12]"}
    assert where({**one_host, "SLURM_JOB_ID": "77"}) == "127.0.0.1"
    assert where({**one_host, "MASTER_ADDR": "chosen", "SLURM_JOB_ID": "77"}) == "chosen"


def test_store_of_the_launcher_is_used_where_it_says_so() -> None:
    agent = {"TORCHELASTIC_RUN_ID": "r", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    agent |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}
    agent |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    reading = read_environment(agent, [])
    assert reading.place().keeps_store
    assert not place_with(reading, "tcp://h:29501", None, None).keeps_store
    assert not read_environment({**agent, "TORCHELASTIC_USE_AGENT_STORE": "False"}, []).place().keeps_store
    for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        without = {other: value for other, value in agent.items() if other != name}
        assert not read_environment(without, []).place().keeps_store


def test_nothing_is_guessed_where_nothing_says_where_rank_0_is() -> None:
    assert where(HYDRA) is None
    with pytest.raises(
        InitializationError, match=r"Set MASTER_ADDR to its host and MASTER_PORT.*mpiexec -genv MASTER_"
    ):
        meet(read_environment(HYDRA, []).place(), 1.0, 0)


def test_tasks_of_flux_meet_on_one_node_or_where_the_user_says() -> None:
    def task(name: str) -> Place:
        data = json.loads((RECORDINGS / f"{name}.json").read_text())
        return read_environment({**data["common"], **data["ranks"][1]["environment"]}, []).place()

    first = meeting_point(task("flux-one-node"))
    assert first is not None
    assert (first.address, first.fixed) == ("127.0.0.1", False)
    with pytest.raises(InitializationError, match=r"flux run --env=MASTER_ADDR=h1 .*install mpi4py"):
        meet(task("flux-cyclic"), 1.0, 0)


def test_every_rank_derives_the_same_ports_and_another_job_others() -> None:
    point, other, next_step = (
        meeting_point(read_environment({**SLURM, **own}, []).place())
        for own in ({}, {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}, {"SLURM_STEP_ID": "1"})
    )
    assert point is not None
    assert other is not None
    assert next_step is not None
    assert point.ports == other.ports != next_step.ports
    assert len(set(point.ports)) == 16
    assert all(LOWEST <= port <= HIGHEST for port in point.ports)
    given = meeting_point(read_environment({**SLURM, "MASTER_PORT": "29501"}, []).place())
    assert given is not None
    assert (given.ports, given.fixed) == ((29501,), True)


def test_job_may_begin_while_the_one_before_holds_the_port(meetings: Meetings) -> None:
    """A process that was killed does so until all its threads have ended."""
    earlier = socket.socket()
    earlier.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as rank 0 listens
    earlier.bind(("127.0.0.1", 0))
    earlier.listen()
    place = replace(HERE, master_port=earlier.getsockname()[1])
    for rank in (0, 1):
        meetings.start(replace(place, rank=rank))
    earlier.accept()[0].close()
    earlier.close()
    stores = meetings.join()
    stores[1].set("a", "b")
    assert stores[0].get("a") == b"b"


def test_ranks_meet_at_the_first_free_port(monkeypatch: pytest.MonkeyPatch, meetings: Meetings) -> None:
    """On the first is a stranger who greets as rank 0 would, on the second rank 0 of another job."""
    ports = derived_ports(f"the same {OWN}")
    monkeypatch.setattr("phalanx.membership.rendezvous.ANSWER_S", 0.3)
    monkeypatch.setattr("phalanx.membership.meeting_point.derived_ports", lambda _: ports)
    monkeypatch.setenv("PHALANX_KEY", "the key of this very job")
    heard: list[bytes] = []

    def attend(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                with listener.accept()[0] as sock:
                    sock.sendall(GREETING + b"x" * 32)
                    while data := sock.recv(4096):
                        heard.append(data)

    with socket.create_server(("127.0.0.1", ports[0])) as stranger:
        attending = threading.Thread(target=attend, args=(stranger,))
        attending.start()
        other = replace(HERE, job=f"job 2 {OWN}")
        meetings.start(other, "other 0")  # and waits for its rank 1
        assert soon(lambda: _listens(ports[1]))
        meetings.start(replace(HERE, rank=1))  # rank 0 is late
        assert soon(lambda: len(heard) > 1)
        meetings.start(HERE)
        meetings.start(replace(other, rank=1), "other 1")
        stores = meetings.join()
        stranger.shutdown(socket.SHUT_RDWR)
        attending.join(20)
    for mine, theirs, word in ((0, 1, "b"), ("other 0", "other 1", "c")):
        stores[mine].set("a", word)
        assert stores[theirs].get("a") == word.encode()
    assert b"the key of this very job" not in b"".join(heard)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def among_threads() -> Broadcast:
    """A broadcast of rank 0's line."""
    lines: list[str] = []
    sent = threading.Event()

    def broadcast(line: str | None) -> str:
        if line is not None:
            lines.append(line)
            sent.set()
        sent.wait(20)
        return lines[0]

    return broadcast


@pytest.mark.parametrize("listens", [True, False])
def test_ranks_meet_by_a_broadcast_or_get_the_reason_of_rank_0(
    meetings: Meetings, monkeypatch: pytest.MonkeyPatch, listens: bool
) -> None:
    if not listens:
        monkeypatch.setenv("PHALANX_INTERFACE", "nope0")
    place = replace(read_environment(HYDRA, []).place(), world_size=2, local_world_size=1)
    broadcast = among_threads()
    for rank in (0, 1):
        meetings.start(replace(place, rank=rank), broadcast=broadcast)
    if listens:
        stores = meetings.join()
        stores[0].set("a", "b")
        assert stores[1].get("a") == b"b"
    else:
        meetings.end()
        assert str(meetings.errors[0]) == str(meetings.errors[1])
        assert "rank 0 could not listen: PHALANX_INTERFACE=nope0: " in str(meetings.errors[1])
