"""What a row of the table of launchers is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phalanx.place.readers import Environment, ListOf, Reader, host_of, number, port

__all__ = ["FIELDS", "MASTER_ADDR", "MASTER_PORT", "Launcher"]

# What a row can read, in the order of Place.
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


def _always(_: Environment) -> bool:
    return True


@dataclass(frozen=True)
class Launcher:
    """One row of the table.

    Attributes:
        name: what ``world.launcher`` says.
        title: what it is, for people.
        kind: what its processes may have inherited from a launcher around it (``environment.INHERITED``): ``agent``,
            ``mpi``, ``allocation``, ``platform``, ``hand``.
        all_of: variables that must all be set.
        any_of: variables of which one must be set, if there are any here. One that is set alone is a half-set
            environment, and recognised so that it can be told.
        none_of: variables that must not be set.
        when: what else must hold.
        rank, world_size, …: how each fact is read; None where this launcher does not say.
        attempt: how often the job was started anew; by default how often Slurm has put it back into its queue.
        hosts: the list of exactly the hosts of this world, by node rank.
        always: the facts that it sets for every rank, so that one missing is an error.
        unknown_world: what to do if the world size cannot be known from the variables.
        note: a word for the user, given the environment; empty for none.
    """

    name: str
    title: str
    kind: str
    all_of: tuple[str, ...] = ()
    any_of: tuple[str, ...] = ()
    none_of: tuple[str, ...] = ()
    when: Callable[[Environment], bool] = _always
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
    always: tuple[str, ...] = ("rank", "world_size")
    unknown_world: str = ""
    note: Callable[[Environment], str] = lambda _: ""

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
