"""Join node 0, and be the agent of this node's ranks: the command was started here, by a platform or by hand.

It dials node 0 until that answers. Then it is an agent like any other, with three differences: it prints its ranks'
lines here as well, because each pod has a log of its own; it ends with the job's exit code; and if node 0 is lost
although the job may start again, it begins anew, because a platform may replace that node.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from phalanx import settings
from phalanx.errors import InitializationError, LaunchError
from phalanx.launch.agent import Agent
from phalanx.launch.job.job import Job
from phalanx.launch.job.nodes import Nodes
from phalanx.launch.job.target import Refusal
from phalanx.launch.link import OUT, Link, dial_address
from phalanx.launch.output.failure import signal_name
from phalanx.launch.output.logs import Console, Sink, make_prefixes
from phalanx.launch.output.streams import RankStream
from phalanx.launch.protocol import ORDERS, Asked, EndOrder, Leave, Start, Tell
from phalanx.launch.rank.start import RankStart
from phalanx.launch.starters.host_agent import look_around
from phalanx.launch.starters.invitation import Invitation
from phalanx.system import processes
from phalanx.system.host import machine_name
from phalanx.wire.dial import NoAnswer
from phalanx.wire.key import Key, job_key
from phalanx.wire.proof import NoProof, WrongKey
from phalanx.words import tell

__all__ = ["ENDING", "be_agent", "ended_by_signals", "node_key"]

# After so long without node 0 the reason is said for the first time, and then once in so long again.
_SAID_S, _SAID_AGAIN_S = 4.0, 30.0
_DIAL_S, _PAUSE_S = 4.0, 0.3
#: The signals that end a job.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def node_key() -> Key:
    """Read the key by which nodes prove themselves: the user's file, or an open one, which everybody can prove.

    Raises:
        LaunchError: the file is no key; the message says what to do.
    """
    path = os.environ.get(settings.KEY_FILE)
    try:
        return job_key({settings.KEY_FILE: path} if path else {})
    except InitializationError as error:
        raise LaunchError(str(error)) from error


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise a refusal for a signal that ends a program, also in the first process of a container.

    Raises:
        Refusal: such a signal has come.
    """

    def on_signal(signum: int, _frame: FrameType | None) -> NoReturn:
        raise Refusal(f"{signal_name(signum)} came while nodes were waited for", 128 + signum)

    # One that was ignored stays ignored, as SIGHUP under nohup.
    heard = [signum for signum in ENDING if signal.getsignal(signum) is not signal.SIG_IGN]
    before = {signum: signal.signal(signum, on_signal) for signum in heard}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def be_agent(job: Job, nodes: Nodes, file_limit: tuple[int, int], *, prints: bool = True) -> RankStart:
    """Join node 0, and be the agent of this node's ranks.

    Args:
        job: the job as this node knows it; ``job.ranks`` is how many it takes.
        nodes: the nodes.
        file_limit: the limits on open files that the ranks get.
        prints: whether the ranks' lines are printed here, as they are not beside the supervisor.

    Returns:
        In each rank its start. The agent itself never returns.

    Raises:
        Refusal: node 0 did not come in time, or does not want this node.
    """
    processes.set_name("phalanx-agent")
    processes.adopt_orphans()
    # After the loss of a node 0 another one may be long in coming.
    timeout_s = max(nodes.join_within_s, nodes.rejoin_within_s if job.attempt.restarts else 0.0)
    with ended_by_signals():
        link = _dial(nodes, node_key(), timeout_s)
    if not prints:
        # From now on it sees the supervisor's end as the end of the link, unless it has been stopped.
        processes.die_with_parent(os.getppid(), signal.SIGCONT)
    agent = NodeAgent(link, file_limit, job, nodes, prints=prints)
    agent.introduce()
    return agent.run()


def _dial(nodes: Nodes, key: Key, timeout_s: float) -> Link:
    """Dial node 0 until it answers, and say why it does not."""
    began = time.monotonic()
    say_at = began + _SAID_S
    while True:
        try:
            return dial_address(nodes.master_addr, nodes.master_port, key, _DIAL_S)
        except WrongKey:
            raise Refusal(
                f"node 0 at {nodes.where} has another key ({key.source or 'this node has none'}); set "
                f"{settings.KEY_FILE} on every node to a file with the same content, or on none",
                1,
            ) from None
        except NoProof:
            why = "what listens there is not phalanx run"
        except NoAnswer:
            why = "what listens there is busy, runs an attempt without this node, or is not phalanx run"
        except OSError as error:
            why = error.strerror or str(error)
        now = time.monotonic()
        if now - began >= timeout_s:
            raise Refusal(
                f"node 0 did not answer at {nodes.where} within {timeout_s:g} s (--join-within): {why}. Is "
                "the same command running there, and does --master-addr name that node?",
                1,
            )
        if now >= say_at:
            say_at = now + _SAID_AGAIN_S
            tell(f"node 0 does not answer at {nodes.where} after {now - began:.0f} s: {why}; it is asked again")
        time.sleep(_PAUSE_S)


