"""Rendezvous of the nodes of a job whose command every node starts.

Before each attempt the nodes meet: their agents dial, say who they are, and are told for whom they wait. Only then is
it known how many ranks there are, and the supervisor is made. The agents stay for all attempts, and so does the
listening socket. A node that is lost is waited for before the next attempt, because the platform may replace it.
Whoever dials while an attempt runs waits in the kernel's queue.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx import settings
from phalanx.errors import LaunchError
from phalanx.launch.job.hosts import HostSlots
from phalanx.launch.job.job import Job
from phalanx.launch.job.nodes import Nodes
from phalanx.launch.job.target import Refusal
from phalanx.launch.link import MESSAGE, Link, Lost, door_at
from phalanx.launch.output.failure import signal_name
from phalanx.launch.protocol import Asked, Here, Leave, Tell, decode_event
from phalanx.launch.rank.start import RankStart
from phalanx.launch.starters.contract import Starter
from phalanx.launch.starters.hosts import find_differences, place_ranks
from phalanx.launch.starters.local import fork_process
from phalanx.launch.starters.node_agent import ENDING, be_agent, ended_by_signals, node_key
from phalanx.system import interfaces, processes
from phalanx.wire.proof import WrongKey
from phalanx.wire.sockets import listen
from phalanx.words import format_count, format_named, tell

if TYPE_CHECKING:
    from phalanx.launch.roster import AgentState
    from phalanx.launch.supervisor import Supervisor
    from phalanx.wire.door import Door

__all__ = ["NodeRendezvous", "NodesStarter", "join_nodes"]

# After so long without a node it is named for the first time, and then once in so long again.
_SAID_S, _SAID_AGAIN_S = 4.0, 30.0
# How long a last message may take to leave.
_LAST_WORDS_S = 2.0
_LEAVES = "this node was asked to end; the job waits for another"


@dataclass(eq=False)
class JoinedNode:
    """A node that has come.

    Attributes:
        link: to its agent.
        here: what that has said of its host.
        later: what is to be added to a time of its clock; see :class:`AgentState`.
    """

    link: Link
    here: Here
    later: float


def join_nodes(job: Job, nodes: Nodes, file_limit: tuple[int, int]) -> NodeRendezvous | RankStart:
    """Fork the agent of node 0's ranks, and listen for the others; elsewhere be this node's agent.

    Args:
        job: the job as this node knows it; ``job.ranks`` is how many it takes.
        nodes: the nodes.
        file_limit: the limits on open files that the ranks get.

    Returns:
        On node 0 the rendezvous; in each rank its start.

    Raises:
        LaunchError: node 0's address is not this host's, or its port is taken.
        Refusal: node 0 did not come in time, or does not want this node.
    """
    if not nodes.is_first:
        return be_agent(job, nodes, file_limit)
    node_key()  # a mistake in it is said before anything is started
    addresses = _own_addresses(nodes)
    try:
        listener = listen(interfaces.listening_address(addresses), nodes.master_port)
    except OSError as error:
        raise LaunchError(
            f"--master-port {nodes.master_port}: cannot be listened to: {error.strerror}. If another job has it, "
            "choose another port, the same on every node; if this is not node 0, give --node-rank"
        ) from error
    own = dataclasses.replace(nodes, node_rank=0, master_addr=addresses[0], master_port=listener.getsockname()[1])

    supervisor = os.getpid()

    def be_own_agent() -> RankStart:
        processes.die_with_parent(supervisor)  # until it has joined
        listener.close()
        return be_agent(job, own, file_limit, prints=False)

    pid = fork_process(be_own_agent)
    if isinstance(pid, RankStart):
        return pid
    return NodeRendezvous(nodes, listener, addresses, pid)


def _own_addresses(nodes: Nodes) -> list[str]:
    """Find the addresses of this node, which is node 0. A platform may publish its name later than it starts it."""
    name, began = nodes.master_addr, time.monotonic()
    if interfaces.is_own_name(name):
        return interfaces.outward_addresses()
    say_at = began + _SAID_S
    while True:
        try:
            found = interfaces.resolve(name)
            break
        except OSError as error:
            now = time.monotonic()
            if now - began >= nodes.join_within_s:
                raise LaunchError(
                    f"--master-addr {name}: {error.strerror}, for {nodes.join_within_s:g} s (--join-within)"
                ) from error
            if now >= say_at:
                say_at = now + _SAID_AGAIN_S
                tell(f"this node's name {name} does not resolve yet ({error.strerror}); it is asked again")
        time.sleep(0.3)
    own = [address for address in found if not interfaces.is_other_host(address)]
    if not own:
        raise LaunchError(
            f"--master-addr {name}: is not an address of this node, although that is node 0; its interfaces are "
            f"{interfaces.describe_interfaces()}. Give each node its own --node-rank"
        )
    return own[:1]


class NodeRendezvous:
    """The nodes that have come, from the first attempt to the last.

    Args:
        nodes: the nodes that are wanted.
        listener: the listening socket.
        addresses: this node's.
        own_agent: the process of node 0's own agent.

    Attributes:
        note: a note for the user; empty for none.
        joined: the nodes that have come, before an attempt in the order of their node ranks.
    """

    def __init__(self, nodes: Nodes, listener: socket.socket, addresses: Sequence[str], own_agent: int) -> None:
        self.nodes, self.addresses, self.own_agent = nodes, tuple(addresses), own_agent
        self.joined: list[JoinedNode] = []
        self._listener = listener
        self._key = node_key()
        self._selector = selectors.DefaultSelector()
        self._came_at = 0.0
        self._restarts = False
        self.note = ""
        if self._key.is_open:
            self.note = (
                f"whoever reaches {nodes.where} can join this job, because no key is asked for. Put the same secret "
                f"into a file on every node, readable by its owner alone, and set {settings.KEY_FILE} to its path"
            )

    def wait_for_nodes(self, job: Job, timeout_s: float, came: Sequence[int] = ()) -> Job:
        """Wait for the nodes; return the job with its hosts and ranks.

        Args:
            job: the job, or its next attempt.
            timeout_s: how long to wait.
            came: the signals that have come since the attempt before.

        Raises:
            LaunchError: the job has no such rank.
            Refusal: a node did not come, they do not fit together, or somebody has ended the job.
        """
        self._selector = selectors.DefaultSelector()
        for node in self.joined:
            self._selector.register(node.link, selectors.EVENT_READ, functools.partial(self._hear, node))
        door = door_at(self._listener.dup(), self._key, self._selector, self._welcome, self._refuse)
        try:
            with ended_by_signals():
                for signum in [signum for signum in came if signum in ENDING]:
                    signal.raise_signal(signum)
                self._wait(door, timeout_s, restarts=job.attempt.number > 0)
            self.joined.sort(key=lambda node: (node.here.agent < 0, node.here.agent, node.here.name))
            heres = [node.here for node in self.joined]
            if differences := find_differences([here.name for here in heres], heres, may_share=True):
                raise Refusal("\nphalanx: ".join(differences), 1)
            hosts = tuple(HostSlots(here.name, here.size) for here in heres)
            ranks = sum(here.size for here in heres)
            job.output.check(ranks)
            if not 0 <= (job.reader or 0) < ranks:
                raise LaunchError(f"--stdin {job.reader}: is not one of the {format_count(ranks, 'rank')}, from 0 on")
        except (Refusal, LaunchError) as error:
            self.dismiss(error.code if isinstance(error, Refusal) else 2, str(error))
            raise
        finally:
            door.close()
            self._selector.close()
        threads = os.environ.get("OMP_NUM_THREADS", "")
        return dataclasses.replace(
            job, hosts=hosts, ranks=ranks, addresses=self.addresses, threads=threads, cpus=(), counted=True
        )

    def lose(self, agents: Sequence[AgentState]) -> None:
        """Forget the nodes that an attempt has lost, or that were asked to end."""
        for node, agent in zip(list(self.joined), agents, strict=True):
            if agent.leaving is not None:
                node.link.send(Leave(code=agent.leaving, why=_LEAVES))
                node.link.finish(_LAST_WORDS_S)
            if agent.link is None or agent.leaving is not None:
                self.joined.remove(node)

    def dismiss(self, code: int, why: str) -> None:
        """Let all agents end with this exit code, and say there why."""
        for node in self.joined:
            node.link.send(Leave(code=code, why=why))
            node.link.finish(_LAST_WORDS_S)
        self.joined.clear()
        self._listener.close()

    def _wait(self, door: Door, timeout_s: float, *, restarts: bool) -> None:
        nodes, began, self._restarts = self.nodes, time.monotonic(), restarts
        self._came_at, say_at = began, began + (0 if self._came_at else _SAID_S)
        while len(self.joined) < nodes.most:
            now = time.monotonic()
            enough = len(self.joined) >= nodes.least
            until = self._came_at + min(nodes.one_more_s, timeout_s) if enough else began + timeout_s
            if now >= until:
                if enough:
                    return
                raise Refusal(f"{self._missing()} not come to {nodes.where} within {timeout_s:g} s", 1)
            if now >= say_at:
                say_at = now + _SAID_AGAIN_S
                text = f"after {now - began:.0f} s {self._missing()} not come to {nodes.where}"
                if enough:
                    text = f"{len(self.joined)} nodes have come, which are enough; {until - now:.0f} s more for another"
                tell(text)
                for node in self.joined:
                    node.link.send(Tell(text=text))
            for key, _ in self._selector.select(max(0.0, min(say_at, until, door.tend(now)) - now)):
                key.data()

    def _missing(self) -> str:
        """Name the nodes that have not come, as far as they are numbered, with the verb."""
        numbers = {node.here.agent for node in self.joined}
        missing = [number for number in range(self.nodes.least) if number not in numbers]
        named = format_named("node", missing)
        if -1 in numbers or self.nodes.least < self.nodes.most:
            missing = missing[: self.nodes.least - len(self.joined)]
            named = f"{len(missing)} of at least {format_count(self.nodes.least, 'node')}"
        elif self.nodes.names:
            named += f" ({', '.join(self.nodes.names[number] for number in missing)})"
        return f"{named} {'has' if len(missing) == 1 else 'have'}"

    # Arrivals.

    def _welcome(self, link: Link) -> None:
        """Wait for the first message of a process that has proven the key: it says which node it is."""
        if self._key.is_open and (known := self._known_addresses()) and link.peer not in known:
            names = ", ".join(self.nodes.names)
            why = f"{link.peer} is not one of this job's nodes ({names}); {settings.KEY_FILE} lets it prove that it is"
            link.send(Leave(code=1, why=why))
            link.finish(_LAST_WORDS_S)
            return
        node = JoinedNode(link, Here(agent=-1, name="", machine="", pid=0), math.inf)
        self._selector.register(link, selectors.EVENT_READ, functools.partial(self._hear, node))
        self._hear(node)

    def _refuse(self, peer: str, why: Exception) -> None:
        if isinstance(why, WrongKey):
            tell(f"{peer} wants to join with another key; {settings.KEY_FILE} is to name the same file on every node")

    def _known_addresses(self) -> set[str]:
        """Return the addresses of the nodes that the platform lists; none until all of their names resolve."""
        try:
            found = {address for name in self.nodes.names for address in interfaces.resolve(name)}
        except OSError:
            return set()
        return found | {*self.addresses} if found else found

    def _hear(self, node: JoinedNode) -> None:
        try:
            frames = node.link.receive()
        except Lost:
            self._drop(node)
            return
        for kind, data in frames:
            match decode_event(data) if kind == MESSAGE else None:
                case Here() as here:
                    node.here, node.later = here, time.monotonic() - here.now
                    self._register(node)
                case Asked() as asked:
                    if self._restarts and asked.signal == signal.SIGTERM:
                        self._send_away(node, _LEAVES, 128 + asked.signal)
                        return
                    name = signal_name(asked.signal)
                    raise Refusal(f"{name} came to {node.here.name} while nodes were waited for", 128 + asked.signal)

    def _register(self, node: JoinedNode) -> None:
        number, most = node.here.agent, self.nodes.most
        for other in [other for other in self.joined if other.here.agent == number >= 0]:
            # The newer one counts: a platform has replaced the node before its old connection was seen to end.
            self._send_away(other, f"{node.here.name} has come as node {number}, too; give each node its own number")
        if number >= most or len(self.joined) >= most:
            self._send_away(node, f"this job has {format_count(most, 'node')}, and takes no further one")
            return
        self.joined.append(node)
        self._came_at = time.monotonic()

    def _send_away(self, node: JoinedNode, why: str, code: int = 1) -> None:
        node.link.send(Leave(code=code, why=why))
        self._drop(node)

    def _drop(self, node: JoinedNode) -> None:
        with contextlib.suppress(KeyError, ValueError):  # it was dropped in this very turn
            self._selector.unregister(node.link)
        node.link.finish(_LAST_WORDS_S)
        if node in self.joined:
            self.joined.remove(node)


class NodesStarter(Starter):
    """Starts the ranks of nodes that have joined.

    Args:
        supervisor: that of the attempt.
        rendezvous: the nodes that have come.
    """

    def __init__(self, supervisor: Supervisor, rendezvous: NodeRendezvous) -> None:
        from phalanx.launch.roster import AgentState

        self._supervisor, self._rendezvous = supervisor, rendezvous
        self.agents: list[AgentState] = []
        first = 0
        for number, node in enumerate(rendezvous.joined):
            ranks = supervisor.ranks[first : first + node.here.size]
            agent = AgentState(number, node.here.name, ranks, here=node.here, later=node.later)
            self.agents.append(agent)
            first += len(ranks)

    def begin(self) -> None:
        """Start the ranks: all agents are here."""
        for agent, node in zip(self.agents, self._rendezvous.joined, strict=True):
            self._supervisor.links.admit(agent, node.link)
        rows, notes = place_ranks(self._supervisor.job, self.agents)
        self._supervisor.all_here(rows, [*filter(None, [self._rendezvous.note]), *notes])

    def describe_lost(self, agent: AgentState, *, silent: bool) -> tuple[str, int]:
        """See :class:`Starter`."""
        why = f"node {agent.number} ({agent.name}) is lost: it has failed, its network has, or phalanx run there ended"
        return (f"phalanx: {why}\n", 1) if agent.number == 0 else (why, 0)

    def give_up(self, agent: AgentState) -> None:
        """See :class:`Starter`."""
        self._supervisor.links.drop(agent)

    def dismiss(self, turn: Callable[[], None]) -> None:
        """Do nothing yet: the agents are to end with the job's exit code."""

    def farewell(self, code: int, why: str) -> None:
        """See :class:`Starter`."""
        self._rendezvous.dismiss(code, why)

    def kill(self) -> None:
        """Do nothing: agents kill their ranks when they are told how the job ended."""
