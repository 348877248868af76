"""The process that hosts torch's TCPStore for a job, for scripts that use ``env://``.

The server of a TCPStore runs threads, so it cannot live in the zygote, which must be able to fork. It should not live
in a rank either: when rank 0 hosts it, as torch does without a launcher's store, the other ranks lose it as soon as
rank 0 ends. Phalanx's own store is in ``store/``.
"""

from __future__ import annotations

import os
import signal
import socket

from phalanx.system.processes import die_with_parent, set_name

__all__ = ["host_store"]


def host_store(listener: socket.socket, address: str, ranks: int, parent: int) -> None:
    """Serve the store in this process until it is killed. Never returns.

    Args:
        listener: the bound, listening socket. Clients that connect before the server runs wait in its queue.
        address: the address it is bound to.
        ranks: the world size.
        parent: the process id of the zygote, with which this process ends.
    """
    code = 1
    try:
        die_with_parent(parent)
        set_name("phalanx-store")
        from torch._C._distributed_c10d import TCPStore

        port = listener.getsockname()[1]
        # The server closes the descriptor it is given, so it gets one that Python does not also own.
        server = TCPStore(
            address,
            port,
            ranks,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),
            use_libuv=True,
        )
        listener.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        while server is not None:
            signal.pause()
        code = 0
    finally:
        # After an error too, this copy of the launcher must not go on as the launcher.
        os._exit(code)
