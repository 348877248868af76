"""The process that serves a job's store to scripts that use ``env://``, and to all that speak to MASTER_PORT.

It should not be a rank: when rank 0 hosts the store, as torch does without a launcher's, the other ranks lose it as
soon as rank 0 ends. Nor can it be the zygote, which waits for its children.
"""

from __future__ import annotations

import os
import signal
import socket
import traceback
from collections.abc import Mapping
from typing import NoReturn

from phalanx.store.ended import EndsChannel
from phalanx.store.torch_server import LONG_WAIT_S, Referral, TorchStoreServer
from phalanx.system.processes import die_with_parent, set_name
from phalanx.words import format_placed, tell

__all__ = ["host_store"]


def host_store(listener: socket.socket, parent: int, ends: EndsChannel, referral: Referral | None = None) -> NoReturn:
    """Serve the store in this process until it is killed.

    Args:
        listener: the bound, listening socket. Clients that connect before the server runs wait in its queue.
        parent: the process id of the zygote, or of the relay, with which this process ends.
        ends: says which ranks have ended.
        referral: asks about the connections from other hosts; None if the job is on this host alone.
    """
    try:
        die_with_parent(parent)
        set_name("phalanx-store")
        ends.keep_reading_end()
        server = TorchStoreServer(listener, referral=referral, ends=ends, on_long_wait=_Missed())
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        server.serve()
    except BaseException:
        traceback.print_exc()
    finally:
        # After an error too, this copy of the launcher must not go on as the launcher.
        os._exit(1)


class _Missed:
    """Tells the user when a rank waits in the store although another one has ended.

    A rank may end before the others, and often does. But if one of them waits for a key, in ``init_rpc`` for one, the
    rank that would have written it may be the one that has ended, and nobody else would say so before the timeout.
    """

    def __init__(self) -> None:
        self._told: set[int] = set()

    def __call__(self, keys: list[bytes], ended: Mapping[int, str]) -> None:
        if ended.keys() <= self._told:
            return
        self._told |= ended.keys()
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        tell(
            f"{format_placed(ended)} {'have' if len(ended) > 1 else 'has'} ended, and another rank has "
            f"waited for {LONG_WAIT_S:.0f} s in the job's store, for {keys[0].decode(errors='replace')!r}{more}"
        )
