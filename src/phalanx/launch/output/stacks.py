"""Where the ranks were: from the stacks that ``faulthandler`` has written to one line for each distinct place."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.words import format_named

__all__ = ["format_places", "format_stacks"]

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)
_LIBRARIES = tuple({f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
# This package's own files, which need not be among the installed ones.
_OWN = f"{os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))}{os.sep}"
_LAUNCHERS = (f"{_OWN}launch{os.sep}", f"{_OWN}commands{os.sep}", f"{_OWN}__main__.py")
_MOST_PLACES = 8
_LONGEST_LINE = 60


@dataclass(frozen=True)
class _Frame:
    file: str
    line: int
    function: str

    @property
    def is_launchers(self) -> bool:
        """Whether it belongs to what runs the script."""
        return self.file.startswith(("<frozen ", *_LAUNCHERS))

    @property
    def is_librarys(self) -> bool:
        return self.file.startswith(("<", *_LIBRARIES, _OWN))

    def describe(self) -> str:
        """``train.py:6 dist.all_reduce(x)``; the function's name in place of a line that cannot be read."""
        beside = os.path.relpath(self.file) if os.path.isabs(self.file) else self.file
        name = self.file if beside.startswith(os.pardir) else beside
        text = linecache.getline(self.file, self.line).strip() or self.function
        return f"{name}:{self.line} {text if len(text) <= _LONGEST_LINE else f'{text[: _LONGEST_LINE - 1]}…'}"


def _frames(stack: str) -> list[_Frame]:
    """The frames of a stack without the launcher's, the innermost first, as faulthandler lists them."""
    found = [_Frame(match["file"], int(match["line"]), match["function"]) for match in _FRAME.finditer(stack)]
    # Below the script are the frames of the launcher and of the console script that called it.
    while found and not found[-1].is_launchers:
        found.pop()
    while found and found[-1].is_launchers:
        found.pop()
    return found


def _place(stack: str) -> str:
    frames = _frames(stack)
    own = [frame for frame in frames if not frame.is_librarys]
    if own or frames:
        return (own or frames)[0].describe()
    return "not in its script"


def format_places(stacks: Mapping[int, str]) -> list[str]:
    """A line for each distinct place at which ranks were, without an indent.

    Args:
        stacks: what faulthandler has written for each rank; the last stack counts.
    """
    places: dict[str, list[int]] = {}
    for rank, stack in stacks.items():
        places.setdefault(_place(_last(stack)), []).append(rank)
    lines = [f"{format_named('rank', ranks)}: {place}" for place, ranks in places.items()]
    if len(lines) > _MOST_PLACES:
        lines = [*lines[:_MOST_PLACES], f"and {len(lines) - _MOST_PLACES} more places"]
    return lines


def format_stacks(stacks: Mapping[int, str]) -> list[str]:
    """The stacks in full, those of several ranks once if they are equal; the innermost call last, as in a traceback."""
    groups: dict[tuple[_Frame, ...], list[int]] = {}
    for rank, stack in stacks.items():
        groups.setdefault(tuple(_frames(_last(stack))), []).append(rank)
    lines = []
    for frames, ranks in groups.items():
        lines.append(f"{format_named('rank', ranks)} {'is' if len(ranks) == 1 else 'are'} at")
        for frame in reversed(frames):
            lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
            text = linecache.getline(frame.file, frame.line).strip()
            lines += [f"    {text}"] if text else []
    return lines


def _last(stack: str) -> str:
    return stack[max(0, stack.rfind("Stack (")) :] if "Stack (" in stack else stack
