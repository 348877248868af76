"""Rank 0's store: a server on a thread of rank 0's process, for processes that prove the job's key.

A connection comes in by a door (``wire/door.py``), then the claim of its process is judged (:class:`Seats`). If it is
refused, the reason is sent to the process and printed here; else its bytes are read as requests. Rank 0 itself is a
client like all others.

The thread alone uses the table, the seats and the door. Other threads give it tasks (``loop.py``).
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from phalanx.membership.launcher_store import ENDED, EndedRank
from phalanx.membership.loop import Channel, Loop
from phalanx.membership.store_protocol import KEEP_ALIVE, ROLE, Claim, Code, Verdict, pack, unpack
from phalanx.membership.table import Table, Wait
from phalanx.system.exit_order import Stage, at_exit
from phalanx.wire.door import Arrival, Door
from phalanx.wire.framing import Malformed
from phalanx.wire.key import Key
from phalanx.wire.proof import Address, NoProof, PassedOn, WrongKey
from phalanx.words import format_named, format_spans, tell

__all__ = ["Seats", "StoreServer"]

# Refused connections are reported one by one up to this number: a port scan makes many of them.
MOST_COMPLAINTS = 16
# How long rank 0's process, when it ends, waits for ranks that still read its answers.
LINGER_S = 0.3


class Seats:
    """The ranks of one world, entered as they join, and why a process is refused.

    Args:
        own: rank 0's claim; all others must be of the same job, attempt, opening and world size.
        hosts: the hosts of the job by node rank, if the launcher names them.
        num_nodes: how many hosts there are, if that is known.
    """

    def __init__(self, own: Claim, hosts: Sequence[str] = (), num_nodes: int | None = None) -> None:
        self.own = own
        self._hosts, self._num_nodes = hosts, num_nodes
        self._taken: dict[int, Claim] = {0: own}
        self._refused = ""  # why, for the last process that was

    @property
    def complete(self) -> bool:
        """Return whether all have come."""
        return len(self._taken) == self.own.world_size

    def describe_missing(self) -> str:
        """Name the missing ranks, for people, and what may be the reason: one was refused, or none came of a node.

        The text is empty when all have come.
        """
        if self.complete:
            return ""
        missing = [rank for rank in range(self.own.world_size) if rank not in self._taken]
        text = f"{format_named('rank', missing)} of {self.own.world_size}"
        nodes = {claim.node_rank for claim in self._taken.values()}
        absent = [] if -1 in nodes else [node for node in range(self._num_nodes or 0) if node not in nodes]
        if absent:
            names = format_spans(absent)
            if len(self._hosts) == self._num_nodes and len(absent) <= 16:
                names = ", ".join(f"{node} ({self._hosts[node]})" for node in absent)
            text += f"; no rank has come from node{'s' if len(absent) > 1 else ''} {names}"
        return f"{text} (refused: {self._refused})" if self._refused else text

    def judge(self, claim: Claim) -> Verdict:
        """Give a process its seat, or the reason why it gets none."""
        own = self.own
        if claim.job != own.job:
            return Verdict("other")
        if (claim.attempt, claim.opening) > (own.attempt, own.opening):
            return Verdict("other", f"rank 0 ({own.name}) is still in attempt {own.attempt}, world {own.opening}")
        reason = self._why_refused(claim)
        if reason:
            self._refused = reason
            return Verdict("refused", reason)
        self._taken.setdefault(claim.rank, claim)
        return Verdict("welcome", "", own.pid, own.host, own.start, own.sight)

    def _why_refused(self, claim: Claim) -> str:
        own, who = self.own, f"rank {claim.rank} ({claim.name})"
        if claim.attempt != own.attempt:
            return (
                f"{who} is of attempt {claim.attempt}, which is over; rank 0 ({own.name}) is of attempt {own.attempt}"
            )
        if claim.opening != own.opening:
            return (
                f"{who} opens its world number {claim.opening}, and rank 0 ({own.name}) its number {own.opening}; "
                f"every rank must call phalanx.init() the same number of times"
            )
        if claim.world_size != own.world_size:
            return f"{who} was started for a world of {claim.world_size}, rank 0 ({own.name}) for {own.world_size}"
        if not 0 <= claim.rank < own.world_size:
            return f"there is no rank {claim.rank} in a world of {own.world_size} ({claim.name})"
        holder = self._taken.get(claim.rank, claim)
        # Another connection of the process that has the seat has its token.
        if holder is not claim and not (
            holder.token and secrets.compare_digest(claim.token.encode(), holder.token.encode())
        ):
            return f"there are two of rank {claim.rank}: {claim.name} and {holder.name}"
        return ""

    def leave(self, rank: int) -> None:
        """Free a rank's seat: it may be started again."""
        self._taken.pop(rank, None)


