"""An OpenSSH server on each test host, and the configuration of a user who can log in there."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from .hosts import TestHosts

__all__ = ["client", "running_sshd", "why_no_sshd"]

PROGRAMS = ("sshd", "ssh", "ssh-keygen")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_SERVER = """
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin yes
PasswordAuthentication yes
Subsystem sftp internal-sftp
"""
_CLIENT = """
Host *
  IdentityFile {key}
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile {known}
  GlobalKnownHostsFile /dev/null
  LogLevel ERROR
"""


def why_no_sshd() -> str:
    """Why there can be no OpenSSH server here; empty if there can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    return f"needs OpenSSH (apt-get install openssh-server): no {', '.join(missing)}" if missing else ""


def client(folder: Path, *, key: bool = True, known: bool = True) -> Path:
    """The configuration of a user: with a key that is let in or without, and with the hosts' keys known or not."""
    path = folder / f"client-{key}-{known}"
    paths = {"key": folder / "user_key" if key else "none", "known": folder / "known" if known else "/dev/null"}
    path.write_text(_CLIENT.format(**paths))
    return path


@contextlib.contextmanager
def running_sshd(hosts: TestHosts, folder: Path) -> Iterator[None]:
    """A server on every host."""
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "known").write_text(f"* {(folder / 'host_key.pub').read_text()}")
    (folder / "sshd_config").write_text(_SERVER.format(folder=folder))
    sshd = f"{shutil.which('sshd', path=PATH)} -D -e -f {folder}/sshd_config"
    command = ["sh", "-c", f"mount -t tmpfs tmpfs /run; mkdir /run/sshd; exec {sshd}"]
    servers = []
    until = time.monotonic() + 60
    try:
        for host in range(hosts.count):
            with open(folder / f"sshd-{host}", "wb") as log:
                servers.append(hosts.start(host, command, {}, stdout=log, stderr=log))
        for host in range(hosts.count):
            probe = f"import socket; socket.create_connection(('{hosts.address(host)}', 22), 1)"
            while hosts.start(host, ["python3", "-c", probe], {}, stderr=subprocess.DEVNULL).wait():
                assert time.monotonic() < until, "no sshd"
                time.sleep(0.1)
        yield
    finally:
        for server in servers:
            server.kill()
            server.wait()
