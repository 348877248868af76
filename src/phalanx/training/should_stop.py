"""Leave a training loop in step: what ``world.should_stop()`` does on a rank.

Under ``phalanx run`` no collective is needed. The agent shares a cell of words with each of its ranks, and the launcher
agrees on a call with all agents (``launch/stop_in_step.py``). Every word has one writer at a time:

===========  ============================================================  ======  ====================================
word         what                                                          writer  if the writer dies in between
===========  ============================================================  ======  ====================================
``CALLS``    the number of the call of ``should_stop`` in progress, or     rank    the count stays; the rank is gone
             of the last one
``ASKED``    a signal that came to the rank; the agent takes it out        rank    the signal is not passed on
``HOLD``     not 0: a rank waits in its next call for ``STOP_AT``          agent   its ranks die with it
``STOP_AT``  the call from which on the answer is yes; 0: not agreed yet   agent   its ranks die with it
``ENDING``   not 0: the rank is being ended, so signals act as before      agent   its ranks die with it
===========  ============================================================  ======  ====================================

A rank writes ``CALLS`` and then reads ``HOLD``; the agent writes ``HOLD``, waits until the store buffers of all cores
have long drained, and then reads ``CALLS``. So either the rank sees that it is held, or the agent sees its call.

Elsewhere (torchrun, srun, mpiexec) the ranks exchange by a small collective whether one of them was asked.
"""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from phalanx.errors import ArgumentError

if TYPE_CHECKING:
    from types import FrameType

    from phalanx.group import Group

__all__ = [
    "ASKED",
    "CALLS",
    "CELL_WORDS",
    "ENDING",
    "HOLD",
    "STOP_AT",
    "STOP_SIGNALS",
    "Stopper",
    "arm",
    "shared_cells",
    "stopper_of",
]

CELL_WORDS = 8  # a cache line, so that ranks do not take it from each other
CALLS, ASKED, HOLD, STOP_AT, ENDING = range(5)
#: The signals that ask for a stop, unless the user chooses others.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_LOOK_S = 0.0005


class Stopper(Protocol):
    """Answers ``world.should_stop()``."""

    def should_stop(self, every: int) -> bool:
        """Return whether this rank is to leave its loop."""


def shared_cells(ranks: int) -> memoryview:
    """Make the cells of so many ranks, in memory that an agent shares with what it forks."""
    return memoryview(mmap.mmap(-1, max(1, ranks) * CELL_WORDS * 8)).cast("Q")


class _StopSignals:
    """Handle the stop signals of this process, if the caller is its main thread.

    A handler that the script has installed before is called too. Processes that this one forks do not inherit ours:
    SIGTERM ends them, as multiprocessing relies on, and the others, which a scheduler may send to all processes, are
    nothing to them.

    Args:
        signals: those to handle. One that is ignored stays ignored.
        note: takes each that comes.
        ending: tells whether the launcher ends this process, so that a signal is to act as before.
    """

    def __init__(self, signals: Sequence[int], note: Callable[[int], None], ending: Callable[[], object]) -> None:
        self._note, self._ending = note, ending
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for signum in signals:
                before = signal.getsignal(signum)
                if before is not signal.SIG_IGN:
                    self._before[signum] = before if before is not None else signal.SIG_DFL
                    signal.signal(signum, self._handle)
            # Python forgets what comes to a child before this has given the handlers back; so the kernel keeps it.
            os.register_at_fork(before=self._block, after_in_parent=self._unblock, after_in_child=self._give_back)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        before = self._before[signum]
        if self._ending():
            signal.signal(signum, before)
            signal.raise_signal(signum)
            return
        self._note(signum)
        if callable(before):
            before(signum, frame)

    def _block(self) -> None:
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._before)

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _give_back(self) -> None:
        for signum, before in self._before.items():
            if signal.getsignal(signum) == self._handle:
                ignored = signum != signal.SIGTERM and before is signal.SIG_DFL
                signal.signal(signum, signal.SIG_IGN if ignored else before)
        self._unblock()


class _LaunchedStopper:
    """Ask the launcher: a rank of ``phalanx run``.

    Args:
        cell: the words that it shares with its agent.
        agent: the agent's process, which SIGUSR1 has look at the words, as at reports.
        signals: those that ask for a stop.
    """

    def __init__(self, cell: memoryview, agent: int, signals: Sequence[int]) -> None:
        self.pid = os.getpid()
        self._cell, self._agent, self._signals = cell, agent, signals
        self._calls = 0

    def begin(self) -> None:
        """Take over the signals, and tell the agent that this rank can be stopped."""
        if not self._calls:
            _StopSignals(self._signals, self._note, lambda: self._cell[ENDING])
            self._cell[CALLS] = 1
            os.kill(self._agent, signal.SIGUSR1)

    def _note(self, signum: int) -> None:
        self._cell[ASKED] = signum
        os.kill(self._agent, signal.SIGUSR1)

    def should_stop(self, every: int) -> bool:
        """Return whether the agreed call has come. ``every`` is for ranks without a launcher of ours."""
        self._calls = calls = self._calls + 1
        cell = self._cell
        cell[CALLS] = calls  # before the next line
        if not cell[HOLD]:
            return False
        while not cell[STOP_AT]:
            time.sleep(_LOOK_S)
        return calls >= cell[STOP_AT]


class _CollectiveStopper:
    """Ask all ranks, at every so many calls: ranks of another launcher."""

    def __init__(self, world: Group, device: Any) -> None:
        import torch

        self._world, self._calls, self._stops = world, 0, False
        self._flag = torch.zeros(1, dtype=torch.int32, device=device)
        _listen()

    def should_stop(self, every: int) -> bool:
        """Return whether one of the ranks had been asked by the last exchange."""
        self._calls += 1
        if self._stops or self._calls % every:
            return self._stops
        if self._world.size == 1:
            self._stops = bool(_asked)
        else:
            self._flag.fill_(bool(_asked))
            self._world.all_reduce(self._flag, op="max")
            self._stops = bool(self._flag.item())
        return self._stops


_launched: _LaunchedStopper | None = None
_asked: list[int] = []  # the stop signals that have come to this process, of another launcher


@cache
def _listen() -> None:
    """Note stop signals from now on; once, whatever worlds come and go."""
    _StopSignals(STOP_SIGNALS, _asked.append, lambda: False)


def arm(cell: memoryview, agent: int, signals: Sequence[int]) -> None:
    """Let this process, a rank of ``phalanx run``, ask its launcher; see :class:`_LaunchedStopper`."""
    global _launched
    _launched = _LaunchedStopper(cell, agent, signals)


def stopper_of(world: Group, device: Any, every: int) -> Stopper:
    """Return what answers ``should_stop`` on this rank.

    Args:
        world: all ranks.
        device: where a tensor lies that the world's backend serves.
        every: at how many calls the ranks ask each other.

    Raises:
        ArgumentError: ``every`` is no number of calls.
    """
    if every < 1:
        raise ArgumentError(f"should_stop: every={every} is not a number of calls; give 1 or more")
    if _launched is None or _launched.pid != os.getpid():  # a child that the script forks is not the rank
        return _CollectiveStopper(world, device)
    _launched.begin()
    return _launched
