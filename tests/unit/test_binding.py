"""Which cores each rank is bound to, on machines of every shape."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.errors import LaunchError
from phalanx.launch.job.binding import Core, bind_ranks, parse_cpu_list, usable_cpus
from phalanx.launch.job.job import make_job
from phalanx.launch.job.mpi_launcher import MpiLauncher
from phalanx.launch.job.target import Target

# Two NUMA nodes of two physical cores with two threads each, numbered as Linux does: siblings are 4 apart.
TWO_SOCKETS = [Core(cpu % 4 // 2, cpu % 4, cpu) for cpu in range(8)]


@pytest.mark.parametrize(
    ("ranks", "shares"),
    [
        (3, [(0, 4), (1, 5), (2, 6, 3, 7)]),
        (5, [(0,), (4, 1), (5,), (2, 6), (3, 7)]),
        (8, [(0,), (4,), (1,), (5,), (2,), (6,), (3,), (7,)]),
    ],
)
def test_cores_are_divided(ranks: int, shares: list[tuple[int, ...]]) -> None:
    assert bind_ranks("core", ranks, TWO_SOCKETS) == shares


def test_a_numa_node_takes_its_share_of_the_ranks() -> None:
    first, second = (0, 4, 1, 5), (2, 6, 3, 7)
    assert bind_ranks("numa", 2, TWO_SOCKETS) == [first, second]
    assert bind_ranks("numa", 5, TWO_SOCKETS) == [first, first, second, second, second]
    assert bind_ranks("numa", 12, TWO_SOCKETS) == [first] * 6 + [second] * 6
    # A launcher that may use one core of node 0 and three of node 1.
    few = [core for core in TWO_SOCKETS if core.cpu in (0, 2, 3, 6)]
    assert bind_ranks("numa", 4, few) == [(0,), (2, 6, 3), (2, 6, 3), (2, 6, 3)]


def test_too_few_cores_is_an_error_with_both_remedies() -> None:
    with pytest.raises(LaunchError, match=r"9 ranks need a core each.* may use 8 .*at most 8 ranks.*--bind none"):
        bind_ranks("core", 9, TWO_SOCKETS)
    with pytest.raises(LaunchError, match=r"may use 2 "):
        bind_ranks("core", 3, TWO_SOCKETS, most=2)
    target, hydra = Target("script", "t", "/t", ("t",)), MpiLauncher("mpich", "MPICH", "/opt/mpiexec")
    with pytest.raises(LaunchError, match="--mpi 'mpiexec -bind-to core' for MPICH"):  # it binds itself
        make_job(2, target, mpi=hydra, bind="core", environment={})


def test_lists_of_the_kernel() -> None:
    lists = {"0-3,8\n": [0, 1, 2, 3, 8], "5": [5], "": [], "0,2-2": [0, 2], "\n": []}
    assert {text: parse_cpu_list(text) for text in lists} == lists


def test_the_machine_is_read_from_the_kernel(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    (tmp_path / "node" / "node3").mkdir(parents=True)
    (tmp_path / "node" / "node3" / "cpulist").write_text(",".join(map(str, mine)) + "\n")
    siblings = tmp_path / "cpu" / f"cpu{mine[-1]}" / "topology"
    siblings.mkdir(parents=True)
    (siblings / "thread_siblings_list").write_text(f"{mine[0]},{mine[-1]}\n")
    assert usable_cpus(str(tmp_path)) == sorted([*(Core(3, cpu, cpu) for cpu in mine[:-1]), Core(3, mine[0], mine[-1])])
    assert {core.cpu for core in usable_cpus(str(tmp_path / "nothing"))} == set(mine)


@pytest.mark.parametrize("bind", ["core", "numa"])
def test_only_cores_that_the_launcher_may_use(bind: str) -> None:
    all_of_them = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {max(all_of_them)})
        job = make_job(1, Target("script", "t", "/t", ("t",)), bind=bind, environment={})  # type: ignore[arg-type]
    finally:
        os.sched_setaffinity(0, all_of_them)
    assert job.cpus == ((max(all_of_them),),)
    assert [(row.cores, row.threads) for row in job.rows()] == [(1, 1)]


def test_threads_are_a_ranks_share_of_the_cores_it_is_bound_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.launch.job.job.usable_cpus", lambda: TWO_SOCKETS)
    monkeypatch.setattr("phalanx.launch.job.job.usable_cores", lambda: 8)

    def table(ranks: int, bind: str, **environment: str) -> list[tuple[int | None, int | None]]:
        target = Target("script", "t", "/t", ("t",))
        job = make_job(ranks, target, bind=bind, environment=environment)  # type: ignore[arg-type]
        return [(row.cores, row.threads) for row in job.rows()]

    assert table(2, "none") == [(8, 4)] * 2
    assert table(2, "core") == [(4, 4)] * 2
    assert table(3, "core") == [(2, 2), (2, 2), (4, 2)]
    assert table(16, "numa") == [(4, 1)] * 16
    assert table(2, "core", OMP_NUM_THREADS="3") == [(4, 3)] * 2