class NodeAgent(Agent):
    """The agent of a node.

    Args:
        link, file_limit: see :class:`Agent`.
        job: the job as this node knows it.
        nodes: the nodes.
        prints: whether it prints its ranks' lines, and what node 0 has to say.
    """

    def __init__(self, link: Link, file_limit: tuple[int, int], job: Job, nodes: Nodes, *, prints: bool) -> None:
        super().__init__(link, file_limit, job.host)
        self.job, self.nodes, self.prints = job, nodes, prints
        self.environment = dict(os.environ)  # before torch's import adds to it
        self.console = Console(Sink(1, os.environ), Sink(2, os.environ))
        for sink in (self.console.out, self.console.err):
            sink.terminal = False  # no line is drawn again: this process waits for the ranks, not for a clock
            sink.meanwhile = self._give_up_printing
        for signum in ENDING:
            if self.handlers[signum] is signal.SIG_IGN:
                signal.signal(signum, signal.SIG_IGN)  # as SIGHUP under nohup
        self.streams: dict[int, tuple[RankStream, RankStream]] = {}  # by rank

    def introduce(self) -> None:
        """Say which node this is, and how many ranks it takes."""
        job, nodes = self.job, self.nodes
        invitation = Invitation(
            version=settings.VERSION,
            environment={},
            directory=os.getcwd(),
            door="",
            host=-1 if nodes.node_rank is None else nodes.node_rank,
            name=machine_name(),
            python=job.target.is_python,
            path=job.target.path,
            ranks=job.ranks,
            interface=job.interface,
            bind=job.bind,
            device=job.device,
        )
        here = look_around(invitation)
        here.same["Phalanx"] = settings.VERSION
        here.size = job.ranks
        self.say(here)

    # Orders.

    def _obey(self, order: ORDERS) -> RankStart | None:
        match order:
            case Tell():
                self._tell(order.text)
            case Leave():
                self._tell(order.why)
                self.leave(order.code)
            case _:
                return super()._obey(order)
        return None

    def _tell(self, text: str) -> None:
        if self.prints and text:
            tell(text)

    def on_asked(self) -> None:
        """Let node 0 decide: it has to end the ranks of the other nodes as well."""
        self.say(Asked(signal=self.asked))
        self.asked = 0

    def end_import(self) -> None:
        """See :class:`Agent`. An end of the ranks waits for the import: the next attempt needs this process."""
        for order in list(self.orders):
            if isinstance(order, Leave):
                self._obey(order)

    def on_lost(self) -> None:
        """End, or wait for another node 0 if the job may start again."""
        if not self.prints or not self.job.attempt.restarts or not self.nodes.rejoin_within_s:
            self._tell(f"node 0 at {self.nodes.where} is lost, and the job with it")
            self.leave(1)
        self._tell(f"node 0 at {self.nodes.where} is lost; this node ends its ranks, and waits for it to come back")
        processes.end_descendants()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCONT})  # which may be blocked while orders are read
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], self.environment)

    # Output.

    def _start(self, order: Start) -> RankStart | None:
        if self.prints:
            size = int(order.ranks[0].environment["WORLD_SIZE"])
            prefixes = make_prefixes(size, color=self.console.out.color) if self.job.prefix else [b""] * size
            for number in filter(self.job.output.shows, (plan.rank for plan in order.ranks)):
                self.streams[number] = (
                    RankStream("stdout", self.console, self.console.out, prefixes[number], True, None),
                    RankStream("stderr", self.console, self.console.err, prefixes[number], True, None),
                )
        return super()._start(order)

    def forward(self, kind: bytes, rank: int, data: bytes) -> None:
        """See :class:`Agent`."""
        super().forward(kind, rank, data)
        if rank in self.streams:
            self.streams[rank][kind != OUT].feed(data)

    def _on_exit(self, part: int, status: int, at: float) -> None:
        number = self.ranks[part].plan.rank
        super()._on_exit(part, status, at)
        for stream in self.streams.pop(number, ()):
            stream.close()

    def _give_up_printing(self) -> None:
        """Print no more to a reader that has stopped, once somebody wants this process or its ranks to end."""
        self._read_orders()
        if self.asked or any(isinstance(order, (EndOrder, Leave)) for order in self.orders):
            self.console.out.closed = self.console.err.closed = True
            self.console.out.deadline = self.console.err.deadline = time.monotonic()
