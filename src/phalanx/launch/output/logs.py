"""From the bytes of many ranks to lines that a person can read.

Ranks write at the same time, in pieces that may end in the middle of a line. Here the bytes of each stream become whole
lines with a prefix; they stay bytes, because output need not be valid UTF-8. ``bytes.replace`` puts in all prefixes of
a block at once, so a hundred thousand lines cost little.

A progress bar redraws its line with carriage returns. Files and pipes get all of it, with the prefix behind each of
these too. On a terminal only the last state of a line stays, and the unfinished line that changed last is the *live
line*: it is drawn below all other output, and again whenever it changes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import stat
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from phalanx.words import printable

__all__ = ["Console", "LineAssembler", "Sink", "make_prefixes", "mark_lines", "visible_state"]

# A line that grows longer is cut, because a stream that never ends its line would fill the memory.
LONGEST_LINE = 1 << 20
# A pipe that poll reports as writable takes this many bytes without blocking; the kernel guarantees it.
_ATOMIC = select.PIPE_BUF
_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_ESCAPES = re.compile(rb"(\x1b\[[0-?]*[ -/]*[@-~])")
REDRAW_S = 0.05
_WIPE = b"\r\x1b[K"


def make_prefixes(ranks: int, *, color: bool) -> list[bytes]:
    """``[rank 3] `` for each rank, all of the same width; in a colour for each rank if ``color`` is true."""
    width = len(str(ranks - 1))
    prefixes = []
    for rank in range(ranks):
        text = f"[rank {rank:>{width}}]"
        if color:
            text = f"\x1b[{_COLORS[rank % len(_COLORS)]}m{text}\x1b[0m"
        prefixes.append(text.encode() + b" ")
    return prefixes


def mark_lines(lines: bytes, prefix: bytes) -> bytes:
    """Put a prefix before each of some whole lines."""
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n"


class LineAssembler:
    """Make whole lines with a prefix of the bytes of one stream.

    With ``redraws`` text that a carriage return has overwritten is left out, as on a terminal.
    """

    def __init__(self, prefix: bytes, *, redraws: bool = False) -> None:
        self._prefix = prefix
        self._redraws = redraws
        self._pending = b""

    def feed(self, data: bytes) -> bytes:
        """Add what was read; return the lines that are now complete, each with its prefix and newline."""
        end = data.rfind(b"\n")
        if end < 0:
            self._keep(self._pending + data)
            return self._cut()
        lines = self._pending + data[:end]
        self._pending = b""
        self._keep(data[end + 1 :])
        return self._prefixed(lines) + self._cut()

    def finish(self) -> bytes:
        """Return the last line of a stream that has ended without a newline, with one added; empty if it is blank."""
        line, self._pending = self._pending, b""
        if not (visible_state(line) if self._redraws else line).strip():
            # A progress bar that has erased itself leaves blanks.
            return b""
        return self._prefixed(line)

    def live(self) -> bytes:
        """The unfinished line as a terminal would show it now, prefixed; empty if there is none."""
        state = visible_state(self._pending)
        return self._prefix + state if state else b""

    def _prefixed(self, lines: bytes) -> bytes:
        if b"\r" in lines:
            lines = b"\n".join(map(self._state, lines.split(b"\n")))
        return mark_lines(lines + b"\n", self._prefix) if self._prefix else lines + b"\n"

    def _state(self, line: bytes) -> bytes:
        return visible_state(line) if self._redraws else line.rstrip(b"\r").replace(b"\r", b"\r" + self._prefix)

    def _keep(self, pending: bytes) -> None:
        # A carriage return as the last byte is kept: it may be the first half of "\r\n".
        cut = pending.rfind(b"\r", 0, max(0, len(pending) - 1))
        if self._redraws and cut >= 0 and pending[cut + 1 :].strip(b"\r"):
            pending = pending[cut + 1 :]
        self._pending = pending

    def _cut(self) -> bytes:
        """Return as lines of their own the pieces of LONGEST_LINE bytes by which an unfinished line is too long."""
        done = b""
        while len(self._pending) > LONGEST_LINE:
            done += self._prefixed(self._pending[:LONGEST_LINE])
            self._pending = self._pending[LONGEST_LINE:]
        return done


def visible_state(line: bytes) -> bytes:
    """The part of a line that a terminal shows: that after the last carriage return that has text after it."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Sink:
    """One of the launcher's own output streams.

    If its reader has stopped (a pager), the launcher must still be able to end its ranks. The descriptor cannot be made
    non-blocking, because other processes share it. So it is polled, and written in pieces that it is guaranteed to
    take.

    Attributes:
        closed: whether it cannot be written to any more.
        fault: why, if that is not that its reader has gone.
        terminal, color: whether a live line can be drawn, and whether colours are wanted.
        deadline: when a write gives up if nothing is read, on the monotonic clock; None to wait without end.
        meanwhile: called again and again while a reader keeps a write waiting.
    """

    def __init__(self, descriptor: int, environment: Mapping[str, str]) -> None:
        self.descriptor = descriptor
        self.closed, self.fault = False, ""
        self.terminal = os.isatty(descriptor) and environment.get("TERM") != "dumb"
        self.color = self.terminal and not environment.get("NO_COLOR")
        self.deadline: float | None = None
        self.meanwhile: Callable[[], None] = lambda: None
        kind = os.fstat(descriptor).st_mode
        self._may_block = stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind) or stat.S_ISCHR(kind)
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def write(self, data: bytes | str) -> None:
        """Write all of ``data``, unless the stream is or becomes ``closed``."""
        if self.closed:
            return
        view = memoryview(printable(data).encode() if isinstance(data, str) else data)
        while view:
            if self._may_block and not self._wait():
                return
            try:
                written = os.write(self.descriptor, view[:_ATOMIC] if self._may_block else view)
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.EIO, errno.EBADF):
                    self.fault = os.strerror(error.errno or 0)
                self.closed = True
                return
            view = view[written:]

    def _wait(self) -> bool:
        while True:
            left_s = 0.1 if self.deadline is None else min(0.1, max(0.0, self.deadline - time.monotonic()))
            if self._poll.poll(left_s * 1000):
                return True
            self.meanwhile()  # may set the deadline
            if self.deadline is not None and time.monotonic() > self.deadline:
                return False

    def columns(self) -> int:
        """Width of the terminal in columns; 80 if it is unknown."""
        with contextlib.suppress(OSError):
            return os.get_terminal_size(self.descriptor).columns or 80
        return 80


