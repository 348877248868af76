"""Where ranks meet when the launcher gives no address or no port: known on every rank without a word passing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from torch._C._distributed_c10d import Store

from phalanx.errors import InitializationError
from phalanx.place.environment import find_place
from phalanx.place.place import Place
from phalanx.rendezvous.meet import Broadcast, leave, meet
from phalanx.rendezvous.meeting_point import HIGHEST, LOWEST, derived_ports, meeting_point

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
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
HERE = Place("slurm", 0, 2, 0, 2, 0, 1, master_addr="127.0.0.1", job="job 1")


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
        until = time.monotonic() + 20
        while any(thread.name == "phalanx-store" for thread in threading.enumerate()) and time.monotonic() < until:
            time.sleep(0.01)


@pytest.fixture
def meetings() -> Iterator[Meetings]:
    them = Meetings()
    yield them
    them.end()


def where(environment: Mapping[str, str]) -> str | None:
    point = meeting_point(find_place(environment, []))
    return None if point is None else point.address


def test_the_first_host_of_the_node_list_is_where_rank_0_is(tmp_path: Path) -> None:
    assert where(SLURM) == "node07"
    assert where({**HYDRA, "SLURM_JOB_NODELIST": "node[07,12]", "SLURM_JOB_ID": "77"}) == "node07"
    nodefile = tmp_path / "nodes"
    nodefile.write_text("pbs3\npbs3\npbs1\npbs1\n")
    assert where({**HYDRA, "PBS_NODEFILE": str(nodefile), "PBS_JOBID": "5.head"}) == "pbs3"
    assert where({**HYDRA, "LSB_MCPU_HOSTS": "n1 2 n2 2", "LSB_JOBID": "9"}) == "n1"
    assert where({**HYDRA, "LSB_MCPU_HOSTS": "launch 1 n1 2 n2 2", "LSB_JOBID": "9"}) == "n1"
    assert where({**SLURM, "MASTER_ADDR": "chosen"}) == "chosen"
    # On one host, which need not be the first of the allocation.
    one_host = {**HYDRA, "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4", "SLURM_JOB_NODELIST": "node[07,12]"}
    assert where({**one_host, "SLURM_JOB_ID": "77"}) == "127.0.0.1"
    assert where({**one_host, "MASTER_ADDR": "chosen", "SLURM_JOB_ID": "77"}) == "chosen"


def test_where_nothing_says_where_rank_0_is_nothing_is_guessed() -> None:
    assert where(HYDRA) is None
    with pytest.raises(InitializationError, match="Set MASTER_ADDR to its host and MASTER_PORT"):
        meet(find_place(HYDRA, []), 1.0, 0)


def test_every_rank_derives_the_same_ports_and_another_job_others() -> None:
    point = meeting_point(find_place(SLURM, []))
    other = meeting_point(find_place({**SLURM, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}, []))
    next_step = meeting_point(find_place({**SLURM, "SLURM_STEP_ID": "1"}, []))
    assert point is not None
    assert other is not None
    assert next_step is not None
    assert point.ports == other.ports != next_step.ports
    assert len(set(point.ports)) == 16
    assert all(LOWEST <= port <= HIGHEST for port in point.ports)


def test_a_given_port_is_taken_as_it_is() -> None:
    point = meeting_point(find_place({**SLURM, "MASTER_PORT": "29501"}, []))
    assert point is not None
    assert (point.ports, point.fixed) == ((29501,), True)


def test_ranks_meet_at_the_first_free_port_and_pass_by_what_listens_on_the_others(
    monkeypatch: pytest.MonkeyPatch, meetings: Meetings
) -> None:
    monkeypatch.setattr("phalanx.rendezvous.search.ANSWER_S", 0.3)
    monkeypatch.setattr("phalanx.rendezvous.opening.ANSWER_S", 0.3)
    monkeypatch.setattr("phalanx.rendezvous.meeting_point.derived_ports", lambda _: derived_ports("the same"))
    ports = derived_ports("the same")
    # A server that says nothing, and rank 0 of another job that comes to the same ports, and waits for its rank 1.
    with socket.create_server(("127.0.0.1", ports[0])):
        other = replace(HERE, job="job 2")
        meetings.start(other, "other 0")
        until = time.monotonic() + 20
        while not _listens(ports[1]) and time.monotonic() < until:
            time.sleep(0.01)
        meetings.start(replace(HERE, rank=1))  # rank 0 is late
        time.sleep(0.05)
        meetings.start(HERE)
        meetings.start(replace(other, rank=1), "other 1")
        stores = meetings.join()
    for mine, theirs, word in ((0, 1, "b"), ("other 0", "other 1", "c")):
        stores[mine].set("a", word)
        assert stores[theirs].get("a") == word.encode()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_rank_that_finds_no_rank_0_says_where_it_looked() -> None:
    with pytest.raises(InitializationError, match=r"rank 1 on .* waited 0 s for rank 0 at 127\.0\.0\.1"):
        meet(replace(HERE, rank=1, job="nobody's"), 0.2, 0)


def test_rank_0_names_the_ranks_that_did_not_come() -> None:
    with pytest.raises(InitializationError, match="after 0 s ranks 1-2 of 3 had not come to rank 0"):
        meet(replace(HERE, world_size=3, local_world_size=3, job="a lonely one's"), 0.2, 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": 1}, r"there are two of rank 1: pid \d+ on \S+ and pid \d+ on"),
        ({"rank": 0}, "there are two of rank 0"),
        ({"rank": 2, "world_size": 4}, r"rank 2 \(pid .* was started for a world of 4, rank 0 \(pid .* for 3"),
    ],
)
def test_a_rank_that_cannot_be_is_refused_and_the_others_still_meet(
    change: dict[str, int],
    words: str,
    meetings: Meetings,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("phalanx.rendezvous.opening.REMIND_S", 0.1)
    place = replace(HERE, world_size=3, local_world_size=3, job="with a stranger")
    meetings.start(place)
    meetings.start(replace(place, rank=1))
    # Both must have come before a second one can be told from the first.
    told, until = "", time.monotonic() + 20
    while "phalanx: waiting for rank 2 of 3, " not in told and time.monotonic() < until:
        told += capfd.readouterr().err
        time.sleep(0.01)
    wrong = replace(place, **{"rank": 1, **change})  # type: ignore[arg-type]
    started = time.monotonic()
    with pytest.raises(InitializationError, match=words):
        meet(replace(wrong, local_world_size=wrong.world_size), 20.0, 0)
    assert time.monotonic() - started < 15  # not the timeout
    meetings.start(replace(place, rank=2))
    stores = meetings.join()
    stores[0].set("a", "b")
    assert stores[1].get("a") == stores[2].get("a") == b"b"
    assert "phalanx: refused a process: " in capfd.readouterr().err


def test_rank_0_on_another_host_than_the_list_says_is_told() -> None:
    elsewhere = replace(HERE, master_addr="192.0.2.7", local_world_size=1, num_nodes=2)
    with pytest.raises(InitializationError, match=r"rank 0 runs on .* and cannot listen on 192.0.2.7"):
        meet(elsewhere, 1.0, 0)


def test_a_broadcast_serves_where_no_variable_does(meetings: Meetings) -> None:
    place = replace(find_place(HYDRA, []), world_size=2)
    heard: list[str] = []
    told = threading.Event()

    def broadcast(words: str | None) -> str:
        if words is not None:
            heard.append(words)
            told.set()
        told.wait(20)
        return heard[0]

    for rank in (0, 1):
        meetings.start(replace(place, rank=rank), broadcast=broadcast)
    stores = meetings.join()
    stores[0].set("a", "b")
    assert stores[1].get("a") == b"b"
