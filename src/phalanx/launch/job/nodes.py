"""Read on which nodes a job runs whose command is started on every node, by a platform or by hand.

Node 0 holds the supervisor, and an agent on each node dials it (``starters/nodes.py``). Elsewhere one call of
``phalanx run`` starts the agents of all hosts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from phalanx.errors import LaunchError
from phalanx.launch.job.hosts import is_here
from phalanx.launch.job.platforms import PlatformNodes
from phalanx.system.host import machine_name

__all__ = ["Nodes", "read_nodes"]

#: torchrun's port, too.
DEFAULT_PORT = 29500
# How long all nodes are waited for; and with a range of nodes, once there are enough, for one more.
_ALL_S, _ONE_MORE_S = 600.0, 30.0


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job, as the command on one of them knows them.

    Attributes:
        least, most: how many there may be.
        node_rank: this node's number; None if node 0 is to choose it.
        master_addr, master_port: where node 0 listens.
        names: the names or addresses of all nodes in the order of their ranks; empty if the platform does not say.
        title: who said so, for people.
        join_within_s: how long nodes that have not come are waited for.
        one_more_s: with a range, how long for one more once there are enough.
        rejoin_within_s: how long a node that is lost is waited for before a restart; 0 not to wait.
    """

    least: int
    most: int
    node_rank: int | None
    master_addr: str
    master_port: int
    names: tuple[str, ...] = ()
    title: str = "--nnodes"
    join_within_s: float = _ALL_S
    one_more_s: float = _ONE_MORE_S
    rejoin_within_s: float = 600.0

    @property
    def is_first(self) -> bool:
        """Tell whether this is node 0."""
        return self.node_rank == 0

    @property
    def where(self) -> str:
        """Name node 0's address and port."""
        host = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
        return f"{host}:{self.master_port}"


def read_nodes(
    nnodes: str | None,
    node_rank: int | None,
    master_addr: str | None,
    master_port: int | None,
    platform: PlatformNodes | None,
    join_within_s: float | None = None,
    rejoin_within_s: float = _ALL_S,
) -> Nodes | None:
    """Read the nodes of a job; None for a job that ``phalanx run`` starts alone.

    Args:
        nnodes, node_rank, master_addr, master_port, join_within_s: the options of these names; None if not given.
        platform: what the variables of a platform say; an option that is given counts instead.
        rejoin_within_s: the option.

    Raises:
        LaunchError: the options are no numbers, contradict each other, or do not say where node 0 is.
    """
    if nnodes is None and platform is None:
        _check_needless(node_rank, master_addr)
        return None
    least, most = _read_range(nnodes if nnodes is not None else platform.nodes if platform is not None else "1")
    if most == 1:
        _check_needless(node_rank, master_addr)
        return None
    named = node_rank is not None
    if platform is not None:
        node_rank = node_rank if named else platform.node_rank
        master_addr = master_addr or platform.master_addr
        master_port = master_port or platform.master_port
    if not master_addr and node_rank == 0:
        master_addr = machine_name()  # AWS Batch tells node 0 no address; by hand, it need not be told either
    if not master_addr:
        raise LaunchError(
            f"{most} nodes: say where node 0 is, on every node: --master-addr HOST; or call phalanx run once, "
            "and it starts the ranks of all hosts: -H h1:4,h2:4"
        )
    address, port = _split(master_addr)
    if node_rank is not None and not 0 <= node_rank < most:
        raise LaunchError(f"--node-rank {node_rank}: is not one of {most} nodes, which count from 0")
    if node_rank is None and is_here(address):
        node_rank = 0
    return Nodes(
        least,
        most,
        node_rank,
        address,
        port or master_port or DEFAULT_PORT,
        platform.names if platform is not None and nnodes is None else (),
        platform.title if platform is not None else "--nnodes",
        _ALL_S if join_within_s is None else join_within_s,
        _ONE_MORE_S if join_within_s is None else join_within_s,
        rejoin_within_s,
    )


def _check_needless(node_rank: int | None, master_addr: str | None) -> None:
    if node_rank:
        raise LaunchError(f"--node-rank {node_rank}: say how many nodes there are, on every node: --nnodes N")
    if master_addr and not is_here(_split(master_addr)[0]):
        raise LaunchError(
            f"--master-addr {master_addr}: is another host; say how many nodes there are, on every node: --nnodes N"
        )


def _read_range(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"\s*(\d+)\s*(?::\s*(\d+)\s*)?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise LaunchError(f"--nnodes {text}: is neither a number of nodes nor a range such as 2:4")
    return least, most


def _split(master_addr: str) -> tuple[str, int | None]:
    """Part HOST or HOST:PORT; an IPv6 address with a port has brackets."""
    host, port = master_addr, None
    if master_addr.startswith("["):
        host, _, rest = master_addr[1:].partition("]")
        port = rest[1:] if rest else None
    elif master_addr.count(":") == 1:
        host, _, port = master_addr.partition(":")
    if not host or (port is not None and not (port.isdecimal() and 0 < int(port) < 1 << 16)):
        raise LaunchError(f"--master-addr {master_addr}: is not HOST or HOST:PORT, such as h0:29500")
    return host, int(port) if port is not None else None
