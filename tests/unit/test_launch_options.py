"""What options of ``phalanx run`` make of a job: outputs, times, rehearsed hosts, cores of ranks, and their memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from phalanx.commands.run import run
from phalanx.errors import LaunchError
from phalanx.launch.job import memory
from phalanx.launch.job.binding import Core, bind_ranks, parse_cpu_list, usable_cpus
from phalanx.launch.job.job import make_job
from phalanx.launch.job.mpi_launcher import MpiLauncher
from phalanx.launch.job.options import LaunchOptions, decide_output
from phalanx.launch.job.target import Target

# -- outputs and times ---------------------------------------------------------------------------------


def test_which_ranks_are_shown_and_what_makes_no_sense() -> None:
    for log_dir, tee, only, shown in (
        (None, False, None, [0, 1, 2, 3, 4]),
        (None, False, "0,2-3", [0, 2, 3]),
        (None, False, " 4 , 1 - 1 ", [1, 4]),
        ("logs", False, None, []),
        ("logs", True, None, [0, 1, 2, 3, 4]),
        ("logs", False, "1", [1]),
    ):
        options = decide_output(log_dir, tee=tee, only=only)
        options.check(5)
        assert [rank for rank in range(5) if options.shows(rank)] == shown
        assert options.log_of(3) == ("logs/rank-3.log" if log_dir else "")
        assert bool(options.note(5)) == (log_dir is not None and not shown)
    for log_dir, tee, only, said in (
        (None, True, None, "--log-dir DIR"),
        ("logs", True, "0", "--only 0"),
        ("", False, None, "empty"),
        (None, False, "3-2", "'3-2'"),
        (None, False, "0,,1", "0,2-3"),
        (None, False, "all", "'all'"),
    ):
        with pytest.raises(LaunchError) as error:
            decide_output(log_dir, tee=tee, only=only)
        assert said in str(error.value)
    with pytest.raises(LaunchError, match=r"no rank 5; the job has 5 ranks"):
        decide_output(None, tee=False, only="0-5").check(5)


@pytest.mark.parametrize("option", ["--grace", "--warn-after", "--report-after"])
def test_times_that_cannot_be_waited_for_are_refused(option: str) -> None:
    for given in ("nan", "-1", "3000000", "soon"):
        done = CliRunner().invoke(run, ["-n", "2", option, given, "true"])
        assert done.exit_code == 2
        assert f"Invalid value for '{option}'" in done.output


# -- rehearsed hosts and devices -----------------------------------------------------------------------

SCRIPT = Target("script", "train.py", "/train.py", ("train.py", "--lr", "1"))


def test_the_device_of_each_rank() -> None:
    def devices(device: str | None, **environment: str) -> list[str]:
        job = make_job(LaunchOptions(ranks=2, device=device), SCRIPT, environment)
        told = {job.environment(rank, port=1).get("PHALANX_DEVICE") for rank in range(2)}
        assert told == {device or environment.get("PHALANX_DEVICE")}
        return [row.device for row in job.rows()]

    for wrong in ("", "3", "cuda:x", "CUDA"):
        with pytest.raises(LaunchError, match="is not a device"):
            devices(wrong)
    assert devices("cuda") == ["cuda:0", "cuda:1"]
    assert devices("cpu") == ["cpu", "cpu"]
    assert devices("xpu:1") == ["xpu:1", "xpu:1"]
    assert devices(None, PHALANX_DEVICE="npu") == ["npu:0", "npu:1"]


# -- the cores of a rank -------------------------------------------------------------------------------

# Two NUMA nodes of two physical cores with two threads each, numbered as Linux does: siblings are 4 apart.
TWO_SOCKETS = [Core(cpu % 4 // 2, cpu % 4, cpu) for cpu in range(8)]


def test_cores_are_divided_and_a_numa_node_takes_its_share() -> None:
    assert bind_ranks("core", 3, TWO_SOCKETS) == [(0, 4), (1, 5), (2, 6, 3, 7)]
    assert bind_ranks("core", 5, TWO_SOCKETS) == [(0,), (4, 1), (5,), (2, 6), (3, 7)]
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
    hydra = MpiLauncher("mpich", "MPICH", "/opt/mpiexec")
    with pytest.raises(LaunchError, match="--mpi 'mpiexec -bind-to core' for MPICH"):  # it binds itself
        make_job(LaunchOptions(ranks=2, mpi=hydra, bind="core"), SCRIPT, {})


def test_the_machine_is_read_from_the_kernel(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    (tmp_path / "node" / "node3").mkdir(parents=True)
    (tmp_path / "node" / "node3" / "cpulist").write_text(",".join(map(str, mine)) + "\n")
    siblings = tmp_path / "cpu" / f"cpu{mine[-1]}" / "topology"
    siblings.mkdir(parents=True)
    (siblings / "thread_siblings_list").write_text(f"{mine[0]},{mine[-1]}\n")
    assert usable_cpus(str(tmp_path)) == sorted([*(Core(3, cpu, cpu) for cpu in mine[:-1]), Core(3, mine[0], mine[-1])])
    assert {core.cpu for core in usable_cpus(str(tmp_path / "nothing"))} == set(mine)
    lists = {"0-3,8\n": [0, 1, 2, 3, 8], "5": [5], "": [], "0,2-2": [0, 2], "\n": []}
    assert {text: parse_cpu_list(text) for text in lists} == lists


@pytest.mark.parametrize("bind", ["core", "numa"])
def test_only_cores_that_the_launcher_may_use(bind: str) -> None:
    all_of_them = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {max(all_of_them)})
        job = make_job(LaunchOptions(ranks=1, bind=bind), SCRIPT, {})  # type: ignore[arg-type]
    finally:
        os.sched_setaffinity(0, all_of_them)
    assert job.cpus == ((max(all_of_them),),)
    assert [(row.cores, row.threads) for row in job.rows()] == [(1, 1)]


def test_threads_are_a_ranks_share_of_the_cores_it_is_bound_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.launch.job.binding.usable_cpus", lambda: TWO_SOCKETS)
    monkeypatch.setattr("phalanx.launch.job.job.usable_cores", lambda: 8)

    def table(ranks: int, bind: str, **environment: str) -> list[tuple[int | None, int | None]]:
        job = make_job(LaunchOptions(ranks=ranks, bind=bind), SCRIPT, environment)  # type: ignore[arg-type]
        return [(row.cores, row.threads) for row in job.rows()]

    assert table(2, "none") == [(8, 4)] * 2
    assert table(2, "core") == [(4, 4)] * 2
    assert table(3, "core") == [(2, 2), (2, 2), (4, 2)]
    assert table(16, "numa") == [(4, 1)] * 16
    assert table(2, "core", OMP_NUM_THREADS="3") == [(4, 3)] * 2


# -- memory ---------------------------------------------------------------------------------------------


MIB = 1 << 20
HUGE = {memory.HUGE: "1"}


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stand-in for the kernel's file about huge pages, which says that programs may ask for them."""
    file = tmp_path / "enabled"
    file.write_text("always [madvise] never\n")
    monkeypatch.setattr(memory, "_ENABLED", str(file))
    return file


