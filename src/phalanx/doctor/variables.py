"""Whether the variables of this process's environment fit together, and which of them change what happens."""

from __future__ import annotations

import difflib
import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from phalanx import settings
from phalanx.doctor.finding import Finding, Level
from phalanx.errors import LauncherEnvironmentError
from phalanx.rendezvous.meeting_point import MeetingPoint, meeting_point
from phalanx.system.host import machine_name
from phalanx.system.interfaces import holder_of_port, is_loopback, is_other_host, resolve
from phalanx.system.limits import usable_cores
from phalanx.topology.environment import Reading, read_environment
from phalanx.words import format_list

__all__ = ["device_variables", "variables"]


@dataclass(frozen=True)
class _Effect:
    """A variable that changes what a job does, in a way that its user may not remember.

    Attributes:
        name: the variable.
        values: its values that do so; empty for any.
        said: what they do.
    """

    name: str
    values: tuple[str, ...]
    said: str


_EFFECTS = (
    _Effect(
        "TORCH_DISTRIBUTED_DEBUG", ("DETAIL",), "every collective is compared among the ranks first, and is slower"
    ),
    _Effect("CUDA_LAUNCH_BLOCKING", ("1",), "every kernel of a GPU is waited for, which is several times slower"),
    _Effect("PYTORCH_NO_CUDA_MEMORY_CACHING", ("1",), "every tensor of a GPU is allocated anew, which is much slower"),
    _Effect("NCCL_P2P_DISABLE", ("1",), "GPUs of a host talk through its memory instead of directly"),
    _Effect("NCCL_SHM_DISABLE", ("1",), "ranks of a host talk over the network where GPUs cannot talk directly"),
    _Effect("NCCL_IB_DISABLE", ("1",), "InfiniBand is not used"),
    _Effect("TORCH_NCCL_ASYNC_ERROR_HANDLING", ("0",), "a rank that is lost leaves the others waiting for ever"),
    _Effect("TORCH_NCCL_BLOCKING_WAIT", ("1",), "the CPU waits for every collective of the GPUs"),
)

_SWITCH, _DISTANCE = "[01]", r"LOC|NVL|PIX|PXB|PHB|SYS|\d+"
# Another value is ignored or taken for less, mostly without a word.
_VALUES = {
    "CUDA_DEVICE_ORDER": "FASTEST_FIRST|PCI_BUS_ID",
    "CUDA_LAUNCH_BLOCKING": _SWITCH,
    "CUDA_MODULE_LOADING": "LAZY|EAGER",
    "CUDA_VISIBLE_DEVICES": r"-1|(\d+|(GPU|MIG)-[^,]+)(,(\d+|(GPU|MIG)-[^,]+))*",
    "NCCL_DEBUG": "NONE|VERSION|WARN|INFO|ABORT|TRACE",
    "NCCL_IB_DISABLE": _SWITCH,
    "NCCL_NET_GDR_LEVEL": _DISTANCE,
    "NCCL_P2P_DISABLE": _SWITCH,
    "NCCL_P2P_LEVEL": _DISTANCE,
    "NCCL_SHM_DISABLE": _SWITCH,
}


def variables(environment: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Findings about the environment of this process."""
    environment = os.environ if environment is None else environment
    yield from _launcher(environment)
    yield from device_variables(environment)
    yield from _threads(environment)
    yield from _misspelt(environment)


def device_variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Findings about variables of torch, CUDA and NCCL that change what a job does, or have a wrong value."""
    for effect in _EFFECTS:
        value = environment.get(effect.name)
        if value is not None and (not effect.values or value.upper() in effect.values):
            yield Finding(Level.WARNING, "environment", f"{effect.name}={value}: {effect.said}", f"unset {effect.name}")
    for name, pattern in _VALUES.items():
        value = environment.get(name, "")
        if value and not re.fullmatch(pattern, value, re.IGNORECASE):
            said = f"{name}={value} is not a value that it can have"
            yield Finding(Level.WARNING, "environment", said, f"unset {name}, or write it as {pattern}")


def _launcher(environment: Mapping[str, str]) -> Iterator[Finding]:
    try:
        reading = read_environment(dict(environment), [])
    except LauncherEnvironmentError as error:
        remedy = "unset what another job has left, or start this process by the launcher itself"
        yield Finding(Level.FAILURE, "launcher", str(error), remedy)
        return
    said = "none, a world of one" if reading.launcher is None else f"{reading.launcher.title}, by {reading.signs}"
    yield Finding(Level.OK, "launcher", said)
    for note in reading.notes:
        yield Finding(Level.WARNING, "launcher", note.rstrip("."), "see docs/launchers.md")
    try:
        place = reading.place()
    except LauncherEnvironmentError:
        return  # only MPI knows the world
    point = meeting_point(place) if place.world_size != 1 else None
    if point is not None:
        yield from _meeting(reading, point, one_host=place.on_one_host)


def _meeting(reading: Reading, point: MeetingPoint, *, one_host: bool) -> Iterator[Finding]:
    where = f"rank 0 at {point.address} ({point.source})"
    try:
        addresses = resolve(point.address)
    except OSError as error:
        said = f"{where}: this name does not resolve on {machine_name()} ({error.strerror or error})"
        yield Finding(Level.FAILURE, "meeting point", said, "add it to /etc/hosts, or give rank 0's address in numbers")
        return
    if not one_host and all(map(is_loopback, addresses)):
        yield Finding(
            Level.FAILURE,
            "meeting point",
            f"{where}: that is loopback ({format_list(addresses)}), so each host would wait for itself",
            "give the address by which the other hosts reach rank 0's",
        )
        return
    yield Finding(Level.OK, "meeting point", f"{where}: {format_list(addresses)}")
    if reading.number("rank") == 0 and point.fixed and not reading.keeps_store:
        yield _port(point, addresses)


def _port(point: MeetingPoint, addresses: list[str]) -> Finding:
    port, subject = point.ports[0], f"port {point.ports[0]}"
    if is_other_host(point.address):
        said = f"{machine_name()} is to be rank 0, and {point.address} is another host"
        return Finding(Level.FAILURE, subject, said, "start rank 0 on that host, or give this host's address")
    try:
        with socket.socket(socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((addresses[0], port))
    except OSError as error:
        holder = holder_of_port(port)
        said = f"rank 0 cannot listen on it: {error.strerror}" + f", it is held by {holder}" * bool(holder)
        return Finding(Level.FAILURE, subject, said, "end that process, or set MASTER_PORT to another one")
    return Finding(Level.OK, subject, "free for rank 0")


def _threads(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = environment.get(name, "")
        if value.isdecimal() and int(value) > usable_cores():
            said = f"{name}={value} threads for each rank, and {usable_cores()} cores for all: they would take turns"
            yield Finding(Level.WARNING, "environment", said, f"unset {name}; phalanx run shares the cores out")


def _misspelt(environment: Mapping[str, str]) -> Iterator[Finding]:
    known = [value for name, value in vars(settings).items() if name.isupper() and str(value).startswith("PHALANX_")]
    for name in sorted(environment):
        if name.startswith("PHALANX_") and name not in known:
            close = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {close[0]}?" if close else "docs/reference/variables.md lists those that there are"
            yield Finding(Level.WARNING, "environment", f"{name} is not a variable that Phalanx reads", remedy)
