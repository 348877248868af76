"""Dialling the lookout of another process, and what follows for that process if it cannot be reached."""

from __future__ import annotations

import errno
import json
import time
from dataclasses import dataclass

from phalanx.transports.hierarchical.watcher import Endpoint
from phalanx.wire.dial import Line, NoAnswer, dial
from phalanx.wire.key import Key
from phalanx.wire.proof import NoProof, WrongKey
from phalanx.wire.sockets import KeepAlive

__all__ = ["AGAIN_S", "HERE", "KEEP_ALIVE", "NO", "PROBE_S", "ROLE", "WELCOME", "Target", "has_gone", "reach"]

ROLE = "lookout"
WELCOME, HERE, NO = b"welcome", b"here", b"no"  # what a process that is dialled answers
# The heartbeats and wire/sockets.py notice everything sooner; this is for the handshake.
KEEP_ALIVE = KeepAlive(idle_s=10, interval_s=5, probes=6)
AGAIN_S = 1.0
PROBE_S = 3.0  # for how long the other one may not have dialled
_PATIENCE_S = 3.0
_ASKED_S = 0.3  # where somebody waits: the kernel of a process that has gone refuses at once
# The pause while a process may be ending: its kernel closes what it listens on and its connections one after the other.
_ENDING_AGAIN_S, _ENDS_FOR_S = 0.02, 0.5
# Its host has no such port any more, or it is another program's.
_GONE = (ConnectionRefusedError, NoProof, WrongKey)
_OWN_WANTS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}


@dataclass
class Target:
    """A process that is watched, and how far it can be reached. It belongs to the lookout's thread.

    Attributes:
        endpoint: where it is.
        groups: how many groups watch it.
        dialling: a thread dials it now.
        again_at: when to dial it again, if there is a reason to.
        fails_since: since when it cannot be reached; infinity if it can.
        lost_at: when the last connection to it ended.
        gone: it has ended: nothing listens there any more.
    """

    endpoint: Endpoint
    groups: int = 0
    dialling: bool = False
    again_at: float = 0.0
    fails_since: float = float("inf")
    lost_at: float = float("-inf")
    gone: bool = False

    def lost(self, now: float) -> None:
        """The connection to it has ended; it is to be dialled at once."""
        self.lost_at = self.again_at = now

    def reached(self) -> None:
        """It has been reached."""
        self.dialling, self.fails_since = False, float("inf")

    def failed(self, why: Exception | None, now: float) -> bool:
        """There is no connection to it; returns whether it has gone.

        Args:
            why: why there is none; None if it was only asked whether it is there, and it is.
            now: the time, on a clock that stands still while this process does.
        """
        self.dialling = False
        if why is None:
            self.fails_since, self.again_at = float("inf"), now + PROBE_S
            return False
        self.again_at = now + (_ENDING_AGAIN_S if now - self.lost_at < _ENDS_FOR_S else AGAIN_S)
        if isinstance(why, _GONE):
            self.gone, self.fails_since = True, now
            return True
        # A process that does not answer although its kernel does may have its interpreter held. And that this one has
        # no descriptor left says nothing of the other.
        if not (isinstance(why, (NoAnswer, ConnectionResetError)) or getattr(why, "errno", 0) in _OWN_WANTS):
            self.fails_since = min(self.fails_since, now - _PATIENCE_S)
        return False


def reach(
    there: Endpoint, own: str, key: Key, *, probes: bool, patience_s: float = _PATIENCE_S
) -> tuple[Line | None, Exception | None]:
    """Dial a process, which takes a few seconds at most.

    Args:
        there: where it is.
        own: the id of this process.
        key: the job's key.
        probes: only ask whether it is there.
        patience_s: how long connecting may take, and then the handshake as long again.

    Returns:
        The connection, or None; and why there is none, or None if it is there and was only asked.
    """
    claim = json.dumps({"from": own, "to": there.identity, "probes": probes}).encode()
    where = (there.address, there.port)
    try:
        line, verdict = dial(where, key, ROLE, claim, patience_s=patience_s, keep_alive=KEEP_ALIVE)
    except Exception as error:
        return None, error
    if verdict == WELCOME:
        return line, None
    line.close()
    return None, None if verdict == HERE else ConnectionRefusedError("another process listens there")


def has_gone(there: Endpoint, own: str, key: Key) -> bool:
    """Ask whether a process has no lookout any more, since it has ended, or has left its last group.

    One that does not answer in time, as its interpreter is held, may be there.

    Args:
        there: where its lookout is, or was.
        own: the id of this process.
        key: the job's key.
    """
    until = time.monotonic() + _ENDS_FOR_S
    while True:
        _, why = reach(there, own, key, probes=True, patience_s=_ASKED_S)
        if why is None or isinstance(why, _GONE):
            return why is not None
        if not isinstance(why, ConnectionResetError) or time.monotonic() > until:
            return False
        time.sleep(_ENDING_AGAIN_S)