class _Conversation:
    """The requests of one connection, and the answers."""

    def __init__(self, store: StoreServer, claim: Claim, say: Callable[[bytes], object]) -> None:
        self.claim = claim
        self._store, self._say = store, say
        self._wait: Wait | None = None  # that of the request which is not answered yet

    def take(self, message: bytes) -> None:
        """Carry out a request; raise Malformed if it is none."""
        if self._wait is not None:
            raise Malformed("a request came before the last one was answered")
        try:
            self._carry_out(*unpack(message))
        except ValueError as error:
            self.reply(Code.FAILED, 0, [str(error).encode()])

    def end(self) -> None:
        """Forget what this connection waits for: it has gone."""
        if self._wait is not None:
            self._wait.forget()
        self._store.on_gone(self)

    def reply(self, code: int, number: int = 0, fields: Sequence[bytes] = ()) -> None:
        """Answer the request that has been read last."""
        self._wait = None
        try:
            message = pack(code, number, fields)
        except ValueError as error:
            message = pack(Code.FAILED, 0, [str(error).encode()])
        self._say(message)

    def _carry_out(self, code: int, number: int, fields: list[bytes]) -> None:
        table, result, said = self._store.table, 0, list[bytes]()
        match code, fields:
            case ((Code.READ | Code.WAIT), keys):
                self._await(keys, reads=code == Code.READ)
                return
            case ((Code.SET | Code.APPEND), _) if len(fields) % 2 == 0:
                put = table.set if code == Code.SET else table.append
                for key, value in zip(fields[::2], fields[1::2], strict=True):
                    put(key, value)
            case Code.ADD, [key]:
                result = table.add(key, number)
            case Code.COMPARE_SET, [key, expected, desired]:
                said = [table.compare_set(key, expected, desired)]
            case Code.DELETE, [key]:
                result = int(table.delete(key))
            case Code.CHECK, keys:
                result = int(all(map(table.has, keys)))
            case Code.COUNT, _:
                result = len(table.entries)
            case Code.LIST, _:
                said = list(table.entries)
            case Code.MISSING, _:
                if self._store.given_up:
                    raise ValueError(self._store.given_up)
                said = [self._store.seats.describe_missing().encode()]
            case _:
                raise ValueError(f"there is no request with the code {code} and {len(fields)} fields")
        self.reply(Code.DONE, result, said)

    def _await(self, keys: list[bytes], *, reads: bool) -> None:
        entries = self._store.table.entries
        wait = self._store.table.wait(
            keys, lambda: self.reply(Code.DONE, 0, [entries.get(key, b"") for key in keys] if reads else [])
        )
        if wait.missing:
            self._wait = wait


