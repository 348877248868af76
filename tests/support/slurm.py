"""Slurm for one test, on test hosts: munge, a controller, and a node on each, in a folder of their own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

from .hosts import TestHosts

__all__ = ["running_slurm", "why_no_slurm"]

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"  # Debian keeps daemons there
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={first}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={controller}
SlurmdPort={port}
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
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        return f"needs Slurm and munge (apt-get install slurm-wlm munge): no {', '.join(missing)}"
    return "" if os.geteuid() == 0 else "needs root, to start slurmd"


@contextlib.contextmanager
def running_slurm(folder: Path, hosts: TestHosts) -> Iterator[dict[str, str]]:
    """Slurm with a node of eight CPUs on each host; yields the environment that its commands need, on h0."""
    nodes = {f"h{host}": hosts.address(host) for host in range(hosts.count)}
    environment = _configure(folder, nodes)

    def start(number: int, words: list[str], **streams: Any) -> subprocess.Popen[Any]:
        return hosts.start(number, words, environment, **streams)

    names = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid"}
    names |= {"log-file": "munge.log", "seed-file": "munge.seed"}
    munge = ["munged", "--foreground", "--force", *(f"--{option}={folder / name}" for option, name in names.items())]
    daemons = [(0, munge), (0, ["slurmctld", "-D"])]
    daemons += [(number, ["slurmd", "-D", "-N", name]) for number, name in enumerate(nodes)]
    processes: list[subprocess.Popen[Any]] = []
    try:
        for number, words in daemons:
            with open(folder / f"{words[0]}-{number}.out", "wb") as out:
                processes.append(start(number, words, stdout=out, stderr=out))
            time.sleep(0.3)
        _wait_until_idle(folder, lambda: start(0, ["sinfo", "-h", "-o", "%T"], stdout=PIPE, text=True))
        yield environment
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _configure(folder: Path, nodes: dict[str, str]) -> dict[str, str]:
    """Write the configuration of a cluster of these nodes, the controller on the first; its commands' environment."""
    folder.chmod(0o755)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        controller, port = (one.getsockname()[1] for one in sockets)
    (first, address), *_ = nodes.items()
    text = _CONFIGURATION.format(first=first, address=address, folder=folder, controller=controller, port=port)
    for name, where in nodes.items():
        text += f"NodeName={name} NodeAddr={where} CPUs=8 RealMemory=500\n"
    text += "PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
    (folder / "slurm.conf").write_text(text)
    return {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}


def _wait_until_idle(folder: Path, ask: Callable[[], subprocess.Popen[Any]]) -> None:
    deadline = time.monotonic() + 120
    state = ""
    while time.monotonic() < deadline:
        state = ask().communicate(timeout=60)[0].strip()
        if state == "idle":
            return
        time.sleep(0.2)
    logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in sorted(folder.glob("*.out")))
    raise AssertionError(f"Slurm did not come up: {state}\n{logs}")
