"""What is seen of a rank, as plain values: in a report, and on the way to another host."""

from __future__ import annotations

from typing import Any

from phalanx.diagnosis.diagnose import RankSnapshot
from phalanx.diagnosis.records import Recording
from phalanx.system.foreign_values import checked

__all__ = ["seen_from_json", "seen_to_json"]


def seen_to_json(seen: RankSnapshot, recording: Recording | None) -> dict[str, Any]:
    """Plain values, from which :func:`seen_from_json` makes the same, without stacks.

    Args:
        seen: what is seen.
        recording: as much of its recording as is wanted.
    """
    return {
        "rank": seen.rank,
        "state": seen.state,
        "ended": seen.ended,
        "place": seen.place,
        "asked": seen.asked,
        "host": seen.host,
        "silent": seen.silent,
        "recording": recording.to_json() if recording is not None else None,
    }


def seen_from_json(values: dict[str, Any]) -> RankSnapshot:
    """What :func:`seen_to_json` made plain values of.

    Raises:
        ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError: it is something else.
    """
    recording = Recording.from_json(values["recording"]) if values["recording"] is not None else None
    own = {name: values[name] for name in ("rank", "state", "ended", "place", "asked")}
    # An earlier Phalanx wrote reports on jobs of one host only.
    more = {"recording": recording, "host": values.get("host", ""), "silent": values.get("silent", False)}
    return checked(RankSnapshot, {**own, **more})
