"""What the hosts' answers say together: versions that differ, names, routes, rates, clocks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx import settings
from phalanx.doctor.finding import Finding, Level
from phalanx.doctor.probe import Reach
from phalanx.system.interfaces import is_loopback
from phalanx.words import format_list

__all__ = ["clocks", "differences", "paths", "rates"]

CLOCK_WARNING_S = 1.0
# A pair is slow beside the others, or beside what its interface is made for, or for any training at all.
SLOW_BESIDE_OTHERS, SLOW_BESIDE_INTERFACE, SLOW_BYTES_PER_S = 0.5, 0.1, 100e6 / 8
# Subjects that must be equal on all hosts.
_EQUAL = ("python", "torch", "phalanx")


def differences(answers: Mapping[str, Mapping[str, Any]], directory: str) -> list[Finding]:
    """Findings about what must be the same on all hosts.

    Args:
        answers: each host's answer to ``examine``.
        directory: where the job is to run.
    """
    found = []
    for subject in _EQUAL:
        by_version: dict[str, list[str]] = {}
        for host, answer in answers.items():
            said = next(one["said"] for one in answer["findings"] if one["subject"] == subject)
            by_version.setdefault(said.split(",")[0].split(";")[0], []).append(host)
        if len(by_version) > 1:
            parts = [f"{version} on {format_list(hosts)}" for version, hosts in by_version.items()]
            remedy = "install the same version everywhere"
            found.append(Finding(Level.FAILURE, subject, f"the hosts differ: {'; '.join(parts)}", remedy))
    lacking = {host: answer["directory"] for host, answer in answers.items() if answer["directory"]}
    for host, why in lacking.items():
        remedy = "make it there, or put the job's files on a file system that all hosts share"
        found.append(Finding(Level.FAILURE, "directory", f"{directory} cannot be entered: {why}", remedy, host))
    same: dict[tuple[str, ...], list[str]] = {}
    for host, answer in answers.items():
        same.setdefault(tuple(answer["host"].values()), []).append(host)
    for names in same.values():
        if len(names) > 1:
            said = f"{format_list(names)} are one host"
            found.append(Finding(Level.FAILURE, "hosts", said, "name each host once, with the number of its ranks"))
    return found


def paths(reached: Mapping[tuple[str, str], Reach]) -> list[Finding]:
    """Findings about the way from each host to each other one.

    Args:
        reached: for each (from, to), what the first one has seen.
    """
    found = []
    for (host, other), reach in reached.items():
        subject = f"to {other}"
        loopback = [address for address in reach.addresses if is_loopback(address)]
        if loopback:
            said = f"{other} is {format_list(loopback)} there, which is {host} itself"
            remedy = f"on {host}, let /etc/hosts give {other} the address by which others reach it"
            found.append(Finding(Level.FAILURE, subject, said, remedy, host))
        elif reach.error:
            found.append(Finding(Level.FAILURE, subject, reach.error, _remedy_of(reach, other), host))
        elif reach.small_only:
            said = f"small packets arrive, and those of {reach.interface} (MTU {reach.mtu}) are lost on the way"
            remedy = f"give both hosts and all between them the same MTU: ip link set dev {reach.interface} mtu 1400"
            found.append(Finding(Level.FAILURE, subject, said, remedy, host))
        else:
            found += _ways_back(host, other, reach, reached.get((other, host)))
    return found


def _remedy_of(reach: Reach, other: str) -> str:
    if not reach.addresses:
        return f"add {other} to /etc/hosts there, or call it by its address"
    if reach.address:
        return "look at the firewalls and the MTU between the two"
    return (
        f"let the firewalls of both hosts pass TCP on all ports between the hosts of a job, {reach.addresses[0]} here"
    )


def _ways_back(host: str, other: str, there: Reach, back: Reach | None) -> list[Finding]:
    """Whether both directions of a pair use the same interfaces; said once for a pair."""
    if back is None or back.error or host > other:
        return []
    if there.source == back.address and back.source == there.address:
        return []
    said = (
        f"{host} reaches {other} from {there.source} ({there.interface}) at {there.address}, and is itself reached "
        f"from {back.source} ({back.interface}) at {back.address}"
    )
    remedy = f"name the interface that the job should use: {settings.INTERFACE}, or --interface of phalanx run"
    return [Finding(Level.WARNING, f"to {other}", said, remedy, host)]


def rates(reached: Mapping[tuple[str, str], Reach]) -> list[Finding]:
    """Findings about pairs that are slower than they should be."""
    measured = {pair: reach for pair, reach in reached.items() if reach.bytes_per_s}
    if not measured:
        return []
    usual = statistics.median(reach.bytes_per_s for reach in measured.values())
    found = []
    for (host, other), reach in measured.items():
        rate, made_for = reach.bytes_per_s, reach.speed_mbit * 1e6 / 8
        slow = f"{rate / 1e6:.3g} MB/s"
        if len(measured) > 2 and rate < SLOW_BESIDE_OTHERS * usual:
            said, remedy = (
                f"{slow}, and {usual / 1e6:.3g} MB/s between most hosts",
                "leave that host out, or mend its link",
            )
        elif rate < SLOW_BESIDE_INTERFACE * made_for:
            said = f"{slow}, and {reach.interface} is made for {made_for / 1e6:.3g} MB/s"
            remedy = "look for other traffic, a limit of the cloud's, or a wrong duplex mode (ethtool)"
        elif rate < SLOW_BYTES_PER_S:
            said, remedy = f"{slow} is slow for training", "average rarely, or compress: docs/world.md"
        else:
            continue
        found.append(Finding(Level.WARNING, f"to {other}", said, remedy, host))
    return found


def clocks(offsets_s: Mapping[str, float]) -> list[Finding]:
    """Findings about clocks that differ from this host's.

    Args:
        offsets_s: how far each host's clock is ahead of this host's, in seconds.
    """
    said = "its clock is {:.1f} s {} of this host's: times of logs and files do not fit together"
    return [
        Finding(
            Level.WARNING,
            "clock",
            said.format(abs(ahead), "ahead" if ahead > 0 else "behind"),
            "run an NTP service",
            host,
        )
        for host, ahead in offsets_s.items()
        if abs(ahead) > CLOCK_WARNING_S
    ]


def in_order(hosts: Sequence[str], found: Sequence[Finding]) -> list[Finding]:
    """Findings by host; those about all of them first."""
    order = {"": -1, **{host: number for number, host in enumerate(hosts)}}
    return sorted(found, key=lambda finding: order[finding.host])
