"""Find which launcher started this process, and its place, by the variables of its environment.

Every value is checked before it is used, because a half-set environment (a shell that still exports RANK from
yesterday) otherwise ends as a hang, or as two ranks that both take themselves for rank 0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import parse_qs, urlsplit

from phalanx import settings
from phalanx.errors import InitializationError, LauncherEnvironmentError
from phalanx.topology.launchers import LAUNCHERS, Kind, Launcher
from phalanx.topology.place import Place, Traits
from phalanx.topology.readers import Environment, Fact, whole_number

_ALONE = {"local_rank": 0, "local_world_size": 1, "node_rank": 0, "num_nodes": 1}


@dataclass(frozen=True)
class Reading:
    """The facts that one row of the table reads from an environment, complete or not.

    ``launcher`` is None for a process started plainly, and ``signs`` has the variables by which it was recognised.
    ``found`` has the facts by the names of the attributes of ``Place``; the other fields are those of ``Place``.
    """

    launcher: Launcher | None
    found: Mapping[str, Fact]
    signs: str = ""
    notes: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    keeps_store: bool = False

    @property
    def name(self) -> str:
        return "none" if self.launcher is None else self.launcher.name

    def number(self, fact: str) -> int | None:
        """Return a fact that is a number; None where the launcher does not give it."""
        return int(self.found[fact].value) if fact in self.found else None

    def text(self, fact: str) -> str | None:
        """Return a fact that is a text; None where the launcher does not give it."""
        return str(self.found[fact].value) if fact in self.found else None

    def said(self, *facts: str, by: str = ", ") -> str:
        """Say where these facts were read: ``RANK=1, WORLD_SIZE=4``."""
        return by.join(self.found[fact].source for fact in facts if fact in self.found)

    def place(self) -> Place:
        """Return the place of this process, or raise if only MPI itself knows the world size."""
        launcher, master = self.launcher, self.found.get("master_addr")
        rank, world_size = self.number("rank"), self.number("world_size")
        if rank is None or world_size is None:
            title, remedy = ("", "") if launcher is None else (launcher.title, launcher.unknown_world)
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
            first_of_allocation=master is not None and master.listed and not self.hosts,
            keeps_store=self.keeps_store,
            traits=Traits() if launcher is None else launcher.traits,
            sources={fact: found.source for fact, found in self.found.items()},
            notes=self.notes,
        )


def read_environment(environment: Environment | None = None, arguments: Sequence[str] | None = None) -> Reading:
    """Read the facts that this process's launcher gives; those of a world of one when no launcher is recognised.

    Args:
        environment: the variables to read; ``os.environ`` by default.
        arguments: the script's own, which may have the older ``--local_rank``; ``sys.argv`` by default.

    Raises:
        LauncherEnvironmentError: a variable is missing, not a number, or out of range, or two launchers contradict each
            other; the message names the variables and their values.
    """
    environment = os.environ if environment is None else environment
    arguments = sys.argv[1:] if arguments is None else arguments
    rows = [launcher for launcher in LAUNCHERS if launcher.recognises(environment)]
    not_distributed = all(row.kind is Kind.HAND for row in rows) and _says_not_distributed(environment)
    if not rows and not not_distributed:
        _refuse_remains(environment, arguments)
    if not rows or not_distributed:
        alone = {"rank": 0, "world_size": 1, **_ALONE}
        return Reading(None, {fact: Fact(value, "started plainly") for fact, value in alone.items()})
    launcher = rows[0]
    reading = _read(launcher, environment, arguments)
    for other in rows[1:]:
        counts_nodes = other.kind is Kind.HAND and launcher.rank_counts_nodes
        if other.name != launcher.name and other.kind not in launcher.around and not counts_nodes:
            _compare(launcher, reading, Reading(other, other.read(environment)))
    return reading


# -- one row -------------------------------------------------------------------------------------------


def _read(launcher: Launcher, environment: Environment, arguments: Sequence[str]) -> Reading:
    found = launcher.read(environment)
    if launcher.kind is Kind.HAND:
        found = {**_local_rank_argument(environment, arguments), **found}
        if "world_size" in found and found["world_size"].value == 1:
            found.setdefault("rank", Fact(0, "the only rank"))
            if "local_rank" in found and found["local_rank"].value == -1:
                del found["local_rank"]  # "not distributed", in the older convention
    for fact, other in (("rank", "world_size"), ("world_size", "rank")):
        if fact not in found and not (fact == "world_size" and launcher.unknown_world):
            beside = f" beside {found[other].source}" if other in found else ""
            raise LauncherEnvironmentError(
                f"{launcher.name} is recognised (by {launcher.signs(environment)}), but {launcher.readers[fact].names} "
                f"is not set{beside}; every rank needs it. Was the environment passed on only in part, or left by "
                f"another job?"
            )
    if found.get("world_size") and found["world_size"].value == 1:
        found = {**{fact: Fact(value, "a world of one") for fact, value in _ALONE.items()}, **found}
    keeps_store = False
    if launcher.kind is Kind.AGENT and {"master_addr", "master_port"} <= found.keys():
        # A script under ``phalanx run`` may have set a MASTER_PORT of its own; then rank 0 opens a store there.
        own = environment.get(settings.STORE_PORT, environment["MASTER_PORT"])
        keeps_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and own == environment["MASTER_PORT"]
    note = launcher.note(environment)
    hosts = () if launcher.hosts is None else tuple(launcher.hosts.hosts(environment))
    reading = Reading(launcher, found, launcher.signs(environment), (note,) if note else (), hosts, keeps_store)
    _check(launcher, reading)
    return reading


def _check(launcher: Launcher, reading: Reading) -> None:
    """Refuse facts that no process can have together; :func:`phalanx.topology.topology.arrange` compares the ranks'."""
    for index, count in (("rank", "world_size"), ("local_rank", "local_world_size"), ("node_rank", "num_nodes")):
        low, high = reading.number(index), reading.number(count)
        said = reading.said(index, count, by=" and ")
        if high is not None and high < 1:
            raise LauncherEnvironmentError(f"{said} is impossible: a world has at least one rank, on at least one node")
        if low is not None and (low < 0 or (high is not None and low >= high)):
            limit = "" if high is None else f" to {high - 1}"
            raise LauncherEnvironmentError(f"{said} is impossible: ranks and nodes count from 0{limit}")
    world, local, nodes = (reading.number(fact) for fact in ("world_size", "local_world_size", "num_nodes"))
    if launcher.one_process_per_node and local == 1 and None not in (nodes, world) and nodes != world:
        note = f" {reading.notes[0]}" if reading.notes else ""
        raise LauncherEnvironmentError(
            f"{reading.name}: {reading.said('world_size')} ranks on {reading.said('num_nodes')} nodes, but the "
            f"platform starts one process on each, and this is one of them.{note}"
        )


