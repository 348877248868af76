"""Examine all hosts of a job: each by a helper on it (``host.py``), and each pair of them (``probe.py``)."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from phalanx import settings
from phalanx.doctor.accelerators import DEVICES_S, DeviceRecord, device_findings, probe_devices
from phalanx.doctor.finding import Finding, Level, failure, warning
from phalanx.doctor.probe import Reach
from phalanx.launch.job.hosts import is_here
from phalanx.launch.starters.helpers import Helper, Unanswered
from phalanx.system.interfaces import is_loopback
from phalanx.topology.table import format_table
from phalanx.words import format_list, format_time

MOST_THREADS = 256
CLOCK_ASKS = 5
CLOCK_WARNING_S = 1.0
PROBE_S = 60.0
# A pair is slow beside the others, or beside what its interface is made for, or for any training at all.
SLOW_BESIDE_OTHERS, SLOW_BESIDE_INTERFACE, SLOW_BYTES_PER_S = 0.5, 0.1, 100e6 / 8

Pair = tuple[str, str]  # from, to
Key = TypeVar("Key")
Answer = TypeVar("Answer")


@dataclass
class Examination:
    """The findings on several hosts; ``offsets_s`` is how far each clock is ahead of this host's."""

    findings: list[Finding] = field(default_factory=list)
    reached: dict[Pair, Reach] = field(default_factory=dict)
    offsets_s: dict[str, float] = field(default_factory=dict)
    devices: dict[str, list[DeviceRecord]] = field(default_factory=dict)


class _Helpers:
    """A helper on each host, all asked at once; one that does not answer becomes a finding, and is asked no more."""

    def __init__(self, hosts: Iterable[str], starter: Sequence[str]) -> None:
        self.findings: list[Finding] = []
        self._helpers: dict[str, Helper] = {}
        with contextlib.ExitStack() as running:
            self._pool = running.enter_context(ThreadPoolExecutor(MOST_THREADS))
            for name in hosts:
                try:
                    helper = Helper(name, starter, "phalanx.doctor.host")
                except Unanswered as error:
                    self.findings.append(failure("start", str(error), error.remedy, name))
                else:
                    self._helpers[name] = running.enter_context(helper)
            self.each(lambda _, helper: helper.wait_ready(), subject="start")
            self._running = running.pop_all()

    def __enter__(self) -> _Helpers:
        return self

    def __exit__(self, *error: object) -> None:
        self._running.close()

    def each(
        self, ask: Callable[[str, Helper], Answer], among: Iterable[str] | None = None, subject: str = "helper"
    ) -> dict[str, Answer]:
        """Ask each helper, or those on some hosts; return the answers by host."""
        asked = {name: helper for name, helper in self._helpers.items() if among is None or name in among}
        futures = {name: self._pool.submit(ask, name, helper) for name, helper in asked.items()}
        answers = {}
        for name, future in futures.items():
            try:
                answers[name] = future.result()
            except Unanswered as error:
                self.findings.append(failure(subject, str(error), error.remedy, name))
                del self._helpers[name]
        return answers


def examine_hosts(
    hosts: Mapping[str, int | None], starter: Sequence[str], *, rate: bool, progress: Callable[[str], None]
) -> Examination:
    """Examine every host, and the way from each to each other one.

    Args:
        hosts: each host, and how many ranks are to run there, if the user has said so.
        starter: the user's starter and its arguments; empty for ssh.
        rate: whether to measure rates, which uses each link for about a second.
        progress: called with what is done next, for people who wait.
    """
    made, directory = Examination(), os.getcwd()
    progress(f"starting a helper on {', '.join(hosts)}")
    with _Helpers(hosts, starter) as helpers:
        progress("looking at each host")
        # A host that is reached from here has to be reachable itself, also if it is the only one of the job.
        several = len(hosts) > 1 or not all(is_here(name, starter=bool(starter)) for name in hosts)
        answers = helpers.each(
            lambda name, helper: helper.ask("examine", directory=directory, ranks=hosts[name], several_hosts=several)
        )
        made.offsets_s = helpers.each(lambda _, helper: _clock(helper))
        listening = helpers.each(lambda _, helper: helper.ask("listen"))
        turns = [turn for pairs in _rounds(sorted(listening)) for turn in (pairs, {b: a for a, b in pairs.items()})]
        for number, turn in enumerate(turns, 1):
            progress(f"measuring pairs, round {number} of {len(turns)}")

            def probe(name: str, helper: Helper, turn: dict[str, str] = turn) -> Reach:
                other = turn[name].rpartition("@")[2]  # ssh takes a user's name before it
                return Reach(**helper.ask("probe", PROBE_S, name=other, rate=rate, **listening[turn[name]]))

            made.reached |= {(name, turn[name]): reach for name, reach in helpers.each(probe, turn).items()}
    made.findings = [
        *helpers.findings,
        *(finding for name, answer in answers.items() for finding in _findings(name, answer)),
        *_differences(answers, directory),
        *_clock_findings(made.offsets_s),
        *_paths(made.reached),
        *_rates(made.reached),
    ]
    return _in_order(hosts, made)


