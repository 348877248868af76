"""``--log-dir``: a file for each rank, with all that it has written; with ``--restarts`` one for each attempt.

Each line begins with the time at which it arrived, by the clock of the launcher's host, so that lines of ranks on
different hosts can be compared; and with the stream that it was written to, as in the log files of Kubernetes::

    2026-11-22T13:35:57.123+00:00 stdout loss 0.31
    2026-11-22T13:35:57.124+00:00 stderr UserWarning: ...
    2026-11-22T13:36:02.001+00:00 phalanx exit code 1

Lines of ``phalanx`` say what is run, when and where the rank was started, why it failed, and how it ended. A file that
exists is continued, because a job that is started anew after a failure must not erase the reason. Two jobs at a time
would mix their lines, so the first one locks its files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
from collections.abc import Sequence
from datetime import datetime

from phalanx.errors import LaunchError
from phalanx.launch.job.job import Job
from phalanx.launch.output.failure import Report
from phalanx.launch.output.logs import Sink, mark_lines
from phalanx.words import printable

__all__ = ["LogFiles", "RankLog"]


class RankLog:
    """The file of one rank.

    Args:
        path: where it is; the folder exists.
        faults: if it cannot be written to, the reason is added here, unless there is one.

    Raises:
        OSError: it cannot be opened for writing. A ``BlockingIOError`` if another job is writing it.
    """

    def __init__(self, path: str, faults: list[str]) -> None:
        self._path = path
        self._faults = faults
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise
        except OSError:
            pass  # some file systems have no locks
        self._sink = Sink(descriptor, {})

    def write(self, stream: str, lines: bytes) -> None:
        """Add whole lines, each with the time and the name of the stream."""
        if not lines:
            return
        failed, self._sink.closed = self._sink.closed, False  # a disk that was full may have room again
        now = datetime.now().astimezone().isoformat(timespec="milliseconds")
        self._sink.write(b"\n" * failed + mark_lines(lines, f"{now} {stream} ".encode()))
        if self._sink.closed and not self._faults:
            self._faults.append(f"{self._path} cannot be written: {self._sink.fault or 'it is gone'}")

    def note(self, text: str) -> None:
        """Add the launcher's own words, of one or several lines."""
        self.write("phalanx", printable(text).rstrip("\n").encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            os.close(self._sink.descriptor)


class LogFiles:
    """The files of all ranks of a job; none if it has no ``--log-dir``.

    Args:
        job: the job.

    Raises:
        LaunchError: the files cannot be written, or another job is writing them. Nothing has been written.
    """

    def __init__(self, job: Job) -> None:
        options = job.output
        self.ranks: list[RankLog] = []
        #: Why a file could not be written to, empty while all can; and whether the user has been told.
        self.faults: list[str] = []
        self.said = False
        if not options.log_dir:
            return
        try:
            os.makedirs(os.path.dirname(options.log_of(0)), exist_ok=True)
            for rank in range(job.ranks):
                self.ranks.append(RankLog(options.log_of(rank), self.faults))
            command = shlex.join([job.target.name, *job.target.argv[1:]])
            for rank, log in enumerate(self.ranks):
                log.note(f"rank {rank} of {job.ranks}: {command}")
        except BlockingIOError:
            self.close()
            raise LaunchError(
                f"--log-dir {options.log_dir}: another job is writing its files there; give each job a folder of its "
                "own"
            ) from None
        except OSError as error:
            self.close()
            raise LaunchError(
                f"--log-dir {options.log_dir}: {error.filename or options.log_dir} cannot be written: {error.strerror}"
            ) from error

    def of(self, rank: int) -> RankLog | None:
        """The file of a rank; None if it has none."""
        return self.ranks[rank] if self.ranks else None

    def note_start(self, job: Job, hosts: Sequence[str], pids: Sequence[int]) -> None:
        """Note in each file on which host its rank has been started; the rank may have written something before."""
        for rank, log in enumerate(self.ranks):
            log.note(f"started on host {hosts[rank]}, pid {pids[rank]}")
            if job.keeps_terminal(rank):
                log.note("it has the terminal (--debug), so what it writes is not in this file")

    def note_end(self, rank: int, ending: str, report: Report | None) -> None:
        """Note in a rank's file how it has ended, and its traceback if nothing else has shown it."""
        if self.ranks:
            if report is not None and report.traceback:
                self.ranks[rank].note(report.traceback)
            self.ranks[rank].note(ending)

    def close(self) -> None:
        """Close all files."""
        for log in self.ranks:
            log.close()