# -- several rows, none, or a half one -----------------------------------------------------------------


def _compare(launcher: Launcher, reading: Reading, beside: Reading) -> None:
    """Refuse another launcher that is recognised too, and not around this one, unless it gives the same facts."""
    by_hand = beside.launcher is not None and beside.launcher.kind is Kind.HAND
    lacking = [name for name, fact in (("RANK", "rank"), ("WORLD_SIZE", "world_size")) if fact not in beside.found]
    if by_hand and lacking:
        raise LauncherEnvironmentError(
            f"{_claim(reading)}, and beside it {beside.said('rank', 'world_size')} is set but {lacking[-1]} is not "
            f"set; unset the one that is set, or set both to what the launcher says"
        )
    both = [fact for fact in ("rank", "world_size") if fact in reading.found and fact in beside.found]
    if all(reading.number(fact) == beside.number(fact) for fact in both):
        return
    # A launcher around one with agents, such as an mpiexec around torchrun, starts one agent on each node.
    if launcher.kind is Kind.AGENT and beside.number("world_size") == reading.number("num_nodes"):
        return
    raise LauncherEnvironmentError(
        f"two launchers contradict each other: {_claim(reading)}, but {_claim(beside)}. Unset the variables of the one "
        f"that did not start this process (a shell gives its exported variables to every program that it starts)"
    )


def _claim(reading: Reading) -> str:
    rank, world = (reading.text(fact) or "?" for fact in ("rank", "world_size"))
    return f"{reading.name} says rank {rank} of {world} ({reading.said('rank', 'world_size')})"


def _says_not_distributed(environment: Environment) -> bool:
    """Return whether a rank is -1 or empty, the older convention for "not distributed", and no world has several."""
    alone = {"RANK": ("", "-1"), "WORLD_SIZE": ("", "-1", "1"), "LOCAL_RANK": ("", "-1", "0")}
    said = {name: environment[name].strip() for name in alone if name in environment}
    return all(value in alone[name] for name, value in said.items()) and not {"", "-1"}.isdisjoint(said.values())


