"""``phalanx doctor`` names what is wrong: a fault is made, on a host or between two, and its cause has to be found."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.hosts import TestHosts, running_hosts, why_no_hosts
from tests.support.strangers import as_another_user, needs_another_user

from phalanx.doctor.machine import machine

PATIENCE_S = 300.0  # no busy machine needs as long
needs_hosts = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")


@dataclass
class Said:
    """What a doctor has printed with ``--json``, and its exit code."""

    code: int
    answer: dict[str, Any]

    def about(self, subject: str, host: str = "") -> tuple[str, str]:
        """The level and the text, with the remedy, of what it said about a subject; it said so once."""
        found = [
            (one["level"], f"{one['said']}; {one['remedy']}")
            for one in self.answer["findings"]
            if one["subject"] == subject and one["host"] == host and (one["level"] != "ok" or not host)
        ]
        assert len(found) == 1, self.answer["findings"]
        return found[0]

    def complaints(self) -> list[tuple[str, str, str]]:
        """The level, host and subject of everything that is not well."""
        return [(one["level"], one["host"], one["subject"]) for one in self.answer["findings"] if one["level"] != "ok"]


def run_doctor(words: Sequence[str], environment: Mapping[str, str] | None = None, cwd: Path | None = None) -> Said:
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "doctor", "--json", *words],
        env={**os.environ, **(environment or {})},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stdout, done.stderr
    return Said(done.returncode, json.loads(done.stdout))


# -- one host ------------------------------------------------------------------------------------------


def test_a_host_without_faults_is_told_so() -> None:
    said = run_doctor(["-n", "1"])
    subjects = [one["subject"] for one in said.answer["findings"]]
    for subject in ("python", "torch", "phalanx", "cores", "memory", "interface", "launcher"):
        assert subject in subjects
    assert said.code == (3 if said.answer["worst"] == "failure" else len(said.complaints()) > 0)
    assert "failure" not in [level for level, _, _ in said.complaints()]


@needs_hosts
def test_this_host_alone_needs_no_name_or_interface_for_others() -> None:
    # A namespace in which the host's own name and its only interface lead to loopback.
    alone = "hostname localhost && ip link set lo up && exec " + shlex.join([sys.executable, "-m", "phalanx", "doctor"])
    for words in ("-n 1", "-H localhost:1 --no-rates"):
        done = subprocess.run(
            ["unshare", "--net", "--uts", "sh", "-c", f"{alone} --json {words}"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.stdout, done.stderr
        said = Said(done.returncode, json.loads(done.stdout))
        assert {subject for _, _, subject in said.complaints()}.isdisjoint({"own name", "interface"}), words


def test_an_interface_that_is_not_there() -> None:
    said = run_doctor([], {"PHALANX_INTERFACE": "nope0"})
    level, text = said.about("interface")
    assert level == "failure"
    assert said.code == 3
    assert "nope0" in text
    assert "lo 127.0.0.1" in text
    level, text = run_doctor([], {"GLOO_SOCKET_IFNAME": "nope1"}).about("GLOO_SOCKET_IFNAME")
    assert level == "failure"
    assert "nope1" in text


@pytest.mark.parametrize(
    ("environment", "texts"),
    [
        ({"RANK": "0"}, ["RANK=0", "WORLD_SIZE is not set"]),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "3", "SLURM_STEP_ID": "0"},
            ["contradict"],
        ),
    ],
)
def test_variables_that_contradict_each_other(environment: dict[str, str], texts: list[str]) -> None:
    level, text = run_doctor([], environment).about("launcher")
    assert level == "failure"
    assert all(one in text for one in texts)


def test_a_port_that_is_taken_and_who_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        said = run_doctor([], {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    level, text = said.about(f"port {port}")
    assert level == "failure"
    assert f"pid {os.getpid()}" in text


def test_rank_0_at_loopback_for_several_hosts() -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29533"}
    level, text = run_doctor([], place).about("meeting point")
    assert level == "failure"
    assert "loopback" in text


def test_variables_that_change_what_happens_or_are_misspelt() -> None:
    said = run_doctor([], {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "PHALANX_INTERFCE": "eth0", "OMP_NUM_THREADS": "4096"})
    texts = " ".join(one["said"] + one["remedy"] for one in said.answer["findings"] if one["level"] == "warning")
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" in texts
    assert "did you mean PHALANX_INTERFACE" in texts
    assert "OMP_NUM_THREADS=4096" in texts


@needs_another_user
def test_a_process_limit_that_is_too_low() -> None:
    def look() -> list[tuple[int, str, str, str]]:
        import resource

        resource.setrlimit(resource.RLIMIT_NPROC, (9, 9))
        return [(int(one.level), one.subject, one.said, one.remedy) for one in machine(8)]

    found = {subject: (level, f"{said}; {remedy}") for level, subject, said, remedy in as_another_user(look)}
    level, text = found["processes and threads"]
    assert level == 2
    assert "not for 8" in text
    assert "ulimit -u" in text


# -- several hosts -------------------------------------------------------------------------------------


class Job:
    """Three hosts, on which the doctor can be asked; a fault is made by shell commands on one of them."""

    def __init__(self, hosts: TestHosts, folder: Path) -> None:
        self.hosts, self._folder = hosts, folder
        self.starter = folder / "starter"
        self.start_by("")

    def start_by(self, before: str, host: str = "h1") -> None:
        """Let the starter put words before the command of one host."""
        cases = "\n".join(
            f'h{number}|alias{number}) pid={pid}; before="{before if host == f"h{number}" else ""}";;'
            for number, pid in enumerate(self.hosts.inside)
        )
        self.starter.write_text(
            "#!/bin/sh\nhost=$1; shift; before=\n"
            f'case $host in\n{cases}\n*) echo "ssh: Could not resolve hostname $host" >&2; exit 255;;\nesac\n'
            'exec nsenter -t $pid -m -u -n -p --wd="$PWD" -- $before "$@"\n'
        )
        self.starter.chmod(0o755)

    def shell(self, host: int, command: str) -> None:
        done = self.hosts.start(host, ["sh", "-c", command], {}, stderr=subprocess.PIPE)
        _, errors = done.communicate(timeout=PATIENCE_S)
        assert done.returncode == 0, errors

    def ask(self, words: str = "-H h0,h1 --no-rates", *, cwd: Path | None = None) -> Said:
        return run_doctor([*shlex.split(words), "--starter", str(self.starter)], cwd=cwd)


@pytest.fixture(scope="module")
def three_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    folder = tmp_path_factory.mktemp("doctor")
    with running_hosts(3, folder) as hosts:
        yield Job(hosts, folder)


@pytest.fixture
def job(three_hosts: Job) -> Iterator[Job]:
    try:
        yield three_hosts
    finally:
        three_hosts.start_by("")
        three_hosts.hosts.reset_names()
        three_hosts.hosts.mend()


@contextlib.contextmanager
def broken(job: Job, host: int, fault: str, mend: str) -> Iterator[None]:
    """While a command's fault is there."""
    job.shell(host, fault)
    try:
        yield
    finally:
        job.shell(host, mend)


