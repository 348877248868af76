"""Slurm on this machine for one test: munge, a controller and one node, on loopback, in a folder of their own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Any

from .hosts import TestHosts

__all__ = ["running_slurm", "slurm_on", "why_no_slurm"]

_Start = tuple[list[str], Callable[..., subprocess.Popen[Any]]]
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={controller}
SlurmdPort={node}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdParameters=config_overrides
"""


def why_no_slurm() -> str:
    """Why Slurm cannot be started here; empty if it can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"needs Slurm and munge (apt-get install slurm-wlm munge): no {', '.join(missing)}"
    return "" if os.geteuid() == 0 else "needs root, to start slurmd"


@contextlib.contextmanager
def running_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Slurm with one node of eight CPUs; yields the environment that its commands need."""
    environment = _configure(folder, {socket.gethostname(): "127.0.0.1"})
    node = ["slurmd", "-D", "-N", socket.gethostname()]
    starts: list[_Start] = [(words, subprocess.Popen) for words in (*_central(folder), node)]
    with _running(starts, environment, folder):
        yield environment


@contextlib.contextmanager
def slurm_on(hosts: TestHosts, folder: Path) -> Iterator[dict[str, str]]:
    """Slurm with a node on each of the test hosts, and its controller on h0, where its commands are to be called."""
    environment = _configure(folder, {f"h{host}": hosts.address(host) for host in range(hosts.count)})

    def on(host: int) -> Callable[..., subprocess.Popen[Any]]:
        return lambda words, env, **streams: hosts.start(host, words, env, **streams)

    starts: list[_Start] = [(words, on(0)) for words in _central(folder)]
    starts += [(["slurmd", "-D", "-N", f"h{host}"], on(host)) for host in range(hosts.count)]

    def ask(words: list[str]) -> subprocess.Popen[Any]:
        return hosts.start(0, words, environment, stdout=PIPE, text=True)

    with _running(starts, environment, folder, ask):
        yield environment


def _configure(folder: Path, nodes: Mapping[str, str]) -> dict[str, str]:
    """Write the configuration of a cluster of these nodes, the controller on the first; its commands' environment."""
    folder.chmod(0o755)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    configuration = folder / "slurm.conf"
    controller, port = _free_ports(2)
    (first, address), *_ = nodes.items()
    text = _CONFIGURATION.format(host=first, address=address, folder=folder, controller=controller, node=port)
    for name, where in nodes.items():
        text += f"NodeName={name} NodeAddr={where} CPUs=8 RealMemory=500\n"
    configuration.write_text(f"{text}PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n")
    return {**os.environ, "PATH": _path(), "SLURM_CONF": str(configuration)}


def _central(folder: Path) -> list[list[str]]:
    names = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid"}
    names |= {"log-file": "munge.log", "seed-file": "munge.seed"}
    munge = ["munged", "--foreground", "--force", *(f"--{option}={folder / name}" for option, name in names.items())]
    return [munge, ["slurmctld", "-D"]]


@contextlib.contextmanager
def _running(
    starts: Sequence[_Start],
    environment: dict[str, str],
    folder: Path,
    ask: Callable[[list[str]], subprocess.Popen[Any]] | None = None,
) -> Iterator[None]:
    processes: list[subprocess.Popen[Any]] = []
    try:
        for number, (command, start) in enumerate(starts):
            with open(folder / f"{command[0]}-{number}.out", "wb") as out:
                processes.append(start(command, env=environment, stdout=out, stderr=out))
            time.sleep(0.3)
        _wait_until_idle(environment, folder, ask)
        yield
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_idle(
    environment: dict[str, str], folder: Path, ask: Callable[[list[str]], subprocess.Popen[Any]] | None
) -> None:
    deadline = time.monotonic() + 120
    state = ""
    while time.monotonic() < deadline:
        words = ["sinfo", "-h", "-o", "%T"]
        asked = ask(words) if ask is not None else subprocess.Popen(words, env=environment, stdout=PIPE, text=True)
        state = asked.communicate(timeout=60)[0].strip()
        if state == "idle":
            return
        time.sleep(0.2)
    logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in sorted(folder.glob("*.out")))
    raise AssertionError(f"Slurm did not come up: {state}\n{logs}")


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"  # Debian keeps daemons there


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]
