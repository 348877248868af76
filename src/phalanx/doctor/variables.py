"""Check environment variables: of launchers, torch, CUDA, NCCL and Phalanx."""

from __future__ import annotations

import difflib
import re
import socket
from collections.abc import Iterator, Mapping

from phalanx import settings
from phalanx.doctor.finding import Finding, failure, ok, warning
from phalanx.errors import LauncherEnvironmentError
from phalanx.membership.meeting_point import MeetingPoint, meeting_point
from phalanx.system.host import machine_name
from phalanx.system.interfaces import holder_of_port, is_loopback, is_other_host, resolve
from phalanx.system.limits import usable_cores
from phalanx.topology.environment import Reading, read_environment
from phalanx.words import format_list

# Variables whose effect a user may not remember: the value that has it, and the effect.
_EFFECTS = {
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is compared among the ranks first, and is slower"),
    "CUDA_LAUNCH_BLOCKING": ("1", "every kernel of a GPU is waited for, which is several times slower"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "every tensor of a GPU is allocated anew, which is much slower"),
    "NCCL_P2P_DISABLE": ("1", "GPUs of a host talk through its memory instead of directly"),
    "NCCL_SHM_DISABLE": ("1", "ranks of a host talk over the network where GPUs cannot talk directly"),
    "NCCL_IB_DISABLE": ("1", "InfiniBand is not used"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "a rank that is lost leaves the others waiting for ever"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "the CPU waits for every collective of the GPUs"),
}
_SWITCH, _DISTANCE = "[01]", r"LOC|NVL|PIX|PXB|PHB|SYS|\d+"
# Any other value is ignored, mostly without a word.
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


def variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check all variables."""
    yield from _launcher(environment)
    yield from device_variables(environment)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value, cores = environment.get(name, ""), usable_cores()
        if value.isdecimal() and int(value) > cores:
            said = f"{name}={value} threads for each rank, and {cores} cores for all: they would take turns"
            yield warning("environment", said, f"unset {name}; phalanx run shares the cores out")
    known = [value for name, value in vars(settings).items() if name.isupper() and str(value).startswith("PHALANX_")]
    for name in sorted(environment):
        if name.startswith("PHALANX_") and name not in known:
            close = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {close[0]}?" if close else "docs/reference/variables.md lists those that there are"
            yield warning("environment", f"{name} is not a variable that Phalanx reads", remedy)


def device_variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check the variables of torch, CUDA and NCCL."""
    for name, (changing, said) in _EFFECTS.items():
        value = environment.get(name, "")
        if value.upper() == changing:
            yield warning("environment", f"{name}={value}: {said}", f"unset {name}")
    for name, pattern in _VALUES.items():
        value = environment.get(name, "")
        if value and not re.fullmatch(pattern, value, re.IGNORECASE):
            said = f"{name}={value} is not a value that it can have"
            yield warning("environment", said, f"unset {name}, or write it as {pattern}")


def _launcher(environment: Mapping[str, str]) -> Iterator[Finding]:
    try:
        reading = read_environment(dict(environment), [])
    except LauncherEnvironmentError as error:
        remedy = "unset what another job has left, or start this process by the launcher itself"
        yield failure("launcher", str(error), remedy)
        return
    by = f"{reading.launcher.title}, by {reading.signs}" if reading.launcher else "none, a world of one"
    yield ok("launcher", by)
    for note in reading.notes:
        yield warning("launcher", note.rstrip("."), "see docs/launchers.md")
    try:
        place = reading.place()
    except LauncherEnvironmentError:
        return  # only MPI knows the world
    point = meeting_point(place) if place.world_size != 1 else None
    if point is not None:
        yield from _meeting_point(reading, point, one_host=place.on_one_host)


def _meeting_point(reading: Reading, point: MeetingPoint, *, one_host: bool) -> Iterator[Finding]:
    subject, where = "meeting point", f"rank 0 at {point.address} ({point.source})"
    try:
        addresses = resolve(point.address)
    except OSError as error:
        said = f"{where}: this name does not resolve on {machine_name()} ({error.strerror or error})"
        yield failure(subject, said, "add it to /etc/hosts, or give rank 0's address in numbers")
        return
    if not one_host and all(map(is_loopback, addresses)):
        said = f"{where}: that is loopback ({format_list(addresses)}), so each host would wait for itself"
        yield failure(subject, said, "give the address by which the other hosts reach rank 0's")
        return
    yield ok(subject, f"{where}: {format_list(addresses)}")
    if reading.number("rank") == 0 and point.fixed and not reading.keeps_store:
        yield _port(point, addresses)


def _port(point: MeetingPoint, addresses: list[str]) -> Finding:
    port, subject = point.ports[0], f"port {point.ports[0]}"
    if is_other_host(point.address):
        said = f"{machine_name()} is to be rank 0, and {point.address} is another host"
        return failure(subject, said, "start rank 0 on that host, or give this host's address")
    try:
        with socket.socket(socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((addresses[0], port))
    except OSError as error:
        holder = holder_of_port(port)
        said = f"rank 0 cannot listen on it: {error.strerror}" + f", it is held by {holder}" * bool(holder)
        return failure(subject, said, "end that process, or set MASTER_PORT to another one")
    return ok(subject, "free for rank 0")
