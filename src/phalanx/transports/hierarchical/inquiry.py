"""What the ranks of other hosts do, for a rank that has waited for long and has no launcher that sees all ranks.

A rank that waits asks, and one rank of each other host answers for all ranks there. It goes through the job's store,
since a process that is stopped or holds the interpreter answers nobody, but those beside it see that.

The keys, in the group's own part of the store; whoever leaves the group last deletes them (``departing.py``):

- ``asked``: how often somebody has asked. Each rank that asks adds one, and the first rank of each host that is not
  stopped reads it twice a second. If the asker dies, it is answered in vain.
- ``seen/R``, where R is the lowest rank of a host: the number of the question up to which this is the answer, and what
  its ranks do. Any rank of that host writes it, those that ask read it. If the one that is to answer dies or is stopped
  before it does, the next rank there sees that, and answers; if after, the answer is there. If two answer, as when the
  first goes on after it was stopped, both answers are right.

A host of which nobody answers in time is silent: all its ranks are stopped or hold the interpreter, or the store is
slow. A host that is gone breaks the group, long before.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace
from torch._C._distributed_c10d import Store

from phalanx.diagnosis.snapshot import RankSnapshot
from phalanx.membership.client import peek
from phalanx.system.foreign_values import read_json
from phalanx.transports.hierarchical.asking import Questions
from phalanx.transports.hierarchical.layout import Layout

__all__ = ["ASKED", "SEEN", "Inquiry", "answer_from"]

ASKED, SEEN = "asked", "seen"
# How long an answer may take. Whoever is to answer looks twice a second, and may be asking its neighbours something.
_PATIENCE_S = 3.0
_LOOK_S = 0.05
_RECORDS = 32  # of each rank, beside those that show which collectives it has come to
_LONGEST = 1 << 24  # bytes of an answer


class Inquiry:
    """One rank's side of it. Only the thread that watches its waits uses it.

    Args:
        store: the group's own part of the job's store.
        rank: this process's rank in the group, which is the world.
        layout: where the ranks are.
        questions: asks the store; nothing is asked or answered any more once this rank has left the group.
    """

    def __init__(self, store: Store, rank: int, layout: Layout, questions: Questions) -> None:
        self._store, self._rank, self._layout, self._questions = store, rank, layout, questions
        self._answered = 0  # up to this number there is an answer of this rank's

    def answer(self, seen: Callable[[], Sequence[RankSnapshot]]) -> None:
        """If somebody has asked since, tell what the ranks of this host do.

        Args:
            seen: looks at all of them; may take a second.
        """
        self._ask_store(lambda: self._answer(seen))

    def ask(self, seen: Callable[[], Sequence[RankSnapshot]], over: Callable[[], bool]) -> list[RankSnapshot]:
        """What the ranks of the other hosts do, in some seconds at most; those of a host that is silent are, too.

        Args:
            seen: as in :meth:`answer`; others may ask meanwhile.
            over: whether nobody wants to know any more.

        Returns:
            Each with the name of its host. Empty if the store cannot be asked.
        """
        found: dict[int, list[RankSnapshot]] = {}

        def look() -> None:
            number = self._store.add(ASKED, 1)
            until = time.monotonic() + _PATIENCE_S
            while len(found) < len(self._layout.hosts) - 1 and time.monotonic() < until and not over():
                for host, ranks in enumerate(self._layout.hosts):
                    if host == self._layout.host or host in found:
                        continue
                    said = peek(self._store, f"{SEEN}/{ranks[0]}")
                    with contextlib.suppress(ValueError):
                        if said and (answered := answer_from(said, ranks))[0] >= number:
                            found[host] = answered[1]
                self._answer(seen)
                time.sleep(_LOOK_S)
            for host, ranks in enumerate(self._layout.hosts):
                if host != self._layout.host and host not in found:
                    found[host] = [RankSnapshot(rank, silent=True) for rank in ranks]

        self._ask_store(look)
        return [self.named(each) for ranks in found.values() for each in ranks]

    def named(self, seen: RankSnapshot) -> RankSnapshot:
        """The same with the name of its host."""
        return replace(seen, host=self._layout.name(seen.rank))

    def _answer(self, seen: Callable[[], Sequence[RankSnapshot]]) -> None:
        number = int(peek(self._store, ASKED) or 0)
        if number > self._answered:
            ranks = [each.to_json(_RECORDS) for each in seen()]
            self._store.set(f"{SEEN}/{self._layout.here[0]}", json.dumps({"number": number, "ranks": ranks}))
            self._answered = number

    def _ask_store(self, task: Callable[[], object]) -> None:
        if self._questions.are_late:
            return
        with self._questions.asking() as asks, contextlib.suppress(RuntimeError):  # the store has gone with rank 0
            if asks:
                task()


def answer_from(said: bytes, ranks: Sequence[int]) -> tuple[int, list[RankSnapshot]]:
    """The number of the question up to which this is an answer, and what these ranks do.

    Raises:
        ValueError: it is not an answer about these ranks.
    """
    if len(said) > _LONGEST:
        raise ValueError("too long")
    values: Any = read_json(said)
    try:
        number, seen = values["number"], [RankSnapshot.from_json(each) for each in values["ranks"]]
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is not an answer: {error}") from None
    if type(number) is not int or {each.rank for each in seen} != set(ranks):
        raise ValueError("it is not an answer of that host")
    return number, seen
