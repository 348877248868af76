"""Examine one host from a process on it: its software, limits, accelerators, names and variables.

``python -m phalanx.doctor.host`` is the doctor's helper on a host. It answers through the pipe of the program that
started it (ssh, for one), so that it can say what is wrong where nothing else passes between the hosts.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from typing import Any

from phalanx import settings
from phalanx.c10d import torch_versions
from phalanx.doctor.accelerators import devices, probe_devices
from phalanx.doctor.finding import Finding, failure, ok, warning
from phalanx.doctor.probe import Listener, probe
from phalanx.doctor.variables import variables
from phalanx.errors import BackendError, InitializationError, LaunchError
from phalanx.launch.starters.helpers import serve
from phalanx.native import core
from phalanx.system.host import machine_name, this_host
from phalanx.system.interfaces import (
    LOOPBACK,
    check_reachable,
    chosen_interface,
    describe_interfaces,
    interface_addresses,
    is_loopback,
    outward_address,
    resolve,
)
from phalanx.system.limits import Limit, Resource, machine_limits, usable_cores
from phalanx.words import format_count, format_gib, format_list

_SHM = "/dev/shm"
# A DataLoader worker puts each batch into /dev/shm. Docker gives 64 MiB, too little for batches of images.
_SHM_LEAST, _SHM_USUAL = 16 << 20, 256 << 20
_TEMPORARY_LEAST = 16 << 20
_FEW_FILES = 1024  # for data loaders


def examine(ranks: int | None = None, *, several_hosts: bool = False) -> list[Finding]:
    """Return all findings about this host.

    Args:
        ranks: how many ranks are to run here; as many as there are usable cores by default.
        several_hosts: whether the job is to have other hosts; else it does not matter whether they reach this one.
    """
    return [*_software(), *machine(ranks), *devices(ranks), *_names(several_hosts), *variables(os.environ)]


# -- software, without importing torch, because that takes seconds -------------------------------------


def _versions() -> dict[str, str]:
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "none"
    return {"python": platform.python_version(), "torch": torch, "phalanx": settings.VERSION}


def _software() -> Iterator[Finding]:
    yield ok("python", f"{platform.python_version()}, {sys.executable}")
    torch, oldest = _versions()["torch"], ".".join(map(str, torch_versions.OLDEST))
    needs = f"phalanx.init() and the backend phalanx need torch >= {oldest}; phalanx run starts scripts on others"
    if torch == "none":
        remedy = "activate the environment that has it, or install it there: pip install torch"
        yield warning("torch", f"this Python ({sys.executable}) has no torch: {needs}", remedy)
    elif tuple(int(part) for part in torch.split("+")[0].split(".")[:2] if part.isdecimal()) < torch_versions.OLDEST:
        yield warning("torch", f"{torch}: {needs}", f"pip install 'torch>={oldest}'")
    else:
        yield ok("torch", torch)
    try:
        core.library()
    except (BackendError, OSError) as error:
        yield failure("phalanx", f"{settings.VERSION}, whose C core cannot be loaded: {error}", "install Phalanx again")
        return
    entry = core.quick_entry()
    if isinstance(entry, str):
        said = f"{settings.VERSION}; every call goes by ctypes, which costs small ones some microseconds: {entry}"
        yield warning("phalanx", said, "install Phalanx again, with a C compiler")
    else:
        yield ok("phalanx", settings.VERSION)


# -- room ----------------------------------------------------------------------------------------------


def machine(ranks: int | None = None) -> Iterator[Finding]:
    """Check cores, memory, open files, processes, shared memory and folders."""
    yield _cores(ranks)
    for limit in machine_limits(python=True):
        yield _room(limit, ranks or usable_cores())
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if os.path.isdir("/dev/infiniband") and soft != resource.RLIM_INFINITY:
        said = f"at most {soft >> 10} KiB, and InfiniBand registers the memory that it sends"
        remedy = "ulimit -l unlimited; LimitMEMLOCK=infinity for slurmd, docker --ulimit memlock=-1"
        yield warning("locked memory", said, remedy)
    yield _shared_memory()
    try:
        yield ok("directory", os.getcwd())
    except FileNotFoundError:
        yield failure("directory", "the one this was started in has been removed", "cd to another one")
    yield _temporary_files()


def _cores(ranks: int | None) -> Finding:
    there, allowed, usable = os.cpu_count() or 1, len(os.sched_getaffinity(0)), usable_cores()
    said = f"{usable} of {there} may be used here"
    if usable < allowed:
        why, remedy = "a cgroup's quota (cpu.max)", "docker --cpus, limits.cpu of Kubernetes, CPUQuota of systemd"
    else:
        why, remedy = "the affinity of this process", "srun --cpus-per-task, taskset, the launcher's binding"
    if ranks is not None and ranks > usable:
        remedy = f"start fewer ranks, or ask for more cores: {remedy}" if usable < there else "start fewer ranks"
        return warning("cores", f"{said}, and {format_count(ranks, 'rank')} would take turns", remedy)
    if usable == 1 and there > 1:
        return warning("cores", f"only {said}, by {why}: all ranks would take turns", f"ask for more: {remedy}")
    return ok("cores", said if usable == there else f"{said}, by {why}")


def _room(limit: Limit, ranks: int) -> Finding:
    subject = limit.resource.value
    said = f"{limit.resource.describe(limit.available)} left, enough for {format_count(limit.fits, 'rank')}"
    if limit.fits < ranks:
        return failure(subject, f"{said}, not for {ranks}", limit.remedy)
    if limit.resource is Resource.FILES and limit.available < _FEW_FILES:
        return warning(subject, f"{said}, but few for data loaders", limit.remedy)
    return ok(subject, said)


def _shared_memory() -> Finding:
    try:
        room = shutil.disk_usage(_SHM)
    except OSError as error:
        said = f"cannot be used ({error.strerror}), and DataLoader workers pass their batches through it"
        return warning(_SHM, said, f"mount it: mount -t tmpfs tmpfs {_SHM}")
    said = f"{format_gib(room.free)} of {format_gib(room.total)} free"
    if room.free < min(_SHM_LEAST, room.total):
        remedy = f"look for what ended programs have left there, and remove it: ls -l {_SHM}"
        return failure(_SHM, f"full ({said}): DataLoader workers end with a bus error (SIGBUS)", remedy)
    if room.total < _SHM_USUAL:
        said += ": DataLoader workers with large batches end with a bus error (SIGBUS)"
        return warning(_SHM, said, "docker run --shm-size=8g, or --ipc=host")
    return ok(_SHM, said)


def _temporary_files() -> Finding:
    subject = "temporary files"
    try:
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return failure(subject, f"no folder for them can be written: {error.strerror}", "set TMPDIR to one that can")
    if free < _TEMPORARY_LEAST:
        remedy = "make room there, or set TMPDIR to another folder"
        return failure(subject, f"{folder} is full ({free >> 10} KiB free)", remedy)
    return ok(subject, f"{folder}, {format_gib(free)} free")


# -- names, and the interface by which others reach this host ------------------------------------------


def _names(several_hosts: bool) -> Iterator[Finding]:
    try:
        check_reachable(LOOPBACK)
        yield ok("loopback", "ranks of this host reach each other")
    except LaunchError as error:
        yield failure("loopback", str(error), "ip link set lo up")
    yield _own_name(several_hosts)
    yield _interface(several_hosts)
    for variable in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if value := os.environ.get(variable):
            yield _engine_interface(variable, value)


def _own_name(several_hosts: bool) -> Finding:
    subject, name = "own name", machine_name()
    address = "ADDRESS"
    with contextlib.suppress(InitializationError):
        address = address if is_loopback(found := outward_address()) else found
    try:
        addresses = resolve(name)
    except OSError as error:
        said = f"{name} does not resolve here ({error.strerror or error}), and some engines listen where it leads"
        return warning(subject, said, f"add a line to /etc/hosts: {address} {name}")
    said = f"{name} is {format_list(addresses)}"
    if all(map(is_loopback, addresses)):
        if not several_hosts:
            return ok(subject, f"{said}, which is enough for one host")
        said += ", which no other host can reach; torch's Gloo and torchrun take that address"
        return warning(subject, said, f"let /etc/hosts say: {address} {name}")
    own = {address.partition("%")[0] for of_one in interface_addresses().values() for address in of_one}
    foreign = [address for address in addresses if not is_loopback(address) and address not in own]
    if foreign:
        remedy = f"mend it in /etc/hosts or at the name server; the interfaces are {describe_interfaces()}"
        return warning(subject, f"{said}, but this host does not have {format_list(foreign)}", remedy)
    return ok(subject, said)


def _interface(several_hosts: bool) -> Finding:
    subject = "interface"
    try:
        chosen = chosen_interface()
        address = outward_address()
    except InitializationError as error:
        remedy = f"set {settings.INTERFACE} (or --interface) to one of them, or unset it"
        return failure(subject, str(error), remedy)
    by = f"{settings.INTERFACE}={chosen[0]}" if chosen else "the one towards other hosts"
    there = interface_addresses()
    name = chosen[0] if chosen else next((name for name, own in there.items() if address in own), "?")
    if is_loopback(address):
        if not several_hosts:
            return ok(subject, f"{name} {address}, which is enough for one host")
        said = f"{name} {address}: other hosts cannot reach this one; its interfaces are {describe_interfaces()}"
        return failure(subject, said, "bring a network interface up, or name one that is")
    said = f"{name} {address}, {by}"
    if all(":" in one for one in there.get(name, [address])):
        said += ": it has IPv6 only, which Phalanx uses, and some engines (NCCL before 2.3, some MPIs) do not"
        return warning(subject, said, "fine if every host has IPv6; else give the interface an IPv4 address too")
    return ok(subject, said)


def _engine_interface(variable: str, value: str) -> Finding:
    there = interface_addresses()
    wanted = [name for name in value.lstrip("^=").split(",") if name]
    # Gloo and TensorPipe take exact names, NCCL takes beginnings of names unless = stands before.
    exact = not variable.startswith("NCCL") or value.startswith("=")
    lacking = [one for one in wanted if not any(name == one if exact else name.startswith(one) for name in there)]
    if lacking and not value.startswith("^"):
        said = f"{variable}={value}: this host has no interface {format_list(lacking)}; it has {describe_interfaces()}"
        return failure(variable, said, "name one of them, or unset the variable")
    return ok(variable, value)


# -- the helper's answers ------------------------------------------------------------------------------


def _examine(directory: str, ranks: int | None, several_hosts: bool) -> dict[str, Any]:
    try:
        os.chdir(directory)
        lacking = ""
    except OSError as error:
        lacking = error.strerror or str(error)
    return {
        "host": asdict(this_host()),
        "directory": lacking,
        "versions": _versions(),
        "findings": [asdict(finding) for finding in examine(ranks, several_hosts=several_hosts)],
    }


def _listen() -> dict[str, Any]:
    listener = Listener()  # for as long as this process lives
    return {"port": listener.port, "token": listener.token}


if __name__ == "__main__":
    serve(
        {
            "examine": _examine,
            "devices": probe_devices,
            "time": lambda: {"now": time.time()},
            "listen": _listen,
            "probe": lambda **asked: asdict(probe(**asked)),
        }
    )
