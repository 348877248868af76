"""``phalanx run`` over test hosts: started beside them, as on a cluster's login node, with a look at what it leaves."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest

from tests.launch_support import changed, comm

from .hosts import TestHosts, running_hosts

__all__ = ["RemoteJob", "RemoteLauncher", "hosts", "impatient", "reachable_hosts", "remote"]

PHALANX = ("-m", "phalanx")
_MARK = "TEST_LAUNCH"  # a variable that all processes of a launch have
PATIENCE_S = 120.0  # no busy machine needs as long


@dataclass
class RemoteJob:
    """A launch under way; its output goes to files, so that nobody has to read it meanwhile."""

    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def said(self) -> str:
        return f"exit code {self.process.poll()}\n--- out\n{self.out}--- err\n{self.err}"

    def wait_for_lines(self, count: int, word: str = "") -> None:
        """Wait until so many lines with this word in them have been printed."""
        until = time.monotonic() + PATIENCE_S
        while True:
            has_ended = self.process.poll() is not None  # before what it has printed is counted, which is all then
            if sum(word in line for line in self.out.splitlines()) >= count:
                return
            assert time.monotonic() < until, self.said()
            assert not has_ended, self.said()
            time.sleep(0.005)

    def finish(self) -> int:
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            pytest.fail(self.said())


class RemoteLauncher:
    """Starts launches over hosts.

    Attributes:
        hosts: the hosts.
        own: the numbers of those that launches use, and that are looked at afterwards.
        folder: where scripts are written and launches run.
        files: files that launches find in the place of others.
        python: the interpreter that runs the launcher.
        starter_path: starts a command on a host: ``starter_path h1 COMMAND...``.
        starter: the starter of launches, or the MPI launcher; empty for ssh.
        environment: variables of all launches.
    """

    def __init__(self, hosts: TestHosts, folder: Path, own: Sequence[int] = ()) -> None:
        self.hosts = hosts
        self.own = own or range(hosts.count)
        self.folder = folder
        self.files: dict[str, Path] = {}
        self.python = sys.executable
        self.environment: dict[str, str] = {}
        # A name of its own for each launcher, by which its processes are found.
        self.starter_path = folder / f"starter-{'-'.join(map(str, self.own))}"
        self.starter_path.symlink_to(hosts.starter)
        self.starter = [f"--starter={self.starter_path}"]
        self.jobs: list[RemoteJob] = []
        self.before = {pid for host in self.own for pid in hosts.processes(host)}

    def script(self, text: str, name: str = "script.py") -> str:
        path = self.folder / name
        path.write_text(dedent(text).removeprefix("\n"))
        return str(path)

    def start(
        self, *arguments: str, stdin: bytes | None = None, environment: dict[str, str] | None = None
    ) -> RemoteJob:
        """``phalanx run ARGUMENTS`` by the starter, beside the hosts, so nothing of it is on one of them."""
        folder = self.folder / f"job-{len(self.jobs)}"
        folder.mkdir()
        own = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "NO_COLOR")}
        own["PATH"] = f"{own.get('PATH', '')}:/usr/sbin:/sbin"
        with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
            process = subprocess.Popen(
                [*self.hosts.outside(self.files), self.python, *PHALANX, "run", *self.starter, *arguments],
                stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
                stdout=out,
                stderr=err,
                cwd=self.folder,
                env={**own, _MARK: str(self.starter_path), **self.environment, **(environment or {})},
            )
        if process.stdin is not None and stdin is not None:
            process.stdin.write(stdin)
            process.stdin.close()
        self.jobs.append(RemoteJob(process, folder))
        return self.jobs[-1]

    def run(self, *arguments: str, stdin: bytes | None = None, environment: dict[str, str] | None = None) -> RemoteJob:
        job = self.start(*arguments, stdin=stdin, environment=environment)
        job.finish()
        return job

    def wait_for_process(self, host: int, name: str) -> int:
        """The process of this name on a host, as soon as there is one."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            for pid in self.hosts.processes(host):
                if comm(pid) == name:
                    return pid
            time.sleep(0.005)
        pytest.fail(f"there is no {name} on h{host}")

    def left(self) -> list[str]:
        """Every process and file that a launch has left on any host, and the processes that it has left here."""
        found = []
        for host in self.own:
            found += [f"h{host}: {pid} {comm(pid)}" for pid in self.hosts.processes(host) if pid not in self.before]
            shared = Path(f"/proc/{self.hosts.holder(host)}/root/dev/shm")
            found += [f"h{host}: {path.name} in /dev/shm" for path in shared.iterdir()]
        words = str(self.starter_path).encode()
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                # Ranks of the launcher's own host show it in their environment only.
                if any(words in Path(f"/proc/{name}/{file}").read_bytes() for file in ("cmdline", "environ")):
                    found.append(f"here: {name} {comm(int(name))}")
        return found

    def check(self, within_s: float = 20.0) -> float:
        """Nothing is left anywhere, ``within_s`` seconds from now; how long that took."""
        began = time.monotonic()
        while left := self.left():
            if time.monotonic() > began + within_s:
                pytest.fail("\n".join([f"left after {within_s:.0f} s:", *left]))
            time.sleep(0.02)
        return time.monotonic() - began

    def clear(self) -> None:
        """End whatever a test has left, so that the next one can be judged for itself."""
        for host in self.own:
            self.hosts.mend(host)
        for job in self.jobs:
            if job.process.poll() is None:
                job.process.kill()
                job.process.wait()
        for host in self.own:
            self.hosts.kill_all(host, but=self.before)


def impatient(folder: Path) -> dict[str, str]:
    """The environment of a launch to which a host is lost after two seconds of silence, in place of four."""
    return changed(
        folder,
        """
        from phalanx.launch import link
        from phalanx.wire.sockets import KeepAlive
        link._KEEP_ALIVE = KeepAlive(1, 1, 1, 1)
        """,
    )


@contextlib.contextmanager
def reachable_hosts(count: int, folder: Path) -> Iterator[TestHosts]:
    """``count`` hosts that a launch from beside them can reach."""
    with running_hosts(count, folder) as hosts:
        hosts.join_switch()
        yield hosts


@contextlib.contextmanager
def launching(launcher: RemoteLauncher) -> Iterator[RemoteLauncher]:
    """The launcher, of which nothing may be left."""
    try:
        yield launcher
        launcher.check()
    finally:
        launcher.clear()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHosts]:
    with reachable_hosts(2, tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture
def remote(hosts: TestHosts, tmp_path: Path) -> Iterator[RemoteLauncher]:
    with launching(RemoteLauncher(hosts, tmp_path)) as launcher:
        yield launcher
