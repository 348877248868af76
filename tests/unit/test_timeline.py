"""What a timeline says of recordings that are cut, that name a group twice, and whose texts are foreign."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from msgspec.structs import replace
from tests.support.reports import EVIL, SECOND, operation, report

from phalanx.diagnosis.diagnose import HangDiagnosis
from phalanx.diagnosis.render import timeline_page, timeline_svg
from phalanx.diagnosis.report import HangReport
from phalanx.diagnosis.snapshot import Group, RankSnapshot, Recording
from phalanx.diagnosis.timeline import COMMUNICATES, COMPUTES, WAITS, Timeline, chrome_trace, make_timeline

Call = tuple[str, int, float, float]  # its kind, its number in the group, and when it began and ended, in seconds


def recorded(*ranks: Sequence[Call], peer: int = -1, group: str = "0") -> HangReport:
    seen = []
    for rank, calls in enumerate(ranks):
        world = Group(group, "phalanx", tuple(range(len(ranks))), rank)
        records = [
            replace(
                operation(number, world=world, kind=kind),
                in_group=in_group,
                entered_ns=int(begin * SECOND),
                left_ns=int(end * SECOND),
                peer=peer,
                step=-1,
            )
            for number, (kind, in_group, begin, end) in enumerate(calls)
        ]
        seen.append(RankSnapshot(rank, Recording(1, rank, len(ranks), -1, "", len(records), tuple(records))))
    return HangReport("phalanx run: x", "h", "now", 100 * SECOND, HangDiagnosis("", (), (), 0), seen)


def made(left: HangReport) -> Timeline:
    found = make_timeline(left)
    assert found is not None
    return found


def shares(found: Timeline) -> list[list[float]]:
    return [[round(lane.share(kind), 2) for kind in (COMPUTES, COMMUNICATES, WAITS)] for lane in found.lanes]


def test_a_rank_waits_until_the_last_has_come_and_then_communicates() -> None:
    found = made(
        recorded([("all_reduce", 1, 0, 8), ("barrier", 2, 9, 10)], [("all_reduce", 1, 6, 8), ("barrier", 2, 9, 10)])
    )
    assert shares(found) == [[0.1, 0.3, 0.6], [0.7, 0.3, 0.0]]
    assert found.verdict == "rank 1 was waited for most: 6 s in 1 operation"


def test_rank_that_leaves_a_broadcast_early_waited_for_its_root_alone() -> None:
    calls = [[("broadcast", 1, at, end), ("barrier", 2, 9, 10)] for at, end in ((2, 3), (0, 3), (8, 8.5))]
    assert [(wait.awaited, wait.waiting) for wait in made(recorded(*calls, peer=0)).waits] == [(0, (1,))]


def test_only_what_all_recordings_reach_back_to_is_looked_at() -> None:
    """The first rank has kept fewer operations; and a group of the same name was made twice."""
    old = [("all_reduce", number, number, number + 0.5) for number in range(1, 6)]
    new = [("all_reduce", number, 10 + number, 10 + number + 0.5) for number in range(1, 3)]
    late = [("all_reduce", 1, 11.25, 11.5), ("all_reduce", 2, 12, 12.5)]
    found = made(recorded([*old[3:], *new], [*old, *late]))
    assert found.begin_ns == 4 * SECOND
    assert [(wait.awaited, wait.wait_ns, wait.record.in_group) for wait in found.waits] == [(1, SECOND // 4, 1)]


def test_it_begins_with_the_first_step() -> None:
    left = recorded(
        [("all_gather", 1, 0, 5), ("all_reduce", 2, 6, 9)], [("all_gather", 1, 4, 5), ("all_reduce", 2, 8, 9)]
    )
    ranks = []
    for seen in left.ranks:
        assert seen.recording is not None
        first, second = seen.recording.records
        ranks.append(replace(seen, recording=replace(seen.recording, records=(first, replace(second, step=0)))))
    found = made(replace(left, ranks=ranks))
    assert (found.begin_ns, found.end_ns) == (5 * SECOND, 9 * SECOND)
    assert shares(found) == [[0.25, 0.25, 0.5], [0.75, 0.25, 0.0]]
    assert [mark for lane in found.lanes for mark in lane.marks] == [(5 * SECOND, "step 0")] * 2


def test_foreign_texts_stay_texts_and_many_ranks_stay_small() -> None:
    left = report(100, 30, text=EVIL, site=EVIL)
    found = made(left)
    for text in (timeline_svg(found), timeline_page(found)):
        assert "<img" not in text
        assert "alert(1)</script" not in text
        assert len(text) < 200_000
    drawn = ElementTree.fromstring(timeline_svg(found))
    assert sum(each.tag.endswith("}svg") for each in drawn) == 3 + 64  # the legend, and a lane for each rank
    assert {event["pid"] for event in chrome_trace(found)["traceEvents"]} == set(range(100))


def test_nothing_is_made_of_ranks_without_operations() -> None:
    assert make_timeline(recorded([], [])) is None
