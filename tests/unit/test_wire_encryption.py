"""An encrypted session of a proven connection: what its two ends make of the messages, and what others cannot."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.wire import encryption
from phalanx.wire.encryption import EncryptedSession, Exchange
from phalanx.wire.framing import Malformed
from phalanx.wire.session import TAG_BYTES, Session

KEY = b"k" * 32
CLEAR = 5  # bytes at the beginning of a message that are not encrypted


def agreed(key: bytes = KEY) -> tuple[EncryptedSession, EncryptedSession]:
    """The caller's side and the listener's."""
    caller, listener = Exchange(), Exchange()
    return (
        caller.session(Session(key, is_listener=False), listener.public, is_listener=False),
        listener.session(Session(key, is_listener=True), caller.public, is_listener=True),
    )


def sent(session: EncryptedSession, message: bytes) -> bytes:
    return b"".join(session.sealed([message], CLEAR))


def received(session: EncryptedSession, data: bytes) -> bytes:
    view = memoryview(data)
    return bytes(session.opened(view[:-TAG_BYTES], view[-TAG_BYTES:], CLEAR))


@settings(deadline=None, max_examples=50)
@given(
    messages=st.lists(st.tuples(st.booleans(), st.binary(min_size=CLEAR, max_size=300)), max_size=10),
    per_key=st.integers(1, 5),
)
def test_messages_arrive_as_they_were_also_when_the_keys_change(
    messages: list[tuple[bool, bytes]], per_key: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encryption, "MESSAGES_PER_KEY", per_key)
        caller, listener = agreed()
        for from_caller, message in messages:
            sender, receiver = (caller, listener) if from_caller else (listener, caller)
            data = sent(sender, message)
            assert len(data) == len(message) + TAG_BYTES
            assert data[:CLEAR] == message[:CLEAR]
            assert received(receiver, data) == message


def test_a_message_in_several_places_is_the_same_message() -> None:
    caller, listener = agreed()
    head, tail = b"12345", bytearray(b"the rest of it")
    data = b"".join(caller.sealed([head, memoryview(tail)], CLEAR))
    assert received(listener, data) == head + tail
    data = b"".join(caller.sealed([head + b"more", memoryview(tail)], CLEAR))
    assert received(listener, data) == head + b"more" + tail
    data = b"".join(caller.sealed([head, memoryview(tail)], CLEAR))
    place = bytearray(data[CLEAR:-TAG_BYTES])
    listener.open_in_place(data[-TAG_BYTES:], head, memoryview(place))
    assert place == tail


def test_the_same_message_never_looks_the_same() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encryption, "MESSAGES_PER_KEY", 3)
        sides = [*agreed(), *agreed()]
        seen = [sent(side, b"12345" + bytes(40))[CLEAR:] for side in sides for _ in range(10)]
    for one, other in itertools.combinations(seen, 2):
        assert one[:40] != other[:40]
        assert one[40:] != other[40:]


@settings(deadline=None, max_examples=100)
@given(message=st.binary(min_size=CLEAR, max_size=100), at=st.integers(0, 2**20), bit=st.integers(0, 7))
def test_a_message_of_which_a_bit_was_changed_is_refused(message: bytes, at: int, bit: int) -> None:
    caller, listener = agreed()
    data = bytearray(sent(caller, message))
    data[at % len(data)] ^= 1 << bit
    with pytest.raises(Malformed):
        received(listener, bytes(data))


def test_a_message_that_is_repeated_swapped_dropped_or_sent_back_is_refused() -> None:
    first, second = b"12345 first", b"12345 second"

    def both() -> tuple[EncryptedSession, EncryptedSession, bytes, bytes]:
        caller, listener = agreed()
        return caller, listener, sent(caller, first), sent(caller, second)

    caller, listener, one, two = both()
    with pytest.raises(Malformed):
        received(listener, two)
    with pytest.raises(Malformed):
        received(caller, one)
    assert received(listener, one) == first
    with pytest.raises(Malformed):
        received(listener, one)
    assert received(listener, two) == second
    *_, one, _ = both()
    with pytest.raises(Malformed):
        received(listener, one)  # of another connection


def test_the_ends_need_the_same_key_and_each_others_public_keys() -> None:
    caller, listener, stranger = Exchange(), Exchange(), Exchange()

    def pair(of_caller: str, of_listener: str, other_key: bytes = KEY) -> tuple[EncryptedSession, EncryptedSession]:
        return (
            caller.session(Session(KEY, is_listener=False), of_listener, is_listener=False),
            listener.session(Session(other_key, is_listener=True), of_caller, is_listener=True),
        )

    one, other = pair(caller.public, listener.public)
    assert received(other, sent(one, b"12345 secret")) == b"12345 secret"
    for one, other in (
        pair(caller.public, listener.public, b"l" * 32),
        pair(caller.public, stranger.public),
        pair(stranger.public, listener.public),
    ):
        with pytest.raises(Malformed):
            received(other, sent(one, b"12345 secret"))


@pytest.mark.parametrize("theirs", [None, 5, "", "xyz", "00" * 31, "00" * 32, "01" + "00" * 31])
def test_what_is_not_a_public_key_is_refused(theirs: object) -> None:
    with pytest.raises(Malformed):
        Exchange().session(Session(KEY, is_listener=True), theirs, is_listener=True)
