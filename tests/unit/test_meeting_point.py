"""Where ranks meet when the launcher gives no address or no port: known on every rank without a word passing."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import Store, TCPStore

from phalanx.errors import InitializationError
from phalanx.topology.environment import find_place
from phalanx.topology.meeting_point import HIGHEST, LOWEST, derived_ports, meeting_point
from phalanx.topology.place import Place
from phalanx.topology.rendezvous import meet, meet_by_broadcast
from phalanx.topology.signpost import answer_ranks, ask

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


@pytest.fixture(autouse=True, scope="module")
def _first_store() -> None:
    """libuv keeps a pipe for the process from its first loop on, which is no leak of a test's."""
    TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)


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


def both(place: Place, **options: Any) -> list[Store]:
    """Two ranks, as two threads: the stores they found, rank 0's first."""
    stores: dict[int, Store] = {}
    threads = []
    for rank in (1, 0):  # rank 0 is late
        one = replace(place, rank=rank)
        threads.append(
            threading.Thread(target=lambda one=one: stores.update({one.rank: meet(one, 20.0, 0, **options)}))
        )
        threads[-1].start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(30)
    return [stores[0], stores[1]]


def test_ranks_meet_at_the_first_free_port_and_pass_by_what_listens_on_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("phalanx.topology.signpost.ANSWER_S", 0.3)
    ports = derived_ports("job 1")
    others = socket.create_server(("127.0.0.1", ports[1]))
    # A server that says nothing, and rank 0 of another job, which waits for its rank 1.
    with socket.create_server(("127.0.0.1", ports[0])):
        other = threading.Thread(target=answer_ranks, args=(others, "another-word", 2, ("127.0.0.1", 9), 20.0))
        other.start()
        mine, theirs = both(HERE)
        mine.set("a", "b")
        assert theirs.get("a") == b"b"
        assert ask("127.0.0.1", ports[:2], "another-word", 1, 2, 20.0) == ("127.0.0.1", 9)
        other.join(20)


def test_a_rank_that_finds_no_rank_0_says_where_it_looked() -> None:
    with pytest.raises(InitializationError, match=r"rank 1 on .* waited 0 s for rank 0 at 127\.0\.0\.1"):
        meet(replace(HERE, rank=1, job="nobody's"), 0.2, 0)


def test_rank_0_names_the_ranks_that_did_not_come() -> None:
    with pytest.raises(InitializationError, match="after 0 s ranks 1-2 had not come to rank 0"):
        meet(replace(HERE, world_size=3, local_world_size=3, job="a lonely one's"), 0.2, 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": 1}, r"there are two of rank 1: pid \d+ on \S+ and pid \d+ on"),
        ({"rank": 0}, "there are two of rank 0"),
        ({"rank": 2, "world_size": 4}, r"rank 2 \(pid .* was started for a world of 4, rank 0 \(pid .* for 3"),
    ],
)
def test_a_rank_that_cannot_be_is_refused_and_the_others_still_meet(change: dict[str, int], words: str) -> None:
    stores: dict[int, Store] = {}
    place = replace(HERE, world_size=3, local_world_size=3, job="with a stranger")
    point = meeting_point(place)
    assert point is not None

    def join(rank: int) -> None:
        stores[rank] = meet(replace(place, rank=rank), 20.0, 0)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    threads[1].join(20)
    word = hashlib.sha256(f"{point.job}/0".encode()).hexdigest()
    wrong = {"rank": 1, "world_size": 3, **change}
    started = time.monotonic()
    with pytest.raises(InitializationError, match=words):
        ask("127.0.0.1", point.ports, word, wrong["rank"], wrong["world_size"], 20.0)
    assert time.monotonic() - started < 1
    join(2)
    threads[0].join(20)
    stores[0].set("a", "b")
    assert stores[1].get("a") == stores[2].get("a") == b"b"


def test_rank_0_on_another_host_than_the_list_says_is_told() -> None:
    elsewhere = replace(HERE, master_addr="192.0.2.7", local_world_size=1, num_nodes=2)
    with pytest.raises(InitializationError, match=r"rank 0 runs on .* and cannot listen on 192.0.2.7"):
        meet(elsewhere, 1.0, 0)


def test_a_broadcast_serves_where_no_variable_does() -> None:
    place = replace(find_place(HYDRA, []), world_size=2)
    heard: list[str] = []
    told = threading.Event()

    def broadcast(words: str | None) -> str:
        if words is not None:
            heard.append(words)
            told.set()
        told.wait(20)
        return heard[0]

    stores: list[Store] = []
    server = threading.Thread(target=lambda: stores.append(meet_by_broadcast(replace(place, rank=0), 20.0, broadcast)))
    server.start()
    client = meet(replace(place, rank=1), 20.0, 0, broadcast)
    server.join(30)
    stores[0].set("a", "b")
    assert client.get("a") == b"b"
    stores.clear()
