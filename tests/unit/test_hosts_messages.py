"""Messages between two ranks of two hosts, over an engine in this process whose transfers complete when a test says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from typing import Any, cast

import pytest
import torch

from phalanx.errors import ClosedError, PeerLost, PhalanxError
from phalanx.transports.contract import Communicator, Message
from phalanx.transports.hosts.breaking import Reason
from phalanx.transports.hosts.lane import Engine, Transfer, TransferFailed
from phalanx.transports.hosts.layout import Layout
from phalanx.transports.hosts.message_timeouts import Overdue
from phalanx.transports.hosts.messages import HostsMessages

PATIENCE_S = 60.0  # no busy machine needs as long
SMALL, STAGED, LARGE = 10, 25_000, 100_000  # float32: in a frame, through a stage, straight into the tensor
# The engine's tags: of the byte that says that all has arrived, and from there on of large messages.
THERE, BODIES, NONE = 2, 3, 1 << 30


class Wire:
    """What two engines share. Everything is read and written under ``changed``.

    Attributes:
        held: the lowest tag of what stays on its way.
        refused: the lowest tag of what cannot be received any more.
        cut: whether the connection has ended.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sent: dict[tuple[int, int], list[torch.Tensor]] = {}  # by the sender and the tag
        self.held, self.refused, self.cut = NONE, NONE, False

    def hold(self, held: int) -> None:
        with self.changed:
            self.held = held
            self.changed.notify_all()

    def end(self) -> None:
        with self.changed:
            self.cut = True
            self.changed.notify_all()


class Sent(Transfer):
    def wait(self) -> None:
        pass


class Received(Transfer):
    """The next bytes that a rank sends with a tag. As in Gloo, a second wait for it waits for what never comes."""

    def __init__(self, wire: Wire, tensor: torch.Tensor, peer: int, tag: int, number: int) -> None:
        self._wire, self._tensor, self._peer, self._number = wire, tensor, peer, number
        self._of = peer, tag
        self._used = False

    def wait(self) -> None:
        wire = self._wire
        with wire.changed:
            while self._used or not self._is_here():
                if wire.cut and not self._used:
                    raise TransferFailed(self._peer, "the connection has ended")
                wire.changed.wait()
            self._used = True
            sent = wire.sent[self._of][self._number].view(-1).view(torch.uint8)
            self._tensor.view(-1).view(torch.uint8)[: len(sent)] = sent

    def _is_here(self) -> bool:
        return self._of[1] < self._wire.held and len(self._wire.sent.get(self._of, ())) > self._number


class OnWire(Engine):
    """One rank's engine."""

    name = "wire"

    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire, self._rank = wire, rank
        self._received: dict[int, int] = {}

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        with self._wire.changed:
            if self._wire.cut:
                raise TransferFailed(peer, "the connection has ended")
            self._wire.sent.setdefault((self._rank, tag), []).append(tensor.clone())
            self._wire.changed.notify_all()
        return Sent()

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        with self._wire.changed:
            if self._wire.cut or tag >= self._wire.refused:
                raise TransferFailed(peer, "the connection has ended")
            number = self._received[tag] = self._received.get(tag, -1) + 1
        return Received(self._wire, tensor, peer, tag, number)

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def abort(self) -> None:
        self._wire.end()

    def close(self) -> None:
        pass


class NothingTold:
    """A store in which no rank has written anything; and this rank's script does not fail."""

    fails = False

    def is_told(self) -> bool:
        return False

    def tell_left(self, but_for: Collection[int] = ()) -> None:
        pass

    def left(self, ranks: Collection[int]) -> list[int]:
        return []

    unwanting = left

    def pid_of(self, rank: int) -> int:
        return 70 + rank

    def cannot_come(self, rank: int) -> bool:
        return False


class Pair:
    """The messages of ranks 0 and 1, in this process.

    Attributes:
        ranks: those of each.
        broken: what the group was broken for.
    """

    def __init__(self) -> None:
        self.wire = Wire()
        self.broken: list[BaseException] = []
        self.ranks = [self._rank(number) for number in range(2)]

    def _rank(self, number: int) -> HostsMessages:
        def break_group(error: BaseException, call: str) -> PhalanxError:
            self.broken.append(error)
            self.wire.end()
            return error if isinstance(error, PhalanxError) else PeerLost(str(error))

        layout, engine = Layout("ab", number), OnWire(self.wire, number)
        local, reason = cast(Communicator, None), cast(Reason, NothingTold())
        return HostsMessages(layout, number, local, engine, PATIENCE_S, break_group, reason)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.wire.hold(NONE)
    for rank in pair.ranks:
        for thread in rank.leave():
            thread.join(PATIENCE_S)


def numbers(count: int, value: float = 0.0) -> torch.Tensor:
    return torch.full((count,), float(value))


def beside(task: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Do something on another thread; the list gets what it returns or raises."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(task())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def outcome_of(task: Callable[[], Any]) -> Any:
    """What it returns or raises; it must do so in time."""
    thread, outcome = beside(task)
    return ended(thread, outcome)


def ended(thread: threading.Thread, outcome: list[Any]) -> Any:
    thread.join(PATIENCE_S)
    assert outcome, "it still waits"
    return outcome[0]


def until(condition: Callable[[], Any]) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.002)


