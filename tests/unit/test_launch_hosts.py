"""Hosts as the user writes them, and which rank goes where."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.errors import LaunchError
from phalanx.launch.job.host_slots import HostSlots, fill_hosts, parse_hosts, read_hostfile
from phalanx.place.allocated import note_ignored


def slots(hosts: list[HostSlots]) -> list[tuple[str, int | None]]:
    return [(host.name, host.slots) for host in hosts]


def test_what_variables_ask_for_is_not_ignored_in_silence() -> None:
    for variables, ranks, asked in (
        ("PET_NNODES=2 PET_NPROC_PER_NODE=2", None, "PET_NNODES=2, PET_NPROC_PER_NODE=2"),
        ("PET_NNODES=1 PET_NPROC_PER_NODE=1", None, ""),
        ("SLURM_NTASKS=2", None, "SLURM_NTASKS=2"),
        ("SLURM_NTASKS=2", 3, ""),
        ("OMPI_COMM_WORLD_SIZE=2", 1, "OMPI_COMM_WORLD_SIZE=2"),
    ):
        environment = dict(pair.split("=") for pair in variables.split())
        assert note_ignored(environment, ranks).partition(": phalanx run ignores that")[0] == asked


def test_hosts() -> None:
    assert slots(parse_hosts("h1:4,h2")) == [("h1", 4), ("h2", None)]
    assert slots(parse_hosts("h1,h1,h2:3")) == [("h1", 2), ("h2", 3)]  # neighbours are added up as by mpiexec
    assert slots(parse_hosts(" node-7.rack , 10.0.0.3:2 ")) == [("node-7.rack", None), ("10.0.0.3", 2)]
    for wrong in ("", "h1,,h2", "h1:0", "h1:x", ":4", "h1:2,h2:1,h1:2", "a b"):
        with pytest.raises(LaunchError, match="--hosts"):
            parse_hosts(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "h1:2\nh2:3\n",  # MPICH, Intel MPI
        "h1 slots=2\nh2 slots=3 max_slots=4  # slow\n",  # Open MPI
        "# DeepSpeed\nh1 slots=2\n\nh2 slots=3\n",
        "h1\nh1\nh2\nh2\nh2\n",  # PBS
        "h1 slots = 2\nh2\tslots= 3\n",
    ],
)
def test_hostfiles_of_all_launchers(tmp_path: Path, text: str) -> None:
    (tmp_path / "hosts").write_text(text)
    assert read_hostfile(str(tmp_path / "hosts")) == [HostSlots("h1", 2), HostSlots("h2", 3)]


def test_hostfiles_that_make_no_sense(tmp_path: Path) -> None:
    for text, said in (
        ("h1 4\n", "line 1: '4' is not understood"),
        ("h1\nh2 slots=none\n", "line 2"),
        ("# nothing\n", "names no host"),
        ("h1\nh2\nh1\n", "h1 is listed twice"),
    ):
        (tmp_path / "hosts").write_text(text)
        with pytest.raises(LaunchError, match=said):
            read_hostfile(str(tmp_path / "hosts"))


def test_each_host_is_filled_before_the_next() -> None:
    for hosts, ranks, ppn, expected in (
        ("a:2,b:2", None, None, [("a", 2), ("b", 2)]),
        ("a:2,b:2", 3, None, [("a", 2), ("b", 1)]),
        ("a:2,b:2", 2, None, [("a", 2)]),
        ("b,a", 2, 1, [("b", 1), ("a", 1)]),
        ("a,b", None, None, [("a", 1), ("b", 1)]),
    ):
        assert slots(fill_hosts(parse_hosts(hosts), ranks, ppn)) == expected
    with pytest.raises(LaunchError, match=r"-n 5: the hosts take 2 ranks \(a:1, b:1\).*--hosts a:3"):
        fill_hosts(parse_hosts("a,b"), 5)
