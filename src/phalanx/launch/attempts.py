"""Starting a job, and starting it again after a failure (``--restarts``): one attempt after the other.

Prior art: torchrun's agent, which starts the interpreters of all ranks anew. Here the zygote of the first attempt
stays, so torch is imported once for all attempts; and an attempt begins when no process of the one before is left.

An attempt shares nothing with those before: it has pipes, report files, a trace and a control socket of its own, its
store is another process at another port, and its ranks have another key. The supervisor opens all this and sends the
zygote its ends over the control socket of the attempt before. If the supervisor ends meanwhile, the zygote reads the
end of that socket and ends; if the zygote ends, the kernel drops what has been sent, the new socket shows its end here,
and the job is concluded as always when the zygote is gone.

A signal is handled by the supervisor of one attempt or by that of the next, which begins by asking whether there was
one: no attempt starts after Ctrl-C. On several hosts and with an MPI launcher nothing is kept: every attempt has a
relay of its own, which starts everything as in the first.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any

from phalanx.errors import LaunchError
from phalanx.launch.conclusion import HandOver
from phalanx.launch.job.job import Job, Share, next_attempt
from phalanx.launch.output.log_files import LogFiles
from phalanx.launch.rank.descriptors import open_descriptors, open_store
from phalanx.launch.rank.start import RankStart
from phalanx.launch.supervisor import HANDLED, Supervisor
from phalanx.launch.zygote import Inheritance, serve
from phalanx.system import processes
from phalanx.system.interfaces import check_reachable
from phalanx.system.limits import check_limits, machine_limits, raise_file_limit
from phalanx.wire.key import new_key

__all__ = ["launch"]


def launch(job: Job, hand_over: HandOver | None = None) -> RankStart | int:
    """Run a job.

    Args:
        job: the job.
        hand_over: takes the reason if it fails, which then is not printed.

    Returns:
        In the process that called: the exit code. In each rank, which is a fork of it: its start, to be
        handed to :func:`phalanx.launch.rank.start.become` at the top of the interpreter.

    Raises:
        LaunchError: the machine has no room for that many ranks, or their files cannot be written. Nothing has been
            started.
    """
    # getsignal returns None for a handler that Python did not install and cannot put back.
    handlers: dict[int, Any] = {
        signum: signal.getsignal(signum) or signal.SIG_DFL for signum in (*HANDLED, signal.SIGCHLD)
    }
    inheritance = Inheritance(handlers, raise_file_limit())
    limits = machine_limits(python=job.target.is_python, forked=job.is_local, logs=bool(job.output.log_dir))
    check_limits(job.ranks, limits)
    if job.ranks > 1 or job.target.is_python:
        check_reachable(job.addresses[0])
    supervisor, listener = _open(job)
    # Text that is still in the buffers would be copied by the fork, and printed twice.
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    processes.adopt_orphans()
    supervisor.listen_to_signals()
    while True:
        start = _start(supervisor, listener, inheritance)
        if start is not None:
            return start
        code = supervisor.run(hand_over)
        if code is not None:
            return code
        supervisor, listener = _open_next(supervisor)


def _open(job: Job, before: Supervisor | None = None) -> tuple[Supervisor, socket.socket]:
    """Open all that an attempt needs: its supervisor, and the listening socket of its store."""
    descriptors = open_descriptors(job.ranks, job.run_id)
    logs = LogFiles(job)
    listener = open_store(job.addresses)
    return Supervisor(job, descriptors, logs, before), listener


def _start(supervisor: Supervisor, listener: socket.socket, inheritance: Inheritance) -> RankStart | None:
    """Fork the zygote, or the relay in its place, if there is none. In each rank this returns its start."""
    if not supervisor.zygote and supervisor.interrupted is None:
        pid = os.getpid()
        zygote = os.fork()
        if zygote == 0:
            return _serve(supervisor, listener, inheritance, pid)
        supervisor.zygote = zygote
    supervisor.descriptors.keep_supervisor_ends()
    listener.close()
    return None


def _serve(supervisor: Supervisor, listener: socket.socket, inheritance: Inheritance, parent: int) -> RankStart:
    """In the fork: be the zygote, or the relay."""
    job, descriptors = supervisor.job, supervisor.descriptors
    supervisor.forget()
    if not job.is_local:
        # Not imported at the top, because most jobs need no relay.
        from phalanx.launch.relays import be_relay

        be_relay(job, descriptors, listener, inheritance.handlers)
    share = Share(range(job.ranks), job.rows(), listener.getsockname()[1], listener, os.isatty(0))
    return serve(job, share, descriptors, inheritance, parent)


def _open_next(before: Supervisor) -> tuple[Supervisor, socket.socket]:
    """Open the next attempt, and order a zygote that waits for it to start it.

    Raises:
        LaunchError: the ranks' files cannot be written, or this process has too many open.
    """
    job = next_attempt(before.job, new_key())
    # So that the files of two attempts are not open at once.
    before.logs.close()
    before.descriptors.close_files()
    try:
        after, listener = _open(job, before)
    except OSError as error:
        raise LaunchError(
            f"attempt {job.attempt.number + 1} cannot be started: {error.strerror}. Raise the limit (ulimit -n), or "
            f"start fewer ranks"
        ) from error
    after.take_over(before)
    if after.zygote:
        control = before.descriptors.supervisor
        control.send(do="again", key=job.key)
        after.descriptors.pass_zygote_ends(control, listener)
        # In case somebody has stopped it, as with every order.
        os.kill(after.zygote, signal.SIGCONT)
    before.descriptors.supervisor.close()
    return after, listener
