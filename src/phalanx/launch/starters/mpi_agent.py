"""The agent of one rank that an MPI launcher has started: a child of the shim (``start_agent.py``).

Beside the supervisor's orders, these make the rank end:

- The shim is asked to end (SIGTERM and the like), because the MPI launcher ends the job, or the batch system does. The
  rank first gets a moment to end by itself, because it may be the one that has just called ``MPI_Abort``, and then its
  exit code is the one that counts. After that it ends as above, and the supervisor learns that the rank was not the
  cause.
- The shim is killed: so is the rank, at once. Some MPI launchers end a job like that. ``MPI_Abort`` may then not even
  end the process that calls it; what that process has printed shows that it did.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import time
import traceback
from typing import NoReturn

from phalanx import settings
from phalanx.errors import LaunchError
from phalanx.launch.agent import Agent, Rank
from phalanx.launch.job.mpi_launcher import carried_environment, find_abort, place_of
from phalanx.launch.link import Link, join
from phalanx.launch.output.failure import Report, signal_name
from phalanx.launch.protocol import Exited, Here, RankPlan, Refused, Reported, Start
from phalanx.launch.rank.start import RankStart
from phalanx.launch.rank.trace import Stage
from phalanx.system import processes
from phalanx.system.files import remove_unused_mpi_files
from phalanx.system.host import this_host

__all__ = ["be_agent"]

# How long a rank may take to end by itself once the MPI launcher wants it to.
_OWN_END_S = 0.25
# How long a rank whose script has failed may go on with its exit handlers: MPI_Finalize waits for the other ranks.
_WIND_DOWN_S = 0.5


def be_agent(kind: str, shim: int) -> RankStart:
    """Join the supervisor, and be the agent. Returns in the rank its start; the agent never returns.

    Args:
        kind: which MPI launcher started the shim.
        shim: a pipe by which the shim passes on the user's signals; its end is the shim's end.
    """
    processes.set_name("phalanx-agent")
    os.set_blocking(shim, False)
    try:
        (rank, size), invitation = place_of(kind, os.environ), os.environ.pop(settings.MPI_JOIN)
        try:
            link = join(invitation)
        except OSError as error:
            where = invitation.rpartition(":")[0]
            raise LaunchError(
                f"rank {rank} on {this_host().name} could not reach phalanx run at {where}: {error}\n"
                f"  is that address reachable from here? Choose another one with --address"
            ) from error
        remove_unused_mpi_files()
        here = this_host()
        agent = MpiAgent(link, resource.getrlimit(resource.RLIMIT_NOFILE), here.name, kind, shim)
        cpus = tuple(sorted(os.sched_getaffinity(0)))
        agent.say(Here(agent=rank, name=here.name, machine=here.machine, pid=os.getpid(), cpus=[cpus], size=size))
    except BaseException as error:
        text = f"phalanx: {error}\n" if isinstance(error, LaunchError) else traceback.format_exc()
        with contextlib.suppress(OSError):
            os.write(2, text.encode(errors="backslashreplace"))
        os._exit(70)
    return agent.run()


class MpiAgent(Agent):
    """An agent beside a shim; for the arguments see :class:`Agent` and :func:`be_agent`."""

    def __init__(self, link: Link, file_limit: tuple[int, int], name: str, kind: str, shim: int) -> None:
        super().__init__(link, file_limit, name)
        self.kind, self.shim = kind, shim
        self.asked_at: float | None = None
        self.ask_with = int(signal.SIGTERM)
        self.by_others = False  # whether the rank is being ended because the MPI launcher wants that
        self.selector.register(shim, selectors.EVENT_READ, self._read_shim)

    # The shim.

    def on_asked(self) -> None:
        """Let the rank end by itself, and ask it soon; the shim passes this on, or a batch system signals all."""
        self.ask_with, self.asked = self.asked, 0
        self.asked_at = self.asked_at or time.monotonic() + _OWN_END_S

    def _read_shim(self) -> None:
        try:
            signals = os.read(self.shim, 64)
        except BlockingIOError:
            return
        if not signals:
            self.selector.unregister(self.shim)
            os.close(self.shim)
            self.shim = -1
            if self.ranks:
                self.by_others = True
                self.end(signal.SIGKILL, 0.0, ())
            elif self.start is None:
                self.leave(0)
        for signum in signals:
            self.held += [(part, signum) for part in self.ranks]

    def due_at(self) -> list[float | None]:
        return [*super().due_at(), self.asked_at]

    def act_on_time(self, now: float) -> None:
        if self.asked_at is not None and now >= self.asked_at:
            self.asked_at = None
            if self.ranks and self.start is not None:
                self.by_others = True
                self.end(self.ask_with, self.start.grace_s, ())
        super().act_on_time(now)

    # The rank.

    def _fork_all(self, order: Start) -> RankStart | None:
        start = super()._fork_all(order)
        if start is None:
            # Only the rank needs the rest, as the socket of its process manager; pipes may be inherited by mistake.
            self._close_all_but_own()
        return start

    def _close_all_but_own(self) -> None:
        own = {*self.wakeup, self.shim, self.link.fileno(), self.selector.fileno(), self.trace.descriptor}
        own |= {self.feed}
        for rank in self.ranks.values():
            own |= {*rank.outputs, rank.report}
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in own:
                with contextlib.suppress(OSError):
                    os.close(int(name))

    def _start(self, order: Start) -> RankStart | None:
        try:
            os.chdir(order.directory)
        except OSError as error:
            self.say(Refused(text=f"phalanx: {error} (on {self.name})\n", code=2))
            return None
        return super()._start(order)

    def environment_of(self, order: Start, plan: RankPlan) -> dict[str, str]:
        """Keep what MPI needs."""
        return {**carried_environment(order.carried, os.environ), **plan.environment}

    def forget(self) -> None:
        super().forget()
        if self.shim >= 0:
            os.close(self.shim)

    def spared_s(self, grace_s: float) -> float:
        return min(grace_s, _WIND_DOWN_S)

    def explained(self, rank: Rank, event: Exited) -> Exited:
        """Add who has wanted the rank to end, as far as that can be known."""
        # Nobody can handle SIGKILL, so a rank that was sent no other signal and ended in another way was quicker. It
        # may be what made the MPI launcher, or the supervisor, end the others.
        quicker = rank.asked_by == {signal.SIGKILL} and event.status != -signal.SIGKILL
        event.by_itself = not rank.asked_by or quicker
        event.by_others = self.by_others and not event.by_itself
        if self._has_aborted(rank, event.status):
            event.by_others = False
        elif not event.by_others and event.status < 0 and not rank.sent and event.stage == Stage.ENDED:
            # A rank that leaves in order waits in MPI_Finalize for the others. If one of them aborts the job meanwhile,
            # MPICH reads from a connection that is closed by then, and goes on with what it has not read.
            name = signal_name(-event.status)
            text = f"{name} ended it after its script had come to its end: in MPI_Finalize, or in another library's end"
            self._report(event.rank, text, 128 - event.status, consequence=True)
        return event

    def _has_aborted(self, rank: Rank, status: int) -> bool:
        """Tell whether this rank called MPI_Abort, or MPI ended it for an error of its own; if so, that is its report.

        Such an error is said to be a consequence. It often is: a library that reads the memory of a rank which has just
        ended, for one, ends the process that reads. Where it is not, no other rank has failed by itself.
        """
        abort = find_abort(self.kind, rank.last_errors) if status else None
        # The MPI launcher may kill the shim of such a rank before the rank has ended, or after that.
        if abort is None or not (self.shim < 0 or abort.by_mpi or status == abort.code):
            return False
        if not rank.sent:
            self._report(rank.plan.rank, abort.text, abort.code, consequence=abort.by_mpi)
        return True

    def _report(self, rank: int, text: str, code: int, *, consequence: bool) -> None:
        report = Report("", text, "", False, time.monotonic(), code, consequence=consequence)
        self.say(Reported(rank=rank, report=report.to_record()))

    def leave(self, code: int) -> NoReturn:
        """Remove the files that the rank has left, and end."""
        processes.end_descendants()
        remove_unused_mpi_files()
        super().leave(code)
