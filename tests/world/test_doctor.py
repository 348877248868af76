"""``phalanx doctor`` names what is wrong: a fault is made, on a host or between two, and its cause has to be found."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.launch_support import changed
from tests.support.hosts import TestHosts, running_hosts, why_no_hosts
from tests.support.strangers import as_another_user, needs_another_user

from phalanx.doctor.host import machine

PATIENCE_S = 300.0  # no busy machine needs as long
needs_hosts = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")


@dataclass
class Said:
    """What a doctor has printed with ``--json``, and its exit code."""

    code: int
    answer: dict[str, Any]

    def has(self, subject: str, host: str, level: str, *texts: str) -> None:
        """It said this about a subject, once, at this level and with these words."""
        (found,) = [
            one
            for one in self.answer["findings"]
            if one["subject"] == subject and one["host"] == host and (one["level"] != "ok" or not host)
        ]
        assert found["level"] == level
        assert all(text in f"{found['said']}; {found['remedy']}" for text in texts), found

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


@needs_hosts
def test_this_host_alone_is_looked_at_without_others() -> None:
    """Here its own name and its only interface lead to loopback; no machine has room for so many ranks."""
    doctor = shlex.join([sys.executable, "-m", "phalanx", "doctor"])

    def alone(words: str) -> subprocess.CompletedProcess[str]:
        shell = f"hostname localhost && ip link set lo up && exec {doctor} {words}"
        command = ["unshare", "--net", "--uts", "sh", "-c", shell]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    for words in ("-n 1", "-H localhost:1 --no-rates"):
        done = alone(f"--json {words}")
        assert done.stdout, done.stderr
        said = Said(done.returncode, json.loads(done.stdout))
        subjects = {one["subject"] for one in said.answer["findings"]}
        assert {"python", "torch", "phalanx", "cores", "memory"} <= subjects
        assert said.code == (3 if said.answer["worst"] == "failure" else len(said.complaints()) > 0)
        assert {subject for _, _, subject in said.complaints()}.isdisjoint({"own name", "interface"}), words
    done = alone("-n 100000")
    lines = done.stdout.splitlines()
    cores = next(number for number, line in enumerate(lines) if "100000 ranks would take turns" in line)
    assert lines[cores].startswith("warning  cores")
    assert lines[cores + 1].strip().startswith("→ start fewer ranks")
    assert done.returncode == 3


def test_variables_that_cannot_be_right() -> None:
    """Also of a meeting point: a port that is taken, and loopback for several hosts."""
    wrong = {"PHALANX_INTERFACE": "nope0", "GLOO_SOCKET_IFNAME": "nope1", "RANK": "0", "OMP_NUM_THREADS": "4096"}
    wrong |= {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "PHALANX_INTERFCE": "eth0"}
    said = run_doctor([], wrong)
    assert said.code == 3
    said.has("interface", "", "failure", "nope0", "lo 127.0.0.1")
    said.has("GLOO_SOCKET_IFNAME", "", "failure", "nope1")
    said.has("launcher", "", "failure", "RANK=0", "WORLD_SIZE is not set")
    warned = " ".join(one["said"] + one["remedy"] for one in said.answer["findings"] if one["level"] == "warning")
    for text in ("TORCH_DISTRIBUTED_DEBUG=DETAIL", "did you mean PHALANX_INTERFACE", "OMP_NUM_THREADS=4096"):
        assert text in warned
    slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "3", "SLURM_STEP_ID": "0"}
    run_doctor([], {"RANK": "0", "WORLD_SIZE": "2", **slurm}).has("launcher", "", "failure", "contradict")
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        own = {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        run_doctor([], {**place, **own}).has(f"port {port}", "", "failure", f"pid {os.getpid()}")
    own = {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29533"}
    run_doctor([], {**place, **own}).has("meeting point", "", "failure", "loopback")


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


# A connection that does not come, or stands still, is given up sooner.
QUICK = "from phalanx.doctor import probe\nprobe.CONNECT_S, probe.STILL_S = 1.0, 1.5\n"


class Job:
    """Three hosts, on which the doctor can be asked; a fault is made by shell commands on one of them."""

    def __init__(self, hosts: TestHosts, folder: Path) -> None:
        self.hosts, self._folder = hosts, folder
        self.starter = folder / "starter"
        (variables,) = changed(folder / "quick", QUICK).items()
        self._quick = f"env {'='.join(variables)}"
        self.start_by("")

    def start_by(self, before: str, host: str = "h1") -> None:
        """Let the starter put words before the command of one host."""
        words = {f"h{number}": self._quick for number in range(3)} | ({host: before} if before else {})
        cases = "\n".join(
            f'h{number}|alias{number}) pid={pid}; before="{words[f"h{number}"]}";;'
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
def test_names_and_routes_that_lead_nowhere(job: Job) -> None:
    """A name that means the host itself, one that a host does not know, and a host that lets nothing out."""
    address = [job.hosts.address(host) for host in range(3)]
    job.hosts.set_names(0, {"h0": address[0], "h1": "127.0.1.1"})
    job.hosts.set_names(1, {"h0": address[0], "h1": "127.0.1.1", "h2": address[2]})
    with broken(job, 2, f"ip route add prohibit {address[1]}/32", f"ip route del prohibit {address[1]}/32"):
        said = job.ask("-H h0,h1,h2 --no-rates")
    said.has("to h1", "h0", "failure", "127.0.1.1", "/etc/hosts")
    said.has("own name", "h1", "warning", "127.0.1.1", address[1])
    said.has("to h2", "h0", "failure", "does not resolve", "/etc/hosts")
    said.has("to h2", "h1", "failure", "firewall")
    said.has("to h1", "h2", "failure", "firewall")


@pytest.mark.long
@needs_hosts
def test_cable_that_is_out_and_packets_that_are_too_large(job: Job) -> None:
    job.hosts.cut(1)
    said = job.ask()
    assert {one[1:] for one in said.complaints()} >= {("h0", "to h1"), ("h1", "to h0")}
    assert said.code == 3
    job.hosts.mend()
    with (
        broken(job, 1, "ip link set dev eth0 mtu 9000", "ip link set dev eth0 mtu 1500"),
        broken(job, 0, "ip link set dev eth0 mtu 9000", "ip link set dev eth0 mtu 1500"),
    ):
        said = job.ask("-H h0,h1")
    said.has("to h1", "h0", "failure", "MTU 9000", "mtu")
    assert [one["small_packets_only"] for one in said.answer["pairs"]] == [True, True]


@pytest.mark.long
@needs_hosts
def test_hosts_are_measured_and_a_slow_link_is_found(job: Job) -> None:
    slow = "tc qdisc replace dev eth0 root tbf rate 20mbit burst 32kb latency 50ms"
    with broken(job, 2, slow, "tc qdisc del dev eth0 root"):
        said = job.ask("-H h0,h1,h2")
    for other in ("h0", "h1"):
        said.has(f"to {other}", "h2", "warning", "MB/s")
    pairs = {(one["from"], one["to"]): one for one in said.answer["pairs"]}
    assert sorted(pairs) == [(f"h{i}", f"h{j}") for i in range(3) for j in range(3) if i != j]
    for (_, other), pair in pairs.items():
        assert (pair["error"], pair["interface"], pair["mtu"]) == ("", "eth0", 1500)
        assert pair["address"] == job.hosts.address(int(other[1]))
        assert min(pair["round_trip_us"], pair["bytes_per_s"]) > 0
    assert pairs["h2", "h0"]["bytes_per_s"] < 20e6 / 8 * 1.1
    assert sorted(said.answer["clocks"]) == ["h0", "h1", "h2"]


@needs_hosts
def test_ipv6_alone(job: Job) -> None:
    address = f"{job.hosts.address(1)}/24 dev eth0"
    for host in (0, 1):
        job.hosts.set_names(host, {"h0": job.hosts.address6(0), "h1": job.hosts.address6(1)})
    with broken(job, 1, f"ip addr del {address}", f"ip addr add {address}"):
        said = job.ask()
    said.has("interface", "h1", "warning", "IPv6 only")
    assert [one["error"] for one in said.answer["pairs"]] == ["", ""]


@needs_hosts
def test_directory_that_is_not_everywhere(job: Job, tmp_path: Path) -> None:
    here = tmp_path / "project"
    here.mkdir()
    with broken(job, 1, f"mount -t tmpfs tmpfs {tmp_path}", f"umount {tmp_path}"):
        job.starter.write_text(job.starter.read_text().replace('--wd="$PWD"', "--wd=/"))
        job.ask(cwd=here).has("directory", "h1", "failure", str(here), "No such file")


@needs_hosts
def test_host_that_differs_or_has_too_little(job: Job, tmp_path: Path) -> None:
    """One core by its cgroup's quota, no shared memory, another torch, and a clock that is ahead."""
    metadata = tmp_path / "torch-2.99.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.99.0\n")
    (tmp_path / "sitecustomize.py").write_text("import time\nnow = time.time\ntime.time = lambda: now() + 5\n")
    job.start_by(f"env PYTHONPATH={tmp_path}")
    quota = "mount -t tmpfs tmpfs /sys/fs/cgroup && echo '100000 100000' >/sys/fs/cgroup/cpu.max"
    full = "mount -t tmpfs -o size=32m tmpfs /dev/shm && head -c 32M /dev/zero >/dev/shm/full || true"
    with broken(job, 1, quota, "umount /sys/fs/cgroup"), broken(job, 1, full, "umount /dev/shm"):
        said = job.ask("-H h0:1,h1:2 --no-rates")
    said.has("cores", "h1", "warning", "1 of ", "2 ranks would take turns")
    said.has("/dev/shm", "h1", "failure", "full", "SIGBUS")
    said.has("torch", "", "failure", "2.99.0 on h1", "on h0")
    said.has("clock", "h1", "warning", "5.0 s ahead")
    assert abs(said.answer["clocks"]["h0"]) < 1.0


