"""Which message between hosts goes to which receive.

A message goes to the first receive posted that fits, by its source and tag; if there is none it is set aside, in the
order of arrival. A receive from any rank is posted inside the host as well. When a message comes over the engine, the
receive inside is taken back; if one has come there meanwhile, that stays, and the other message goes to the next
receive. So none is lost, and each receive gets one.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from abc import ABC, abstractmethod

import torch

from phalanx.errors import BackendError
from phalanx.transports.contract import Message
from phalanx.transports.hierarchical.calls import Differs, EndsDiffer
from phalanx.transports.hierarchical.gloo_engine import GlooEngine as Engine
from phalanx.transports.hierarchical.gloo_engine import TransferFailed
from phalanx.transports.hierarchical.layout import Layout
from phalanx.transports.hierarchical.message_ends import BrokenThere, NoThread, PeerLeft
from phalanx.transports.hierarchical.message_way import (
    BROKEN,
    DONE,
    LARGE,
    LEFT,
    SMALL,
    STAGED,
    STAGED_BYTES,
    Arrival,
    Way,
)
from phalanx.transports.hierarchical.remote_message import RemoteMessage
from phalanx.transports.shm.communicator import SharedMemoryCommunicator
from phalanx.transports.shm.explanation import MessageEnd

__all__ = ["Matching"]


class Matching(ABC):
    """The messages of one group that are under way, or have come. All methods are called with the lock.

    Args:
        layout: where the ranks are.
        rank: this process's rank in the group.
        inside: the communicator of the ranks of this host; None if there are no others.
        engine: carries bytes between hosts.

    Attributes:
        inside: see above.
        lock: guards all of this, the ways and the messages; nobody holds it while waiting.
        news: notified when any message has got its way or its outcome.
        turn: for each peer, notified when something has happened to a message of its way, or to who leads there.
        wanted: for each way the messages that nobody may wait for, and a thread has to bring.
    """

    def __init__(self, layout: Layout, rank: int, inside: SharedMemoryCommunicator | None, engine: Engine) -> None:
        self._rank, self.inside = rank, inside
        self.lock = threading.Lock()
        self.news = threading.Condition(self.lock)
        size = sum(map(len, layout.hosts))
        self.ways = {peer: Way(engine, peer) for peer in range(size) if peer not in layout.here}
        self.turn = {peer: threading.Condition(self.lock) for peer in self.ways}
        self.wanted: dict[Way, set[RemoteMessage]] = {way: set() for way in self.ways.values()}
        self._posted: list[RemoteMessage] = []
        self._aside: list[Arrival] = []
        self._queued: dict[Way, list[RemoteMessage | int]] = {way: [] for way in self.ways.values()}
        self._unconfirmed: dict[tuple[Way, int], RemoteMessage] = {}
        # Receives that a large message is coming for, and those that receive one aside; no longer posted.
        self._coming: set[RemoteMessage] = set()
        self._held: list[object] = []  # what large messages need that were given up while they were under way
        self._cut: list[tuple[int | None, str]] = []  # what the end of the group has ended: the peers, and in words

    @abstractmethod
    def _new(self, tensor: torch.Tensor, dtype: int, verb: str, peer: int | None, tag: int) -> RemoteMessage:
        """A message, which is not under way yet. ClosedError: the group is closed."""

    @abstractmethod
    def _way(self, peer: int) -> Way:
        """The way to a rank, which is opened now if it has not been."""

    @abstractmethod
    def _start_serving(self, way: Way) -> None:
        """Have a thread read a way."""

    @abstractmethod
    def _start_finishing(self, message: RemoteMessage) -> None:
        """Have a thread wait for the body of a large message."""

    # -- sending -----------------------------------------------------------------------------------

    def _start_send(self, message: RemoteMessage, way: Way) -> None:
        message.way = way
        if way.is_over:
            self._end(message, self._reason_over(way))
        else:
            self._queued[way].append(message)
            self._flush(way)

    def _confirm(self, message: RemoteMessage, way: Way) -> None:
        """Tell the sender of a large message that it is here."""
        # In front of messages, which wait until the other rank receives them: it may wait for this before it does.
        queued = self._queued[way]
        queued.insert(sum(isinstance(one, int) for one in queued), message.number)
        self._flush(way)
        if self._owes(way):  # for want of credit, of which only reading tells, and maybe no message is waited for
            self._start_serving(way)

    def _owes(self, way: Way) -> bool:
        """Whether the other rank waits to be told that a large message of its own is here."""
        return not way.is_over and any(isinstance(one, int) for one in self._queued[way])

    def _flush(self, way: Way) -> None:
        """Send what is queued, as far as there is credit."""
        queued = self._queued[way]
        try:
            while queued:
                first = queued[0]
                if isinstance(first, int):
                    if not way.has_room(0):
                        return
                    way.say_done(first)
                elif first.outcome is None:
                    if not way.has_room(first.nbytes):
                        return
                    if first.nbytes <= STAGED_BYTES:
                        way.send(first.tensor, first.dtype, first.tag, first.site)
                        self._end(first, None)
                    else:
                        first.number, first.body = way.send_large(first.tensor, first.dtype, first.tag, first.site)
                        self._unconfirmed[way, first.number] = first
                        way.release()
                queued.pop(0)
        except TransferFailed:
            return  # reading finds why

    def _send_to_itself(self, message: RemoteMessage) -> Message:
        arrival = Arrival(None, SMALL, message.dtype, message.tag, message.nbytes)
        arrival.memory, arrival.address, arrival.sender = message.tensor, message.tensor.data_ptr(), message
        arrival.line = message.line
        receive = self._claim(None, message.tag)
        if receive is None:
            self._aside.append(arrival)
        else:
            self._give(receive, arrival)
        return message

    # -- receiving ---------------------------------------------------------------------------------

    def _start_recv(self, message: RemoteMessage) -> None:
        if message.peer is not None and message.peer != self._rank:
            message.way = self._way(message.peer)
        arrival = next((one for one in self._aside if _fits(message, one.way, tag_of=one.tag)), None)
        if arrival is not None:
            self._aside.remove(arrival)
            self._give(message, arrival)
        elif message.way is not None and message.way.is_over:
            self._end(message, self._reason_over(message.way))
        else:
            self._post(message)

    def _post(self, message: RemoteMessage) -> None:
        way = message.way
        if message.peer is None:
            if self.inside is not None:
                message.inside = self.inside.recv_for_now(message.tensor, message.tag)
            self._posted.append(message)  # now, so that it ends if a way is lost that cannot be opened
            for each in self.ways:
                self._let_through(self._way(each))
            return
        if way is not None:
            self._let_through(way)
            slot = way.known.get((message.tag, message.dtype, message.nbytes), 0)
            if slot and way.is_open and self._is_next(message):
                with contextlib.suppress(TransferFailed):
                    message.body = way.receive_large(message.tensor, slot)
        self._posted.append(message)

    def _is_next(self, message: RemoteMessage) -> bool:
        """Whether every receive that is posted, and that a message for this one could go to, is with the engine."""
        return not any(
            other.tag == message.tag and (other.peer is None or (other.peer == message.peer and other.body is None))
            for other in self._posted
        )

    def _handle(self, arrival: Arrival) -> bool:
        """Do what a frame says; whether its credit may be given back."""
        way = arrival.way
        assert way is not None
        if arrival.kind == DONE:
            sent = self._unconfirmed.pop((way, arrival.number), None)
            if sent is not None:
                self._end(sent, None)
        elif arrival.kind == LEFT:
            self._lose(way, None)
        elif arrival.kind == BROKEN:
            self._lose(way, BrokenThere(way.peer, "the group is broken"))
        elif arrival.kind <= LARGE:
            receive = self._claim(way, arrival.tag)
            if receive is not None:
                self._give(receive, arrival)
                return True
            if arrival.kind == SMALL:
                arrival.memory = ctypes.string_at(arrival.address, arrival.nbytes)
            arrival.aside = True
            self._aside.append(arrival)
            # A receive waits for what comes after this message, so that has to be let through.
            if any(other.peer is None or other.peer == way.peer for other in self._posted):
                self._set_aside(arrival)
                return True
            # So does a large send, which is done when the other rank says so, and that rank needs credit to say it.
            return any(sent_on is way for sent_on, _ in self._unconfirmed)
        return True

    def _let_through(self, way: Way) -> None:
        """A receive waits for what comes after the messages of a way that have been read and have no receive."""
        way.release()
        for arrival in self._aside:
            if arrival.way is way:
                self._set_aside(arrival)

    def _set_aside(self, arrival: Arrival) -> None:
        """Receive a large message that has no receive, so that its sender can go on."""
        way = arrival.way
        if arrival.kind != LARGE or arrival.memory is not None or way is None:
            return
        memory = torch.empty(arrival.nbytes, dtype=torch.uint8)
        keeper = self._new(memory, arrival.dtype, "recv from", way.peer, arrival.tag)
        keeper.way, keeper.number, keeper.announced, keeper.arrival = way, arrival.number, True, arrival
        with contextlib.suppress(TransferFailed):  # the receive that it is for will try again, and be told why
            keeper.body = way.receive_large(memory, arrival.slot)
            arrival.memory = memory
            self._coming.add(keeper)
            self._start_finishing(keeper)

    def _came_aside(self, arrival: Arrival, memory: torch.Tensor) -> None:
        arrival.kind, arrival.address = STAGED, memory.data_ptr()
        self._give_to_taker(arrival)

    def _lost_aside(self, arrival: Arrival) -> None:
        # It stays among those set aside, so that its receive is told, and gets no later message in its place.
        arrival.lost = True
        self._give_to_taker(arrival)

    def _give_to_taker(self, arrival: Arrival) -> None:
        if (
            arrival.taker is not None and arrival.taker.outcome is None
        ):  # it may have been late, and is never written then
            self._give(arrival.taker, arrival)

    def _claim(self, way: Way | None, tag: int) -> RemoteMessage | None:
        """Take the first receive posted that a message of this way is for; None if there is none."""
        for receive in tuple(self._posted):
            if _fits(receive, way, tag_of=tag):
                self._posted.remove(receive)
                if receive.outcome is None and (receive.inside is None or receive.inside.withdraw()):
                    return receive
        return None

    def _give(self, receive: RemoteMessage, arrival: Arrival) -> None:
        """Let a receive have a message."""
        way, source = arrival.way, self._rank if arrival.way is None else arrival.way.peer
        receive.way = way
        if arrival.lost and way is not None:
            self._end(receive, self._reason_over(way))
        elif (receive.nbytes, receive.dtype) != (arrival.nbytes, arrival.dtype):
            sent = MessageEnd(source, arrival.nbytes, arrival.dtype, arrival.line)
            self._end(receive, EndsDiffer(sent, MessageEnd(self._rank, receive.nbytes, receive.dtype, receive.line)))
        elif arrival.kind == LARGE and arrival.memory is not None:
            arrival.taker, receive.taken = receive, True  # as soon as it is here
            self._coming.add(receive)
        elif arrival.kind == LARGE:
            assert way is not None
            receive.number, receive.announced = arrival.number, True
            self._coming.add(receive)
            if receive.body is None:
                try:
                    receive.body = way.receive_large(receive.tensor, arrival.slot)
                except TransferFailed as error:
                    self._end(receive, self._reason_over(way) if way.is_over else error)
            if receive.served:
                self._start_finishing(receive)
        else:
            data = arrival.memory if isinstance(arrival.memory, bytes) else arrival.address
            ctypes.memmove(receive.tensor.data_ptr(), data, receive.nbytes)
            self._end(receive, None, source)
            if arrival.sender is not None:
                self._end(arrival.sender, None)
        self.news.notify_all()

    # -- the end -----------------------------------------------------------------------------------

    def _end(self, message: RemoteMessage, error: Exception | None, source: int = -1) -> None:
        if message.outcome is not None:
            return
        if isinstance(error, (Differs, TransferFailed)) and message.arrival is None:
            self._cut.append((message.peer, message.words()))
        message.outcome = (error, source)
        message.body = None
        self._coming.discard(message)
        for way in message.served:
            self.wanted[way].discard(message)
        if message.way is not None:
            self.turn[message.way.peer].notify_all()
        self.news.notify_all()

    def _lose(self, way: Way, failure: TransferFailed | None) -> None:
        """Nothing comes on a way any more: the rank has left in order, or there is an error."""
        if way.is_over:
            return
        way.is_over, way.over = True, failure
        reason = self._reason_over(way)
        unconfirmed = [self._unconfirmed.pop(key) for key in tuple(self._unconfirmed) if key[0] is way]
        queued = [one for one in self._queued[way] if not isinstance(one, int)]
        self._queued[way] = []
        for message in (*unconfirmed, *queued):
            self._end(message, reason)
        for message in tuple(self._posted):
            if message.way is way:
                self._posted.remove(message)
                self._end(message, reason)
            elif message.peer is None and (failure is not None or self._is_alone(message)):
                self._posted.remove(message)
                if message.inside is None or message.inside.withdraw():
                    self._end(message, reason)
        for message in tuple(self.wanted[way]):
            if message.way is way:
                self._end(message, reason)
        self.turn[way.peer].notify_all()

    def _give_up(self, message: RemoteMessage, error: BackendError) -> None:
        """End a message that needs a thread which cannot be started. The group breaks when its caller is told."""
        self._hold(message)
        without = NoThread(-1 if message.way is None else message.way.peer, str(error))
        if message.way is not None:
            self._lose(message.way, without)
        self._end(message, without)

    def _hold(self, message: RemoteMessage) -> None:
        # Gloo gets stuck in a transfer whose memory it has lost, and what follows on the connection with it.
        if message.body is not None:
            self._held.append((message.tensor, message.body))

    def _is_alone(self, message: RemoteMessage) -> bool:
        """Whether nobody is left whom a receive from any rank could get a message from."""
        inside = message.inside is None or message.inside.without_peer
        return inside and all(way.is_over for way in self.ways.values())

    def _reason_over(self, way: Way) -> Exception:
        return PeerLeft(way.peer) if way.over is None else way.over

    def _under_way(self) -> list[RemoteMessage]:
        to_itself = [one.sender for one in self._aside if one.sender is not None]
        queued = [one for each in self._queued.values() for one in each if not isinstance(one, int)]
        served = [one for each in self.wanted.values() for one in each]
        return [*self._posted, *self._coming, *queued, *self._unconfirmed.values(), *served, *to_itself]


def _fits(receive: RemoteMessage, way: Way | None, tag_of: int) -> bool:
    """Whether a message with this tag, from the rank at the other end of a way, or from this one, is for a receive."""
    if receive.tag != tag_of:
        return False
    return receive.peer is None or (receive.way is way)
