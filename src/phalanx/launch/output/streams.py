"""The output of the ranks on its way to the terminal, to the rank's file, or to both."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from phalanx.launch.job.job import Job
from phalanx.launch.output.log_files import LogFiles, RankLog
from phalanx.launch.output.logs import Console, LineAssembler, Sink, make_prefixes, visible_state

__all__ = ["RankStream", "last_lines", "open_streams"]

# How many lines of a rank that is not shown are kept for the block that says why it failed.
_LAST_LINES = 10


class RankStream:
    """One of a rank's two output streams.

    Args:
        name: ``stdout`` or ``stderr``.
        console: the launcher's own output.
        sink: that stream of the console on which it is shown.
        prefix: what is shown before each line.
        shown: whether it is shown.
        log: the file to which it is written; None for no file.
    """

    def __init__(
        self, name: str, console: Console, sink: Sink, prefix: bytes, shown: bool, log: RankLog | None
    ) -> None:
        self.name = name
        #: The last lines of a stream that is not shown.
        self.last_lines: deque[bytes] = deque(maxlen=_LAST_LINES)
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
    """Standard output and standard error of each rank of a job.

    Args:
        job: the job.
        console: the launcher's own output.
        logs: the ranks' files.
    """
    nothing = [b""] * job.ranks
    out_prefixes = make_prefixes(job.ranks, color=console.out.color) if job.prefix else nothing
    err_prefixes = make_prefixes(job.ranks, color=console.err.color) if job.prefix else nothing
    opened = []
    for rank in range(job.ranks):
        shown, log = job.output.shows(rank), logs.of(rank)
        out = RankStream("stdout", console, console.out, out_prefixes[rank], shown, log)
        opened.append((out, RankStream("stderr", console, console.err, err_prefixes[rank], shown, log)))
    return opened


def last_lines(streams: Iterable[RankStream]) -> list[str]:
    """The last lines of a rank's streams, one stream after the other."""
    return [line.decode(errors="backslashreplace") for stream in streams for line in stream.last_lines]
