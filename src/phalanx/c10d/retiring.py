"""Giving back what a group holds while its other ranks may not: another group takes its place, or it was aborted.

A group that is shut down finishes what is queued, and waits a little for ranks that are behind. Here nothing is waited
for, because the other ranks may be gone for good.
"""

from __future__ import annotations

import contextlib
import threading

from phalanx.c10d.messages import Messages
from phalanx.c10d.progress import Progress
from phalanx.errors import ClosedError
from phalanx.transports.contract import Communicator
from phalanx.transports.hierarchical.gloo import GlooOnDemand

__all__ = ["Retirement"]

_DOING = "reconfigure(), which ended this group"


class Retirement:
    """What one group holds, without the group itself: it can be given back when that is gone.

    Args:
        name: the group's.
        progress, messages, communicator, gloo: its own.
    """

    def __init__(
        self, name: str, progress: Progress, messages: Messages, communicator: Communicator, gloo: GlooOnDemand
    ) -> None:
        self._name = name
        self._progress, self._messages, self._communicator, self._gloo = progress, messages, communicator, gloo

    def __call__(self) -> None:
        """Give it back now. An operation under way ends with an error, here and on the other ranks; if there is none,
        this rank leaves in order. In a process that was forked from the group's own nothing is done.
        """
        if self._progress.inherited:
            return
        if self._progress.interrupted():
            # A signal handler is the caller: the operation that it has interrupted must leave the group before.
            self._abort()
            threading.Thread(target=self, name="phalanx-closing").start()
            return
        with contextlib.ExitStack() as each:  # what fails must not keep the others from it
            each.callback(self._gloo.release)
            each.callback(self._communicator.close)
            each.callback(self._progress.close)
            each.callback(self._progress.give_up, ClosedError.given_up(self._name), self._abort)
            each.callback(self._messages.close)  # the first to be called: messages need not learn of the abort

    def _abort(self) -> None:
        self._communicator.abort(_DOING)
