"""Hold the options of ``phalanx run`` as values; its ``--help`` explains them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.errors import LaunchError
from phalanx.launch.job.binding import Bind
from phalanx.launch.job.hosts import HostSlots, Rehearsal
from phalanx.launch.job.memory import Mode
from phalanx.launch.job.nodes import Nodes
from phalanx.system.limits import usable_cores
from phalanx.topology.device_files import accelerator_files
from phalanx.words import format_count

if TYPE_CHECKING:
    from phalanx.launch.job.mpi_launcher import MpiLauncher

#: Where ``--log-dir`` has what was printed when its job failed last.
FAILURE_FILE = "failure.txt"
#: The words of ``-n`` for which the accelerators or cores of this machine are counted.
COUNTED_HERE = ("auto", "gpu", "cpu")
# The signals of --stop-on. SIGINT always ends the job, and SIGQUIT asks where its ranks are.
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


@dataclass(frozen=True)
class Attempt:
    """One attempt at a job, counted from 0: after a failure all ranks are started again, up to ``restarts`` times."""

    number: int = 0
    restarts: int = 0

    @property
    def is_last(self) -> bool:
        return self.number >= self.restarts

    @property
    def title(self) -> str:
        return f"attempt {self.number + 1} of {self.restarts + 1}"

    @property
    def folder(self) -> str:
        """The folder of its files within the job's; empty if there is but one attempt."""
        return f"attempt-{self.number}" if self.restarts else ""

    def next(self) -> Attempt:
        return Attempt(self.number + 1, self.restarts)


@dataclass(frozen=True)
class Diagnosis:
    """The times at which the launcher says that ranks wait, and writes a report; as the options of these names.

    With ``warn_after_s`` 0 it says nothing, and there are no reports; without ``report_dir`` there are none either.
    """

    warn_after_s: float = 5.0
    report_after_s: float = 30.0
    report_dir: str = ""
    strict: bool = False

    @property
    def ask_after_s(self) -> float:
        # The launcher finds out what the line has to say before it is due.
        return self.warn_after_s - min(0.25, self.warn_after_s / 20)

    @property
    def look_every_s(self) -> float:
        return min(1.0, self.warn_after_s / 4)

    def look_again_in_s(self, *left_s: float) -> float:
        """Say when to look again: as always, and when something is due in ``left_s`` seconds (negative: over)."""
        return min([self.look_every_s, *(due_in_s for due_in_s in left_s if due_in_s > 0)])

    def why_unwatched(self, *, is_python: bool, ranks: int) -> str:
        """Say why the launcher does not watch the ranks of a job, as a clause; empty if it does."""
        if not is_python:
            return "only ranks of a Python script or module are watched"
        if ranks == 1:
            return "a single rank has no other to wait for"
        return "" if self.warn_after_s > 0 else "--warn-after 0 turns off reports as well"


@dataclass(frozen=True)
class OutputOptions:
    """The ways of the ranks' output: to files, to the terminal, or to both. The default shows all and has no files.

    Attributes:
        log_dir: the folder with a file for each rank; empty for no files.
        shown: the ranks whose output is shown, as ranges with both ends; None for all.
        only: ``shown``, as the user wrote it.
        part: the folder within ``log_dir`` that has the files of one attempt.
    """

    log_dir: str = ""
    shown: tuple[tuple[int, int], ...] | None = None
    only: str = ""
    part: str = ""

    @property
    def is_plain(self) -> bool:
        return not self.log_dir and self.shown is None

    def shows(self, rank: int) -> bool:
        return self.shown is None or any(first <= rank <= last for first, last in self.shown)

    def log_of(self, rank: int) -> str:
        return os.path.join(self.log_dir, self.part, f"rank-{rank}.log") if self.log_dir else ""

    def check(self, ranks: int) -> None:
        """Refuse ``--only`` of a rank that a job of so many ranks does not have."""
        for _, last in self.shown or ():
            if last >= ranks:
                job = f"the job has {format_count(ranks, 'rank')}, which count from 0"
                raise LaunchError(f"--only {self.only}: there is no rank {last}; {job}")

    def note(self, ranks: int) -> str:
        """Tell where the output is, if none is shown; else empty."""
        if not self.log_dir or self.shown != ():
            return ""
        files = f"{self.log_of(0)} to {os.path.basename(self.log_of(ranks - 1))}" if ranks > 1 else self.log_of(0)
        return f"output goes to {files}; --tee shows it here too"