def chosen(mode: memory.Mode, **environment: str) -> dict[str, str]:
    return memory.variables(mode, 4, 1600 * MIB, environment)


@pytest.mark.usefixtures("offered")
def test_each_mode_sets_the_variables_that_torch_and_glibc_read() -> None:
    assert chosen("huge") == HUGE
    # All four ranks together keep at most a quarter of the 1,600 MiB that are left.
    assert chosen("keep") == HUGE | {memory.MMAP_MAX: "0", memory.TRIM_THRESHOLD: str(100 * MIB)}
    assert chosen("return") == {}
    # An allocator that the user has set up is left alone.
    for name, value in (("MALLOC_TOP_PAD_", "4096"), (memory.HUGE, "0"), ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")):
        assert chosen("huge", **{name: value}) == chosen("keep", **{name: value}) == {}


def test_kernel_without_huge_pages_is_not_asked_for_them(offered: Path) -> None:
    offered.write_text("always madvise [never]\n")
    assert chosen("huge") == {}
    assert memory.HUGE not in chosen("keep")
    offered.unlink()
    assert chosen("huge") == {}


def test_ranks_on_an_accelerator_and_other_programs_get_none_of_them() -> None:
    assert make_job(LaunchOptions(ranks=2, device="cuda", memory_mode="keep"), SCRIPT, {}).memory == {}
    program = Target("program", "true", "/bin/true", ("true",))
    assert make_job(LaunchOptions(ranks=2, device="cpu", memory_mode="keep"), program, {}).memory == {}
    assert make_job(LaunchOptions(ranks=2, device="cpu", memory_mode="keep"), SCRIPT, {}).memory[memory.MMAP_MAX] == "0"