def set_aside(pair: Pair) -> tuple[Message, torch.Tensor]:
    """A large message of rank 0, with tag 1, that rank 1 receives aside, since it has received the one after it."""
    sender, receiver = pair.ranks
    pair.wire.hold(BODIES)
    large, box = sender.send(numbers(LARGE, 1.0), 1, 1), numbers(SMALL)
    sender.send(numbers(SMALL, 2.0), 1, 2)
    assert outcome_of(receiver.recv(box, 0, 2).wait) is True
    assert bool((box == 2).all())
    return large, numbers(LARGE)


@pytest.mark.parametrize("first", ["wait", "body"])
@pytest.mark.parametrize("peer", [0, None])
def test_a_large_message_that_is_received_aside_ends_the_wait_for_it(pair: Pair, first: str, peer: int | None) -> None:
    """Its sender says nothing more, so a thread that waited for its next frame would do so for ever."""
    large, box = set_aside(pair)
    receiver = pair.ranks[1]
    if first == "body":
        pair.wire.hold(NONE)
    waiting = beside(receiver.recv(box, peer, 1).wait)
    if first == "wait":
        until(receiver.overdue.waiting)
        time.sleep(0.1)  # so that it waits
        pair.wire.hold(NONE)
    assert ended(*waiting) is True
    assert bool((box == 1).all())
    assert outcome_of(large.wait) is True


def test_a_large_message_that_is_received_aside_is_done_without_a_wait(pair: Pair) -> None:
    _, box = set_aside(pair)
    message = pair.ranks[1].recv(box, 0, 1)
    assert not message.test()
    pair.wire.hold(NONE)
    until(message.test)
    assert bool((box == 1).all())


@pytest.mark.parametrize(
    ("count", "ahead"), [(STAGED, 5), (STAGED, 20), (SMALL, 8), (SMALL, 30), (LARGE, 8), (LARGE, 30)]
)
@pytest.mark.parametrize("before", [0, 8])
def test_a_large_message_passes_those_that_the_other_rank_sends_first(
    pair: Pair, count: int, ahead: int, before: int
) -> None:
    """One rank starts sends and receives a large message; the other sends that, and then receives.

    Args:
        before: how many messages the other rank sends first, as many as it has credit for.
    """
    early, late = pair.ranks
    boxes = [numbers(count) for _ in range(ahead)]

    def of_early() -> list[float]:
        sends = [early.send(numbers(count, number), 1, 1) for number in range(ahead)]
        box = numbers(LARGE)
        early.recv(box, 1, 2).wait()
        smalls = [numbers(SMALL) for _ in range(before)]
        for small in smalls:
            early.recv(small, 1, 3).wait()
        for send in sends:
            send.wait()
        return [*box.unique().tolist(), *(small[0].item() for small in smalls)]

    def of_late() -> list[float]:
        sends = [late.send(numbers(SMALL, number), 0, 3) for number in range(before)]
        late.send(numbers(LARGE, 7.0), 0, 2).wait()
        for box in boxes:
            late.recv(box, 0, 1).wait()
        for send in sends:
            send.wait()
        return [value for box in boxes for value in box.unique().tolist()]

    outcomes = beside(of_early), beside(of_late)
    assert ended(*outcomes[0]) == [7.0, *range(before)]
    assert ended(*outcomes[1]) == [*range(ahead)]


def test_destroying_a_group_ends_a_wait_in_the_middle_of_a_large_message(pair: Pair) -> None:
    """The other rank leaves as well, and the frame that says so is read by a thread and not looked at any more."""
    sender, receiver = pair.ranks
    pair.wire.hold(THERE)  # nobody knows that all has arrived, so the connection stays
    sender.send(numbers(LARGE, 1.0), 1, 1)
    large = receiver.recv(numbers(LARGE), 0, 1)
    waiting = [beside(large.wait)]
    until(lambda: large.claimed)  # type: ignore[attr-defined]
    waiting.append(beside(receiver.recv(numbers(SMALL), 0, 2).wait))
    until(lambda: receiver._led)
    receiver.send(numbers(SMALL), 0, 3)
    leaving = [beside(receiver.end)]
    until(lambda: receiver._ended)
    leaving.append(beside(sender.end))
    until(lambda: not receiver._led)
    pair.wire.hold(BODIES)
    for each in leaving:
        assert ended(*each) is None
    for each in waiting:
        assert isinstance(ended(*each), ClosedError)
    assert pair.broken == []