class StoreServer:
    """The store of one world, served until :meth:`retire` or :meth:`stop`.

    Args:
        listener, key, announced: see :class:`~phalanx.wire.door.Door`.
        seats: which ranks may join, and which have.
        say: takes a line for rank 0's console.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: Key,
        seats: Seats,
        say: Callable[[str], None] = tell,
        announced: Sequence[Address] = (),
    ) -> None:
        self.seats, self.key = seats, key
        self.table, self.loop = Table(), Loop("phalanx-store")
        self.given_up = ""  # why the ranks do not meet; written by the thread that waits for them
        self._ended: list[EndedRank] = []
        self.where: Address = listener.getsockname()[:2]
        self._say, self._complaints = say, 0
        self._retired = self._over = False
        self._conversations: set[_Conversation] = set()
        self._door = Door(
            listener, key, ROLE, KEEP_ALIVE, self.loop.selector, self._admit, self._on_refused, announced=announced
        )
        self.loop.tend = self._door.tend
        try:
            self.loop.start()
        except RuntimeError:
            self._door.close()
            self.loop.stop()
            raise
        _servers.add(self)

    # -- calls of other threads ----------------------------------------------------------------------

    def retire(self) -> None:
        """Accept no further connection, and stop when the last one has ended; the port is free at once."""
        done = threading.Event()

        def retire() -> None:
            self._retired = True
            self._door.stop_listening()
            done.set()
            self._stop_if_unused()

        if self.loop.call(retire) and threading.current_thread() is not self.loop.thread:
            done.wait(LINGER_S)

    def stop(self) -> None:
        """Close all connections, and end the thread."""
        self.loop.call(self._stop)
        self.loop.thread.join(LINGER_S)

    def linger(self, until: float) -> None:
        """Serve the ranks that are still connected, until that time, then stop."""
        self.retire()
        self.loop.thread.join(max(0.0, until - time.monotonic()))
        self.stop()

    # -- the thread ------------------------------------------------------------------------------------

    def _stop(self) -> None:
        self._over = True
        self._door.close()
        for connection in list(self.loop.connections):
            connection.close()
        self.loop.stop()

    def _stop_if_unused(self) -> None:
        if self._retired and not self._over and not self.loop.connections:
            self._stop()

    def on_gone(self, conversation: _Conversation) -> None:
        """Note that a connection has ended: if it was its rank's last, nobody should wait for that rank."""
        self._conversations.discard(conversation)
        claim = conversation.claim
        self._stop_if_unused()
        if self._over or any(other.claim.rank == claim.rank for other in self._conversations):
            return
        if not self.seats.complete and claim.rank:
            self.seats.leave(claim.rank)
            self._say(f"rank {claim.rank} ({claim.name}) has left again before all ranks had come")
        elif claim.rank:
            self._ended.append(EndedRank(claim.rank, claim.pid, claim.host, "or given up"))
            self.table.set(ENDED.encode(), json.dumps(self._ended).encode())

    def _admit(self, arrival: Arrival) -> None:
        """Judge the claim of a process that has proven the key, and let it use the store if it is welcome."""
        try:
            claim = Claim.decode(arrival.proven.claim)
        except NoProof as error:
            self._on_refused(arrival.peer, error)
            arrival.sock.close()
            return
        verdict = self.seats.judge(claim)
        arrival.answer(verdict.encode())
        if verdict.kind != "welcome":
            arrival.sock.close()
            if verdict.kind == "refused":
                self._say(f"refused a process: {verdict.reason}")
            return
        channel = Channel(self.loop, arrival.sock, arrival.proven.session(), lambda request: conversation.take(request))
        conversation = _Conversation(self, claim, channel.say)

        def ended(why: Exception | None) -> None:
            if isinstance(why, Malformed):
                self._complain(arrival.peer, f"sent bytes that are not a request ({why})")
            conversation.end()

        channel.ended = ended
        self._conversations.add(conversation)
        channel.take(arrival.rest)

    def _on_refused(self, peer: str, why: Exception) -> None:
        match why:
            case WrongKey():
                said = f"proves another key than rank 0's ({self.key.source or 'none'})"
            case PassedOn():
                said = (
                    f"was meant for {why.dialled}, not for {self.where[0]} port {self.where[1]}: another process has "
                    f"passed it on. If that is a gateway of your own, set MASTER_ADDR to the address that others dial"
                )
            case _:
                said = "sent no proof that it belongs to the job"
        self._complain(peer, said)

    def _complain(self, peer: str, why: str) -> None:
        self._complaints += 1
        if self._complaints <= MOST_COMPLAINTS:
            more = "; further ones are not reported" if self._complaints == MOST_COMPLAINTS else ""
            self._say(f"refused a connection from {peer}, which {why}{more}")


_servers: weakref.WeakSet[StoreServer] = weakref.WeakSet()


def _at_exit() -> None:
    # The interpreter's end would stop the thread in the middle of an answer, so the servers are stopped before it.
    until = time.monotonic() + LINGER_S
    for server in list(_servers):
        server.linger(until)


at_exit(Stage.END_STORES, _at_exit)
