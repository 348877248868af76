"""How the ranks of several hosts learn which two lines gave the unequal ends of a message.

The reason for which a group breaks has the two ends in numbers (``MessageEnd``), and only the rank that gave an end can
say its line. So each of the two writes its own under ``lines/R`` when it learns the reason, and the others read that.
"""

from __future__ import annotations

import contextlib
import json
import time

from torch._C._distributed_c10d import Store

from phalanx.errors import CollectiveMismatch
from phalanx.store.peek import peek
from phalanx.transports.hosts.asking import Questions
from phalanx.transports.hosts.calls import Differs
from phalanx.transports.hosts.whereabouts import NOTED
from phalanx.transports.hosts.wording import Fact
from phalanx.transports.shm.unequal_ends import MessageEnd, unequal_ends
from phalanx.watch import recorder
from phalanx.watch.call_site import text_of

__all__ = ["EndsDiffer", "UnequalEnds"]

# How long to wait for a line. The rank that says it does nothing else then, or a thread of it does; only one that is
# stopped, or gone, does not say it.
SAID_S = 5.0
_LOOK_S = 0.01


class EndsDiffer(Differs):
    """A message is not of the size or the dtype of the tensor that it is received into.

    Attributes:
        ends: what was sent, and what was to be received.
    """

    def __init__(self, sent: MessageEnd, received: MessageEnd) -> None:
        super().__init__("the two ends of a message differ")
        self.ends = sent, received


class UnequalEnds:
    """One rank's side of it. Any thread may use it.

    Args:
        store: the group's own part of the job's store.
        rank: this process's rank in the group.
        questions: limits how long the store is waited for.
    """

    def __init__(self, store: Store, rank: int, questions: Questions) -> None:
        self._store, self._rank, self._questions = store, rank, questions

    def say(self, fact: Fact) -> None:
        """Write down this rank's line, without waiting, if the reason is a message of its own."""
        lines = self._own_lines(fact)
        if lines:
            self._questions.aside(lambda: self._write(lines))

    def error(self, fact: Fact) -> CollectiveMismatch:
        """The error for such a reason, with the lines that the two ranks say in ``SAID_S`` at most."""
        sent, received = _ends_in(fact)
        lines = {(self._rank, int(site)): line for site, line in self._own_lines(fact).items()}

        def look() -> None:
            until = time.monotonic() + SAID_S
            missing = {end.rank for end in (sent, received) if end.site} - {self._rank}
            while missing and time.monotonic() < until:
                for rank in tuple(missing):
                    if said := peek(self._store, f"lines/{rank}"):
                        lines.update(((rank, int(site)), line) for site, line in json.loads(said).items())
                        missing.discard(rank)
                time.sleep(_LOOK_S if missing else 0)

        self._questions.ask(look, SAID_S, anyway=True)
        return unequal_ends(sent, received, dict(lines))

    def _own_lines(self, fact: Fact) -> dict[str, str]:
        return {str(end.site): text_of(recorder.place_of(end.site)) for end in _ends_in(fact) if end.rank == self._rank}

    def _write(self, lines: dict[str, str]) -> None:
        with contextlib.suppress(RuntimeError):  # the store has gone with rank 0
            self._store.set(NOTED, "")
            self._store.set(f"lines/{self._rank}", json.dumps(lines))


def _ends_in(fact: Fact) -> tuple[MessageEnd, ...]:
    return tuple(MessageEnd(*end) for end in fact.get("ends", ()))
