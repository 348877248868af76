"""Whether other hosts can find this one: its name, its addresses, and the interface that is used."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from phalanx import settings
from phalanx.doctor.finding import Finding, Level
from phalanx.errors import InitializationError, LaunchError
from phalanx.system.host import machine_name
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
from phalanx.words import format_list

__all__ = ["names"]

# Variables of engines that name the interface they use; NCCL's may begin with ^ or = and be a list of prefixes.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def names(environment: Mapping[str, str] | None = None, *, several_hosts: bool = False) -> Iterator[Finding]:
    """Findings about how this host is reached.

    Args:
        environment: where variables are read; ``os.environ`` by default.
        several_hosts: whether the job is to have other hosts; else it does not matter whether they reach this one.
    """
    environment = os.environ if environment is None else environment
    try:
        check_reachable(LOOPBACK)
        yield Finding(Level.OK, "loopback", "ranks of this host reach each other")
    except LaunchError as error:
        yield Finding(Level.FAILURE, "loopback", str(error), "ip link set lo up")
    yield _own_name(several_hosts)
    yield _interface(environment, several_hosts)
    for variable in INTERFACE_VARIABLES:
        if environment.get(variable):
            yield _engine_interface(variable, environment[variable])


def _own_name(several_hosts: bool) -> Finding:
    name = machine_name()
    try:
        addresses = resolve(name)
    except OSError as error:
        return Finding(
            Level.WARNING,
            "own name",
            f"{name} does not resolve here ({error.strerror or error}), and some engines listen where it leads",
            f"add a line to /etc/hosts: {_address_or_example()} {name}",
        )
    said = f"{name} is {format_list(addresses)}"
    if all(map(is_loopback, addresses)):
        if not several_hosts:
            return Finding(Level.OK, "own name", f"{said}, which is enough for one host")
        return Finding(
            Level.WARNING,
            "own name",
            f"{said}, which no other host can reach; torch's Gloo and torchrun take that address",
            f"let /etc/hosts say: {_address_or_example()} {name}",
        )
    own = {address.partition("%")[0] for of_one in interface_addresses().values() for address in of_one}
    foreign = [address for address in addresses if not is_loopback(address) and address not in own]
    if foreign:
        return Finding(
            Level.WARNING,
            "own name",
            f"{said}, but this host does not have {format_list(foreign)}",
            f"mend it in /etc/hosts or at the name server; the interfaces are {describe_interfaces()}",
        )
    return Finding(Level.OK, "own name", said)


def _address_or_example() -> str:
    try:
        found = outward_address()
    except InitializationError:
        found = LOOPBACK
    return found if not is_loopback(found) else "ADDRESS"


def _interface(environment: Mapping[str, str], several_hosts: bool) -> Finding:
    subject = "interface"
    try:
        chosen = chosen_interface(environment)
        address = outward_address(environment=environment)
    except InitializationError as error:
        return Finding(
            Level.FAILURE, subject, str(error), f"set {settings.INTERFACE} (or --interface) to one of them, or unset it"
        )
    by = f"{settings.INTERFACE}={chosen[0]}" if chosen else "the one towards other hosts"
    name = chosen[0] if chosen else next((name for name, own in interface_addresses().items() if address in own), "?")
    if is_loopback(address):
        if not several_hosts:
            return Finding(Level.OK, subject, f"{name} {address}, which is enough for one host")
        said = f"{name} {address}: other hosts cannot reach this one; its interfaces are {describe_interfaces()}"
        return Finding(Level.FAILURE, subject, said, "bring a network interface up, or name one that is")
    said = f"{name} {address}, {by}"
    own = interface_addresses().get(name, [address])
    if ":" in address and not any(":" not in one for one in own):
        return Finding(
            Level.WARNING,
            subject,
            f"{said}: it has IPv6 only, which Phalanx uses, and some engines (NCCL before 2.3, some MPIs) do not",
            "fine if every host has IPv6; else give the interface an IPv4 address too",
        )
    return Finding(Level.OK, subject, said)


def _engine_interface(variable: str, value: str) -> Finding:
    there = interface_addresses()
    wanted = [name for name in value.lstrip("^=").split(",") if name]
    # Gloo and TensorPipe take exact names, NCCL takes beginnings of names unless = stands before.
    exact = not variable.startswith("NCCL") or value.startswith("=")
    lacking = [one for one in wanted if not any(name == one if exact else name.startswith(one) for name in there)]
    if lacking and not value.startswith("^"):
        said = f"{variable}={value}: this host has no interface {format_list(lacking)}; it has {describe_interfaces()}"
        return Finding(Level.FAILURE, variable, said, "name one of them, or unset the variable")
    return Finding(Level.OK, variable, value)
