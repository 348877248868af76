"""Frames, and what a session of a proven connection adds to them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.store.claim import ROLE as STORE
from phalanx.wire.framing import PREFIX_BYTES, Malformed, end_of_frame, frame
from phalanx.wire.key import Key
from phalanx.wire.proof import (
    Challenge,
    Response,
)
from phalanx.wire.session import TAG_BYTES, Session

KEY, HERE = Key(b"the key of the tests", "a test"), ("192.0.2.1", 29500)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.binary(max_size=40), max_size=5), st.integers(0, 300))
def test_frames_come_out_as_they_went_in_wherever_the_stream_is_cut(messages: list[bytes], cut: int) -> None:
    stream = b"".join(frame(message[:3], message[3:]) for message in messages)
    whole, at = [], 0
    while (end := end_of_frame(stream[:cut], at)) is not None and end <= cut and end <= len(stream):
        whole.append(stream[at + PREFIX_BYTES : end])
        at = end
    assert whole == messages[: len(whole)]
    assert len(whole) == len(messages) or sum(PREFIX_BYTES + len(m) for m in messages[: len(whole) + 1]) > cut


def test_a_length_is_believed_only_within_its_limits() -> None:
    assert end_of_frame(b"\0\0\0") is None
    assert end_of_frame(frame(b"abc"), longest=3) == 7
    for limits in ({"longest": 2}, {"shortest": 4}):
        with pytest.raises(Malformed, match="a message of 3 bytes"):
            end_of_frame(frame(b"abc"), **limits)
    with pytest.raises(ValueError, match="a message of 3 bytes is too long; at most 2 bytes are taken"):
        frame(b"ab", b"c", longest=2)


def sessions(role: str = STORE) -> tuple[Session, Session]:
    """The caller's side and the listener's."""
    challenge = Challenge(KEY, role)
    response = Response(KEY, role, challenge.greeting, HERE, b"a claim")
    proven = challenge.check(response.message, [HERE])
    assert proven is not None
    return response.session(), proven.session()


@settings(deadline=None, max_examples=50)
@given(messages=st.lists(st.tuples(st.booleans(), st.binary(max_size=300)), max_size=10))
def test_a_session_passes_every_message_once_and_in_order(messages: list[tuple[bool, bytes]]) -> None:
    caller, listener = sessions()
    for from_caller, message in messages:
        sender, receiver = (caller, listener) if from_caller else (listener, caller)
        sealed = sender.seal(message)
        assert sealed[: len(message)] == message
        receiver.check(bytearray(sealed + b"the next"), len(message))
        with pytest.raises(Malformed):
            receiver.check(bytearray(sealed), len(message))  # repeated


@settings(deadline=None, max_examples=50)
@given(message=st.binary(min_size=1, max_size=60), at=st.integers(0, 75), change=st.integers(1, 255))
def test_a_session_takes_no_message_that_was_changed(message: bytes, at: int, change: int) -> None:
    caller, listener = sessions()
    sealed = bytearray(caller.seal(message))
    sealed[at % len(sealed)] ^= change
    with pytest.raises(Malformed):
        listener.check(sealed, len(message))


def test_a_session_takes_neither_its_own_messages_nor_those_of_another_connection_nor_a_gap() -> None:
    caller, listener = sessions()
    first, second = (bytearray(caller.seal(message)) for message in (b"first", b"second"))
    assert len(first) == 5 + TAG_BYTES
    with pytest.raises(Malformed):
        caller.check(first, 5)
    with pytest.raises(Malformed):
        sessions()[1].check(first, 5)
    with pytest.raises(Malformed):
        listener.check(second, 6)
    listener.check(first, 5)
    listener.check(second, 6)
