"""The draw of the kill matrix: few of many cases, the same ones each time, in which all combinations occur."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from operator import attrgetter

from .kill_cases import RANKS, Case, every_case

__all__ = ["drawn", "quick"]

SEED = 16
DIMENSIONS = ("operation", "moment", "fault", "victim", "world", "meeting")
# Of these three each combination is wanted too, where the count allows it. Of any two dimensions each is in any case.
TRIPLES = (("operation", "moment", "fault"), ("operation", "fault", "victim"))
TRIED = 8  # of the cases that have a combination which is still missing

Combination = tuple[int, tuple[object, ...]]  # the number of its kind, and the values


def drawn(place: str, count: int) -> list[Case]:
    """``count`` different cases of a place, always the same ones."""
    chance = random.Random(f"{SEED} {place}")
    cases = list(every_case(place))
    chosen: dict[Case, None] = {}
    for kinds in (list(itertools.combinations(DIMENSIONS, 2)), TRIPLES):
        _cover(kinds, cases, count, chosen, chance)
    others = [case for case in cases if case not in chosen]
    chosen |= dict.fromkeys(chance.sample(others, count - len(chosen)))
    in_turn = list(chosen)
    chance.shuffle(in_turn)
    return [dataclasses.replace(case, seed=chance.randrange(10**6)) for case in in_turn]


def _cover(
    kinds: Sequence[tuple[str, ...]], cases: list[Case], count: int, chosen: dict[Case, None], chance: random.Random
) -> None:
    """Add cases until every combination of these dimensions occurs, or there are ``count``.

    For each one that is missing it takes, of some cases that have it, the one that has most of the others.
    """

    values_of = [attrgetter(*kind) for kind in kinds]

    def combinations(case: Case) -> list[Combination]:
        return [(number, values(case)) for number, values in enumerate(values_of)]

    with_it: dict[Combination, list[Case]] = {}
    for case in cases:
        for combination in combinations(case):
            with_it.setdefault(combination, []).append(case)
    missing = set(with_it)
    for case in chosen:
        missing.difference_update(combinations(case))
    for combination in chance.sample(list(with_it), len(with_it)):
        if combination not in missing or len(chosen) == count:
            continue
        some = chance.sample(with_it[combination], min(TRIED, len(with_it[combination])))
        best = max(some, key=lambda case: len(missing.intersection(combinations(case))))
        chosen[best] = None
        missing.difference_update(combinations(best))


def quick(cases: list[Case], count: int) -> list[Case]:
    """Of these cases ``count`` that take little time and differ: of each kind one, as long as there are kinds.

    A stopped rank takes long, because one waits for what is said of it.
    """
    cheap = [case for case in cases if case.fault != "SIGSTOP" and case.world < 8]
    kinds = (
        [case for case in cheap if case.victim == "zygote"],
        [case for case in cheap if case.victim in RANKS and case.operation == "init"],
        [case for case in cheap if case.victim in RANKS and case.fault == "SIGKILL" and case.moment == "first"],
        [case for case in cheap if case.victim == "launcher"],
        [case for case in cheap if case.victim in RANKS and case.operation == "close"],
    )
    chosen: list[Case] = []
    for kind in kinds[:count]:
        chosen += [case for case in kind if case not in chosen][:1]
    return chosen
