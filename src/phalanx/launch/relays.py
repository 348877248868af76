"""Which relay takes the zygote's place in a job that is not on this host alone, or that an MPI launcher starts."""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

from phalanx.launch.job.job import Job
from phalanx.launch.rank.descriptors import Descriptors
from phalanx.system import processes

__all__ = ["be_relay"]


def be_relay(job: Job, descriptors: Descriptors, listener: socket.socket, handlers: dict[int, Any]) -> NoReturn:
    """Be the relay of a job; called in the child of the supervisor's fork.

    Args:
        job: the job.
        descriptors: its descriptors.
        listener: the listening socket of its store.
        handlers: the signals that the supervisor handles; in the relay each gets its default action back.
    """
    # Out of the terminal's foreground group: only the supervisor acts on Ctrl-C. This process does not die with the
    # supervisor, because it has to tidy up; the control socket shows it that the supervisor has ended, unless it has
    # been stopped.
    processes.wake_with_parent()
    os.setsid()
    processes.set_name("phalanx-relay")
    processes.adopt_orphans()
    for signum in handlers:
        signal.signal(signum, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    descriptors.keep_zygote_ends()
    code = 0
    try:
        _serve(job, descriptors, listener)
    except BaseException:
        sys.stderr.write(f"phalanx: the launcher itself failed\n{traceback.format_exc()}")
        sys.stderr.flush()
        processes.end_descendants()
        code = 70
    finally:
        os._exit(code)


def _serve(job: Job, descriptors: Descriptors, listener: socket.socket) -> None:
    # A job has one of them, and each brings modules that the other does not need.
    if job.mpi is not None:
        from phalanx.launch.mpi.relay import serve_mpi

        serve_mpi(job, job.mpi, descriptors, listener)
    else:
        from phalanx.launch.remote.head import serve_hosts

        serve_hosts(job, descriptors, listener)
