"""How a keeper ends: nothing of the rank or the MPI launcher may stay on its host without anybody to remove it.

The launcher removes its own session folder, and the relay sees to that. If the relay has gone, the launcher may be
killed just as well, and this keeper be the only one left who knows the folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from typing import NoReturn

from phalanx.launch.mpi.leftover_records import Record
from phalanx.launch.mpi.leftovers import SharedMemoryWatch
from phalanx.launch.relay.channel import Channel
from phalanx.system import processes

__all__ = ["close_all_but", "end_at_once", "leave"]

# How long other ranks may still hold shared memory once all are to end.
_SHARED_S = 0.5
# How long an MPI launcher may take to end once its relay has gone.
_LAUNCHER_S = 5.0


def leave(watch: SharedMemoryWatch, record: Record, channel: Channel, *, connected: bool) -> NoReturn:
    """Remove what is left, and end; the shim ends after this process, with its exit code.

    Args:
        watch: remembers the shared memory of the rank, which has ended.
        record: this keeper's note.
        channel: the connection to the relay.
        connected: whether the relay is there, and waits for the end of the MPI launcher.
    """
    # Other ranks may be being killed just now too, and hold what they share with this one a moment longer.
    watch.remove(_SHARED_S)
    if record.folder is None or record.folder.remove() or connected:
        record.close()
    elif not os.fork():  # the launcher waits for the shim, which waits for this process
        _outlast_launcher(record)
    # Last, because a relay that ends kills its descendants whose connections have ended.
    channel.finish(1.0)
    os._exit(0 if connected else 1)


def _outlast_launcher(record: Record) -> NoReturn:
    signal.set_wakeup_fd(-1)
    close_all_but([record.descriptor])
    folder = record.folder
    if folder is not None:
        processes.await_ends_of([folder.owner], _LAUNCHER_S)
        if folder.remove():
            record.close()
    os._exit(0)  # what is still there is in the note, for the next launch


def end_at_once(text: str) -> NoReturn:
    """End everything below, and this process, which itself has failed; what is left is in its note.

    Args:
        text: what is printed.
    """
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))
    processes.end_descendants()
    os._exit(70)


def close_all_but(kept: Iterable[int | None]) -> None:
    """Close what this process has inherited and does not need, and open the null device as its standard streams.

    Args:
        kept: descriptors that stay open.
    """
    own = {*kept}
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in own:
            with contextlib.suppress(OSError):
                os.close(int(name))