class _LiveLine(NamedTuple):
    sink: Sink
    text: bytes
    owner: object


class Console:
    """The launcher's two output streams, with at most one live line below them."""

    def __init__(self, out: Sink, err: Sink) -> None:
        self.out, self.err = out, err
        self._live: _LiveLine | None = None
        self._wanted: _LiveLine | None = None
        self._drawn_at = 0.0

    def write(self, sink: Sink, lines: bytes | str) -> None:
        """Print whole lines above the live line."""
        if not lines:
            return
        live = self._live if sink.terminal else None
        if live is not None:
            live.sink.write(_WIPE)
        sink.write(lines)
        if live is not None:
            live.sink.write(live.text)

    def say(self, text: str) -> None:
        """Print the launcher's own words on standard error, under its name."""
        self.write(self.err, f"phalanx: {text}\n")

    def show(self, sink: Sink, line: bytes, owner: object) -> None:
        """Make ``line`` the live line at the next redraw. An empty one removes the live line if it is ``owner``'s."""
        if line and sink.terminal:
            self._wanted = _LiveLine(sink, line, owner)
        if not line and self._wanted is not None and self._wanted.owner is owner:
            self._wanted = None
        if not line and self._live is not None and self._live.owner is owner:
            self._erase()

    @property
    def redraw_at(self) -> float | None:
        """Return when :meth:`redraw` has something to do; None for never."""
        return None if self._wanted is None else self._drawn_at + REDRAW_S

    def redraw(self) -> None:
        """Draw the live line that :meth:`show` got last, if ``REDRAW_S`` has passed since the last drawing."""
        if self._wanted is None or time.monotonic() < self._drawn_at + REDRAW_S:
            return
        (sink, line, owner), self._wanted = self._wanted, None
        self._drawn_at = time.monotonic()
        self._erase()
        self._live = _LiveLine(sink, fit(line, sink.columns() - 1), owner)
        sink.write(self._live.text)

    def finish(self) -> None:
        """Erase the live line and draw no other that was asked for before."""
        self._wanted = None
        self._erase()

    def _erase(self) -> None:
        if self._live is not None:
            self._live.sink.write(_WIPE)
        self._live = None


def fit(line: bytes, columns: int) -> bytes:
    """Cut ``line`` to ``columns`` terminal cells. Colours take no cell and are kept; wide characters take two."""
    from rich.cells import cell_len

    parts: list[bytes] = []
    pieces = _ESCAPES.split(line.replace(b"\t", b" "))  # text and escape sequences in turn
    for index, piece in enumerate(pieces):
        if index % 2:
            # Only colours are kept: other escape sequences may move the cursor out of the live line.
            parts.append(piece if piece.endswith(b"m") else b"")
            continue
        for character in filter(str.isprintable, piece.decode(errors="replace")):
            columns -= cell_len(character)
            if columns >= 0:
                parts.append(character.encode())
    return b"".join(parts) + (b"\x1b[0m" if len(pieces) > 1 else b"")
