"""The stacks of a job's ranks, as they come: from this host's trace, and in messages from other hosts.

The user asks for them, and so does the watch over hangs. All answers are written into one place, so an answer to the
one may be read with that to the other, and one to an earlier question with one to a later. So what is read while the
user waits is kept until the user is answered, whoever has read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.launch.output.stacks import format_stacks
from phalanx.launch.rank.trace import Trace
from phalanx.words import format_named

__all__ = ["Places"]


class Places:
    """Where ranks were when they were asked.

    Args:
        trace: where the ranks of this host write.
        ranks: how many there are.
        runs_python: whether they were started to run Python code.
    """

    def __init__(self, trace: Trace, ranks: int, *, runs_python: bool) -> None:
        self._trace, self._ranks, self._runs_python = trace, ranks, runs_python
        self._elsewhere: dict[int, str] = {}
        self._open = 0  # the user's questions that have not been answered
        self._shown = 0  # those of them whose answers the user has seen with that to an earlier one
        self._unseen: dict[int, str] = {}  # what was read while such a question was open

    def ask(self) -> None:
        """The user has asked. A signal handler may call it."""
        self._open += 1

    def add(self, stacks: Mapping[str, str] | None) -> None:
        """Take those that ranks of other hosts have written, by rank."""
        self._elsewhere |= {int(rank): stack for rank, stack in (stacks or {}).items()}

    def take(self) -> dict[int, str]:
        """The stacks that ranks have written since the last call, here or on their hosts."""
        taken = {**self._elsewhere, **self._trace.take(range(self._ranks))}
        self._elsewhere = {}
        if self._open:
            for rank, stack in taken.items():
                self._unseen[rank] = self._unseen.get(rank, "") + stack
        return dict(sorted(taken.items()))

    def answer(self, late: Sequence[int]) -> str:
        """The answer to the user's first question that is open; empty if the user has seen it with an earlier one.

        Args:
            late: the ranks that were asked and have not written.
        """
        self.take()
        stacks, self._unseen = dict(sorted(self._unseen.items())), {}
        self._open = max(0, self._open - 1)
        lines = format_stacks(stacks)
        if late:
            lines.append(f"{format_named('rank', late)} did not say where: stopped, or waiting for a core")
        if lines:
            self._shown = self._open
            return "\n".join(lines)
        if self._shown:
            self._shown -= 1
            return ""
        if not self._runs_python:
            return "no rank runs Python code, so there are no stacks"
        return (
            "no rank says where it is: each has just said so for another question, is about to start or to end, or has "
            "become another program"
        )
