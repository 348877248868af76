"""The ranks' output on its way to the terminal, to files (``--log-dir``), or to both.

There is a file for each rank, with all that it has written; with ``--restarts`` one for each attempt. Each line begins
with the time at which it arrived, by the clock of the launcher's host, and with its stream, as in the log files of
Kubernetes::

    2026-11-22T13:35:57.123+00:00 stdout loss 0.31
    2026-11-22T13:35:57.124+00:00 stderr UserWarning: ...
    2026-11-22T13:36:02.001+00:00 phalanx exit code 1

Lines of ``phalanx`` say what is run, when and where the rank was started, why it failed, and how it ended. A file that
exists is continued, because a job that is started anew must not erase the reason. Two jobs at a time would mix their
lines, so the first one locks its files.
"""

from __future__ import annotations

import fcntl
import os
import shlex
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import datetime

from phalanx.errors import LaunchError
from phalanx.launch.job.job import Job
from phalanx.launch.output.failure import Report
from phalanx.launch.output.logs import Console, LineAssembler, Sink, make_prefixes, mark_lines, visible_state
from phalanx.words import printable

__all__ = ["LogFiles", "RankLog", "RankStream", "last_lines", "open_streams"]

_LAST_LINES = 10  # of a rank that is not shown, for the block that says why it failed


class RankLog:
    """The file of one rank, in a folder that exists; the first reason why one cannot be written is added to ``faults``.

    Raises:
        OSError: it cannot be opened for writing. A ``BlockingIOError`` if another job is writing it.
    """

    def __init__(self, path: str, faults: list[str]) -> None:
        self._path = path
        self._faults = faults
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise
        except OSError:
            pass  # some file systems have no locks

    def write(self, stream: str, lines: bytes) -> None:
        """Add whole lines, each with the time and the name of the stream."""
        if not lines:
            return
        now = datetime.now().astimezone().isoformat(timespec="milliseconds")
        try:
            self._file.write(mark_lines(lines, f"{now} {stream} ".encode()))
        except OSError as error:  # a disk that is full may have room again later
            if not self._faults:
                self._faults.append(f"{self._path} cannot be written: {error.strerror}")

    def note(self, text: str) -> None:
        """Add the launcher's own words, of one or several lines."""
        self.write("phalanx", printable(text).rstrip("\n").encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class LogFiles:
    """The files of all ranks of a job; none if it has no ``--log-dir``.

    Attributes:
        faults, said: why a file could not be written to, empty while all can; and whether the user has been told.

    Raises:
        LaunchError: the files cannot be written, or another job is writing them. Nothing has been written.
    """

    def __init__(self, job: Job) -> None:
        options = job.output
        self.ranks: list[RankLog] = []
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

    def note_start(self, job: Job, hosts: Sequence[str], pids: Sequence[int]) -> None:
        """Note in each file on which host its rank has been started."""
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


class RankStream:
    """One of a rank's two output streams, on its way to ``sink``, if it is shown, and to ``log``, if there is one."""

    def __init__(
        self, name: str, console: Console, sink: Sink, prefix: bytes, shown: bool, log: RankLog | None
    ) -> None:
        self.name = name
        self.last_lines: deque[bytes] = deque(maxlen=_LAST_LINES)  # of a stream that is not shown
        self._console = console
        self._sink = sink
        self._shown = LineAssembler(prefix, redraws=sink.terminal) if shown else None
        # Without the prefix, which says what the file's name says.
        self._kept = LineAssembler(b"") if log is not None or not shown else None
        self._log = log

    def feed(self, data: bytes) -> None:
        """Hand a block on."""
        if self._kept is not None:
            self._keep(self._kept.feed(data))
        if self._shown is not None:
            self._show(self._shown.feed(data), self._shown.live())

    def close(self) -> None:
        """Hand on a last line that has no end."""
        if self._kept is not None:
            self._keep(self._kept.finish())
        if self._shown is not None:
            self._console.show(self._sink, b"", self)
            self._console.write(self._sink, self._shown.finish())

    def _show(self, lines: bytes, live: bytes) -> None:
        if lines:
            # If a line of this stream was shown live, it is one of these lines now.
            self._console.show(self._sink, b"", self)
        self._console.write(self._sink, lines)
        self._console.show(self._sink, live, self)

    def _keep(self, lines: bytes) -> None:
        if self._log is not None:
            self._log.write(self.name, lines)
        if self._shown is None:
            self.last_lines.extend(map(visible_state, lines.split(b"\n")[-_LAST_LINES - 1 : -1]))


def open_streams(job: Job, console: Console, logs: LogFiles) -> list[tuple[RankStream, RankStream]]:
    """Open standard output and standard error of each rank of a job."""
    nothing = [b""] * job.ranks
    out_prefixes = make_prefixes(job.ranks, color=console.out.color) if job.prefix else nothing
    err_prefixes = make_prefixes(job.ranks, color=console.err.color) if job.prefix else nothing
    opened = []
    for rank in range(job.ranks):
        shown, log = job.output.shows(rank), logs.ranks[rank] if logs.ranks else None
        out = RankStream("stdout", console, console.out, out_prefixes[rank], shown, log)
        opened.append((out, RankStream("stderr", console, console.err, err_prefixes[rank], shown, log)))
    return opened


def last_lines(streams: Iterable[RankStream]) -> list[str]:
    """The last lines of a rank's streams, one stream after the other."""
    return [line.decode(errors="backslashreplace") for stream in streams for line in stream.last_lines]
