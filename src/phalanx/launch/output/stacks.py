"""Where the ranks were: from the stacks that ``faulthandler`` has written to one line for each distinct place."""

from __future__ import annotations

import linecache
import os
from collections.abc import Mapping, Sequence

from phalanx.diagnosis.call_site import OWN
from phalanx.diagnosis.stacks import SCRIPT_ENDED, Frame, asked_in, frames_of, has_ended
from phalanx.system.files import beside, own_folder
from phalanx.words import format_named

__all__ = ["format_places", "format_stack", "format_stacks", "frames_in", "place_in"]

_LAUNCHERS = (f"{OWN}launch{os.sep}", f"{OWN}commands{os.sep}", f"{OWN}__main__.py")
_MOST_PLACES = 8
_LONGEST_LINE = 60


def _is_launchers(frame: Frame) -> bool:
    """Whether a frame belongs to what runs the script."""
    return frame.file.startswith(("<frozen ", *_LAUNCHERS))


def _described(frame: Frame) -> str:
    """``train.py:6 dist.all_reduce(x)``; the function's name in place of a line that cannot be read."""
    text = linecache.getline(frame.file, frame.line).strip() or frame.function
    shown = text if len(text) <= _LONGEST_LINE else f"{text[: _LONGEST_LINE - 1]}…"
    return f"{beside(frame.file, own_folder())}:{frame.line} {shown}"


def _frames(stack: str) -> list[Frame]:
    """The frames of a stack without the launcher's, the innermost first, as faulthandler lists them."""
    found = frames_of(stack)
    # Below the script are the frames of the launcher and of the console script that called it; below an exit handler,
    # which the interpreter calls after the script, is nothing.
    if any(map(_is_launchers, found)):
        while not _is_launchers(found[-1]):
            found.pop()
        while found and _is_launchers(found[-1]):
            found.pop()
    return found


def _place(stack: str) -> str:
    asked = asked_in(stack)
    return f"{_line(stack)}{f'; it waits for {asked}' if asked else ''}"


def _line(stack: str) -> str:
    frames = _frames(stack)
    own = [frame for frame in frames if not frame.is_librarys]
    if own or (frames and not has_ended(frames)):
        return _described((own or frames)[0])
    return SCRIPT_ENDED if frames else "not in its script"


def place_in(stack: str) -> str:
    """The innermost line of the script in a stack, with its text, or that it is over; empty if it has neither."""
    return _line(_last(stack)) if _frames(_last(stack)) else ""


def frames_in(stack: str) -> tuple[Frame, ...]:
    """The frames of a stack, the innermost call first, without the launcher's."""
    return tuple(_frames(_last(stack)))


def format_stack(stack: str) -> list[str]:
    """A stack as in a traceback, the innermost call last, without the launcher's frames."""
    return _as_traceback(_frames(_last(stack)))


def _as_traceback(frames: Sequence[Frame]) -> list[str]:
    lines = []
    for frame in reversed(frames):
        lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
        text = linecache.getline(frame.file, frame.line).strip()
        lines += [f"    {text}"] if text else []
    return lines


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
    groups: dict[tuple[tuple[Frame, ...], str], list[int]] = {}
    for rank, stack in stacks.items():
        groups.setdefault((tuple(_frames(_last(stack))), asked_in(stack)), []).append(rank)
    lines = []
    for (frames, asked), ranks in groups.items():
        lines.append(f"{format_named('rank', ranks)} {'is' if len(ranks) == 1 else 'are'} at")
        lines += _as_traceback(frames)
        lines += [f"  waiting for {asked}"] if asked else []
    return lines


def _last(stack: str) -> str:
    return stack[max(0, stack.rfind("Stack (")) :] if "Stack (" in stack else stack
