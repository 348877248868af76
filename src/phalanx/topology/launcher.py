"""The columns of the table of launchers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from phalanx.topology.place import Traits
from phalanx.topology.readers import Environment, ListOf, Reader, host_of, number, port

__all__ = ["FIELDS", "MASTER_ADDR", "MASTER_PORT", "Kind", "Launcher"]

# The facts that a row can read, in the order of Place.
FIELDS = (
    "rank",
    "world_size",
    "local_rank",
    "local_world_size",
    "node_rank",
    "num_nodes",
    "master_addr",
    "master_port",
    "job",
    "attempt",
)


MASTER_ADDR = host_of("MASTER_ADDR")
MASTER_PORT = port("MASTER_PORT")
SLURM_RESTARTS = number("SLURM_RESTART_COUNT")


class Kind(Enum):
    """The kinds of launchers, by what they start."""

    AGENT = "an agent on each node, which starts the ranks there"
    MPI = "one process for each rank of an MPI job"
    ALLOCATION = "one process for each task, on hosts that a scheduler has allotted"
    PLATFORM = "one process on each machine that a cloud has rented out"
    HAND = "whatever a user's own script starts"


_NO_TRAITS = Traits()


def _always(_: Environment) -> bool:
    return True


def _never(_: Environment) -> bool:
    return False


@dataclass(frozen=True)
class Launcher:
    """One row of the table. Everything in which launchers differ is a column here; no other code asks for their names.

    Attributes:
        name: the value of ``world.launcher``.
        title: the launcher, for people.
        kind: which kind of launcher it is.
        around: the kinds whose variables may come from a launcher around this one. Launchers nest: torchrun inside srun
            inherits Slurm's variables. Variables of these kinds may disagree and are ignored. Variables of any other
            kind must agree, or it is an error.
        all_of: variables that must all be set.
        any_of: variables of which at least one must be set; empty if none is needed. One is enough, so that a launcher
            whose variables are set only in part is recognised and an error can name those that are missing.
        none_of: variables that must not be set.
        when: a further condition on the environment.
        condition: ``when`` in words, for the table in the documentation.
        rank, world_size, …: how each fact is read; None where this launcher does not give it.
        attempt: how often the job was started anew; by default how often Slurm has put it back into its queue.
        hosts: the list of exactly the hosts of this world, by node rank.
        exact_hosts: whether the list whose first host is taken for rank 0's names the hosts of this world only, and not
            all hosts of an allocation.
        always: the facts that it sets for every rank, so that one missing is an error.
        unknown_world: the user's remedy where the variables do not give the world size; empty where they do.
        note: a note for the user, given the environment; empty for none.
        one_process_per_node: whether it starts one process on each node, which must start the node's other ranks.
        rank_counts_nodes: whether its RANK and WORLD_SIZE may count nodes, so that they are not compared with ranks.
        keeps_store: whether it keeps a store of torch's at MASTER_ADDR and MASTER_PORT.
        traits: its differences from other launchers that matter when its ranks meet.
        starters: names of the processes with which it starts the ranks of one host.
        own_devices: variables that, if set, mean that each rank sees only its own devices, numbered from 0.
        example: how a command is started by it, for help texts; empty where it is not started from a shell.
    """

    name: str
    title: str
    kind: Kind
    around: tuple[Kind, ...]
    all_of: tuple[str, ...] = ()
    any_of: tuple[str, ...] = ()
    none_of: tuple[str, ...] = ()
    when: Callable[[Environment], bool] = _always
    condition: str = ""
    rank: Reader | None = None
    world_size: Reader | None = None
    local_rank: Reader | None = None
    local_world_size: Reader | None = None
    node_rank: Reader | None = None
    num_nodes: Reader | None = None
    master_addr: Reader | None = MASTER_ADDR
    master_port: Reader | None = MASTER_PORT
    job: Reader | None = None
    attempt: Reader | None = SLURM_RESTARTS
    hosts: ListOf | None = None
    exact_hosts: bool = False
    always: tuple[str, ...] = ("rank", "world_size")
    unknown_world: str = ""
    note: Callable[[Environment], str] = lambda _: ""
    one_process_per_node: bool = False
    rank_counts_nodes: bool = False
    keeps_store: Callable[[Environment], bool] = _never
    traits: Traits = _NO_TRAITS
    starters: tuple[str, ...] = ()
    own_devices: tuple[str, ...] = ()
    example: str = ""

    def recognised(self, environment: Environment) -> bool:
        """Whether ``environment`` has what only this launcher sets."""
        return (
            all(name in environment for name in self.all_of)
            and (not self.any_of or any(name in environment for name in self.any_of))
            and not any(name in environment for name in self.none_of)
            and self.when(environment)
        )

    def signs(self, environment: Environment) -> str:
        """The variables that it is recognised by, for people."""
        return ", ".join(name for name in (*self.all_of, *self.any_of) if name in environment)

    def variables(self, *fields: str) -> tuple[str, ...]:
        """The variables from which these facts are read."""
        readers = [getattr(self, field) for field in fields]
        return tuple(dict.fromkeys(name for reader in readers if reader is not None for name in reader.variables))
