"""The mailbox of a group that another thread closes: no call may reach the core without the group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.errors import ClosedError
from phalanx.transports.shm.mailbox import Mailbox


class Core:
    """Stands for the C core, which would use a handle of 0 as an address."""

    def __getattr__(self, name: str) -> Any:
        def call(comm: int, *_: object) -> int:
            assert comm, f"{name} was called without a group"
            return 1

        return call


class ClosedMeanwhile(Mailbox):
    """A thread that closes the group comes between this thread's reads of ``ended`` and of ``comm``."""

    def __init__(self) -> None:
        self.core: Any = Core()
        self.comm = 1
        self.inside: list[None] = []
        self._finished = 0

    @property
    def ended(self) -> bool:  # type: ignore[override]
        self.comm = 0
        return False


def test_a_call_that_a_close_overtakes_does_not_reach_the_core_without_the_group() -> None:
    tensor = torch.ones(1)
    ClosedMeanwhile().rest()
    ClosedMeanwhile().send(tensor, 1, 0, 0)
    ClosedMeanwhile().recv(tensor, 1, 0, 0)
    closed = ClosedMeanwhile()
    closed.comm = 0
    for call in (closed.send, closed.recv):
        with pytest.raises(ClosedError):
            call(tensor, 1, 0, 0)
