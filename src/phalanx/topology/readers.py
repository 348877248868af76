"""Reading launchers' variables: a value, and which variable said so.

A row of ``launchers.py`` is made of readers. Each knows the variables it reads, so that an error can name them, and
gives None where none of them is set. A variable with a value that makes no sense is an error at once, which names the
variable and the value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from phalanx.errors import LauncherEnvironmentError
from phalanx.system.host import this_host
from phalanx.topology.node_lists import expand_node_list, expand_task_counts

__all__ = [
    "Environment",
    "Finding",
    "ListOf",
    "Reader",
    "comma_list",
    "constant",
    "first",
    "first_host",
    "host_of",
    "host_slots",
    "index_of",
    "json_list",
    "length_of",
    "lines_of",
    "node_list",
    "number",
    "number_unless",
    "port",
    "read_host_slots",
    "tasks_on_node",
    "text",
    "this_host_in",
    "together",
    "whole_number",
]

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Finding:
    """A value, and where it was read.

    Attributes:
        value: the value.
        source: where it was read, for people: ``RANK=3``.
        listed: whether it is the first host of a list, and not a host that was named by itself.
    """

    value: int | str
    source: str
    listed: bool = False


@dataclass(frozen=True)
class Reader:
    """How one fact is read.

    Attributes:
        names: the variables it reads, for people.
        read: gives the finding, or None where nothing is set.
        variables: the variables it reads.
    """

    names: str
    read: Callable[[Environment], Finding | None]
    variables: tuple[str, ...] = ()

    def __call__(self, environment: Environment) -> Finding | None:
        return self.read(environment)


def whole_number(name: str, value: str) -> int:
    """``value`` as a whole number.

    Raises:
        LauncherEnvironmentError: it is not one.
    """
    # int() alone would take 1_000 and digits of other scripts, which no launcher writes.
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", value.strip()):
        raise LauncherEnvironmentError(f"{name}={value!r} is not a whole number")
    return int(value)


def number(*names: str) -> Reader:
    """The first of these variables that is set, as a whole number."""

    def read(environment: Environment) -> Finding | None:
        for name in names:
            if name in environment:
                value = whole_number(name, environment[name])
                return Finding(value, f"{name}={value}")
        return None

    return Reader(" or ".join(names), read, names)


def number_unless(name: str, words: str) -> Reader:
    """A variable as a whole number; a value that matches ``words``, such as ``auto|gpu``, counts as not set."""
    inner = number(name)
    return Reader(
        name,
        lambda environment: None if re.fullmatch(words, environment.get(name, "")) else inner(environment),
        (name,),
    )


def text(*names: str) -> Reader:
    """The first of these variables that is set and not empty, as it is."""

    def read(environment: Environment) -> Finding | None:
        for name in names:
            if environment.get(name):
                return Finding(environment[name], f"{name}={environment[name]}")
        return None

    return Reader(" or ".join(names), read, names)


def together(*names: str) -> Reader:
    """All of these variables as one text, if the first of them is set; for names of jobs."""

    def read(environment: Environment) -> Finding | None:
        if not environment.get(names[0]):
            return None
        there = [f"{name}={environment[name]}" for name in names if environment.get(name)]
        return Finding(" ".join(there), " ".join(there))

    return Reader(" and ".join(names), read, names)


def constant(value: int, why: str) -> Reader:
    """Always ``value``, because ``why``."""
    return Reader(why, lambda _: Finding(value, why))


def first(*readers: Reader) -> Reader:
    """The finding of the first of these readers that has one."""

    def read(environment: Environment) -> Finding | None:
        for reader in readers:
            found = reader(environment)
            if found is not None:
                return found
        return None

    variables = tuple(name for reader in readers for name in reader.variables)
    return Reader(" or ".join(reader.names for reader in readers), read, variables)


def port(name: str) -> Reader:
    """A TCP port."""

    def read(environment: Environment) -> Finding | None:
        if name not in environment:
            return None
        value = whole_number(name, environment[name])
        if not 0 < value < 65536:
            raise LauncherEnvironmentError(f"{name}={value} is not a port: ports go from 1 to 65535")
        return Finding(value, f"{name}={value}")

    return Reader(name, read, (name,))


def host_of(*names: str) -> Reader:
    """The host in a variable that holds ``host`` or ``host:port``."""

    def read(environment: Environment) -> Finding | None:
        for name in names:
            value = environment.get(name, "").strip()
            if value:
                host, colon, last = value.rpartition(":")
                one_colon = bool(colon) and ":" not in host  # two or more: an IPv6 address without a port
                return Finding(host if one_colon and last.isdigit() else value.strip("[]"), f"{name}={value}")
        return None

    return Reader(" or ".join(names), read, names)


# -- lists ---------------------------------------------------------------------------------------------


def _json_list(name: str, value: str) -> list[str]:
    try:
        items = json.loads(value)
    except ValueError:
        items = None
    if not isinstance(items, list) or not items or not all(isinstance(item, str) for item in items):
        raise LauncherEnvironmentError(f"{name}={value!r} is not a JSON list of host names")
    return items


def _comma_list(name: str, value: str) -> list[str]:
    items = [item.strip() for item in value.split(",") if item.strip()]
    if not items:
        raise LauncherEnvironmentError(f"{name}={value!r} names no host")
    return items


def read_host_slots(name: str, value: str) -> list[tuple[str, int]]:
    """LSF's hosts in order, each with its slots: ``h1 4 h2 4``.

    Args:
        name: the variable, for the error.
        value: what it says.

    Raises:
        LauncherEnvironmentError: it is not such a list.
    """
    words = value.split()
    if not words or len(words) % 2 or not all(word.isdigit() for word in words[1::2]):
        raise LauncherEnvironmentError(f"{name}={value!r} is not a list of hosts, each with its slots")
    return list(zip(words[::2], map(int, words[1::2]), strict=True))


# For jsrun: "launch 1 node1 4 node2 4". If the first host has a single slot and another has more, the first is the host
# that the job was launched from, which takes no rank.
def _hosts_with_slots(name: str, value: str) -> list[str]:
    given = read_host_slots(name, value)
    hosts, slots = [host for host, _ in given], [count for _, count in given]
    return hosts[1:] if slots[0] == 1 and len(hosts) > 1 and max(slots) > 1 else hosts


@dataclass(frozen=True)
class ListOf:
    """A variable that holds several hosts.

    Attributes:
        name: the variable.
        parse: takes the name and the value, and gives the hosts in order; raises LauncherEnvironmentError. An empty
            list counts as not set.
    """

    name: str
    parse: Callable[[str, str], Sequence[str]]

    def hosts(self, environment: Environment) -> Sequence[str]:
        value = environment.get(self.name)
        return self.parse(self.name, value) if value else []


def json_list(name: str) -> ListOf:
    """``["algo-1", "algo-2"]``."""
    return ListOf(name, _json_list)


def comma_list(name: str) -> ListOf:
    """``h1,h2``."""
    return ListOf(name, _comma_list)


def node_list(name: str) -> ListOf:
    """Slurm's ``node[01-03,7]``."""
    return ListOf(name, expand_node_list)


