"""Hosts on one machine for a test: each has its own network, host name, process ids and /dev/shm.

They are connected to one switch, in a network namespace of their own, so this machine's network is left as it is. Every
host is held by a pipe of this process: when that closes, whatever the reason, the kernel ends all that runs there.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["TestHosts", "running_hosts", "why_no_hosts"]

PROGRAMS = ("ip", "unshare", "nsenter", "mount", "hostname")
NET, NET6 = "10.213.77", "fd77:a:b"
PATIENCE_S = 300.0  # no busy machine needs as long
_HOLD = "echo ready; exec cat >/dev/null"
_HOST = (
    "set -e; hostname {name}; mount --make-rprivate /; mount -t tmpfs -o size=1g tmpfs /dev/shm; "
    "mount --bind {names} /etc/hosts; mount --bind {order} /etc/nsswitch.conf; ip link set lo up; " + _HOLD
)


def why_no_hosts() -> str:
    """Why there can be no such hosts here; empty if there can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"needs iproute2 and util-linux: no {', '.join(missing)}"
    if os.geteuid() != 0:
        return "needs root, to make networks"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "ip", "link", "add", "x", "type", "bridge"],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": _path()},
        check=False,
    )
    return "" if tried.returncode == 0 else f"no network can be made here: {tried.stderr.strip()}"


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class Zygote:
    """The process on a host that forks ranks (``host_zygote.py``)."""

    def __init__(self, hosts: TestHosts, host: int) -> None:
        command = [sys.executable, "-m", "tests.support.host_zygote"]
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = hosts.start(host, command, {"OMP_NUM_THREADS": "1"}, **streams)
        self._codes: dict[int, int] = {}
        self._count = 0
        self._ready = self._cleaned = False
        self._partial = b""

    def fork(self, script: Path, environment: Mapping[str, str], out: Path, err: Path) -> int:
        """Start a rank; the number by which ``code`` knows it."""
        self._await(lambda: self._ready)
        self._count += 1
        own = {name: value for name, value in os.environ.items() if name != "PATH"} | {"PATH": _path()}
        order = {"number": self._count, "script": str(script), "out": str(out), "err": str(err)}
        self._order({**order, "environment": {**own, **environment}})
        return self._count

    def code(self, number: int) -> int | None:
        """The exit code of a rank; None if it has not ended."""
        self._hear(0.0)
        return self._codes.get(number)

    def show_stacks(self) -> None:
        """Have every rank print its stacks."""
        self._order({"stacks": True})

    def end_others(self) -> None:
        self._await(lambda: self._ready)
        self._cleaned = False
        self._order({"clean": True})
        self._await(lambda: self._cleaned)

    def close(self) -> None:
        """Let it end when it has nothing more to read, or with its host."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def wait(self) -> None:
        """Wait until it has ended, which it has when its host has."""
        self._process.wait(60)

    def _order(self, order: Mapping[str, object]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def _await(self, done: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < until, "the zygote of a host does not answer"
            self._hear(1.0)

    def _hear(self, patience_s: float) -> None:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while select.select([descriptor], [], [], patience_s)[0]:
            data = os.read(descriptor, 1 << 16)
            assert data, "the zygote of a host has ended"
            *lines, self._partial = (self._partial + data).split(b"\n")
            for line in lines:
                said = json.loads(line)
                self._ready |= "ready" in said
                self._cleaned |= "cleaned" in said
                if "code" in said:
                    self._codes[said["number"]] = said["code"]
            patience_s = 0.0


class TestHosts:
    """h0, h1, … with the addresses 10.213.77.1, … and fd77:a:b::1, …; names resolve on all of them."""

    __test__ = False

    def __init__(self, count: int, folder: Path) -> None:
        self.count = count
        self._folder = folder
        self._holders: list[subprocess.Popen[bytes]] = []
        self._inside: list[int] = []
        self._switch = 0
        self.zygotes: list[Zygote] = []
        self.reset_names()

    def address(self, host: int) -> str:
        return f"{NET}.{host + 1}"

    def address6(self, host: int) -> str:
        return f"{NET6}::{host + 1}"

    @property
    def inside(self) -> list[int]:
        """For each host the process id, on this machine, of a process that runs there."""
        return list(self._inside)

    def reset_names(self) -> None:
        """Make every name mean the same on every host."""
        for host in range(self.count):
            self.set_names(host, {f"h{other}": self.address(other) for other in range(self.count)})

    def set_names(self, host: int, names: Mapping[str, str]) -> None:
        """Set what names mean on one host."""
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in names.items())]
        # Written in place: the file is mounted.
        (self._folder / f"names-{host}").write_text("\n".join(lines) + "\n")

    def up(self) -> None:
        switch = self._hold(["unshare", "--net", "sh", "-c", f"ip link add sw type bridge; ip link set sw up; {_HOLD}"])
        self._switch = switch.pid
        order = self._folder / "nsswitch.conf"
        order.write_text("hosts: files\n")  # no name server can be reached from there
        for host in range(self.count):
            words = _HOST.format(name=f"h{host}", names=self._folder / f"names-{host}", order=order)
            namespaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc"]
            holder = self._hold(["unshare", *namespaces, "sh", "-c", words])
            children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
            inside = int(children[0])
            self._inside.append(inside)
            end = f"sw{host}"
            self._ip(switch.pid, f"link add {end} type veth peer name eth0 netns {inside}")
            self._ip(switch.pid, f"link set {end} master sw up")
            self._ip(inside, f"addr add {self.address(host)}/24 dev eth0")
            self._ip(inside, f"addr add {self.address6(host)}/64 dev eth0 nodad")
            self._ip(inside, "link set eth0 up")
        self.zygotes = [Zygote(self, host) for host in range(self.count)]

    def cut(self, host: int) -> None:
        """Let nothing pass between a host and the others, without telling either."""
        self._ip(self._switch, f"link set sw{host} nomaster")

    def mend(self) -> None:
        """Undo every cut."""
        for host in range(self.count):
            self._ip(self._switch, f"link set sw{host} master sw")

    def _hold(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PATH": _path()}
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._holders.append(holder)
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        return holder

    def _ip(self, pid: int, words: str) -> None:
        environment = {**os.environ, "PATH": _path()}
        subprocess.run(["nsenter", "-t", str(pid), "-n", "ip", *words.split()], check=True, env=environment)

    def start(
        self, host: int, command: Sequence[str], environment: Mapping[str, str], **streams: Any
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host, in this directory."""
        entry = ["nsenter", "-t", str(self._inside[host]), "-m", "-u", "-n", "-p", f"--wd={os.getcwd()}", "--"]
        return subprocess.Popen([*entry, *command], env={**os.environ, "PATH": _path(), **environment}, **streams)

    def end_processes(self) -> None:
        """Kill everything on all hosts but the hosts and their zygotes."""
        for zygote in self.zygotes:
            zygote.end_others()

    def down(self) -> None:
        for zygote in self.zygotes:
            zygote.close()
        for holder in self._holders:
            for pipe in (holder.stdin, holder.stdout):
                if pipe is not None:
                    pipe.close()
        for holder in self._holders:
            try:
                holder.wait(20)
            except subprocess.TimeoutExpired:
                holder.kill()
                holder.wait()
        for zygote in self.zygotes:
            zygote.wait()
        until = time.monotonic() + 20
        while any(os.path.exists(f"/proc/{pid}") for pid in self._inside) and time.monotonic() < until:
            time.sleep(0.01)


@contextlib.contextmanager
def running_hosts(count: int, folder: Path) -> Iterator[TestHosts]:
    """``count`` hosts, gone afterwards."""
    hosts = TestHosts(count, folder)
    try:
        hosts.up()
        yield hosts
    finally:
        hosts.down()
