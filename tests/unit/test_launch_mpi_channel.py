"""Who may join the relay of `--mpi`, and what a channel between it and a keeper takes."""

from __future__ import annotations

import os
import selectors
import socket
import struct
import time
from collections.abc import Callable

import pytest

from phalanx.launch.relay.channel import OUT, Channel, Lost, join, open_door
from phalanx.wire.framing import frame
from phalanx.wire.proof import GREETING_BYTES
from phalanx.wire.session import Session


class Entrance:
    """The launcher's door, and the keepers that came in."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.admitted: list[Channel] = []
        self.door, self.invitation = open_door(["127.0.0.1"], self.selector, self.admitted.append)

    def __enter__(self) -> Entrance:
        return self

    def __exit__(self, *_: object) -> None:
        self.door.close()
        for channel in self.admitted:
            channel.close()
        self.selector.close()

    def serve(self, until: Callable[[], bool]) -> None:
        limit = time.monotonic() + 20
        while not until():
            assert time.monotonic() < limit
            for key, _ in self.selector.select(0.02):
                key.data()


def test_a_keeper_that_knows_the_key_comes_in_and_frames_arrive_whole() -> None:
    with Entrance() as entrance:
        pid = os.fork()
        if pid == 0:
            channel = join(entrance.invitation)
            channel.say(event="here", rank=3)
            channel.send(OUT, b"x" * 300_000)
            channel.finish(5.0)
            os._exit(0)
        entrance.serve(lambda: bool(entrance.admitted))
        frames: list[tuple[bytes, bytes]] = []
        with pytest.raises(Lost):
            while True:
                frames += entrance.admitted[0].receive()
        os.waitpid(pid, 0)
        assert frames == [(b"m", b'{"event": "here", "rank": 3}'), (OUT, b"x" * 300_000)]


def test_a_stranger_is_turned_away_before_anything_is_read() -> None:
    with Entrance() as entrance, Entrance() as other:
        address, port, key = entrance.invitation.split(":")
        with socket.create_connection((address, int(port))) as stranger:
            stranger.sendall(b'{"event": "here"}' + b"x" * 64)
            stranger.setblocking(False)
            heard = b""

            def closed() -> bool:
                nonlocal heard
                try:
                    data = stranger.recv(4096)
                except BlockingIOError:
                    return False
                heard += data
                return not data

            entrance.serve(closed)
            assert len(heard) == GREETING_BYTES  # the challenge, and then nothing
        pid = os.fork()
        if pid == 0:
            try:
                join(other.invitation.rpartition(":")[0] + ":" + key)
            except ConnectionRefusedError as error:
                os._exit(0 if "does not know the job's key" in str(error) else 2)
            os._exit(1)
        ended: list[int] = []

        def end() -> bool:
            found, status = os.waitpid(pid, os.WNOHANG)
            ended.extend([status] if found else [])
            return bool(found)

        other.serve(end)
        assert ended == [0]
        assert entrance.admitted == other.admitted == []


def sides() -> tuple[Session, Session]:
    return Session(b"k" * 32, is_listener=True), Session(b"k" * 32, is_listener=False)


@pytest.mark.parametrize("length", [0, (1 << 26) + 1, 0xFFFFFFFF])
def test_a_frame_of_an_impossible_length_ends_the_connection_after_those_before_it(length: int) -> None:
    ours, theirs = socket.socketpair()
    own, other = sides()
    with theirs:
        channel = Channel(ours, own)
        before, after = other.seal(frame(OUT, b"before")), other.seal(frame(OUT, b"after"))
        theirs.sendall(before + struct.pack("!I", length) + b"o" + after)
        assert channel.receive() == [(OUT, b"before")]
        with pytest.raises(Lost):
            channel.receive()
        channel.close()


def test_a_frame_that_the_other_side_has_not_sent_ends_the_connection_after_those_before_it() -> None:
    ours, theirs = socket.socketpair()
    own, other = sides()
    with theirs:
        channel = Channel(ours, own)
        before, after = other.seal(frame(OUT, b"before")), other.seal(frame(OUT, b"after"))
        theirs.sendall(before + after.replace(b"after", b"other"))
        assert channel.receive() == [(OUT, b"before")]
        with pytest.raises(Lost):
            channel.receive()
        channel.close()


def test_what_came_with_the_proof_is_read_before_anything_else_comes() -> None:
    ours, theirs = socket.socketpair()
    own, other = sides()
    with theirs:
        early, late = other.seal(frame(OUT, b"early")), other.seal(frame(OUT, b"late"))
        channel = Channel(ours, own, early[:-1])
        assert channel.receive() == []
        theirs.sendall(early[-1:] + late[:-2])
        assert channel.receive() == [(OUT, b"early")]
        channel.close()
        own, other = sides()
        again = Channel(theirs.dup(), own, other.seal(frame(OUT, b"whole")))
        assert again.receive() == [(OUT, b"whole")]
        again.close()
