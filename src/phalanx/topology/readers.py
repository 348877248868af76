"""Read single facts from launchers' variables: the rows of ``launchers.py`` are made of these readers.

A variable that is not set gives None; one whose value makes no sense is a LauncherEnvironmentError that names the
variable and the value.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from phalanx.errors import LauncherEnvironmentError

Environment = Mapping[str, str]
# More than any cluster has; a list that claims more is a mistake, and would fill the memory.
MOST_NODES = 1_000_000


@dataclass(frozen=True)
class Fact:
    """A value, and where it was read, for people: ``RANK=3``.

    ``listed``: it is the first host of a list, and not a host that was named by itself.
    """

    value: int | str
    source: str
    listed: bool = False


@dataclass(frozen=True)
class Reader:
    """Read one fact; None where nothing is set. ``names`` are the ``variables`` that it reads, for people."""

    names: str
    read: Callable[[Environment], Fact | None]
    variables: tuple[str, ...] = ()

    def __call__(self, environment: Environment) -> Fact | None:
        return self.read(environment)


# -- single values -------------------------------------------------------------------------------------


def whole_number(name: str, value: str) -> int:
    """Parse the value of a variable as a whole number."""
    # int() alone would take 1_000 and digits of other scripts, which no launcher writes.
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", value.strip()):
        raise LauncherEnvironmentError(f"{name}={value!r} is not a whole number")
    return int(value)


def _parsed(names: Sequence[str], parse: Callable[[str, str], int | str | None]) -> Reader:
    """Read the first of these variables of which ``parse``, given name and value, does not make None."""

    def read(environment: Environment) -> Fact | None:
        for name in names:
            if name in environment and (value := parse(name, environment[name])) is not None:
                return Fact(value, f"{name}={environment[name].strip()}")
        return None

    return Reader(" or ".join(names), read, tuple(names))


def number(*names: str) -> Reader:
    """Read the first of these variables that is set, as a whole number."""
    return _parsed(names, whole_number)


def number_unless(name: str, words: str) -> Reader:
    """Read a whole number; a value that matches ``words``, such as ``auto|gpu``, counts as not set."""
    return _parsed((name,), lambda name, value: None if re.fullmatch(words, value) else whole_number(name, value))


def text(*names: str) -> Reader:
    """Read the first of these variables that is not empty, as it is."""
    return _parsed(names, lambda _, value: value or None)


def port(name: str) -> Reader:
    """Read a TCP port."""

    def parse(name: str, value: str) -> int:
        found = whole_number(name, value)
        if not 0 < found < 65536:
            raise LauncherEnvironmentError(f"{name}={found} is not a port: ports go from 1 to 65535")
        return found

    return _parsed((name,), parse)


def host_of(*names: str) -> Reader:
    """Read the host of ``host`` or ``host:port``."""

    def parse(_: str, value: str) -> str | None:
        value = value.strip()
        host, colon, last = value.rpartition(":")
        one_colon = bool(colon) and ":" not in host  # two or more: an IPv6 address without a port
        return (host if one_colon and last.isdigit() else value.strip("[]")) or None

    return _parsed(names, parse)


def together(*names: str) -> Reader:
    """Read all of these variables as one text, if the first is set; for names of jobs."""

    def read(environment: Environment) -> Fact | None:
        there = " ".join(f"{name}={environment[name]}" for name in names if environment.get(name))
        return Fact(there, there) if environment.get(names[0]) else None

    return Reader(" and ".join(names), read, names)


def constant(value: int, why: str) -> Reader:
    """Give ``value`` always, because ``why``."""
    return Reader(why, lambda _: Fact(value, why))


def first(*readers: Reader) -> Reader:
    """Give the finding of the first of these readers that has one."""

    def read(environment: Environment) -> Fact | None:
        return next((found for reader in readers if (found := reader(environment)) is not None), None)

    variables = tuple(name for reader in readers for name in reader.variables)
    return Reader(" or ".join(reader.names for reader in readers), read, variables)


# -- lists of hosts ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostList:
    """A variable that names several hosts; ``parse`` is given name and value. An empty variable counts as not set."""

    name: str
    parse: Callable[[str, str], Sequence[str]]

    def hosts(self, environment: Environment) -> Sequence[str]:
        value = environment.get(self.name)
        return self.parse(self.name, value) if value else []


def json_names(name: str, value: str) -> list[str]:
    """Parse ``["algo-1", "algo-2"]``."""
    try:
        items = json.loads(value)
    except ValueError:
        items = None
    if not isinstance(items, list) or not items or not all(isinstance(item, str) for item in items):
        raise LauncherEnvironmentError(f"{name}={value!r} is not a JSON list of host names")
    return items


def comma_names(name: str, value: str) -> list[str]:
    """Parse ``h1,h2``."""
    items = [item.strip() for item in value.split(",") if item.strip()]
    if not items:
        raise LauncherEnvironmentError(f"{name}={value!r} names no host")
    return items


def slot_names(name: str, value: str) -> list[str]:
    """Parse LSF's ``h1 4 h2 4``, without the host that took no rank.

    For jsrun it is ``launch 1 node1 4 node2 4``: if the first host has a single slot and another has more, the first
    is the host that the job was launched from.
    """
    given = read_host_slots(name, value)
    launched = len(given) > 1 and given[0][1] == 1 and max(slots for _, slots in given) > 1
    return [host for host, _ in given[launched:]]


def lines_of(name: str, skip: int = 0) -> HostList:
    """Read a file with a line for each rank, which begins with a host, after ``skip`` other lines."""

    def parse(_: str, path: str) -> list[str]:
        try:
            with open(path) as file:
                hosts = [line.split()[0] for line in file if line.strip()]
        except (OSError, UnicodeDecodeError):
            return []  # the file is on another host, or gone; the ranks themselves find out where they are
        return list(dict.fromkeys(hosts[skip:]))

    return HostList(name, parse)


def _of_lists(lists: Sequence[HostList], find: Callable[[HostList, Sequence[str], Environment], Fact]) -> Reader:
    """Give what ``find`` makes of the first list that names a host."""

    def read(environment: Environment) -> Fact | None:
        given = ((one, one.hosts(environment)) for one in lists)
        return next((find(one, hosts, environment) for one, hosts in given if hosts), None)

    names = tuple(one.name for one in lists)
    return Reader(" or ".join(names), read, names)


def first_host(*lists: HostList) -> Reader:
    """Read the first host of the first list that is set."""

    def find(one: HostList, hosts: Sequence[str], _: Environment) -> Fact:
        return Fact(hosts[0].rpartition(":")[0] or hosts[0], f"the first of {one.name}", listed=True)

    return _of_lists(lists, find)


def length_of(*lists: HostList) -> Reader:
    """Count the hosts of the first list that is set."""

    def find(one: HostList, hosts: Sequence[str], environment: Environment) -> Fact:
        return Fact(len(hosts), f"{len(hosts)} in {one.name}={environment[one.name]}")

    return _of_lists(lists, find)


def index_of(name: str, among: HostList) -> Reader:
    """Read the index in a list of the host that variable ``name`` names."""

    def read(environment: Environment) -> Fact | None:
        hosts, own = among.hosts(environment), environment.get(name)
        if not hosts or own is None:
            return None
        if own not in hosts:
            raise LauncherEnvironmentError(f"{name}={own!r} is not in {among.name}={environment[among.name]}")
        return Fact(hosts.index(own), f"{name}={own} in {among.name}={environment[among.name]}")

    return Reader(f"{name} and {among.name}", read, (name, among.name))


def tasks_on_node(counts: str, node: str) -> Reader:
    """Read the entry of Slurm's compressed ``4(x2),3`` for this node."""

    def read(environment: Environment) -> Fact | None:
        if counts not in environment or node not in environment:
            return None
        tasks, index = expand_task_counts(counts, environment[counts]), whole_number(node, environment[node])
        if not 0 <= index < len(tasks):
            raise LauncherEnvironmentError(
                f"{node}={index} is not among the {len(tasks)} node(s) of {counts}={environment[counts]!r}"
            )
        return Fact(tasks[index], f"{counts}={environment[counts]} at {node}={index}")

    return Reader(f"{counts} and {node}", read, (counts, node))


