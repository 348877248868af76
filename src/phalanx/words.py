"""Words for people: ranks, plurals, sizes and times as text, and the line it prints under its name.

These texts are for people only: no code may read them back.
"""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "did_you_mean",
    "first_kinds",
    "format_bytes",
    "format_count",
    "format_gib",
    "format_limit",
    "format_list",
    "format_named",
    "format_placed",
    "format_size",
    "format_spans",
    "format_time",
    "printable",
    "tell",
    "tell_progress",
]

# The launcher's block about calls that differ has at most 12 lines then, beside the frames of a traceback.
_MOST_KINDS = 4
_UNITS = (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``did you mean bench? `` of a name that is nearly one of those that are known; empty if it is not."""
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}? " if near else ""


def format_spans(numbers: Sequence[int]) -> str:
    """``0-3, 8`` for 0, 1, 2, 3, 8."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def format_named(noun: str, numbers: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-3, 8``: a noun with its numbers, in the plural if there are several."""
    return f"{_plural(noun, len(numbers))} {format_spans(numbers)}"


def format_placed(hosts: Mapping[int, str]) -> str:
    """``ranks 1-2 on h0 and rank 4 on h1``: ranks with their hosts, which are empty where they go without saying."""
    alike: dict[str, list[int]] = {}
    for rank, host in sorted(hosts.items()):
        alike.setdefault(host, []).append(rank)
    return format_list(
        [f"{format_named('rank', ranks)}{f' on {host}' if host else ''}" for host, ranks in alike.items()]
    )


def format_list(words: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def first_kinds(lines: list[str]) -> list[str]:
    """The first of lines that say each what some ranks called; for the others one line that says how many they are."""
    if len(lines) <= _MOST_KINDS:
        return lines
    left_out = len(lines) - _MOST_KINDS + 1
    return [*lines[: _MOST_KINDS - 1], f"  and {left_out} other calls on other ranks"]


def format_count(count: int, noun: str) -> str:
    """``1 rank``, ``4 ranks``, ``0 hosts``: a number of things."""
    return f"{count} {_plural(noun, count)}"


def format_size(nbytes: int) -> str:
    """A number of bytes, exactly, as options take it: ``64K`` for 65536, ``1000`` for 1000."""
    for unit, size in _UNITS:
        if nbytes and nbytes % size == 0:
            return f"{nbytes // size}{unit}"
    return str(nbytes)


def format_bytes(nbytes: float) -> str:
    """A number of bytes, rounded: ``16 B``, ``4.0 KiB``, ``25.0 MiB``."""
    for unit, size in _UNITS:
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}iB"
    return f"{nbytes:.0f} B"


def format_gib(nbytes: int) -> str:
    """An amount of memory, rounded: ``1.2 GiB``."""
    return f"{nbytes / (1 << 30):.1f} GiB"


def format_time(microseconds: float) -> str:
    """A time in microseconds, or a ratio of times, rounded to about three digits: 0.52, 6.04, 61.2, 40,100."""
    if microseconds >= 99.95:
        return f"{float(f'{microseconds:.3g}'):,.0f}"
    return f"{microseconds:.1f}" if microseconds >= 9.995 else f"{microseconds:.2f}"


def format_limit(seconds: float) -> str:
    """A time that was given for something: ``1800 s``, ``2.5 s``, ``0.01 s``."""
    return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.2g} s"


def printable(text: str) -> str:
    """Escape what is not Unicode: names of files, hosts, users and variables may be any bytes."""
    return text.encode(errors="backslashreplace").decode()


def tell(text: str) -> None:
    """Write one line to standard error, under Phalanx's name. If nobody reads it any more, it is lost."""
    # A thread that serves others must not end because a console was closed, and text from others may not be printable.
    with contextlib.suppress(OSError, ValueError):
        # The line break with the text: print() writes it by itself, and another process may write in between.
        print(f"phalanx: {text}\n", end="", file=sys.stderr, flush=True)


def tell_progress(text: str) -> None:
    """Say what is done next on standard error, in a line that the next text replaces; nothing where nobody looks."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else f"{noun}s"
