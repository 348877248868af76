"""When a rank's receives begin: before the leaders have compared the calls, where that is safe.

An engine that has been told where data goes before it comes takes it at once; otherwise a sender may have to ask first,
which takes one more way there and back. Nothing of this is sent before the calls have been compared, so memory may wait
for it earlier, with one exception: two ranks that have never talked to each other may wait for each other to connect,
and would do so for ever if their calls differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from phalanx.transports.hierarchical.lane import Engine, Transfer

__all__ = ["EarlyReceives", "wait_for"]

_TAG = 3  # of no data
_Begun = TypeVar("_Begun")


class EarlyReceives:
    """Begins receives from ranks that this one has talked to before their calls are compared, from others after that.

    Args:
        engine: connects them.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connected: set[int] = set()

    def begin(self, peers: Iterable[int], agree: Callable[[], None], expect: Callable[[], _Begun]) -> _Begun:
        """Compare the calls and start to receive, in the quicker order that is safe.

        Args:
            peers: the ranks with which this one exchanges data in this call; it is one of theirs.
            agree: compares the calls.
            expect: starts the receives, and sends nothing.

        Returns:
            What ``expect`` returns.
        """
        new = sorted(set(peers) - self._connected)
        if not new:
            begun = expect()
            agree()
            return begun
        agree()
        # In the order of their ranks, so that no circle of ranks waits for each other.
        byte = torch.zeros(1, dtype=torch.uint8)
        transfers = []
        for peer in new:
            transfers.append(self._engine.recv(torch.empty_like(byte), peer, _TAG))
            transfers.append(self._engine.send(byte, peer, _TAG))
        wait_for(transfers)
        self._connected.update(new)
        return expect()


def wait_for(transfers: Sequence[Transfer], meanwhile: Callable[[], None] | None = None) -> None:
    """Wait for all of them, and call ``meanwhile`` once before they are waited for on this thread."""
    if transfers:
        transfers[0].wait_with(transfers[1:], meanwhile)
    elif meanwhile is not None:
        meanwhile()