# -- notations of batch systems; name is the variable, for the error -----------------------------------


def read_host_slots(name: str, value: str) -> list[tuple[str, int]]:
    """Parse LSF's hosts in order, each with its slots: ``h1 4 h2 4``."""
    words = value.split()
    if not words or len(words) % 2 or not all(word.isdigit() for word in words[1::2]):
        raise LauncherEnvironmentError(f"{name}={value!r} is not a list of hosts, each with its slots")
    return list(zip(words[::2], map(int, words[1::2]), strict=True))


_RANGE = r"\s*([0-9]{1,18})(?:-([0-9]{1,18}))?\s*"
_NODE = r"(?:[^\[\],]|\[[^\[\]]*\])+"


def expand_node_list(name: str, value: str) -> list[str]:
    """Expand Slurm's ``a,node[01-03,7]x``: a, node01x, node02x, node03x, node7x.

    Several brackets in one name multiply, the last varying fastest: ``r[1-2]n[1-2]``.
    """

    def wrong(why: str) -> LauncherEnvironmentError:
        return LauncherEnvironmentError(f"{name}={value!r} is not a list of nodes: {why}")

    def expand(ranges: str) -> list[str]:
        found: list[str] = []
        for one in ranges.split(","):
            match = re.fullmatch(_RANGE, one)
            if not match or int(match[2] or match[1]) < int(match[1]):
                raise wrong(f"{one!r} is neither a number nor a range")
            low, high = int(match[1]), int(match[2] or match[1])
            if high - low > MOST_NODES:
                raise wrong(f"more than {MOST_NODES} nodes")
            # Leading zeros are part of the name: 08, 09, 10.
            found += [str(each).zfill(len(match[1])) for each in range(low, high + 1)]
        return found

    if not re.fullmatch(f"{_NODE}(?:,{_NODE})*", value.strip()):
        raise wrong("a name is empty, or a bracket has no partner")
    nodes: list[str] = []
    for item in re.findall(_NODE, value.strip()):
        # Every second part was in brackets.
        pieces = [expand(part) if index % 2 else [part] for index, part in enumerate(re.split(r"[\[\]]", item))]
        if math.prod(map(len, pieces)) > MOST_NODES:
            raise wrong(f"more than {MOST_NODES} nodes")
        nodes += map("".join, itertools.product(*pieces))
    return nodes


def expand_task_counts(name: str, value: str) -> list[int]:
    """Expand the tasks of each node in Slurm's ``4(x2),3``: 4, 4, 3."""
    counts: list[int] = []
    for item in value.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?", item.strip())
        if not match:
            raise LauncherEnvironmentError(f"{name}={value!r} is not a list of tasks per node, such as 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
