"""From the environment to a place: which launcher started this process, and can what it says be true?

Every value is checked before it is used, because a half-set environment (a shell that still exports RANK from
yesterday) otherwise ends as a hang, or as two ranks that both take themselves for rank 0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.errors import LauncherEnvironmentError
from phalanx.topology.launcher import FIELDS, Kind, Launcher
from phalanx.topology.launchers import LAUNCHERS
from phalanx.topology.place import Place, Traits
from phalanx.topology.readers import Environment, Finding, whole_number

__all__ = ["Reading", "read_environment"]


@dataclass(frozen=True)
class Reading:
    """The facts that one row of the table reads from an environment, complete or not.

    Attributes:
        launcher: the row; None for a process started plainly.
        found: the facts, by the names of the attributes of ``Place``.
        signs: the variables by which the row was recognised.
        notes: what the user should know.
        hosts: the hosts by node rank, where the launcher lists them.
        keeps_store: whether the launcher keeps a store of torch's at the address and port that were found.
    """

    launcher: Launcher | None
    found: Mapping[str, Finding]
    signs: str = ""
    notes: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    keeps_store: bool = False

    @property
    def name(self) -> str:
        return "none" if self.launcher is None else self.launcher.name

    def number(self, field: str) -> int | None:
        """A fact that is a number; None where the launcher does not give it."""
        found = self.found.get(field)
        return None if found is None else int(found.value)

    def text(self, field: str) -> str | None:
        """A fact that is a text; None where the launcher does not give it."""
        found = self.found.get(field)
        return None if found is None else str(found.value)

    def said(self, *fields: str) -> str:
        """Where these facts were read, for people: ``RANK=1, WORLD_SIZE=4``."""
        return ", ".join(self.found[field].source for field in fields if field in self.found)

    def place(self) -> Place:
        """The place of this process.

        Raises:
            LauncherEnvironmentError: the variables do not give the rank or the world size, which only MPI itself knows.
        """
        launcher, master = self.launcher, self.found.get("master_addr")
        rank, world_size = self.number("rank"), self.number("world_size")
        if rank is None or world_size is None:
            title = "" if launcher is None else launcher.title
            remedy = "" if launcher is None else launcher.unknown_world
            raise LauncherEnvironmentError(
                f"{title} is recognised, but its variables do not say how many ranks there are. {remedy}"
            )
        return Place(
            launcher=self.name,
            rank=rank,
            world_size=world_size,
            local_rank=self.number("local_rank"),
            local_world_size=self.number("local_world_size"),
            node_rank=self.number("node_rank"),
            num_nodes=self.number("num_nodes"),
            master_addr=self.text("master_addr"),
            master_port=self.number("master_port"),
            job=self.text("job"),
            attempt=self.number("attempt") or 0,
            hosts=self.hosts,
            first_of_allocation=(
                launcher is not None and not launcher.exact_hosts and master is not None and master.listed
            ),
            keeps_store=self.keeps_store,
            traits=Traits() if launcher is None else launcher.traits,
            sources={field: found.source for field, found in self.found.items()},
            notes=self.notes,
        )


def read_environment(environment: Environment | None = None, arguments: Sequence[str] | None = None) -> Reading:
    """The facts that this process's launcher gives; those of a world of one when no launcher is recognised.

    The answer may lack the world size, because under some launchers only MPI knows it; then its ``place()`` raises.

    Args:
        environment: the variables to read; ``os.environ`` by default.
        arguments: the script's own, which may have the older ``--local_rank``; ``sys.argv`` by default.

    Raises:
        LauncherEnvironmentError: a variable is missing, not a number, or out of range, or two launchers contradict each
            other; the message names the variables and their values.
    """
    environment = os.environ if environment is None else environment
    arguments = sys.argv[1:] if arguments is None else arguments
    if _not_distributed(environment):
        return _world_of_one()
    rows = [launcher for launcher in LAUNCHERS if launcher.recognised(environment)]
    if not rows:
        _refuse_remains(environment, arguments)
        return _world_of_one()
    launcher = rows[0]
    found = {} if launcher.kind is not Kind.HAND else _local_rank_argument(environment, arguments)
    reading = _read(launcher, environment, found)
    for other in rows[1:]:
        _compare(reading, other, environment)
    return reading


# -- one row -------------------------------------------------------------------------------------------


def _read(launcher: Launcher, environment: Environment, more: Mapping[str, Finding]) -> Reading:
    found = {**more, **_collect(launcher, environment)}
    if launcher.kind is Kind.HAND and "world_size" in found and found["world_size"].value == 1:
        found.setdefault("rank", Finding(0, "the only rank"))
        if "local_rank" in found and found["local_rank"].value == -1:
            del found["local_rank"]  # "not distributed", in the older convention
    for field in launcher.always:
        if field not in found:
            reader = getattr(launcher, field)
            if field == "world_size" and launcher.unknown_world:
                continue
            there = _collect(launcher, environment).get("world_size" if field == "rank" else "rank")
            beside = "" if there is None else f" beside {there.source}"
            raise LauncherEnvironmentError(
                f"{launcher.name} is recognised (by {launcher.signs(environment)}), but {reader.names} is not set"
                f"{beside}; every rank needs it. Was the environment passed on only in part, or left by another job?"
            )
    if found.get("world_size") and found["world_size"].value == 1:
        alone = {"local_rank": 0, "local_world_size": 1, "node_rank": 0, "num_nodes": 1}
        found = {**{field: Finding(value, "a world of one") for field, value in alone.items()}, **found}
    note = launcher.note(environment)
    hosts = () if launcher.hosts is None else tuple(launcher.hosts.hosts(environment))
    keeps_store = {"master_addr", "master_port"} <= found.keys() and launcher.keeps_store(environment)
    reading = Reading(launcher, found, launcher.signs(environment), (note,) if note else (), hosts, keeps_store)
    _check(reading)
    return reading


def _collect(launcher: Launcher, environment: Environment) -> dict[str, Finding]:
    found = {}
    for field in FIELDS:
        reader = getattr(launcher, field)
        finding = None if reader is None else reader(environment)
        if finding is not None:
            found[field] = finding
    return found


def _check(reading: Reading) -> None:
    """Refuse facts that no process can have together."""
    for index, count in (("rank", "world_size"), ("local_rank", "local_world_size"), ("node_rank", "num_nodes")):
        _check_pair(reading, index, count)
    world = reading.number("world_size")
    local, nodes = reading.number("local_world_size"), reading.number("num_nodes")
    if world is None:
        return
    for field, value in (
        ("local_world_size", local),
        ("num_nodes", nodes),
        ("local_rank", reading.number("local_rank")),
    ):
        if value is not None and value > (world - 1 if field == "local_rank" else world):
            raise LauncherEnvironmentError(
                f"{reading.said(field)} does not fit into a world of {world} ({reading.said('world_size')})"
            )
    if local is None or nodes is None:
        return
    if reading.launcher is not None and reading.launcher.one_process_per_node and local == 1 and nodes != world:
        note = f" {reading.notes[0]}" if reading.notes else ""
        raise LauncherEnvironmentError(
            f"{reading.name}: {reading.said('world_size')} ranks on {reading.said('num_nodes')} nodes, but the "
            f"platform starts one process on each, and this is one of them.{note}"
        )
    # One node has all ranks; of several, each has at least one.
    if (nodes == 1) != (local == world) or local + nodes - 1 > world:
        raise LauncherEnvironmentError(
            f"{reading.said('local_world_size')} and {reading.said('num_nodes')} contradict "
            f"{reading.said('world_size')}: with {local} ranks on this node, {world - local} are left for the "
            f"{nodes - 1} other(s)"
        )


def _check_pair(reading: Reading, index: str, count: str) -> None:
    low, high = reading.number(index), reading.number(count)
    said = " and ".join(reading.found[field].source for field in (index, count) if field in reading.found)
    if high is not None and high < 1:
        raise LauncherEnvironmentError(f"{said} is impossible: a world has at least one rank, on at least one node")
    if low is not None and (low < 0 or (high is not None and low >= high)):
        limit = "" if high is None else f" to {high - 1}"
        raise LauncherEnvironmentError(f"{said} is impossible: ranks and nodes count from 0{limit}")


# -- several rows --------------------------------------------------------------------------------------


def _compare(reading: Reading, other: Launcher, environment: Environment) -> None:
    """Refuse another launcher that is recognised too, unless it may be around this one or gives the same facts.

    Raises:
        LauncherEnvironmentError: the two contradict each other; the message shows both.
    """
    launcher = reading.launcher
    if launcher is None or other.name == launcher.name or other.kind in launcher.around:
        return
    if other.kind is Kind.HAND and launcher.rank_counts_nodes:
        return
    beside = Reading(other, _collect(other, environment))
    pairs = [(reading.number(field), beside.number(field)) for field in ("rank", "world_size")]
    if other.kind is Kind.HAND and None in (pairs[0][1], pairs[1][1]):
        lacking = "WORLD_SIZE" if pairs[1][1] is None else "RANK"
        raise LauncherEnvironmentError(
            f"{_claim(reading)}, and beside it {beside.said('rank', 'world_size')} is set but {lacking} is not set; "
            f"unset the one that is set, or set both to what the launcher says"
        )
    if all(own is None or its is None or own == its for own, its in pairs):
        return
    # A launcher around one with agents, such as an mpiexec around torchrun, starts one agent on each node.
    if launcher.kind is Kind.AGENT and beside.number("world_size") == reading.number("num_nodes"):
        return
    raise LauncherEnvironmentError(
        f"two launchers contradict each other: {_claim(reading)}, but {_claim(beside)}. Unset the variables of the one "
        f"that did not start this process (a shell gives its exported variables to every program that it starts)"
    )


def _claim(reading: Reading) -> str:
    rank, world = reading.number("rank"), reading.number("world_size")
    shown = f"rank {'?' if rank is None else rank} of {'?' if world is None else world}"
    return f"{reading.name} says {shown} ({reading.said('rank', 'world_size')})"


# -- no row, or a half one -----------------------------------------------------------------------------


def _world_of_one() -> Reading:
    alone = {"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1, "node_rank": 0, "num_nodes": 1}
    return Reading(None, {field: Finding(value, "started plainly") for field, value in alone.items()})


def _not_distributed(environment: Environment) -> bool:
    """Whether the variables say "not distributed" by the older convention.

    That is a rank of -1, or a variable that was set to nothing, and no world of several ranks.
    """
    if any(launcher.recognised(environment) for launcher in LAUNCHERS if launcher.kind is not Kind.HAND):
        return False
    said = {name: environment[name].strip() for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in environment}
    alone = {"RANK": ("", "-1"), "WORLD_SIZE": ("", "-1", "1"), "LOCAL_RANK": ("", "-1", "0")}
    return all(value in alone[name] for name, value in said.items()) and any(
        value in ("", "-1") for value in said.values()
    )


def _local_rank_argument(environment: Environment, arguments: Sequence[str]) -> dict[str, Finding]:
    """``--local_rank``, as the older torch.distributed.launch gives it to the script; -1 means not given."""
    found = {}
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in ("--local_rank", "--local-rank"):
            if not equals:
                value = arguments[index + 1] if index + 1 < len(arguments) else ""
            local_rank = whole_number(name, value)
            if local_rank != -1:
                found["local_rank"] = Finding(local_rank, f"{name}={local_rank}")
    own = environment.get("LOCAL_RANK")
    if found and own is not None and whole_number("LOCAL_RANK", own) != found["local_rank"].value:
        raise LauncherEnvironmentError(f"{found['local_rank'].source} and LOCAL_RANK={own} contradict each other")
    return found


def _refuse_remains(environment: Environment, arguments: Sequence[str]) -> None:
    """Refuse a process that no launcher is recognised for, if a variable or an argument says that there are others."""
    several = []
    found = _local_rank_argument(environment, arguments)
    if found and found["local_rank"].value != 0:
        several.append(found["local_rank"].source)
    for name, alone in (("LOCAL_RANK", (0, -1)), ("LOCAL_WORLD_SIZE", (1,)), ("GROUP_WORLD_SIZE", (1,))):
        if name in environment and whole_number(name, environment[name]) not in alone:
            several.append(f"{name}={environment[name]}")
    if several:
        raise LauncherEnvironmentError(
            f"{' and '.join(several)} says that there are several processes, but neither RANK nor WORLD_SIZE is set. "
            f"Start the script with a launcher, such as phalanx run -n N, or unset it"
        )
