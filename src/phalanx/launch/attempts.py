"""Start a job, and start it again after a failure (``--restarts``): one attempt after the other.

An attempt shares nothing with those before: its pipes, report files and trace are new, its store is another process at
another port, and its ranks have another key. On one host, and on nodes that start the command themselves, the
agents stay, so torch is imported once for all attempts. Elsewhere every attempt starts its agents anew.

A signal is handled by the supervisor of one attempt or by that of the next, which takes over what has come: no attempt
starts after Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, TypeAlias

from phalanx.errors import LaunchError
from phalanx.launch.job.job import Job, next_attempt
from phalanx.launch.job.target import Refusal, prepare_target
from phalanx.launch.starters.local import LocalAgent, LocalStarter, fork_agent
from phalanx.system import processes
from phalanx.system.limits import check_limits, machine_limits, raise_file_limit
from phalanx.words import tell

if TYPE_CHECKING:
    from phalanx.launch.conclusion import HandOver
    from phalanx.launch.rank.start import RankStart
    from phalanx.launch.starters.contract import Starter
    from phalanx.launch.starters.nodes import NodeRendezvous
    from phalanx.launch.supervisor import Supervisor

__all__ = ["launch"]

# The agents that stay for all attempts.
Standing: TypeAlias = "LocalAgent | NodeRendezvous | None"


def launch(job: Job, hand_over: HandOver | None = None) -> RankStart | int:
    """Run a job.

    Args:
        job: the job.
        hand_over: takes the reason if it fails, which then is not printed.

    Returns:
        In the process that called: the exit code. In each rank, which is a fork of it: its start, for
        :func:`phalanx.launch.rank.start.become` at the top of the interpreter.

    Raises:
        LaunchError: the machine has no room for that many ranks, or their files cannot be written. No rank has been
            started.
    """
    file_limit = raise_file_limit()
    limits = machine_limits(python=job.target.is_python, forked=job.is_local, logs=bool(job.output.log_dir))
    check_limits(job.ranks, limits)
    processes.guard_standard_streams()
    # A program that became the launcher by exec may have had children before; they are not this job's.
    strangers = processes.children_of(os.getpid())
    processes.adopt_orphans()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # a fork would copy what is in the buffers
    standing: Standing = None
    if job.is_local:
        local = fork_agent(job, file_limit)
        if not isinstance(local, LocalAgent):
            return local
        standing = local
    if job.nodes is not None:
        from phalanx.launch.starters.nodes import NodeRendezvous, join_nodes

        try:
            joined = join_nodes(job, job.nodes, file_limit)
            if not isinstance(joined, NodeRendezvous):
                return joined
            job, standing = joined.wait_for_nodes(job, job.nodes.join_within_s), joined
            strangers.append(joined.own_agent)
        except Refusal as refusal:
            tell(str(refusal))
            return refusal.code
    # Not imported at the top, so that the agent need not wait for it.
    from phalanx.system.interfaces import check_reachable

    if job.ranks > 1 or job.target.is_python:
        check_reachable(job.addresses[0])
    supervisor = _open(job, standing, strangers)
    supervisor.listen_to_signals()
    if standing is None:
        try:
            prepare_target(job.target)  # a mistake in it is said before any host is asked
        except Refusal as refusal:
            supervisor.refuse(refusal)
    while True:
        if not supervisor.over:
            supervisor.begin()
        code = supervisor.run(hand_over)
        if code is not None:
            return code
        try:
            supervisor = _open_next(supervisor, standing, strangers)
        except Refusal as refusal:
            tell(str(refusal))
            return refusal.code


def _open(job: Job, standing: Standing, strangers: list[int], before: Supervisor | None = None) -> Supervisor:
    """Open all that an attempt needs."""
    from phalanx.launch.output.streams import LogFiles
    from phalanx.launch.supervisor import Supervisor
    from phalanx.system.interfaces import listening_address
    from phalanx.wire.sockets import listen

    try:
        logs = LogFiles(job)
        listener = listen(listening_address(job.addresses), 0)
    except (LaunchError, OSError) as error:
        if standing is not None and not isinstance(standing, LocalAgent):
            standing.dismiss(2, str(error))
        raise

    def starter(supervisor: Supervisor) -> Starter:
        # A job has one of them, and each brings modules that the others do not need.
        if isinstance(standing, LocalAgent):
            return LocalStarter(supervisor, standing)
        if standing is not None:
            from phalanx.launch.starters.nodes import NodesStarter

            return NodesStarter(supervisor, standing)
        if job.mpi is not None:
            from phalanx.launch.starters.mpi import MpiStarter

            return MpiStarter(supervisor)
        from phalanx.launch.starters.hosts import HostsStarter

        return HostsStarter(supervisor)

    return Supervisor(job, listener, logs, starter, strangers, before)


def _open_next(before: Supervisor, standing: Standing, strangers: list[int]) -> Supervisor:
    """Open the next attempt.

    Raises:
        Refusal: a node that was lost has not come back.
        LaunchError: the ranks' files cannot be written, or this process has too many open.
    """
    from phalanx.wire.key import new_key

    job = next_attempt(before.job, new_key())
    before.logs.close()  # so that the files of two attempts are not open at once
    before.looks.close()
    if job.nodes is not None and standing is not None and not isinstance(standing, LocalAgent):
        standing.lose(before.agents)
        job = standing.wait_for_nodes(job, job.nodes.rejoin_within_s, before.signals)
    try:
        after = _open(job, standing, strangers, before)
    except OSError as error:
        raise LaunchError(
            f"attempt {job.attempt.number + 1} cannot be started: {error.strerror}. Raise the limit (ulimit -n), or "
            f"start fewer ranks"
        ) from error
    after.take_over(before)
    return after