@needs_hosts
def test_hosts_on_which_nothing_starts(job: Job) -> None:
    script = job.starter.read_text()
    for host, message in (("h1", "Permission denied (publickey,password)."), ("h2", "Host key verification failed.")):
        refuse = f'[ "$host" = {host} ] && {{ echo "{message}" >&2; exit 255; }}\nexec nsenter'
        script = script.replace("exec nsenter", refuse)
    job.starter.write_text(script)
    said = job.ask("-H h0,h1,h2,h9 --no-rates")
    said.has("start", "h1", "failure", "Permission denied", "ssh-copy-id")
    said.has("start", "h2", "failure", "Host key", "ssh-keyscan")
    said.has("start", "h9", "failure", "does not know the name h9")
    assert [one["host"] for one in said.answer["findings"] if one["subject"] == "python"] == ["h0"]
    job.start_by("env -i PATH=/nowhere/ nothing")
    job.hosts.set_names(0, {"h0": job.hosts.address(0), "alias0": job.hosts.address(0)})
    said = job.ask("-H h0,alias0,h1 --no-rates")
    said.has("start", "h1", "failure", "ended")
    said.has("hosts", "", "failure", "h0 and alias0 are one host")
    run_doctor(["-H", "h0", "--starter", "/no/ssh"]).has("start", "h0", "failure", "/no/ssh cannot be started")