@needs_hosts
def test_hosts_without_faults_are_measured(job: Job) -> None:
    said = job.ask("-H h0:1,h1:1,h2:1")
    assert [one for one in said.complaints() if one[0] == "failure"] == []
    pairs = {(one["from"], one["to"]): one for one in said.answer["pairs"]}
    assert sorted(pairs) == [(f"h{i}", f"h{j}") for i in range(3) for j in range(3) if i != j]
    for (_, other), pair in pairs.items():
        assert pair["error"] == ""
        assert pair["interface"] == "eth0"
        assert pair["mtu"] == 1500
        assert pair["address"] == job.hosts.address(int(other[1]))
        assert pair["round_trip_us"] > 0
        assert pair["bytes_per_s"] > 0
    assert sorted(said.answer["clocks"]) == ["h0", "h1", "h2"]


@needs_hosts
def test_a_name_that_leads_to_the_host_itself(job: Job) -> None:
    job.hosts.set_names(0, {"h0": job.hosts.address(0), "h1": "127.0.1.1"})
    job.hosts.set_names(1, {"h0": job.hosts.address(0), "h1": "127.0.1.1"})
    said = job.ask()
    level, text = said.about("to h1", "h0")
    assert level == "failure"
    assert "127.0.1.1" in text
    assert "/etc/hosts" in text
    level, text = said.about("own name", "h1")
    assert level == "warning"
    assert "127.0.1.1" in text
    assert job.hosts.address(1) in text


