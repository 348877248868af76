"""Hosts as the user writes them, how each is reached and started, and what has to agree before ranks run there."""

from __future__ import annotations

import socket
import sys
from collections import Counter
from pathlib import Path

import pytest

from phalanx.errors import InitializationError, LaunchError
from phalanx.launch.job.hosts import (
    HostSlots,
    fill_hosts,
    find_allocation,
    is_here,
    note_ignored,
    parse_hosts,
    read_hostfile,
)
from phalanx.launch.job.job import make_job
from phalanx.launch.job.mpi_launcher import MpiLauncher
from phalanx.launch.job.options import LaunchOptions
from phalanx.launch.job.target import Target
from phalanx.launch.protocol import Here
from phalanx.launch.starters.hosts import find_differences
from phalanx.launch.starters.invitation import carried_variables
from phalanx.launch.starters.ssh import command_for, parse_starter
from phalanx.launch.starters.tree import FAN, starting_host
from phalanx.system import interfaces
from phalanx.system.host import machine_name
from phalanx.system.interfaces import is_other_host, listening_address, outward_address, outward_addresses


def slots(hosts: list[HostSlots]) -> list[tuple[str, int | None]]:
    return [(host.name, host.slots) for host in hosts]


def test_what_variables_ask_for_is_not_ignored_in_silence() -> None:
    for variables, ranks, asked in (
        ("PET_NNODES=2 PET_NPROC_PER_NODE=2", None, "PET_NNODES=2, PET_NPROC_PER_NODE=2"),
        ("PET_NNODES=1 PET_NPROC_PER_NODE=1", None, ""),
        ("SLURM_NTASKS=2", None, "SLURM_NTASKS=2"),
        ("SLURM_NTASKS=2", 3, ""),
        ("OMPI_COMM_WORLD_SIZE=2", 1, "OMPI_COMM_WORLD_SIZE=2"),
        ("SKYPILOT_NUM_NODES=2 SKYPILOT_NUM_GPUS_PER_NODE=8", 4, "SKYPILOT_NUM_NODES=2"),
        ("DSTACK_NODES_NUM=1 DSTACK_GPUS_PER_NODE=2", None, "DSTACK_GPUS_PER_NODE=2"),
        ("VC_MPIMASTER_NUM=1 VC_MPIWORKER_NUM=2", None, "VC_MPIWORKER_NUM=2"),
        ("PBS_TASKNUM=20000002 PBS_NODENUM=1", None, "PBS_TASKNUM=20000002"),
        ("PBS_TASKNUM=1 PBS_NODENUM=0", None, ""),
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
        ("h1 4\n", "line 1: 'h1 4' is not understood"),
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


TARGET = Target("program", "true", "/bin/true", ("true",))
HYDRA = MpiLauncher("mpich", "Hydra", "/bin/mpiexec")


@pytest.fixture
def two_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with a name that means loopback, a default route by eth0, and a network of its own for ib0."""
    here = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.3", "fd00::3"], "ib0": ["fd01::3", "10.1.0.3"], "down0": []}
    names = {machine_name(): ["127.0.1.1"], "other": ["10.0.0.4"], "fast": ["10.1.0.4"], "alias": ["10.0.0.3"]}
    ways = {"192.0.2.1": "10.0.0.3", "10.0.0.4": "10.0.0.3", "10.1.0.4": "10.1.0.3"}

    def resolve(name: str) -> list[str]:
        if name not in names and not name[0].isdigit():
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return names.get(name, [name])

    monkeypatch.delenv("PHALANX_INTERFACE", raising=False)
    monkeypatch.setattr(interfaces, "interface_addresses", lambda: here)
    monkeypatch.setattr(interfaces, "resolve", resolve)
    monkeypatch.setattr(
        interfaces,
        "_source_address",
        lambda target: target if any(target in own for own in here.values()) else ways.get(target),
    )


@pytest.mark.usefixtures("two_networks")
def test_others_reach_this_host_by_the_chosen_interface() -> None:
    assert outward_address() == "10.0.0.3"
    assert outward_address(["no-such-name", "alias", "fast"]) == "10.1.0.3"
    assert outward_address(["fast"], {"PHALANX_INTERFACE": "eth0"}) == "10.0.0.3"
    assert outward_address([], {"PHALANX_INTERFACE": "ib0"}) == "fd01::3"
    assert outward_addresses([], {"PHALANX_INTERFACE": "ib0"}) == ["10.1.0.3"]
    assert outward_addresses(["fast"]) == ["10.1.0.3", "10.0.0.3"]
    lists = (["fd00::3"], ["fd00::3", "fd01::3"], ["10.0.0.3", "10.1.0.3"])
    assert [*map(listening_address, lists)] == ["fd00::3", "::", "0.0.0.0"]
    with pytest.raises(InitializationError, match="has no address on it"):
        outward_address([], {"PHALANX_INTERFACE": "down0"})


@pytest.mark.usefixtures("two_networks")
def test_launcher_is_reached_by_the_same_address_and_knows_other_hosts() -> None:
    slurm = {"SLURM_JOB_ID": "7"}
    cases: list[tuple[str, str | None, dict[str, str], str]] = [
        ("alias:1,127.0.0.1:1", None, {}, "127.0.0.1"),
        ("alias:1,fast:1", None, {}, "10.1.0.3"),
        ("alias:1,other:1", "ib0", {}, "10.1.0.3"),
        ("alias:1,other:1", None, {"PHALANX_INTERFACE": "ib0"}, "10.1.0.3"),
        ("alias:1,fast:1", "hsn0", {}, "10.1.0.3"),  # an interface that only the ranks' hosts have
        ("", None, slurm, "10.0.0.3"),
        ("", "ib0", slurm, "10.1.0.3"),
    ]
    for hosts, interface, environment, address in cases:
        listed = tuple(parse_hosts(hosts)) if hosts else ()
        options = LaunchOptions(ranks=None if hosts else 2, mpi=HYDRA, hosts=listed, interface=interface or "")
        job = make_job(options, TARGET, environment)
        assert job.addresses == (address,), (hosts, interface)
    assert is_other_host("other")
    assert not any(map(is_other_host, ("alias", machine_name(), "127.0.0.1", "no-such-name")))


def test_this_host_by_any_of_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"elsewhere": ["192.0.2.7"], "wrong": ["127.0.1.1"], "here": ["10.0.0.5"]}

    def resolve(name: str) -> list[str]:
        if name not in table:
            raise OSError
        return table[name]

    monkeypatch.setattr(interfaces, "resolve", resolve)
    monkeypatch.setattr(interfaces, "is_other_host", lambda name: name == "elsewhere")
    assert all(map(is_here, ("localhost", "127.0.0.1", "user@localhost", machine_name(), "here")))
    assert not any(map(is_here, ("elsewhere", "user@elsewhere", "known-to-ssh-alone")))
    with pytest.raises(LaunchError, match=r"wrong resolves to 127\.0\.1\.1"):
        is_here("wrong")
    # A cluster's own names mean nothing to the resolver of this host.
    assert not is_here("wrong", starter=True)


def test_the_command_on_a_host() -> None:
    *ssh, command = command_for("user@far.example", [])
    assert ssh == ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=8", "--", "user@far.example"]
    assert command.startswith(f"exec {sys.executable} -I -S ")
    agent = command_for("localhost", [])
    assert command_for("pod-1", ["kubectl", "exec", "-i"]) == ["kubectl", "exec", "-i", "pod-1", *agent]
    assert command_for("pod-1", parse_starter("kubectl")) == ["kubectl", "exec", "-i", "pod-1", "--", *agent]
    assert command_for("c1", parse_starter("a -n 'b c' {host} --")) == ["a", "-n", "b c", "c1", "--", *agent]


def test_variables_that_differ_between_hosts_stay() -> None:
    user = {"LR": "0.1", "HOME": "/home/a", "SSH_AUTH_SOCK": "/tmp/x", "TMPDIR": "/scratch", "PATH": "/bin", "PWD": "/"}
    assert carried_variables(user) == {"LR": "0.1", "PATH": "/bin"}
    # A batch system has given each host its own devices.
    chosen = {"CUDA_VISIBLE_DEVICES": "2"}
    assert carried_variables(chosen) == chosen
    assert carried_variables({**chosen, "SLURM_JOB_ID": "7"}) == {}
    assert carried_variables(user, ["TMPDIR"]) == {"LR": "0.1", "PATH": "/bin", "TMPDIR": "/scratch"}


def here(**same: str) -> Here:
    return Here(agent=0, pid=1, machine=same.pop("machine"), name=same.pop("name"), same=same)


def test_differences_are_named_with_their_hosts() -> None:
    first = here(machine="1", name="a", Python="3.12", torch="2.14.0", **{"/x/train.py": "one"})
    second = here(machine="2", name="b", Python="3.12", torch="2.13.0", **{"/x/train.py": "two"})
    third = here(machine="3", name="c", Python="3.12", torch="", **{"/x/train.py": "one"})
    assert find_differences(["a", "b", "c"], [first, second, third]) == [
        "torch is 2.14.0 on a; 2.13.0 on b; not installed on c; install the same version on all hosts",
        "/x/train.py is not the same file on a and c; other than on b; copy it to all hosts, or use a directory that "
        "they share",
    ]
    assert find_differences(["a"], [first]) == []
    assert find_differences(["a", "a.ib"], [first, first]) == [
        "a and a.ib are one host, which calls itself a; list it once, with the number of its ranks"
    ]


def test_hosts_are_started_by_the_supervisor_or_by_one_that_comes_before() -> None:
    assert [starting_host(number) for number in range(FAN)] == [None] * FAN
    parents = [starting_host(number) for number in range(FAN, FAN + FAN * FAN)]
    assert all(parent is not None and parent < FAN for parent in parents)
    assert set(Counter(parents).values()) == {FAN}  # each level is shared out evenly over the one before
    assert starting_host(5000) not in (None, *range(FAN))


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[01-02],m", "SLURM_TASKS_PER_NODE": "4(x2),3"}


def test_the_hosts_of_an_allocation(tmp_path: Path) -> None:
    found = find_allocation(SLURM)
    assert found is not None
    assert (found.title, found.starter[0], found.starter[-1]) == ("Slurm's job 7", "srun", "-w")
    assert found.hosts == (HostSlots("n01", 4), HostSlots("n02", 4), HostSlots("m", 3))
    # The script of sbatch and the shell of salloc are no ranks; a task of srun is.
    for step, is_rank in (("4294967291", False), ("4294967290", False), ("0", True)):
        assert (find_allocation({**SLURM, "SLURM_STEP_ID": step}) is None) is is_rank
    # One node is this host, or another one if the shell of salloc has stayed on the login node.
    assert find_allocation({**SLURM, "SLURM_JOB_NODELIST": machine_name(), "SLURM_TASKS_PER_NODE": "4"}) is None
    assert find_allocation({**SLURM, "SLURM_JOB_NODELIST": "another", "SLURM_TASKS_PER_NODE": "4"}) is not None
    assert find_allocation({}) is None
    with pytest.raises(LaunchError, match="name the nodes"):
        find_allocation({**SLURM, "SLURM_TASKS_PER_NODE": "4"})
    nodes = tmp_path / "nodes"
    nodes.write_text("a\na\nb\nb\n")
    pbs = {"PBS_NODEFILE": str(nodes), "PBS_JOBID": "12.server"}
    found = find_allocation(pbs)
    assert found is not None
    assert (found.hosts, found.starter) == ((HostSlots("a", 2), HostSlots("b", 2)), ())
    assert find_allocation({**pbs, "PMI_RANK": "0"}) is None


def test_the_hosts_of_a_job_of_lsf(tmp_path: Path) -> None:
    lsf = {"LSB_JOBID": "9", "LSB_MCPU_HOSTS": "a 1 b 4"}
    found = find_allocation(lsf)
    assert found is not None
    # Also a first host of one slot takes a rank: it is jsrun that starts its tasks elsewhere.
    assert found.hosts == (HostSlots("a", 1), HostSlots("b", 4))
    assert (found.title, found.starter) == ("LSF's job 9", ("blaunch",))
    slots = tmp_path / "slots"
    slots.write_text("a\na\nb\nb\nb\n")
    found = find_allocation({"LSB_JOBID": "9", "LSB_DJOB_HOSTFILE": str(slots)})
    assert found is not None
    assert (found.hosts, found.starter) == ((HostSlots("a", 2), HostSlots("b", 3)), ("blaunch",))
    assert find_allocation({**lsf, "LSB_MCPU_HOSTS": f"{machine_name()} 4"}) is None
    for task in ("JSM_NAMESPACE_RANK", "PMIX_RANK"):
        assert find_allocation({**lsf, task: "0"}) is None
    with pytest.raises(LaunchError, match=r"the hosts of LSF's job 9 cannot be read: .*; name the nodes"):
        find_allocation({**lsf, "LSB_MCPU_HOSTS": "a b"})
