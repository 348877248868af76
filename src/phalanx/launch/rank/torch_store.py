"""The process that serves a job's store to scripts that use ``env://``, and to all that speak to MASTER_PORT.

It should not be a rank: when rank 0 hosts the store, as torch does without a launcher's, the other ranks lose it as
soon as rank 0 ends. Nor can it be the zygote, which waits for its children.
"""

from __future__ import annotations

import os
import signal
import socket
import traceback
from typing import NoReturn

from phalanx.store.torch_server import Referral, TorchStoreServer
from phalanx.system.processes import die_with_parent, set_name

__all__ = ["host_store"]


def host_store(listener: socket.socket, parent: int, referral: Referral | None = None) -> NoReturn:
    """Serve the store in this process until it is killed.

    Args:
        listener: the bound, listening socket. Clients that connect before the server runs wait in its queue.
        parent: the process id of the zygote, or of the relay, with which this process ends.
        referral: asks about the connections from other hosts; None if the job is on this host alone.
    """
    try:
        die_with_parent(parent)
        set_name("phalanx-store")
        server = TorchStoreServer(listener, referral=referral)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        server.serve()
    except BaseException:
        traceback.print_exc()
    finally:
        # After an error too, this copy of the launcher must not go on as the launcher.
        os._exit(1)