@needs_hosts
def test_a_name_that_one_host_does_not_know(job: Job) -> None:
    job.hosts.set_names(0, {"h0": job.hosts.address(0)})
    level, text = job.ask().about("to h1", "h0")
    assert level == "failure"
    assert "does not resolve" in text
    assert "/etc/hosts" in text


@needs_hosts
def test_a_host_that_lets_nothing_out(job: Job) -> None:
    address = job.hosts.address(0)
    with broken(job, 1, f"ip route add prohibit {address}/32", f"ip route del prohibit {address}/32"):
        said = job.ask()
    for host, other in (("h0", "h1"), ("h1", "h0")):
        level, text = said.about(f"to {other}", host)
        assert level == "failure"
        assert "firewall" in text


@needs_hosts
def test_a_cable_that_is_out(job: Job) -> None:
    job.hosts.cut(1)
    said = job.ask()
    assert {one[1:] for one in said.complaints()} >= {("h0", "to h1"), ("h1", "to h0")}
    assert said.code == 3


@needs_hosts
def test_packets_that_are_too_large_for_the_way(job: Job) -> None:
    with broken(job, 1, "ip link set dev eth0 mtu 9000", "ip link set dev eth0 mtu 1500"):
        job.shell(0, "ip link set dev eth0 mtu 9000")
        try:
            said = job.ask("-H h0,h1")
        finally:
            job.shell(0, "ip link set dev eth0 mtu 1500")
    level, text = said.about("to h1", "h0")
    assert level == "failure"
    assert "MTU 9000" in text
    assert "mtu" in text
    assert [one["small_packets_only"] for one in said.answer["pairs"]] == [True, True]


@needs_hosts
def test_a_slow_link(job: Job) -> None:
    slow = "tc qdisc replace dev eth0 root tbf rate 20mbit burst 32kb latency 50ms"
    with broken(job, 2, slow, "tc qdisc del dev eth0 root"):
        said = job.ask("-H h0,h1,h2")
    for other in ("h0", "h1"):
        level, text = said.about(f"to {other}", "h2")
        assert level == "warning"
        assert "MB/s" in text
    rates = {(one["from"], one["to"]): one["bytes_per_s"] for one in said.answer["pairs"]}
    assert rates["h2", "h0"] < 20e6 / 8 * 1.1


@needs_hosts
def test_ipv6_alone(job: Job) -> None:
    address = f"{job.hosts.address(1)}/24 dev eth0"
    for host in (0, 1):
        job.hosts.set_names(host, {"h0": job.hosts.address6(0), "h1": job.hosts.address6(1)})
    with broken(job, 1, f"ip addr del {address}", f"ip addr add {address}"):
        said = job.ask()
    level, text = said.about("interface", "h1")
    assert level == "warning"
    assert "IPv6 only" in text
    assert [one["error"] for one in said.answer["pairs"]] == ["", ""]


@needs_hosts
def test_one_core_by_the_cgroups_quota(job: Job) -> None:
    fault = "mount -t tmpfs tmpfs /sys/fs/cgroup && echo '100000 100000' >/sys/fs/cgroup/cpu.max"
    with broken(job, 1, fault, "umount /sys/fs/cgroup"):
        level, text = job.ask("-H h0:1,h1:2 --no-rates").about("cores", "h1")
    assert level == "warning"
    assert text.startswith("1 of ")
    assert "2 ranks would take turns" in text


@needs_hosts
def test_a_full_dev_shm(job: Job) -> None:
    fault = "mount -t tmpfs -o size=32m tmpfs /dev/shm && head -c 32M /dev/zero >/dev/shm/full || true"
    with broken(job, 1, fault, "umount /dev/shm"):
        level, text = job.ask().about("/dev/shm", "h1")
    assert level == "failure"
    assert "full" in text
    assert "SIGBUS" in text


