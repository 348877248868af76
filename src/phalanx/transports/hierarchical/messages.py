"""Messages in a group over several hosts: through shared memory inside a host, over the engine to the others.

Messages between ranks that share memory are those of their communicator. The others travel on *ways*, one for each pair
of ranks (``message_way.py``), and ``message_matching.py`` says which goes to which receive. Here is what moves them.

Nobody reads a way before something is wanted from it. A thread that waits for a message reads the frames of its way
itself, for all: it *leads*, one thread at a time, and the others wait until it has brought theirs or stops. For
messages that no thread waits for, or only for a limited time, and for receives from any rank, the way is *served*, by a
thread that reads as long as there are such. A large message that no thread waits for gets one of its own when it comes.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Collection
from functools import partial

import torch

from phalanx.diagnosis import recorder
from phalanx.errors import BackendError, ClosedError, PhalanxError
from phalanx.system.threads import SLICE_S, wait_awake
from phalanx.transports.contract import SENT, Communicator, Message
from phalanx.transports.hierarchical.gloo_engine import GlooEngine as Engine
from phalanx.transports.hierarchical.gloo_engine import TransferFailed
from phalanx.transports.hierarchical.layout import Layout
from phalanx.transports.hierarchical.message_delivery import Delivery
from phalanx.transports.hierarchical.message_ends import BreaksGroup, BrokenThere, Ends, NoThread
from phalanx.transports.hierarchical.message_matching import Matching
from phalanx.transports.hierarchical.message_threads import MessageThreads
from phalanx.transports.hierarchical.message_timeouts import Overdue
from phalanx.transports.hierarchical.message_way import BROKEN, LEFT, STAGED_BYTES, Way
from phalanx.transports.hierarchical.reason import Reason
from phalanx.transports.hierarchical.remote_message import RemoteMessage
from phalanx.transports.shm.communicator import SharedMemoryCommunicator
from phalanx.transports.shm.mailbox import WithdrawableReceive
from phalanx.transports.shm.numbers import DTYPE_NUMBERS

__all__ = ["HierarchicalMessages"]

LEAVING_S = 1.0  # how long a rank that leaves waits until what it has sent has arrived, before it goes on meanwhile
THREADS_S = 0.3  # how long threads that were woken from the engine may take to end


class HierarchicalMessages(Matching):
    """The messages of one group.

    Args:
        layout: where the ranks are.
        rank: this process's rank in the group.
        local: the communicator of the ranks of this host.
        engine: carries bytes between hosts, for messages alone; its transfers wait without a limit.
        timeout_s: how long a message waits for its peer.
        break_group: the error for a group that is broken, or is to be, given what was found and the message.
        reason: why the group is broken, and which ranks have left it, as its ranks share it.

    Attributes:
        places: for each rank of the group its rank in the memory of this host; -1 for those elsewhere.
        overdue: finds messages that have waited for too long.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        local: Communicator,
        engine: Engine,
        timeout_s: float,
        break_group: Callable[[BaseException, str], PhalanxError],
        reason: Reason,
    ) -> None:
        super().__init__(layout, rank, local if isinstance(local, SharedMemoryCommunicator) else None, engine)
        self._engine = engine
        self.places = [-1] * sum(map(len, layout.hosts))
        if self.inside is not None:
            for place, member in enumerate(layout.here):
                self.places[member] = place
        limit: Callable[[], float] = lambda: self.overdue.timeout_s  # noqa: E731
        self._ends = Ends(layout, rank, break_group, reason.is_told, reason.left, limit, reason.pid_of, reason)
        self.explain = self._ends.error
        self._opening: set[Way] = set()
        self._led: set[Way] = set()
        self._bringing = MessageThreads(self.lock)
        self._ended = False
        self._ways_ended = False  # later than that; then nobody uses the engine, and it can be closed
        self._close_engine: Callable[[], None] | None = None
        self._delivery: Delivery | None = None
        self._reason = reason
        self._absent: set[int] = set()  # ranks that had left when that was looked for, as the thread of overdue knows
        self.overdue = Overdue(
            timeout_s, self._is_late, reason.is_told, self._break_off, self._look_for_absent, self._is_unwatched
        )

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Message:
        """Start to send to a rank of the group; a message of at most ``STAGED_BYTES`` is mostly done at once."""
        if self.inside is not None and self.places[peer] >= 0:
            return self.inside.send(tensor, self.places[peer], tag)
        dtype, tag = DTYPE_NUMBERS[tensor.dtype][1], tag & 0xFFFFFFFF
        with self.lock:
            if peer == self._rank:
                return self._send_to_itself(self._new(tensor, dtype, "send to", peer, tag))
            way, nbytes = self._way(peer), tensor.nbytes
            if not self._ended and nbytes <= STAGED_BYTES and not self._queued[way] and way.has_room(nbytes):
                with contextlib.suppress(TransferFailed):  # reading finds why
                    way.send(tensor, dtype, tag, recorder.number_here())
                    return SENT
            message = self._new(tensor, dtype, "send to", peer, tag)
            self._start_send(message, way)
            return message

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Message:
        """Start to receive from a rank of the group, or from any."""
        if peer is not None and self.inside is not None and self.places[peer] >= 0:
            return self.inside.recv(tensor, self.places[peer], tag)
        with self.lock:
            message = self._new(tensor, DTYPE_NUMBERS[tensor.dtype][1], "recv from", peer, tag & 0xFFFFFFFF)
            self._start_recv(message)
            return message

    def _new(self, tensor: torch.Tensor, dtype: int, verb: str, peer: int | None, tag: int) -> RemoteMessage:
        if self._ended:
            raise ClosedError.of_message()
        return RemoteMessage(self, tensor, dtype, verb, peer, tag)

    # -- threads -----------------------------------------------------------------------------------

    def _way(self, peer: int) -> Way:
        """The way to a rank, which is opened now if it has not been."""
        way = self.ways[peer]
        if not way.is_open and not way.is_over and way not in self._opening and not self._ended:
            self._opening.add(way)
            self._start_serving(way)
        return way

    def _start_serving(self, way: Way) -> None:
        try:
            # Opening may wait until the other rank has a message for this one, which nobody who starts one may do.
            self._bringing.read(way, self._serve)
        except BackendError as error:
            self._opening.discard(way)
            self._lose(way, NoThread(way.peer, str(error)))

    def _serve(self, way: Way) -> None:
        failure: TransferFailed | None = None
        if way in self._opening:
            try:
                # Gloo would print that nobody answers there.
                self._reason.meet(way.peer, lambda: math.inf, lambda: self._ended, of_messages=True)
                way.open()
            except TransferFailed as error:
                failure = error
        with self.lock:
            if way in self._opening:
                self._opening.remove(way)
                if failure is None:
                    way.is_open = True
                    self._flush(way)
                else:
                    self._lose(way, failure)
                self.turn[way.peer].notify_all()
            while (self.wanted[way] or self._owes(way)) and not way.is_over and not self._ended:
                if way not in self._led:
                    self._lead(way)
                else:
                    self.turn[way.peer].wait(SLICE_S)
            self._bringing.has_read(way)

    def serve(self, message: RemoteMessage) -> None:
        """Have a thread bring a message, as none may wait for it."""
        with self.lock:
            if message.announced:
                self._start_finishing(message)
            elif message.outcome is None and not (message.taken or message.served or self._ended):
                message.served = [message.way] if message.way is not None else list(self.ways.values())
                if message.peer == self._rank:
                    message.served = []
                for way in message.served:
                    self.wanted[way].add(message)
                    self._start_serving(way)

    def _lead(self, way: Way) -> None:
        """Read one frame, for all. Called with the lock, and without anybody leading; the lock is let go meanwhile."""
        self._led.add(way)
        failure: TransferFailed | None = None
        self.lock.release()
        try:
            way.read()
        except TransferFailed as error:
            failure = error
        finally:
            self.lock.acquire()
            self._led.remove(way)
            self.turn[way.peer].notify_all()
        if failure is not None:
            self._lose(way, failure)
        elif not self._ended:
            way.take(self._handle)
            self._flush(way)

    def _start_finishing(self, message: RemoteMessage) -> None:
        """Have a thread wait for the body of a large message, since none may come that waits for it."""
        if not message.claimed and message.outcome is None:
            message.claimed = True
            try:
                self._bringing.finish(message, self._finish)
            except BackendError as error:
                self._give_up(message, error)

    def _finish(self, message: RemoteMessage) -> None:
        """Wait for the body of a large message. Called with the lock, which is let go meanwhile."""
        message.claimed = True
        way, body = message.way, message.body
        if way is None or body is None:
            return  # it has ended meanwhile
        failure: TransferFailed | None = None
        self.lock.release()
        try:
            for transfer in body:
                transfer.wait()
        except TransferFailed as error:
            failure = error
        finally:
            self.lock.acquire()
        if failure is not None:
            # The frames say whether the rank has left in order. After `end`, which has ended it, none is looked at.
            while not (way.is_over or self._ended):
                if way in self._led:
                    self.turn[way.peer].wait(SLICE_S)
                else:
                    self._lead(way)
            self._end(message, self._reason_over(way))
            if message.arrival is not None:
                self._lost_aside(message.arrival)
        elif message.outcome is None:
            self._confirm(message, way)
            self._end(message, None, way.peer)
            if message.arrival is not None:
                self._came_aside(message.arrival, message.tensor)

    # -- waiting -----------------------------------------------------------------------------------

    def wait_for(self, message: RemoteMessage, timeout_s: float | None) -> None:
        """Return when a message has its outcome, or the time is over."""
        if timeout_s:
            self.serve(message)
            wait_awake(lambda slice_s: self._wait_while_served(message, slice_s), timeout_s)
            return
        message.waiters.append(None)
        self.overdue.begin(message)
        try:
            if message.way is None:
                self.serve(message)
                while message.outcome is None and message.way is None:
                    self._wait_while_served(message, SLICE_S, limited=False)
            self._wait_and_lead(message)
        except PhalanxError:
            raise
        except BaseException as error:  # Ctrl-C: a frame may have been lost, so nothing can go on
            self._ends.break_group(error, message.words())
            raise
        finally:
            message.waiters.pop()
            if not message.waiters:
                self.overdue.end(message)

    def _wait_and_lead(self, message: RemoteMessage) -> None:
        way = message.way
        with self.lock:
            while message.outcome is None:
                if way is None:
                    self.news.wait(SLICE_S)
                elif message.announced and not message.claimed:
                    self._finish(message)
                elif way.is_open and not (way.is_over or way in self._led or message.announced or message.taken):
                    self._lead(way)  # never for a message that may end without a frame: nothing ends a read for it
                else:
                    self.turn[way.peer].wait(SLICE_S)

    def _wait_while_served(self, message: RemoteMessage, slice_s: float, limited: bool = True) -> bool:
        """Wait a while for the outcome, or for the way, of a message that is served; whether it has an outcome."""
        inside = message.inside
        if message.outcome is None and message.way is None and inside is not None and not inside.without_peer:
            limit_s = max(slice_s, 1e-6) if limited else None
            self.ask_inside(message, lambda inside: inside.wait(limit_s))
            return message.outcome is not None
        with self.lock:
            if message.outcome is None:
                self.news.wait(slice_s)
        return message.outcome is not None

    def ask_inside(self, message: RemoteMessage, ask: Callable[[WithdrawableReceive], bool]) -> None:
        """Ask for the half of a receive from any rank that waits for the ranks of this host."""
        inside = message.inside
        if inside is None or message.outcome is not None or message.way is not None or inside.without_peer:
            return
        error: PhalanxError | None = None
        try:
            if not ask(inside):
                return
        except PhalanxError as reason:
            error = reason
        with self.lock:
            if message.way is not None or (inside.without_peer and not self._is_alone(message)):
                return  # taken back for a message of another host; or only ranks of other hosts are left
            if message in self._posted:
                self._posted.remove(message)
            self._end(message, error, inside.source)

    def rest(self) -> None:
        """Move messages along, and sleep until one may be done."""
        if self.inside is not None and not any(self.wanted.values()):
            self.inside.rest()
            return
        with self.lock:
            self.news.wait(0.005)

    # -- the end -----------------------------------------------------------------------------------

    def _is_late(self, message: RemoteMessage, timeout_s: float) -> None:
        with self.lock:
            if message.outcome is not None:  # it has come meanwhile
                return
            text = message.words()
            late = self._ends.late(message.peer, text, timeout_s)
            self._end(message, BreaksGroup(late))
        self._ends.break_group(late, text)  # the thread that waits may be in the engine, which only this ends

    def _is_unwatched(self, message: RemoteMessage, error: BackendError) -> None:
        with self.lock:
            self._give_up(message, error)

    def _break_off(self) -> None:
        """Another rank has broken the group: end the waits of this one."""
        with self.lock:
            for message in {*self._under_way(), *self.overdue.waiting()}:
                self._end(message, BrokenThere(-1 if message.peer is None else message.peer, "the group is broken"))
        self.abort()

    def _look_for_absent(self) -> None:
        """End the messages for ranks that have left, and to which there is no way that could say so."""
        with self.lock:
            awaited = {message.peer for message in self.overdue.waiting()}
            closed = [peer for peer, way in self.ways.items() if not (way.is_open or way.is_over)]
        waited_for = [peer for peer in closed if peer in awaited or None in awaited]
        absent = set(self._reason.left(waited_for)) if waited_for else set()
        with self.lock:
            for peer in absent & self._absent:  # a moment ago as well: a way may have been opened just before
                if not self.ways[peer].is_open:
                    self._lose(self.ways[peer], None)
        self._absent = absent

    def awaited(self) -> Collection[int]:
        peers = {message.peer for message in self.overdue.waiting()}
        return self.ways.keys() if None in peers else self.ways.keys() & peers

    def doing(self, about: Collection[int]) -> str:
        with self.lock:
            waiting = [message for message in self.overdue.waiting() if message.outcome is None]
            under_way = [message for message in self._under_way() if message.arrival is None]
            here = [message for message in (*waiting, *under_way) if message.outcome is None]
            found = [*self._cut, *((message.peer, message.words()) for message in here)]
        # A message with a rank that the end is about, or else the first that is waited for.
        return next((text for peer, text in found if peer in about), found[0][1] if found else "")

    def end(self) -> None:
        """Let no message move any more; the other ranks hear that this one has left."""
        until = time.monotonic() + LEAVING_S
        with self.lock:
            # The first messages to a rank wait for the way to open; inside a host such are on their way at once.
            while any(self._queued[way] for way in self._opening) and time.monotonic() < until and not self._ended:
                self.news.wait(0.02)
            if self._ended:
                return
            sent = {}
            for way in self.ways.values():
                if way.is_open and not way.is_over:
                    ahead = way.is_ahead
                    with contextlib.suppress(TransferFailed):
                        last = way.say_last(BROKEN if self._reason.fails else LEFT)
                        if ahead:
                            sent[way] = last
            self._ended = True
            under_way = {*self._under_way(), *self.overdue.waiting()}
            for message in under_way:
                self._hold(message)
                self._end(message, ClosedError.of_message())
        self.overdue.close()
        if self.inside is not None:
            self.inside.end_messages()
        # A peer that writes to a closed connection may never read the last frame.
        self._reason.tell_left(but_for=[way.peer for way in sent])
        end_ways = partial(self._end_ways, bool(sent))
        self._delivery = Delivery(self._engine, sent, self._reason.unwanting, self.overdue.timeout_s, end_ways)
        self._delivery.begin(LEAVING_S)

    def _end_ways(self, were_kept: bool) -> None:
        """Close the connections: what was sent has arrived, as far as it will."""
        if were_kept:
            self._reason.tell_left()
        self._engine.abort()
        self._held = []
        if were_kept:  # else those that asked for the end wait for the threads
            for thread in self._threads():
                thread.join(THREADS_S)
        with self.lock:
            self._ways_ended = True
            close = self._close_engine
        if close is not None:
            close()

    def leave(self) -> list[threading.Thread]:
        """End the threads, whatever is under way: the process exits. Returns them."""
        self.end()
        return self._threads()

    def _threads(self) -> list[threading.Thread]:
        with self.lock:
            threads = [*self._bringing.all(), *self.overdue.threads()]
        return [thread for thread in threads if thread.is_alive()]  # an exit refuses to start one

    def give_back(self) -> None:
        """Give back what would disturb the interpreter's end."""
        self._close_when_ended(self._engine.give_back)
        if self._delivery is not None:  # one that began when the process was ending already
            self._delivery.wait()

    def abort(self) -> None:
        """End every wait for another host, here and there."""
        with self.lock:
            for way in self.ways.values():
                if way.is_open and not way.is_over:
                    with contextlib.suppress(TransferFailed):
                        way.say_last(BROKEN)
        self._engine.abort()

    def close(self, close: Callable[[], None]) -> None:
        """End; ``close`` gives back the engine, and is called on any thread when nothing needs it any more."""
        self.end()
        self._close_when_ended(close)

    def _close_when_ended(self, close: Callable[[], None]) -> None:
        with self.lock:
            self._close_engine = close
            ended = self._ways_ended
        if ended:
            close()
