"""What a rank did last, from its flight recorder, also when it has been killed."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from phalanx.errors import PhalanxError
from phalanx.launch.rank.trace import Trace
from phalanx.system.files import beside, own_folder

if TYPE_CHECKING:
    from phalanx.diagnosis.snapshot import Recording

__all__ = ["last_call", "last_operation", "last_recording"]


def last_operation(trace: Trace, part: int, at: float | None = None) -> str:
    """A rank's last operation in words, for the block about its failure; empty if it has recorded none.

    Args:
        trace: the ranks' trace.
        part: the rank's part of it.
        at: when the rank failed, on the monotonic clock; now by default.
    """
    recording = last_recording(trace, part)
    if recording is None or recording.last is None:
        return ""
    last = replace(recording.last, site=beside(recording.last.site, own_folder()))
    now_ns = (time.monotonic() if at is None else at) * 1e9
    if last.under_way:
        since_s = max(0.0, now_ns - last.entered_ns) / 1e9
        return f"it was in {last.text()}, for {since_s:.1f} s"
    since_s = max(0.0, now_ns - last.left_ns) / 1e9
    how = "failed" if last.failed else "was done"
    return f"its last operation, {last.text()}, {how} {since_s:.1f} s before"


def last_call(trace: Trace, part: int) -> dict[str, Any]:
    """A rank's last operation as the errors of other ranks have it: of a rank whose recorder is in this file.

    Returns:
        ``last_operation`` and ``last_line``, and whether it ``was_in_it``; empty if it has recorded none.
    """
    recording = last_recording(trace, part)
    if recording is None or recording.last is None:
        return {}
    last = recording.last
    text = replace(last, site=beside(last.site, own_folder())).text()
    return {"last_operation": text, "last_line": last.site, "was_in_it": last.under_way}


def last_recording(trace: Trace, part: int, count: int = 0) -> Recording | None:
    """Read what a rank has recorded, the last ``count`` operations, by default all; None if it cannot be read."""
    # The job may have been one without Phalanx, so what reads it is not imported before.
    from phalanx.diagnosis.reading import copy_recorder, in_words

    try:
        copy = copy_recorder(trace.descriptor, trace.place_of_recorder(part))
        return in_words(copy.latest(count) if copy is not None and count else copy)
    except (OSError, ValueError, PhalanxError):
        return None