@pytest.mark.parametrize("aside", [False, True])
def test_destroying_a_group_ends_large_messages_that_are_on_their_way(pair: Pair, aside: bool) -> None:
    if aside:
        _, box = set_aside(pair)
        message = pair.ranks[1].recv(box, 0, 1)
    else:
        sender, receiver = pair.ranks
        pair.wire.hold(BODIES)
        message = receiver.recv(numbers(LARGE), 0, 1)
        sender.send(numbers(LARGE), 1, 1)
        sender.send(numbers(SMALL), 1, 2)
        assert outcome_of(receiver.recv(numbers(SMALL), 0, 2).wait) is True
    pair.wire.hold(THERE)
    pair.ranks[1].send(numbers(SMALL), 0, 3)
    leaving = beside(pair.ranks[1].end)
    until(lambda: pair.ranks[1]._ended)
    for _ in range(2):
        assert isinstance(outcome_of(message.test), ClosedError)
        assert isinstance(outcome_of(message.wait), ClosedError)
    pair.wire.hold(NONE)
    assert ended(*leaving) is None
    assert pair.broken == []


def test_destroying_a_group_ends_a_message_to_oneself(pair: Pair) -> None:
    rank = pair.ranks[0]
    message = rank.send(numbers(SMALL), 0, 1)
    assert not message.test()
    rank.end()
    assert isinstance(outcome_of(message.wait), ClosedError)


def test_a_receive_that_has_failed_is_not_written_when_its_message_has_been_set_aside(pair: Pair) -> None:
    large, box = set_aside(pair)
    receiver = pair.ranks[1]
    message = receiver.recv(box, 0, 1)
    with receiver.lock:
        receiver._end(message, ClosedError("it was late"))  # type: ignore[arg-type]
    assert isinstance(outcome_of(message.wait), ClosedError)
    pair.wire.hold(NONE)
    assert outcome_of(large.wait) is True
    until(lambda: not receiver._bringing._finishing)
    assert bool((box == 0).all())


@pytest.mark.parametrize("early", [False, True])
def test_a_large_message_whose_sender_leaves_while_it_is_set_aside_is_lost(pair: Pair, early: bool) -> None:
    """Its receive is told at once, and so are the later ones; what came behind it is not taken for it.

    Args:
        early: whether the receive is posted before the sender leaves.
    """
    sender, receiver = pair.ranks
    sender.send(numbers(SMALL, 3.0), 1, 2)
    assert outcome_of(receiver.recv(numbers(SMALL), 0, 2).wait) is True
    _, box = set_aside(pair)
    sender.send(numbers(SMALL, 4.0), 1, 1)
    sender.send(numbers(SMALL, 5.0), 1, 2)
    assert outcome_of(receiver.recv(numbers(SMALL), 0, 2).wait) is True
    receives = [receiver.recv(box, 0, 1)] if early else []
    sender.end()
    until(lambda: not receiver._bringing._finishing)
    lost = outcome_of((receives or [receiver.recv(box, 0, 1)])[0].wait)
    assert isinstance(lost, PeerLost)
    assert "rank 0 of the group (pid 70 on host 0) left the group in order" in str(lost)
    assert (lost.group_rank, lost.pid, lost.host) == (0, 70, "host 0")
    small = numbers(SMALL)
    assert outcome_of(receiver.recv(small, 0, 1).wait) is True
    assert bool((small == 4).all())
    assert isinstance(outcome_of(receiver.recv(small, 0, 1).wait), PeerLost)
    assert pair.broken == []


def test_a_large_message_that_cannot_be_set_aside_is_not_waited_for(pair: Pair) -> None:
    sender, receiver = pair.ranks
    pair.wire.refused = BODIES
    sender.send(numbers(LARGE), 1, 1)
    sender.send(numbers(SMALL), 1, 2)
    assert outcome_of(receiver.recv(numbers(SMALL), 0, 2).wait) is True
    pair.wire.end()
    assert isinstance(outcome_of(receiver.recv(numbers(LARGE), 0, 1).wait), PeerLost)


@pytest.mark.parametrize("settled", [False, True])
def test_a_message_that_has_come_when_its_time_is_over_breaks_nothing(pair: Pair, settled: bool) -> None:
    sender, receiver = pair.ranks
    message = receiver.recv(numbers(SMALL), 0, 1)
    waiting = beside(message.wait) if settled else None
    sender.send(numbers(SMALL), 1, 1)
    if waiting is None:
        receiver.serve(message)  # type: ignore[arg-type]
        until(lambda: message.outcome)  # type: ignore[attr-defined]
    else:
        assert ended(*waiting) is True
    receiver._is_late(message, 1.0)  # type: ignore[arg-type]  # as one who looked before it came
    assert message.wait()
    assert pair.broken == []


class Awaited:
    """A message that does not come."""

    outcome = None


def test_a_wake_that_comes_late_leaves_nothing_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that begins to wait may be held up between seeing that the other one sleeps and waking it."""
    looks: list[float] = []
    look = Overdue._look

    def counted(overdue: Overdue, asked: float) -> float:
        looks.append(asked)
        return look(overdue, asked)

    monkeypatch.setattr(Overdue, "_look", counted)
    overdue = Overdue(PATIENCE_S, print, lambda: False, print, lambda: None, print)
    overdue.begin(Awaited())
    until(lambda: looks)
    overdue._wake.set()
    until(lambda: len(looks) > 1)
    time.sleep(0.5)
    overdue.close()
    for thread in overdue.threads():
        thread.join(PATIENCE_S)
    assert len(looks) < 20  # two or three, and thousands if it spins
