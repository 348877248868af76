"""What the flight recorder of another rank says of it, for errors about that rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phalanx.diagnosis.records import Recording
from phalanx.system.folder import beside, jobs_folder

__all__ = ["facts_in"]


def facts_in(recording: Recording) -> dict[str, Any]:
    """The attributes of :class:`PeerLost` that are in a rank's recorder, and whether it ``was_in_it``."""
    facts: dict[str, Any] = {"rank": recording.rank}
    last = recording.last
    if last is not None:
        facts["last_line"], facts["was_in_it"] = last.site, last.under_way
        facts["last_operation"] = replace(last, site=beside(last.site, jobs_folder())).text()
    return facts
