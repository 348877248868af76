"""List this user's jobs on this host: every launcher describes its own, in memory that others find.

The description lies in a memfd that the launcher holds open. Others of the same user, to whom alone the kernel shows
it, find it by its name under /proc. So there is no folder that strangers could fill or read, and nothing is left of a
launcher that is killed. It is believed if the file is the reader's own, and if the process that it names holds it.

Each line of the file is the whole job as JSON, written at once. The last line that ends counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from phalanx.errors import LaunchError
from phalanx.system.files import own_folder
from phalanx.system.foreign_values import read_json
from phalanx.system.processes import start_of

if TYPE_CHECKING:
    from phalanx.launch.job.job import Job

WHERE_LISTED = "A job is listed on the host on which phalanx run was called"

_NAME, _SUFFIX = "/memfd:", "-job (deleted)"
_SHORT = "phalanx-"  # with which every job's run id begins
_LEAST_LETTERS = 3  # of an id, so that the number of a process that has ended is hardly taken for one


class RankProcess(msgspec.Struct, frozen=True):
    """A rank of a running job: its number in the world, its process, and the name of its host."""

    rank: int
    pid: int
    host: str


class RunningJob(msgspec.Struct, frozen=True):
    """A job, as its launcher describes it.

    Attributes:
        run_id: ``PHALANX_RUN_ID`` in its ranks.
        pid, start: the process of ``phalanx run``, and when it began (:func:`phalanx.system.processes.start_of`).
        since: when the job began, in seconds since 1970.
        target, arguments: the script, module or program, as the user named it, and its own arguments.
        directory, host: where the launcher runs.
        hosts: the hosts that were asked for, if there are others; empty if all ranks run here, or if MPI chooses.
        mpi: the MPI launcher that starts the ranks; empty for none.
        end_s: how long its ranks may take to end after SIGTERM.
        processes: the ranks; empty until they have been started.
        stops: whether they call ``world.should_stop()``, so that ``phalanx stop --gently`` can be heard.
    """

    run_id: str
    pid: int
    start: int
    since: float
    ranks: int
    target: str
    arguments: tuple[str, ...]
    directory: str
    host: str
    hosts: tuple[str, ...]
    mpi: str
    is_python: bool
    end_s: float
    processes: tuple[RankProcess, ...] = ()
    stops: bool = False

    @property
    def id(self) -> str:
        """The name by which users call it."""
        return self.run_id.removeprefix(_SHORT)

    def again(self) -> RunningJob | None:
        """The same job, as its launcher describes it now; None if it has ended."""
        return next((job for job in _described_by(self.pid) if job.run_id == self.run_id), None)


class Description:
    """A launcher's description of its own job. A job runs as well without, so what cannot be written is left out."""

    def __init__(self, job: Job) -> None:
        self._file = -1
        with contextlib.suppress(OSError):
            self._file = os.memfd_create(f"{job.run_id}-job")
        self._is_local = job.is_local
        self._job = RunningJob(
            run_id=job.run_id,
            pid=os.getpid(),
            start=start_of(os.getpid()),
            since=time.time(),
            ranks=job.ranks,
            target=job.target.name,
            arguments=tuple(job.target.argv[1:]),
            directory=own_folder(),
            host=job.host,
            hosts=tuple(host.name for host in job.hosts),
            mpi=job.mpi.title if job.mpi is not None else "",
            is_python=job.target.is_python,
            end_s=job.patience_s(signal.SIGTERM),
        )
        self._write()

    def add_ranks(self, pids: Sequence[int], hosts: Sequence[str]) -> None:
        """Describe the ranks, once they have been started, or started anew."""
        where = [self._job.host] * len(hosts) if self._is_local else hosts  # rehearsed hosts are this one
        ranks = tuple(RankProcess(rank, pid, where[rank]) for rank, pid in enumerate(pids))
        self._job = msgspec.structs.replace(self._job, processes=ranks, stops=False)
        self._write()

    def note_stops(self) -> None:
        """Describe that the ranks call ``world.should_stop()``."""
        if not self._job.stops:
            self._job = msgspec.structs.replace(self._job, stops=True)
            self._write()

    def close(self) -> None:
        """Give up the description, in a process that is not the launcher."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # also of -1, the file that could not be made
            os.write(self._file, json.dumps(msgspec.to_builtins(self._job)).encode() + b"\n")


def running_jobs() -> list[RunningJob]:
    """The jobs of this user whose launchers run on this host, the oldest first."""
    own = os.geteuid()
    found: list[RunningJob] = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == own:
                found += _described_by(int(name))
    return sorted(found, key=lambda job: (job.since, job.run_id))


def _described_by(pid: int) -> Iterator[RunningJob]:
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{number}"
            with contextlib.suppress(OSError):
                link = os.readlink(path)
                if link.startswith(_NAME) and link.endswith(_SUFFIX):
                    job = _read(path)
                    if job is not None and job.pid == pid and start_of(pid) == job.start:
                        yield job


def _read(path: str) -> RunningJob | None:
    """The job that a file describes; None if it is no description, or that of another version of Phalanx."""
    with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
        lines = file.read().split(b"\n")
        if os.fstat(file.fileno()).st_uid == os.geteuid() and len(lines) > 1:
            return msgspec.convert(read_json(lines[-2]), RunningJob)
    return None


def find_job(name: str | None) -> RunningJob:
    """The running job that a user names by its id, how that begins, or its launcher's pid; None is the only one.

    Raises:
        LaunchError: there is no such job, or there are several. The message lists the jobs that there are.
    """
    jobs = running_jobs()
    listed = "\n".join(f"  {job.id}  pid {job.pid}, {job.target}, in {job.directory}" for job in jobs)
    if not jobs:
        raise LaunchError(
            f"{'no job' if name is None else f'no job {name}'} of yours runs on this host. {WHERE_LISTED}"
        )
    if name == "":
        raise LaunchError(f"which job? The name given is empty; these run on this host:\n{listed}")
    if name is None:
        found = jobs
    else:
        found = [job for job in jobs if name in (str(job.pid), job.id, job.run_id)]
        found = found or [job for job in jobs if job.id.startswith(name) and len(name) >= _LEAST_LETTERS]
    if not found:
        raise LaunchError(f"no job {name} of yours runs on this host; these do:\n{listed}")
    if len(found) > 1:
        why = "several jobs run here" if name is None else f"{name} may be any of several jobs"
        raise LaunchError(f"{why}; name one by more of its id:\n{listed}")
    return found[0]
