"""All hosts of a job at once: each by itself, every pair, and what they say together."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from phalanx.doctor.between import clocks, differences, in_order, paths, rates
from phalanx.doctor.device_probe import PROBE_S as DEVICES_S
from phalanx.doctor.device_probe import probe_devices
from phalanx.doctor.device_records import DeviceRecord, device_findings
from phalanx.doctor.finding import Finding, Level
from phalanx.doctor.probe import Reach
from phalanx.doctor.rounds import rounds
from phalanx.launch.job.hosts import is_here
from phalanx.launch.remote.helpers import Helper, Unanswered

__all__ = ["Examination", "examine_devices", "examine_hosts"]

CLOCK_ASKS = 5
PROBE_S = 60.0
Answer = TypeVar("Answer")


@dataclass
class Examination:
    """What was found out about several hosts.

    Attributes:
        findings: by host, those about all of them first.
        reached: for each pair (from, to), what the first one saw.
        offsets_s: how far each host's clock is ahead of this one's.
        devices: the accelerators of each host, where they were measured.
    """

    findings: list[Finding] = field(default_factory=list)
    reached: dict[tuple[str, str], Reach] = field(default_factory=dict)
    offsets_s: dict[str, float] = field(default_factory=dict)
    devices: dict[str, list[DeviceRecord]] = field(default_factory=dict)


def examine_hosts(
    hosts: Mapping[str, int | None],
    starter: Sequence[str] = (),
    *,
    rate: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> Examination:
    """Look at every host, and at the way from each to each other one.

    Helpers are started on all hosts at once. A pair is measured while no other pair uses one of its hosts.

    Args:
        hosts: each host, and how many ranks are to run there, if the user has said so.
        starter: how a helper is started, as of :class:`~phalanx.launch.remote.helpers.Helper`.
        rate: whether to measure rates, which uses each link for about a second.
        progress: called with what is done next, for people who wait.
    """
    made = Examination()
    with contextlib.ExitStack() as running, ThreadPoolExecutor(max(1, len(hosts))) as pool:
        progress(f"starting a helper on {', '.join(hosts)}")
        agents = _started(hosts, starter, running, pool, made)
        directory = os.getcwd()
        progress("looking at each host")
        # A host that is reached from here has to be reachable itself, also if it is the only one of the job.
        several = len(hosts) > 1 or not all(is_here(name, starter=bool(starter)) for name in agents)
        answers = _each(
            pool,
            made,
            {name: partial(_examine, agent, directory, hosts[name], several) for name, agent in agents.items()},
        )
        for name, answer in answers.items():
            made.findings += _findings(name, answer)
        made.findings += differences(answers, directory)
        made.offsets_s = _each(pool, made, {name: partial(_clock, agents[name]) for name in answers})
        made.findings += clocks(made.offsets_s)
        listening = _each(pool, made, {name: partial(agents[name].ask, "listen") for name in answers})
        turns = rounds(sorted(listening))
        for number, pairs in enumerate(turns, 1):
            progress(f"measuring pairs, round {number} of {len(turns)}")
            for now in (pairs, [(other, one) for one, other in pairs]):
                asked = {
                    pair: partial(
                        agents[pair[0]].ask, "probe", PROBE_S, name=_plain(pair[1]), rate=rate, **listening[pair[1]]
                    )
                    for pair in now
                }
                said = _each(pool, made, asked, host=lambda pair: pair[0])
                made.reached.update({pair: _reach(answer) for pair, answer in said.items()})
    made.findings += [*paths(made.reached), *rates(made.reached)]
    made.findings = in_order(list(hosts), made.findings)
    return made


def examine_devices(hosts: Mapping[str, int | None], starter: Sequence[str] = ()) -> Examination:
    """Measure the accelerators of all hosts at once; of this one, without a helper, if none is named.

    Args:
        hosts, starter: as of :func:`examine_hosts`.
    """
    made = Examination()
    with contextlib.ExitStack() as running, ThreadPoolExecutor(max(1, len(hosts))) as pool:
        agents = _started(hosts, starter, running, pool, made)
        asked = {name: partial(agent.ask, "devices", 2 * DEVICES_S) for name, agent in agents.items()}
        answers = _each(pool, made, asked) if hosts else {"": probe_devices()}
    for name, answer in answers.items():
        made.findings += _findings(name, answer)
        made.devices[name] = [DeviceRecord(**record) for record in answer["devices"]]
    made.findings = in_order(list(hosts), [*made.findings, *device_findings(made.devices)])
    return made


def _started(
    hosts: Mapping[str, int | None],
    starter: Sequence[str],
    running: contextlib.ExitStack,
    pool: ThreadPoolExecutor,
    made: Examination,
) -> dict[str, Helper]:
    agents: dict[str, Helper] = {}
    for name in hosts:
        try:
            agents[name] = running.enter_context(Helper(name, starter, "phalanx.doctor.agent"))
        except Unanswered as error:
            made.findings.append(Finding(Level.FAILURE, "start", str(error), error.remedy, name))
    ready = _each(pool, made, {name: partial(_ready, agent) for name, agent in agents.items()}, subject="start")
    return {name: agents[name] for name in ready}


def _ready(agent: Helper) -> bool:
    agent.wait_ready()
    return True


def _examine(agent: Helper, directory: str, ranks: int | None, several_hosts: bool) -> dict[str, Any]:
    return agent.ask("examine", directory=directory, ranks=ranks, several_hosts=several_hosts)


def _clock(agent: Helper) -> float:
    """How far its clock is ahead: by the quickest of some questions, half of whose way is taken for each direction."""
    asked = []
    for _ in range(CLOCK_ASKS):
        began = time.time()
        there = float(agent.ask("time")["now"])
        ended = time.time()
        asked.append((ended - began, there - (began + ended) / 2))
    return min(asked)[1]


def _findings(host: str, answer: Mapping[str, Any]) -> list[Finding]:
    return [Finding(**{**said, "level": Level(said["level"]), "host": host}) for said in answer["findings"]]


def _reach(answer: Mapping[str, Any]) -> Reach:
    return Reach(**{**answer, "addresses": tuple(answer["addresses"])})


def _plain(host: str) -> str:
    """The host without the user's name that ssh takes before it."""
    return host.rpartition("@")[2]


Key = TypeVar("Key")


def _each(
    pool: ThreadPoolExecutor,
    made: Examination,
    asked: Mapping[Key, Callable[[], Answer]],
    *,
    subject: str = "helper",
    host: Callable[[Key], str] = str,
) -> dict[Key, Answer]:
    """Ask all at once; those who do not answer become findings, and are left out of what is returned."""
    futures = {key: pool.submit(ask) for key, ask in asked.items()}
    answers: dict[Key, Answer] = {}
    for key, future in futures.items():
        try:
            answers[key] = future.result()
        except Unanswered as error:
            made.findings.append(Finding(Level.FAILURE, subject, str(error), error.remedy, host(key)))
    return answers