def _local_rank_argument(environment: Environment, arguments: Sequence[str]) -> dict[str, Fact]:
    """Read ``--local_rank``, as the older torch.distributed.launch gives it to the script; -1 means not given."""
    found = {}
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in ("--local_rank", "--local-rank"):
            local_rank = whole_number(name, value if equals else "".join(arguments[index + 1 : index + 2]))
            if local_rank != -1:
                found["local_rank"] = Fact(local_rank, f"{name}={local_rank}")
    own = environment.get("LOCAL_RANK")
    if found and own is not None and whole_number("LOCAL_RANK", own) != found["local_rank"].value:
        raise LauncherEnvironmentError(f"{found['local_rank'].source} and LOCAL_RANK={own} contradict each other")
    return found


def _refuse_remains(environment: Environment, arguments: Sequence[str]) -> None:
    """Refuse a process that no launcher is recognised for, if a variable or an argument says that there are others."""
    several = [found.source for found in _local_rank_argument(environment, arguments).values() if found.value != 0]
    for name, alone in (("LOCAL_RANK", (0, -1)), ("LOCAL_WORLD_SIZE", (1,)), ("GROUP_WORLD_SIZE", (1,))):
        if name in environment and whole_number(name, environment[name]) not in alone:
            several.append(f"{name}={environment[name]}")
    if several:
        raise LauncherEnvironmentError(
            f"{' and '.join(several)} says that there are several processes, but neither RANK nor WORLD_SIZE is set. "
            f"Start the script with a launcher, such as phalanx run -n N, or unset it"
        )


# -- the place that a script gives itself --------------------------------------------------------------


def place_with(reading: Reading | None, init_method: str | None, rank: int | None, world_size: int | None) -> Place:
    """Find this process's place by its launcher and by what the script gives; where both give a fact they must agree.

    Args:
        reading: what the launcher says; read from ``os.environ`` by default.
        init_method: ``tcp://host:port``, with ``?rank=…&world_size=…`` if wanted, ``env://``, or None.
        rank, world_size: the place; None, or -1 as in torch, to leave it to the launcher.
    """
    reading = read_environment() if reading is None else reading
    address = port = None
    if init_method is not None and init_method != "env://":
        address, port, query = _parse(init_method)
        rank = query.get("rank") if rank is None else rank
        world_size = query.get("world_size") if world_size is None else world_size
    # Scripts written for torch pass -1 for "not given", and for "not distributed".
    rank, world_size = (None if number == -1 else number for number in (rank, world_size))
    if rank is None and world_size == 1 and reading.launcher is None:
        rank = 0
    given = {
        name: Fact(value, f"{name}={value} in phalanx.init()")
        for name, value in (("rank", rank), ("world_size", world_size))
        if value is not None
    }
    if given and reading.launcher is None:  # the script is its own launcher
        if len(given) != 2:
            (one,) = given.values()
            raise InitializationError(f"{one.source}, but the other is not known; pass both rank and world_size")
        place = Place("env", int(rank or 0), int(world_size or 0), None, None, None, None)
    else:
        for name, finding in given.items():
            if reading.number(name) not in (None, finding.value):
                raise LauncherEnvironmentError(
                    f"{finding.source}, but {reading.name} says {reading.said(name)}; leave {name} out, or correct "
                    f"the one that is wrong"
                )
        place = replace(reading, found={**given, **reading.found}).place()
    if given and not 0 <= place.rank < place.world_size:
        raise LauncherEnvironmentError(
            f"{' and '.join(one.source for one in given.values())}: {place.rank} is not a rank of a world of "
            f"{place.world_size}; ranks count from 0"
        )
    if given and place.world_size == 1:
        place = replace(place, local_rank=0, local_world_size=1, node_rank=0, num_nodes=1)
    if address is None:
        return place
    said = f"init_method={init_method}"
    return replace(
        place,
        master_addr=address,
        master_port=port,
        first_of_allocation=False,
        keeps_store=False,
        sources={**place.sources, "master_addr": said, "master_port": said},
    )


def _parse(init_method: str) -> tuple[str, int, dict[str, int]]:
    """Parse ``tcp://host:port?rank=1&world_size=2`` into host, port, and the numbers that are given."""
    parts = urlsplit(init_method)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "tcp" or not parts.hostname or not port:
        raise InitializationError(
            f"init_method={init_method!r} is neither tcp://host:port nor env://; for another rendezvous call "
            f"torch.distributed.init_process_group('phalanx', …) itself"
        )
    query = {name: values[-1] for name, values in parse_qs(parts.query).items() if name in ("rank", "world_size")}
    numbers = {name: whole_number(f"{name} in init_method", value) for name, value in query.items()}
    return parts.hostname, port, numbers