def decide_output(log_dir: str | None, *, tee: bool, only: str | None) -> OutputOptions:
    """Decide where output goes: as under torchrun, what goes to files is not shown too unless that is asked for."""
    if tee and not log_dir:
        raise LaunchError("--tee shows what goes to the files of --log-dir; add --log-dir DIR, or leave --tee out")
    if tee and only is not None:
        raise LaunchError(f"--tee shows all ranks and --only {only} some; leave one of them out")
    if log_dir == "":
        raise LaunchError("--log-dir: the name of the folder is empty")
    if only is None:
        return OutputOptions(log_dir or "", () if log_dir and not tee else None)
    ranges = []
    for part in only.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last:
            raise LaunchError(f"--only {only}: {part!r} is not a rank, or a range such as 2-3; write them as 0,2-3")
        ranges.append((first, last))
    return OutputOptions(log_dir or "", tuple(ranges), only)


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The user's choices: click makes them of the command line, ``phalanx.launch()`` of its arguments.

    Attributes:
        ranks: how many; None for one, or for as many as the hosts take.
        hosts: where they may run; empty for this host, or for those that the MPI launcher chooses.
        nodes: the nodes on each of which this command is started; None if it is started once.
        starter: the program that starts a command on another host, and its arguments; empty for ssh.
        addresses: those at which ranks on other hosts reach this one; empty to find them out.
        named: the variables of -x, which go to other hosts whatever they are.
        reader, debugged: the ranks of --stdin and --debug.
        stop_on: the signals that ask ranks which call ``world.should_stop()`` to stop.
        stop_before_s: how long before Slurm's limit they are asked; None for never. So with ``max_hours``.
        requeue: queue the job again in Slurm once they have stopped.
    """

    ranks: int | None = None
    hosts: tuple[HostSlots, ...] = ()
    ppn: int | None = None
    nodes: Nodes | None = None
    starter: tuple[str, ...] = ()
    mpi: MpiLauncher | None = None
    addresses: tuple[str, ...] = ()
    interface: str = ""
    named: tuple[str, ...] = ()
    rehearsal: Rehearsal | None = None
    bind: Bind = "none"
    device: str | None = None
    memory_mode: Mode = "huge"
    replace: tuple[str, ...] = ()
    pass_local_rank: bool = False
    preload: bool = True
    reader: int | None = None
    debugged: int | None = None
    quiet: bool = False
    prefix: bool = True
    output: OutputOptions = OutputOptions()
    grace_s: float | None = None
    attempt: Attempt = Attempt()
    diagnosis: Diagnosis = Diagnosis()
    svg: str = ""
    stop_on: tuple[int, ...] = (signal.SIGTERM, signal.SIGUSR1)
    stop_before_s: float | None = None
    max_hours: float | None = None
    requeue: bool = False


def count_ranks(given: str) -> int:
    """Count the ranks of ``-n``: a number, ``gpu``, ``cpu``, or ``auto``, which is ``gpu``, or ``cpu`` without one."""
    if given not in COUNTED_HERE:
        try:
            return int(given)
        except ValueError:
            raise LaunchError(f"-n {given}: is not a number of ranks; give one, or auto, gpu or cpu") from None
    devices = 0
    if given != "cpu" and accelerator_files():
        # Another process asks, because the launcher never imports torch.
        code = "import torch; print(torch.accelerator.device_count())"
        asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        devices = int(asked.stdout) if asked.returncode == 0 else 0
    if given == "gpu" and not devices:
        raise LaunchError("-n gpu: torch sees no accelerator on this machine; -n cpu starts a rank for each core")
    return devices or usable_cores()


def read_stop_signals(given: str) -> tuple[int, ...]:
    """Read the signals of ``--stop-on``: ``USR1,TERM``, with or without SIG.

    Raises:
        LaunchError: one cannot ask for a stop.
    """
    known = {signum.name.removeprefix("SIG"): signum for signum in _STOP_SIGNALS}
    names = [name.strip().upper().removeprefix("SIG") for name in given.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise LaunchError(f"--stop-on {given}: {unknown[0]!r} is none of {', '.join(known)}")
    return tuple(known[name] for name in names)


def slurm_end_time(environment: Mapping[str, str]) -> float:
    """Return when Slurm's job ends, in seconds since 1970.

    Raises:
        LaunchError: it does not say.
    """
    given = environment.get("SLURM_JOB_END_TIME", "")
    if not given.isdigit():
        raise LaunchError(
            "--stop-before: Slurm says the end of a job in SLURM_JOB_END_TIME, which is not set here; give the time "
            'by --max-hours, or: export SLURM_JOB_END_TIME=$(date -d "$(squeue -h -j $SLURM_JOB_ID -o %e)" +%s)'
        )
    return float(given)
