"""Compare the calls of a job's ranks when one failed, where an error of torch's own backends cannot say it.

Each rank's last operations come with the news of its end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from phalanx.diagnosis.diagnose import calls_that_differ, disagreement
from phalanx.diagnosis.snapshot import Recording
from phalanx.launch.roster import RankState

__all__ = ["parted"]

_CLOCKS_DIFFER_S = 0.1


def parted(
    ranks: Sequence[RankState],
    hosts: Sequence[str],
    rank: int,
    at: float,
    stopped: Collection[int] = (),
    ended: Collection[int] = (),
) -> list[str]:
    """Lines on how the calls of ranks differed when one failed; see ``diagnosis/diagnose.py``.

    Args:
        ranks: all ranks.
        hosts: the host of each.
        rank: the one that failed.
        at: when, on the monotonic clock.
        stopped: the ranks that were stopped then (state T).
        ended: those that ended by themselves, with exit code 0.
    """
    if ranks[rank].recording is None:
        return []
    nothing = Recording(0, -1, 0, -1, "", 0, ())  # of a rank that has not come to a group so far
    found = {each.number: each.recording or nothing for each in ranks}
    if len(set(hosts)) > 1:
        # Which calls differ does not depend on who came first, and clocks of hosts are not known to the microsecond.
        late_ns = (at + _CLOCKS_DIFFER_S) * 1e9
        known = {each.number: each.recording for each in ranks if each.recording is not None}
        if differing := calls_that_differ(known, rank, late_ns):
            return differing
    return disagreement(found, rank, at * 1e9, stopped, ended)
