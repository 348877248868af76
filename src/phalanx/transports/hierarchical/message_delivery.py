"""What a rank has sent to other hosts when it leaves its group: it keeps its connections until that has arrived.

A send is done as soon as the engine has the bytes, but they may wait in this process for the other rank, which opens
its end of the way when it first wants something from this one. So the connections outlive the group, and the process
does not end, until the other ranks have all of it, or want none of it any more, or the group's timeout is over.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta

from phalanx.diagnosis.ends import script_failed
from phalanx.system.exit_order import Stage, at_exit
from phalanx.system.threads import AwakeClock, start, wait_awake
from phalanx.transports.hierarchical.gloo_engine import GlooEngine as Engine
from phalanx.transports.hierarchical.gloo_engine import Transfer, TransferFailed
from phalanx.transports.hierarchical.message_way import Way

__all__ = ["Delivery"]

THREADS_S = 0.3
ASK_S = 1.0  # how often to ask who wants nothing any more, which is a question to rank 0's host

_under_way: set[Delivery] = set()  # each adds itself, and its thread removes it, in one step of Python's


class Delivery:
    """One rank's last messages of one group.

    Args:
        engine: carries them.
        sent: for each way what is still under way there; nothing more is sent.
        unwanted: which of some ranks take no message of this one any more.
        timeout_s: how long to wait for all.
        finish: called, on any thread, when nothing is waited for any more; it closes the connections.
    """

    def __init__(
        self,
        engine: Engine,
        sent: Mapping[Way, Sequence[Transfer]],
        unwanted: Callable[[Collection[int]], Collection[int]],
        timeout_s: float,
        finish: Callable[[], None],
    ) -> None:
        self._engine, self._sent, self._unwanted = engine, dict(sent), unwanted
        self._timeout_s, self._finish = timeout_s, finish
        self._waited_for = {way.peer for way in sent}  # each way's thread removes its rank, a step of Python's
        self._news = threading.Event()
        self._over = threading.Event()
        self._clock = AwakeClock()
        self._asked = 0.0

    def begin(self, patience_s: float) -> None:
        """Begin to wait; return when it is over, or after so many seconds, and it goes on."""
        if not self._sent:
            self._end()
            return
        _under_way.add(self)
        try:
            start(threading.Thread(target=self._run, name="phalanx-hosts-delivery", daemon=True))
        except RuntimeError:  # Python 3.12 and later start none when the interpreter ends
            self._run()
        self._over.wait(patience_s)

    def _end(self, threads: Sequence[threading.Thread] = ()) -> None:
        try:
            self._finish()
            for thread in threads:  # those that were still in the engine have been woken
                thread.join(THREADS_S)
        finally:  # the end of the process waits for it, whatever has failed
            self._sent.clear()  # a transfer keeps its connection
            self._over.set()
            _under_way.discard(self)

    def wait(self) -> None:
        """Wait until it is over; not for other ranks, if the script has failed: what it sent is not waited for."""
        try:
            if script_failed():
                self._give_up()
            self._over.wait()
        except KeyboardInterrupt:
            self._give_up()
            self._over.wait()
            raise

    def _give_up(self) -> None:
        self._waited_for.clear()
        self._news.set()

    def _run(self) -> None:
        threads: list[threading.Thread] = []
        try:
            without: list[Way] = []
            for way in self._sent:
                thread = threading.Thread(target=self._deliver, args=(way,), name="phalanx-hosts-delivery", daemon=True)
                try:
                    start(thread)
                    threads.append(thread)
                except RuntimeError:  # the interpreter has begun to end
                    without.append(way)
            self._deliver_here(without)
            wait_awake(self._is_done, self._timeout_s, self._clock)
        finally:
            self._end(threads)

    def _deliver_here(self, ways: Sequence[Way]) -> None:
        """Deliver, one after the other, where no thread can be started; the engine's own limit ends the waits then."""
        until = time.monotonic() + self._timeout_s
        for way in ways:
            left_s = until - time.monotonic()
            if left_s > 0 and not script_failed() and not self._unwanted([way.peer]):
                self._engine.set_timeout(timedelta(seconds=left_s))
                self._deliver(way)
            else:
                self._is_delivered(way)

    def _deliver(self, way: Way) -> None:
        with contextlib.suppress(TransferFailed):
            way.wait_until_there(self._sent[way])
        self._is_delivered(way)

    def _is_delivered(self, way: Way) -> None:
        self._waited_for.discard(way.peer)
        self._news.set()

    def _is_done(self, slice_s: float) -> bool:
        self._news.wait(slice_s)
        self._news.clear()
        if self._waited_for and self._clock.now() - self._asked >= ASK_S:
            self._asked = self._clock.now()
            self._waited_for.difference_update(self._unwanted(tuple(self._waited_for)))
        return not self._waited_for


def _at_exit() -> None:
    for delivery in tuple(_under_way):
        delivery.wait()


at_exit(Stage.DELIVER_MESSAGES, _at_exit)
