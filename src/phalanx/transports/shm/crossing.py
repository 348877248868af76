"""Lines that ranks of one host have called in different orders: the core's finding, and what comes of it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from phalanx.native.core import Crossing, library
from phalanx.transports.crossing import MOST_JUDGED, Wish, crossed_lines

__all__ = ["begin_to_compare", "judge", "tells"]

_ALL = (1 << 32) - 1


def begin_to_compare(comm: int) -> None:
    """Have the lines of a group's calls compared, unless the user has turned that off."""
    wanted = Wish.read()
    if wanted != Wish.IGNORE:
        library().phx_compare_lines(comm, MOST_JUDGED if wanted == Wish.WARN else _ALL)


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
    crossed = crossed_lines(found, names[rank], names[found.peer])
    if crossed is None:
        return ""
    if Wish.read() == Wish.ERROR:
        core.phx_break_crossed(comm)
        return crossed.briefly()
    if tells(comm):
        crossed.warn()
    return ""


def tells(comm: int) -> bool:
    """Whether this is the first rank of the group that asks, which then tells the user; no other one will."""
    return bool(library().phx_tells_crossing(comm))