@needs_hosts
def test_a_directory_that_is_not_everywhere(job: Job, tmp_path: Path) -> None:
    here = tmp_path / "project"
    here.mkdir()
    with broken(job, 1, f"mount -t tmpfs tmpfs {tmp_path}", f"umount {tmp_path}"):
        job.start_by("")
        script = job.starter.read_text().replace('--wd="$PWD"', "--wd=/")
        job.starter.write_text(script)
        said = job.ask(cwd=here)
    level, text = said.about("directory", "h1")
    assert level == "failure"
    assert str(here) in text
    assert "No such file" in text


@needs_hosts
def test_another_torch(job: Job, tmp_path: Path) -> None:
    metadata = tmp_path / "torch-2.99.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.99.0\n")
    job.start_by(f"env PYTHONPATH={tmp_path}")
    level, text = job.ask().about("torch")
    assert level == "failure"
    assert "2.99.0 on h1" in text
    assert "on h0" in text


@needs_hosts
def test_a_clock_that_is_ahead(job: Job, tmp_path: Path) -> None:
    source = tmp_path / "ahead.c"
    source.write_text(
        textwrap.dedent("""
        #define _GNU_SOURCE
        #include <sys/syscall.h>
        #include <time.h>
        #include <unistd.h>

        int clock_gettime(clockid_t clock, struct timespec *now)
        {
            long failed = syscall(SYS_clock_gettime, clock, now);
            if (clock == CLOCK_REALTIME)
                now->tv_sec += 5;
            return (int)failed;
        }
        """)
    )
    library = tmp_path / "ahead.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    job.start_by(f"env LD_PRELOAD={library}")
    said = job.ask()
    level, text = said.about("clock", "h1")
    assert level == "warning"
    assert "5.0 s ahead" in text
    assert abs(said.answer["clocks"]["h0"]) < 1.0


@needs_hosts
@pytest.mark.parametrize(
    ("before", "texts"),
    [
        (
            "sh -c 'echo Permission denied \\(publickey,password\\). >&2; exit 255'",
            ["Permission denied", "ssh-copy-id"],
        ),
        ("sh -c 'echo Host key verification failed. >&2; exit 255'", ["Host key", "ssh-keyscan"]),
        ("env -i PATH=/nowhere/", ["ended"]),
    ],
)
def test_a_host_on_which_nothing_starts(job: Job, before: str, texts: list[str]) -> None:
    job.starter.write_text(
        job.starter.read_text().replace("exec nsenter", f'[ "$host" = h1 ] && exec {before} nothing "$@"\nexec nsenter')
    )
    said = job.ask()
    level, text = said.about("start", "h1")
    assert level == "failure"
    assert all(one in text for one in texts)
    assert [one["host"] for one in said.answer["findings"] if one["subject"] == "python"] == ["h0"]


@needs_hosts
def test_a_host_that_nobody_knows_and_one_by_two_names(job: Job) -> None:
    assert "does not know the name h9" in job.ask("-H h0,h9 --no-rates").about("start", "h9")[1]
    job.hosts.set_names(0, {"h0": job.hosts.address(0), "alias0": job.hosts.address(0)})
    assert "h0 and alias0 are one host" in job.ask("-H h0,alias0 --no-rates").about("hosts")[1]


def test_a_starter_that_is_not_there() -> None:
    said = run_doctor(["-H", "h0", "--starter", "/nowhere/ssh"])
    level, text = said.about("start", "h0")
    assert level == "failure"
    assert "/nowhere/ssh cannot be started" in text


def test_text_for_people() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "doctor", "-n", "100000"], capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    cores = next(number for number, line in enumerate(lines) if "100000 ranks would take turns" in line)
    assert lines[cores].startswith("warning  cores")
    assert lines[cores + 1].strip().startswith("→ start fewer ranks")
    assert done.returncode == 3  # the memory of no machine is enough
