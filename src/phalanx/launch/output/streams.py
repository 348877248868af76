"""The streams of the ranks on their way from their pipes: to the terminal, to the rank's file, or to both."""

from __future__ import annotations

import os
import selectors
from collections import deque
from collections.abc import Iterable

from phalanx.launch.job.job import Job
from phalanx.launch.output.log_files import LogFiles, RankLog
from phalanx.launch.output.logs import Console, LineAssembler, Sink, make_prefixes, visible_state

__all__ = ["RankStream", "StreamReader", "last_lines", "open_streams"]

BLOCK = 1 << 16
# The most that an ended rank's pipe may still hold; more than this was written by another process.
_LARGEST_REMAINDER = 1 << 20
# How many lines of a rank that is not shown are kept for the block that says why it failed.
_LAST_LINES = 10


class RankStream:
    """One of a rank's two output streams.

    Args:
        name: ``stdout`` or ``stderr``.
        descriptor: the end of the pipe at which it is read.
        console: the launcher's own output.
        sink: that stream of the console on which it is shown.
        prefix: what is shown before each line.
        shown: whether it is shown.
        log: the file to which it is written; None for no file.
    """

    def __init__(
        self, name: str, descriptor: int, console: Console, sink: Sink, prefix: bytes, shown: bool, log: RankLog | None
    ) -> None:
        self.name = name
        self.descriptor = descriptor
        #: The last lines of a stream that is not shown.
        self.last_lines: deque[bytes] = deque(maxlen=_LAST_LINES)
        self._console = console
        self._sink = sink
        self._shown = LineAssembler(prefix, redraws=sink.terminal) if shown else None
        # Without the prefix, which says what the file's name says.
        self._kept = LineAssembler(b"") if log is not None or not shown else None
        self._log = log

    def read(self) -> int | None:
        """Read one block and hand it on; return its length, 0 at the end of the stream, None if none is there now."""
        if self.descriptor < 0:
            # The rank's end was reported in this same turn, and then the stream was drained and closed.
            return None
        try:
            data = os.read(self.descriptor, BLOCK)
        except BlockingIOError:
            return None
        if data and self._kept is not None:
            self._keep(self._kept.feed(data))
        if data and self._shown is not None:
            self._show(self._shown.feed(data), self._shown.live())
        return len(data)

    def close(self) -> None:
        """Close the pipe, and hand on a last line that has no end."""
        os.close(self.descriptor)
        self.descriptor = -1
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


class StreamReader:
    """Reads the ranks' streams as a selector finds them readable, each until its end or until its rank has ended.

    Args:
        selector: in which a stream is registered with itself as its data.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector

    def register(self, streams: Iterable[RankStream]) -> None:
        """Read these from now on."""
        for stream in streams:
            self._selector.register(stream.descriptor, selectors.EVENT_READ, stream)

    def read(self, stream: RankStream) -> int:
        """Read one block and hand it on; return its length, 0 when there is nothing (left)."""
        length = stream.read()
        if length == 0:
            self._close(stream)
        return length or 0

    def drain(self, streams: Iterable[RankStream]) -> None:
        """Read what a rank that has ended has left in its pipes, and close them, whoever else holds them open."""
        for stream in streams:
            taken = 0
            while stream.descriptor >= 0 and taken < _LARGEST_REMAINDER and (length := self.read(stream)):
                taken += length
            self._close(stream)

    def _close(self, stream: RankStream) -> None:
        if stream.descriptor >= 0:
            self._selector.unregister(stream.descriptor)
            stream.close()


def open_streams(
    job: Job, pipes: Iterable[tuple[int, int]], console: Console, logs: LogFiles
) -> list[list[RankStream]]:
    """The two streams of each rank of a job.

    Args:
        job: the job.
        pipes: the ends at which each rank's standard output and standard error are read.
        console: the launcher's own output.
        logs: the ranks' files.
    """
    nothing = [b""] * job.ranks
    out_prefixes = make_prefixes(job.ranks, color=console.out.color) if job.prefix else nothing
    err_prefixes = make_prefixes(job.ranks, color=console.err.color) if job.prefix else nothing
    opened = []
    for rank, (out_read, err_read) in enumerate(pipes):
        shown, log = job.output.shows(rank), logs.of(rank)
        out = RankStream("stdout", out_read, console, console.out, out_prefixes[rank], shown, log)
        err = RankStream("stderr", err_read, console, console.err, err_prefixes[rank], shown, log)
        opened.append([out, err])
    return opened


def last_lines(streams: Iterable[RankStream]) -> list[str]:
    """The last lines of a rank's streams, one stream after the other."""
    return [line.decode(errors="backslashreplace") for stream in streams for line in stream.last_lines]