def examine_devices(hosts: Sequence[str], starter: Sequence[str]) -> Examination:
    """Measure the accelerators of all hosts at once; of this one, without a helper, if none is named."""
    made = Examination()
    if hosts:
        with _Helpers(hosts, starter) as helpers:
            answers = helpers.each(lambda _, helper: helper.ask("devices", 2 * DEVICES_S))
        made.findings = helpers.findings
    else:
        answers = {"": probe_devices()}
    for name, answer in answers.items():
        made.findings += _findings(name, answer)
        made.devices[name] = [DeviceRecord(**record) for record in answer["devices"]]
    made.findings += device_findings(made.devices)
    return _in_order(hosts, made)


def _clock(helper: Helper) -> float:
    """Return how far a clock is ahead, by the quickest of some questions, half of whose time is the way there."""
    asked = []
    for _ in range(CLOCK_ASKS):
        began = time.time()
        there = float(helper.ask("time")["now"])
        ended = time.time()
        asked.append((ended - began, there - (began + ended) / 2))
    return min(asked)[1]


def _rounds(hosts: Sequence[str]) -> list[dict[str, str]]:
    """Return every pair of hosts once, no host twice in a round: a round-robin tournament."""
    places, found = [*hosts] + [""] * (len(hosts) % 2), []
    for _ in range(len(places) - 1):
        pairs = zip(places[: len(places) // 2], reversed(places), strict=False)
        found.append({one: other for one, other in pairs if one and other})
        places = [places[0], places[-1], *places[1:-1]]
    return found


# -- what the answers say ------------------------------------------------------------------------------


def _findings(host: str, answer: Mapping[str, Any]) -> list[Finding]:
    return [Finding(**{**said, "level": Level(said["level"]), "host": host}) for said in answer["findings"]]


def _in_order(hosts: Iterable[str], made: Examination) -> Examination:
    """Sort the findings by host, those about all of them first."""
    order = ["", *hosts]
    made.findings.sort(key=lambda finding: order.index(finding.host))
    return made


def _differences(answers: Mapping[str, Mapping[str, Any]], directory: str) -> Iterator[Finding]:
    """Compare versions and the directory, which must be the same on all hosts."""
    for subject in ("python", "torch", "phalanx"):
        by_version = _alike({host: answer["versions"][subject] for host, answer in answers.items()})
        if len(by_version) > 1:
            parts = [f"{version} on {format_list(hosts)}" for version, hosts in by_version.items()]
            yield failure(subject, f"the hosts differ: {'; '.join(parts)}", "install the same version everywhere")
    for host, answer in answers.items():
        if why := answer["directory"]:
            remedy = "make it there, or put the job's files on a file system that all hosts share"
            yield failure("directory", f"{directory} cannot be entered: {why}", remedy, host)
    for names in _alike({host: tuple(answer["host"].values()) for host, answer in answers.items()}).values():
        if len(names) > 1:
            remedy = "name each host once, with the number of its ranks"
            yield failure("hosts", f"{format_list(names)} are one host", remedy)


def _alike(values: Mapping[str, Key]) -> dict[Key, list[str]]:
    """Return the hosts of each value."""
    found: dict[Key, list[str]] = {}
    for host, value in values.items():
        found.setdefault(value, []).append(host)
    return found


def _paths(reached: Mapping[Pair, Reach]) -> Iterator[Finding]:
    """Find pairs that do not reach each other, or only in part."""
    for (host, other), reach in reached.items():
        subject, back = f"to {other}", reached.get((other, host))
        if loopback := [address for address in reach.addresses if is_loopback(address)]:
            said = f"{other} is {format_list(loopback)} there, which is {host} itself"
            remedy = f"on {host}, let /etc/hosts give {other} the address by which others reach it"
            yield failure(subject, said, remedy, host)
        elif reach.error:
            remedy = "let the firewalls of both hosts pass TCP on all ports between the hosts of a job"
            if not reach.addresses:
                remedy = f"add {other} to /etc/hosts there, or call it by its address"
            elif reach.address:
                remedy = "look at the firewalls and the MTU between the two"
            yield failure(subject, reach.error, remedy, host)
        elif reach.small_packets_only:
            said = f"small packets arrive, and those of {reach.interface} (MTU {reach.mtu}) are lost on the way"
            remedy = f"give both hosts and all between them the same MTU: ip link set dev {reach.interface} mtu 1400"
            yield failure(subject, said, remedy, host)
        elif host < other and back and not back.error and (reach.source, reach.address) != (back.address, back.source):
            said = f"{host} reaches {other} from {reach.source} ({reach.interface}) at {reach.address}, and is itself "
            said += f"reached from {back.source} ({back.interface}) at {back.address}"
            remedy = f"name the interface that the job should use: {settings.INTERFACE}, or --interface of phalanx run"
            yield warning(subject, said, remedy, host)


def _rates(reached: Mapping[Pair, Reach]) -> Iterator[Finding]:
    """Find pairs that are slower than they should be."""
    measured = {pair: reach for pair, reach in reached.items() if reach.bytes_per_s}
    usual = statistics.median(reach.bytes_per_s for reach in measured.values()) if measured else 0.0
    for (host, other), reach in measured.items():
        rate, made_for = reach.bytes_per_s, reach.speed_mbit * 1e6 / 8
        said = f"{rate / 1e6:.3g} MB/s"
        if len(measured) > 2 and rate < SLOW_BESIDE_OTHERS * usual:
            said += f", and {usual / 1e6:.3g} MB/s between most hosts"
            remedy = "leave that host out, or mend its link"
        elif rate < SLOW_BESIDE_INTERFACE * made_for:
            said += f", and {reach.interface} is made for {made_for / 1e6:.3g} MB/s"
            remedy = "look for other traffic, a limit of the cloud's, or a wrong duplex mode (ethtool)"
        elif rate < SLOW_BYTES_PER_S:
            said, remedy = f"{said} is slow for training", "average rarely, or compress: docs/world.md"
        else:
            continue
        yield warning(f"to {other}", said, remedy, host)


def _clock_findings(offsets_s: Mapping[str, float]) -> Iterator[Finding]:
    for host, ahead in offsets_s.items():
        if abs(ahead) > CLOCK_WARNING_S:
            apart = f"{abs(ahead):.1f} s {'ahead' if ahead > 0 else 'behind'}"
            said = f"its clock is {apart} of this host's: times of logs and files do not fit together"
            yield warning("clock", said, "run an NTP service", host)


# -- the table of pairs --------------------------------------------------------------------------------


def pairs_as_text(hosts: Sequence[str], reached: Mapping[Pair, Reach]) -> str:
    """Format a row for each host with the ways to the others, ``117 MB/s 210 µs``; empty for one host."""
    there = [host for host in hosts if any(host in pair for pair in reached)]
    if len(there) < 2:
        return ""
    lines = [{"from": host, **{f"to {other}": _cell(reached.get((host, other))) for other in there}} for host in there]
    return format_table(lines, title="rate and round trip", text_columns=[*lines[0]], color=True)


def _cell(reach: Reach | None) -> str:
    if reach is None:
        return "-"
    if reach.error or reach.small_packets_only:
        return "fails"
    rate = f"{reach.bytes_per_s / 1e6:,.0f} MB/s " if reach.bytes_per_s else ""
    return f"{rate}{format_time(reach.round_trip_us)} µs"


def pairs_as_json(reached: Mapping[Pair, Reach]) -> list[dict[str, Any]]:
    """Return one object for each ordered pair that was tried."""
    return [{"from": host, "to": other, **asdict(reach)} for (host, other), reach in reached.items()]
