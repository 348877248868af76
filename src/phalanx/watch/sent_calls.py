"""Collectives that ranks have done (``done_calls.py``), as one host sends them to the one that compares them.

A loop makes the same few calls again and again, so different ones are listed once and then named by their numbers;
texts likewise. A message never has more than ``LARGEST`` bytes: of what does not fit the oldest calls are left out,
which the comparison takes for calls that nobody has recorded. What is read comes from outside, and is checked whole.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from phalanx.system.foreign_values import checked, is_number
from phalanx.watch.done_calls import NOT_COMPARED, DoneCall, DoneCalls
from phalanx.watch.recorder import ranks_in, spans
from phalanx.watch.records import KINDS, Group
from phalanx.watch.shapes import lengths_in

__all__ = ["LARGEST", "MOST_CALLS", "calls_from_json", "calls_to_json"]

#: The most bytes of one message, as JSON.
LARGEST = 1 << 18
#: The most collectives of one class of ranks in it.
MOST_CALLS = 1 << 12
_MOST_GROUPS = 1 << 12
_LONGEST_TEXT = 1 << 12
_KINDS = set(KINDS.values()) - set(NOT_COMPARED)
_NUMBER = 1 << 32  # numbers of collectives are smaller


def calls_to_json(calls: Sequence[DoneCalls]) -> dict[str, Any] | None:
    """Plain values, from which :func:`calls_from_json` makes the same; None if not even the fewest fit."""
    newest = MOST_CALLS
    while newest:
        values = _Table().put(calls, newest)
        if len(json.dumps(values)) <= LARGEST:
            return values
        newest //= 2
    return None


class _Table:
    """The texts and the different calls of one message, each with its number."""

    def __init__(self) -> None:
        self._texts: dict[str, int] = {}
        self._calls: dict[tuple[object, ...], int] = {}
        self._rows: list[list[int]] = []
        self._groups: dict[Group, int] = {}

    def put(self, calls: Sequence[DoneCalls], newest: int) -> dict[str, Any]:
        done = []
        for each in calls[-_MOST_GROUPS:]:
            group = self._groups.setdefault(each.group, len(self._groups))
            kept = each.calls[-newest:]
            first = each.first + len(each.calls) - len(kept)
            numbers = [-1 if call is None else self._call(call) for call in kept]
            done.append([group, spans(each.ranks), first, numbers, self._steps(kept), int(each.failed)])
        groups = [[self._text(group.name), self._text(group.backend), spans(group.ranks)] for group in self._groups]
        return {"done": done, "groups": groups, "calls": self._rows, "texts": list(self._texts)}

    def _call(self, call: DoneCall) -> int:
        about = (call.identity, call.nbytes, call.peer, call.kind, call.dtype, call.op, call.site, call.shape)
        number = self._calls.get(about)
        if number is None:
            number = self._calls[about] = len(self._rows)
            self._rows.append([*about[:3], *map(self._text, about[3:])])
        return number

    def _steps(self, calls: Sequence[DoneCall | None]) -> list[list[int]]:
        """Which step it was and what it was called, with how many calls in a row that was so."""
        runs: list[list[int]] = []
        for (step, label), run in groupby(calls, lambda call: (call.step, call.label) if call else (-1, "")):
            runs.append([sum(1 for _ in run), step, self._text(label)])
        return runs

    def _text(self, text: str) -> int:
        return self._texts.setdefault(text[:_LONGEST_TEXT], len(self._texts))


def calls_from_json(values: Any, ranks: Collection[int], size: int) -> list[DoneCalls]:
    """See :func:`calls_to_json`.

    Args:
        values: what has come.
        ranks: the ranks that the sender may speak for.
        size: how many ranks there are.

    Raises:
        ValueError, TypeError, KeyError, IndexError: it is something else.
    """
    texts = _listed(values["texts"], LARGEST)
    if not all(isinstance(text, str) and len(text) <= _LONGEST_TEXT for text in texts):
        raise ValueError("texts are strings")
    groups = [_group(texts, row, size) for row in _listed(values["groups"], _MOST_GROUPS)]
    calls = [_call(texts, row) for row in _listed(values["calls"], LARGEST)]
    return [_done(texts, groups, calls, row, ranks) for row in _listed(values["done"], _MOST_GROUPS)]


def _group(texts: Sequence[str], row: Any, size: int) -> Group:
    name, backend, members = _listed(row, 3)
    ranks = ranks_in(members)
    if len(set(ranks)) < len(ranks) or not all(0 <= rank < size for rank in ranks):
        raise ValueError("there are no such ranks")
    return checked(Group, {"name": _at(texts, name), "backend": _at(texts, backend), "ranks": ranks})


def _call(texts: Sequence[str], row: Any) -> DoneCall:
    """A call of which the step is not known yet."""
    identity, nbytes, peer, kind, dtype, op, site, shape = _listed(row, 8)
    words = {"kind": kind, "dtype": dtype, "op": op, "site": site, "shape": shape}
    numbers = {"identity": identity, "nbytes": nbytes, "peer": peer, "label": "", "step": -1}
    call = checked(DoneCall, {**{name: _at(texts, number) for name, number in words.items()}, **numbers})
    if call.kind not in _KINDS or call.nbytes < 0 or call.identity < 0:
        raise ValueError("a call is of an unknown kind, or one of its numbers is negative")
    if call.shape and not lengths_in(call.shape):
        raise ValueError("a shape is something else")
    return call


def _done(
    texts: Sequence[str], groups: Sequence[Group], calls: Sequence[DoneCall], row: Any, allowed: Collection[int]
) -> DoneCalls:
    number, members, first, numbers, steps, failed = _listed(row, 6)
    group, ranks = _at(groups, number), ranks_in(members)
    if not ranks or not all(rank in allowed and rank in group.ranks for rank in ranks):
        raise ValueError("the sender does not speak for these ranks")
    if not is_number(first) or not 0 < first < _NUMBER or failed not in (0, 1):
        raise ValueError("no collective has such a number")
    known = [None if number == -1 else _at(calls, number) for number in _listed(numbers, MOST_CALLS)]
    done: list[DoneCall | None] = []
    for run in _listed(steps, MOST_CALLS):
        count, step, label = _listed(run, 3)
        if not is_number(count) or not 0 < count <= len(known) - len(done) or not is_number(step):
            raise ValueError("there are no such steps")
        about = {"step": step, "label": _at(texts, label)}
        of_run = known[len(done) : len(done) + count]
        own = {id(call): replace(call, **about) for call in of_run if call is not None}
        done += [own.get(id(call)) for call in of_run]
    if len(done) < len(known):
        raise ValueError("of some calls the step is missing")
    return DoneCalls(group, ranks, first, tuple(done), bool(failed))


def _listed(values: Any, most: int) -> list[Any]:
    if not isinstance(values, list) or len(values) > most:
        raise ValueError("a list is missing, or too long")
    return values


def _at(values: Sequence[Any], number: Any) -> Any:
    if not is_number(number) or not 0 <= number < len(values):
        raise IndexError("it names nothing")
    return values[number]
