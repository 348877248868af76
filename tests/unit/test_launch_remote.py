"""What ``phalanx run -H`` decides before a host is reached: hosts, starters, variables, and what has to agree."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import LaunchError
from phalanx.launch.job.allocation import find_allocation
from phalanx.launch.job.host_slots import HostSlots
from phalanx.launch.job.reach import is_here
from phalanx.launch.remote.agreement import find_differences
from phalanx.launch.remote.environment import carried_variables
from phalanx.launch.remote.starter import command_for
from phalanx.launch.remote.tree import FAN, starting_host
from phalanx.system import interfaces
from phalanx.system.host import machine_name

SCRIPT = str(Path(__file__))


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


def test_variables_that_differ_between_hosts_stay() -> None:
    user = {"LR": "0.1", "HOME": "/home/a", "SSH_AUTH_SOCK": "/tmp/x", "TMPDIR": "/scratch", "PATH": "/bin", "PWD": "/"}
    assert carried_variables(user) == {"LR": "0.1", "PATH": "/bin"}
    # A batch system has given each host its own devices.
    chosen = {"CUDA_VISIBLE_DEVICES": "2"}
    assert carried_variables(chosen) == chosen
    assert carried_variables({**chosen, "SLURM_JOB_ID": "7"}) == {}
    assert carried_variables(user, ["TMPDIR"]) == {"LR": "0.1", "PATH": "/bin", "TMPDIR": "/scratch"}


def here(**same: str) -> dict[str, Any]:
    return {"machine": same.pop("machine"), "name": same.pop("name"), "problems": [], "same": same}


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


def test_hosts_are_started_by_the_head_or_by_one_that_comes_before() -> None:
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
