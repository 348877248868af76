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
from collections.abc import Iterator
from pathlib import Path

__all__ = ["running_slurm", "why_no_slurm"]

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={controller}
SlurmdPort={node}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=500
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP
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
    folder.chmod(0o755)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    configuration = folder / "slurm.conf"
    controller, node = _free_ports(2)
    configuration.write_text(
        _CONFIGURATION.format(host=socket.gethostname(), folder=folder, controller=controller, node=node)
    )
    environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(configuration)}
    names = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid"}
    names |= {"log-file": "munge.log", "seed-file": "munge.seed"}
    munge = ["munged", "--foreground", "--force", *(f"--{option}={folder / name}" for option, name in names.items())]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command in (munge, ["slurmctld", "-D"], ["slurmd", "-D", "-N", socket.gethostname()]):
            with open(folder / f"{command[0]}.out", "wb") as out:
                processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
            time.sleep(0.3)
        _wait_until_idle(environment, folder)
        yield environment
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_idle(environment: dict[str, str], folder: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        state = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True, timeout=20)
        if state.stdout.strip() == "idle":
            return
        time.sleep(0.2)
    logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in sorted(folder.glob("*.out")))
    raise AssertionError(f"Slurm did not come up: {state.stdout}{state.stderr}\n{logs}")


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"  # Debian keeps daemons there


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]
