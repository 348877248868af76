"""Who the workers are: ``rpc.workers`` and ``rpc.describe``."""

from __future__ import annotations

from phalanx.rpc import session
from phalanx.rpc.members import Member
from phalanx.topology.table import format_table
from phalanx.words import format_count

__all__ = ["describe", "workers"]


def workers() -> list[Member]:
    """All workers that are there, by rank and name, this one among them; those that are no rank stand at the end.

    It asks the job's store, which costs about as much as an empty call. A worker that was killed is left out as soon as
    somebody has noticed; ``rpc.watch`` notices by itself.

    Raises:
        ClosedError: this process is not a worker.
    """
    return session.agent().members()


def describe() -> str:
    """The workers as a table: name, rank, host, pid, and address. One process is enough to call it.

    It is the rank table's counterpart for calls: ``World.describe`` has the ranks only, and here are also the workers
    that are no rank, such as a parameter server that was started by itself.

    Raises:
        ClosedError: this process is not a worker.
    """
    me = session.agent().me
    lines = [
        {
            "worker": f"{member.name} (this one)" if member.incarnation == me.incarnation else member.name,
            "rank": "none" if member.rank < 0 else str(member.rank),
            "host": member.host,
            "pid": str(member.pid),
            "address": f"{member.address}:{member.port}",
        }
        for member in workers()
    ]
    return format_table(lines, title=format_count(len(lines), "worker"), text_columns=("worker", "host", "address"))
