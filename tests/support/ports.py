"""Ports for processes that a test starts, which listen there only some time later."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

__all__ = ["held_port"]


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port of this host that nobody else gets meanwhile, and at which those listen that are told of it.

    A port that was only found free may be another process's before a script of this test has imported torch. One that
    is bound is given to nobody who asks for any port, and to no connection; but whoever names it, with SO_REUSEADDR as
    servers do, may listen there as long as this socket does not.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]
