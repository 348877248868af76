"""The rule by which two ranks' lines count as crossed, as the core applies it, against the rule as it is written."""

from __future__ import annotations

import random
from collections.abc import Iterator

from phalanx.watch.comparison import _Line, _Lines

KEPT, CALM = 16, 8  # as native/csrc/line_pairs.h promises
Meeting = tuple[_Line, _Line]


def line(place: int, root: int = -1) -> _Line:
    return _Line(place, "broadcast", "float32", "", root)


def crossed_by_the_rule(meetings: list[Meeting]) -> Iterator[bool]:
    """Of each meeting whether two lines are crossed by it.

    Of the pairs of different lines that met lately, the last ones since the ranks were last in step for some calls, a
    new one crosses two lines of different places if each of them stands on both sides, and one of them is in this pair.
    """
    pairs: list[Meeting] = []
    calm = 0
    for mine, theirs in meetings:
        calm = calm + 1 if mine == theirs else 0
        if calm == CALM:
            pairs = []
        if mine == theirs or (mine, theirs) in pairs[-KEPT:]:
            yield False
            continue
        pairs.append((mine, theirs))
        kept = pairs[-KEPT:]
        both = {one for one, _ in kept} & {other for _, other in kept}
        first = next((of_pair for of_pair in (mine, theirs) if of_pair in both), None)
        yield first is not None and any(second.identity != first.identity for second in both)


def drawn(seed: int) -> list[Meeting]:
    """Meetings of two ranks that mostly run the same lines, and at times get out of step, or take other branches."""
    chance = random.Random(seed)
    places, roots = chance.choice([2, 3, 5, 12, 40]), chance.choice([1, 1, 2, 3])
    lines = [line(1 + place, root) for place in range(places) for root in range(roots)]
    in_step = chance.choice([0.0, 0.3, 0.7, 0.9])
    mine = [chance.choice(lines) for _ in range(chance.randrange(1, 120))]
    return [(one, one if chance.random() < in_step else chance.choice(lines)) for one in mine]


def test_random_meetings_cross_lines_as_the_rule_says() -> None:
    verdicts = {False: 0, True: 0}
    for seed in range(250):
        lines, meetings = _Lines(), drawn(seed)
        by_the_rule = crossed_by_the_rule(meetings)
        for number, ((mine, theirs), expected) in enumerate(zip(meetings, by_the_rule, strict=True), 1):
            crossed = lines.meet(mine, theirs, f"train.py:{mine.identity}", number)
            assert bool(crossed) == expected, (seed, number)
            verdicts[expected] += 1
            for place, call_of_mine, call_of_theirs in crossed:
                # The first rank was at this place in the one call, and the other rank in the other call.
                assert place == f"train.py:{meetings[call_of_mine - 1][0].identity}"
                assert place == f"train.py:{meetings[call_of_theirs - 1][1].identity}"
    assert min(verdicts.values()) > 100
