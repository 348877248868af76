"""The frames of the leaders of two hosts, over an engine that only keeps what is sent."""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque
from datetime import timedelta

import pytest
import torch

from phalanx.transports.hosts.crossing import Lines
from phalanx.transports.hosts.frames import Frames
from phalanx.transports.hosts.lane import Engine, Transfer

HOSTS = [[0, 1], [2, 3]]
LEADERS = [0, 2]
Mail = defaultdict[tuple[int, int, int], deque[torch.Tensor]]


class _Received(Transfer):
    def __init__(self, mail: deque[torch.Tensor], tensor: torch.Tensor) -> None:
        self._mail, self._tensor = mail, tensor

    def wait(self) -> None:
        came = self._mail.popleft()
        self._tensor[: came.numel()] = came


class _Sent(Transfer):
    def __init__(self, engine: _KeepingEngine) -> None:
        self._engine = engine

    def wait(self) -> None:
        if self._engine.is_stuck:
            pytest.fail("this wait would never end: the other leader does not read any more")
        self._engine.waits += 1


class _KeepingEngine(Engine):
    """Of one rank; ``mail`` is shared by those of all ranks."""

    name = "keeping"

    def __init__(self, rank: int, mail: Mail) -> None:
        self._rank, self._mail = rank, mail
        self.is_stuck = False
        self.waits = 0

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        self._mail[self._rank, peer, tag].append(tensor.clone())
        return _Sent(self)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        return _Received(self._mail[peer, self._rank, tag], tensor)

    def set_timeout(self, timeout: timedelta) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


def _two_leaders(nbytes: int) -> tuple[list[_KeepingEngine], list[Frames]]:
    mail: Mail = defaultdict(deque)
    engines = [_KeepingEngine(rank, mail) for rank in LEADERS]
    frames = [
        Frames(engine, HOSTS, host, nbytes, Lines(rank, {}, lambda: True))
        for host, (rank, engine) in enumerate(zip(LEADERS, engines, strict=True))
    ]
    return engines, frames


@pytest.mark.parametrize("nbytes", [64, 64 * 1024])
def test_a_leader_hears_the_others_while_its_own_frame_is_still_on_the_way(nbytes: int) -> None:
    (engine, other_engine), (frames, others) = _two_leaders(nbytes)
    given = bytes(range(256)) * (nbytes // 256) or b"x" * nbytes
    text = ctypes.create_string_buffer(given, nbytes)
    others.begin(7, {0: (ctypes.addressof(text), nbytes)})
    engine.is_stuck = True  # as where much was sent before the frame, to a leader that has been stopped since
    sent = frames.begin(7, {})
    same, came = frames.end()
    assert same
    assert ctypes.string_at(came[1], nbytes) == given
    engine.is_stuck = False
    for transfer in sent:
        transfer.wait()
    assert engine.waits == len(sent) > 0
    assert other_engine.waits == 0


def test_an_exchange_of_frames_has_sent_its_own() -> None:
    (engine, _), (frames, others) = _two_leaders(64)
    for call in (5, 6, 7):
        others.begin(call, {})
        same, _ = frames.exchange(call, {})
        others.end()
        assert same
    assert engine.waits == 3
