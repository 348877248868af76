"""Hosts on one machine for a test: each has its own network, host name, process ids and /dev/shm.

They are connected to one switch, in a network namespace of their own, so this machine's network is left as it is. Every
host is held by a pipe of this process: when that closes, whatever the reason, the kernel ends all that runs there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["TestHosts", "running_hosts", "why_no_hosts"]

PROGRAMS = ("ip", "unshare", "nsenter", "mount", "hostname")
NET, NET6 = "10.213.77", "fd77:a:b"
_SWITCH = "02:00:0a:d5:4d:fe"  # its hardware address
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


class TestHosts:
    """h0, h1, … with the addresses 10.213.77.1, … and fd77:a:b::1, …; names resolve on all of them."""

    __test__ = False

    def __init__(self, count: int, folder: Path) -> None:
        self.count = count
        self._folder = folder
        self._holders: list[subprocess.Popen[bytes]] = []
        self._inside: list[int] = []
        self._switch = 0
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
        # With an address of its own: otherwise it takes one of a host's link, and another when that link is cut.
        make = f"ip link add sw address {_SWITCH} type bridge; ip link set sw up; {_HOLD}"
        switch = self._hold(["unshare", "--net", "sh", "-c", make])
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

    def add_network(self, interface: str, net: str) -> None:
        """Join the hosts by a second network, to which each has another interface; h0 has the address ``net``.1."""
        for host, inside in enumerate(self._inside):
            end = f"{interface}-{host}"
            self._ip(self._switch, f"link add {end} type veth peer name {interface} netns {inside}")
            self._ip(self._switch, f"link set {end} master sw up")
            self._ip(inside, f"addr add {net}.{host + 1}/24 dev {interface}")
            self._ip(inside, f"link set {interface} up")

    def remove_network(self, interface: str) -> None:
        """Undo :meth:`add_network`."""
        for host in range(self.count):
            self._ip(self._switch, f"link del {interface}-{host}")

    def cut(self, host: int) -> None:
        """Let nothing pass between a host and the others, without telling either."""
        self._ip(self._switch, f"link set sw{host} nomaster")

    def part(self) -> None:
        """Let nothing pass between any two hosts, without telling them; :meth:`outside` still reaches each."""
        for host in range(self.count):
            self._ip(self._switch, f"link set sw{host} type bridge_slave isolated on")

    def mend(self, only: int | None = None) -> None:
        """Undo every cut, or that of one host."""
        for host in range(self.count) if only is None else [only]:
            if os.path.exists(f"/proc/{self._inside[host]}"):
                self._ip(self._switch, f"link set sw{host} master sw")
                self._ip(self._switch, f"link set sw{host} type bridge_slave isolated off")

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
        return subprocess.Popen(
            [*self.entry(host), *command], env={**os.environ, "PATH": _path(), **environment}, **streams
        )

    @contextlib.contextmanager
    def mounted(self, host: int, what: Path, where: str) -> Iterator[None]:
        """While a host finds one file or folder in the place of another."""
        assert self.start(host, ["mount", "--bind", str(what), where], {}).wait() == 0
        try:
            yield
        finally:
            assert self.start(host, ["umount", where], {}).wait() == 0

    def entry(self, host: int) -> list[str]:
        """What to put before a command so that it runs on a host, in this directory."""
        return ["nsenter", "-t", str(self._inside[host]), "-m", "-u", "-n", "-p", f"--wd={os.getcwd()}", "--"]

    def network(self, host: int) -> list[str]:
        """What to put before a command so that it runs here, with the network and the name of a host."""
        return ["nsenter", "-t", str(self._inside[host]), "-n", "-u", "--"]

    def join_switch(self) -> None:
        """Let processes of this machine's reach the hosts, by :meth:`outside`, as from a cluster's login node."""
        self._ip(self._switch, f"addr add {NET}.254/24 dev sw")
        self._ip(self._switch, "link set lo up")
        names = ["127.0.0.1 localhost", f"{NET}.254 login", *(f"{self.address(h)} h{h}" for h in range(self.count))]
        (self._folder / "names-login").write_text("\n".join(names) + "\n")
        pids = "\n".join(f"  h{host}) pid={pid} ;;" for host, pid in enumerate(self._inside))
        starter = self._folder / "starter"
        starter.write_text(
            f'#!/bin/sh\nhost=$1; shift\ncase "$host" in\n{pids}\n  *) echo "no host $host" >&2; exit 1 ;;\nesac\n'
            # As a login does, it brings nothing of this environment along, and begins in the home directory.
            'cd /; exec nsenter -t "$pid" -m -u -n -p -- env -i PATH="$PATH" HOME=/root LOGNAME=root "$@"\n'
        )
        starter.chmod(0o755)

    def add_login_address(self, address: str, device: str = "lo") -> None:
        """Give the place of :meth:`outside` one more address; the hosts have a way to it on device ``sw``."""
        self._ip(self._switch, f"addr add {address} dev {device} nodad")

    @property
    def starter(self) -> str:
        """A program that starts a command on a host, from :meth:`outside`: ``starter h1 COMMAND...``."""
        return str(self._folder / "starter")

    def outside(self, files: Mapping[str, Path] | None = None) -> list[str]:
        """The words before a command that runs beside the hosts, in their network, with files in others' place."""
        own = {"/etc/hosts": self._folder / "names-login", "/etc/nsswitch.conf": self._folder / "nsswitch.conf"}
        binds = "".join(f"mount --bind {path} {place}; " for place, path in {**own, **(files or {})}.items())
        inside = f'mount --make-rprivate /; {binds}hostname login; exec "$@"'
        return ["nsenter", "-t", str(self._switch), "-n", "unshare", "--mount", "--uts", "sh", "-c", inside, "sh"]

    def holder(self, host: int) -> int:
        """The process that holds a host, by its number on this machine."""
        return self._inside[host]

    def processes(self, host: int) -> list[int]:
        """The living processes on a host, by their numbers on this machine, but for the one that holds it."""
        space = os.readlink(f"/proc/{self._inside[host]}/ns/pid")
        own = {self._inside[host]}
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{name}/ns/pid") != space or int(name) in own:
                    continue
                if Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found.append(int(name))
        return found

    def kill_all(self, host: int, but: Collection[int] = ()) -> None:
        """Kill everything on a host but some, also what is being started meanwhile."""
        while pids := [pid for pid in self.processes(host) if pid not in but]:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def down(self) -> None:
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