def host_slots(name: str) -> ListOf:
    """LSF's ``h1 4 h2 4``."""
    return ListOf(name, _hosts_with_slots)


def lines_of(name: str, skip: int = 0) -> ListOf:
    """A variable that names a file with a host on each line, which has as many lines as ranks.

    The first ``skip`` lines are not for ranks, and are left out.
    """

    def parse(_: str, path: str) -> list[str]:
        try:
            with open(path) as file:
                hosts = [line.split()[0] for line in file if line.strip()]
        except (OSError, UnicodeDecodeError):
            return []  # the file is on another host, or gone; the ranks themselves find out where they are
        return list(dict.fromkeys(hosts[skip:]))

    return ListOf(name, parse)


def first_host(*lists: ListOf) -> Reader:
    """The first host of the first list that is set."""

    def read(environment: Environment) -> Finding | None:
        for one in lists:
            hosts = one.hosts(environment)
            if hosts:
                return Finding(hosts[0].rpartition(":")[0] or hosts[0], f"the first of {one.name}", listed=True)
        return None

    return _of_lists(lists, read)


def length_of(*lists: ListOf) -> Reader:
    """How many hosts the first list that is set has."""

    def read(environment: Environment) -> Finding | None:
        for one in lists:
            hosts = one.hosts(environment)
            if hosts:
                return Finding(len(hosts), f"{len(hosts)} in {one.name}={environment[one.name]}")
        return None

    return _of_lists(lists, read)


def _of_lists(lists: Sequence[ListOf], read: Callable[[Environment], Finding | None]) -> Reader:
    names = tuple(one.name for one in lists)
    return Reader(" or ".join(names), read, names)


def index_of(name: str, among: ListOf) -> Reader:
    """The index in a list of the host that variable ``name`` names."""

    def read(environment: Environment) -> Finding | None:
        hosts = list(among.hosts(environment))
        own = environment.get(name)
        if not hosts or own is None:
            return None
        if own not in hosts:
            raise LauncherEnvironmentError(f"{name}={own!r} is not in {among.name}={environment[among.name]}")
        return Finding(hosts.index(own), f"{name}={own} in {among.name}={environment[among.name]}")

    return Reader(f"{name} and {among.name}", read, (name, among.name))


def this_host_in(among: ListOf) -> Reader:
    """The index of this very host in a list."""

    def read(environment: Environment) -> Finding | None:
        own = this_host(environment).name
        short = [host.partition(".")[0] for host in among.hosts(environment)]
        if own.partition(".")[0] not in short:
            return None  # a node may have several names, so this one may be listed under another
        return Finding(short.index(own.partition(".")[0]), f"{own} in {among.name}")

    return Reader(among.name, read, (among.name,))


def tasks_on_node(counts: str, node: str) -> Reader:
    """The entry of Slurm's compressed ``4(x2),3`` for this node."""

    def read(environment: Environment) -> Finding | None:
        if counts not in environment or node not in environment:
            return None
        tasks = expand_task_counts(counts, environment[counts])
        index = whole_number(node, environment[node])
        if not 0 <= index < len(tasks):
            raise LauncherEnvironmentError(
                f"{node}={index} is not among the {len(tasks)} node(s) of {counts}={environment[counts]!r}"
            )
        return Finding(tasks[index], f"{counts}={environment[counts]} at {node}={index}")

    return Reader(f"{counts} and {node}", read, (counts, node))
