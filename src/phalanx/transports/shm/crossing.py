"""Two ranks of a group that have called two lines in different orders: a mistake that equal calls hide.

The core notices it (``native/csrc/lines.h`` has the rule). What is left to decide is whether the two lines are two arms
of one branch, which ranks may well take in turns; and whether the user wants a warning or an error.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from phalanx import settings
from phalanx.errors import CollectiveMismatch, InitializationError
from phalanx.native.core import Crossing, library
from phalanx.watch.call_site import CallSite, text_of
from phalanx.watch.program_text import are_alternatives, call_text_at
from phalanx.watch.recorder import place_of
from phalanx.words import tell

__all__ = ["begin_to_compare", "judge"]

_IGNORED, _WARNS, _ERROR = "ignore", "warn", "error"
# Crossed lines of a group that turn out to be arms of one branch: how many are judged where a warning is all that could
# come of it.
_MOST_JUDGED = 64
_ALL = (1 << 32) - 1


def begin_to_compare(comm: int) -> None:
    """Have the lines of a group's calls compared, unless the user has turned that off."""
    wanted = _wanted()
    if wanted != _IGNORED:
        library().phx_compare_lines(comm, _MOST_JUDGED if wanted == _WARNS else _ALL)


def _wanted() -> str:
    said = os.environ.get(settings.CALL_SITES, "").lower() or _WARNS
    if said not in (_IGNORED, _WARNS, _ERROR):
        raise InitializationError(
            f"{settings.CALL_SITES}={os.environ[settings.CALL_SITES]} is none of {_WARNS}, {_ERROR} and {_IGNORED}"
        )
    return said


def judge(comm: int, rank: int, names: Sequence[int]) -> str:
    """Decide about lines that the group's last call has found crossed, and warn if that is all there is to do.

    Args:
        comm: the core's handle of the group.
        rank: this process's rank in the group.
        names: what to call each rank.

    Returns:
        What was crossed, in words, if that is an error, and then the group is broken; else an empty text.
    """
    core, found = library(), Crossing()
    core.phx_crossing(comm, ctypes.byref(found))
    sites = [place_of(line) for line in found.lines]
    if sites[0] is not None and sites[1] is not None and are_alternatives(sites[0], sites[1]):
        return ""
    # By rank, so that both ranks of the pair say it in the same words.
    ranks = sorted(((names[rank], found.mine), (names[found.peer], found.theirs)))
    (low, of_low), (high, of_high) = ranks
    calls = [
        f"was call #{first} of rank {low} and #{second} of rank {high}"
        for first, second in zip(of_low, of_high, strict=True)
    ]
    if _wanted() == _ERROR:
        core.phx_break_crossed(comm)
        return ", ".join(
            sorted(f"{os.path.basename(text_of(site))} {call}" for site, call in zip(sites, calls, strict=True))
        )
    if core.phx_tells_crossing(comm):
        lines = sorted(f"  {_place(site)} {call}" for site, call in zip(sites, calls, strict=True))
        tell(
            CollectiveMismatch.in_different_orders(low, high, "\n".join(lines))
            + f" {settings.CALL_SITES}=error (phalanx run --strict) makes this an error; if it is meant, "
            f"{settings.CALL_SITES}=ignore says nothing"
        )
    return ""


def _place(site: CallSite | None) -> str:
    text = call_text_at(site) if site is not None else ""
    return f"{text} at {text_of(site)}" if text else text_of(site)
