"""A short measurement of the engines between the hosts of a group, by the leaders of the hosts.

Each leader sends to the leader of the next host and receives from that of the one before, so all links are measured at
once. The engines take turns, so what else the machine does falls on all of them alike.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store

from phalanx.transports.hosts.gloo_lane import GlooEngine
from phalanx.transports.hosts.lane import Engine, TransferFailed
from phalanx.transports.hosts.layout import Layout

__all__ = ["Times", "measured"]

SMALL_BYTES, PROBE_BYTES, LARGE_BYTES = 64, 16 * 1024, 512 * 1024
SMALL_ROUNDS, PROBE_ROUNDS, LARGE_ROUNDS = 12, 3, 5
# Large rounds are left out where they might take longer than this, all together: then the link is what takes the time.
LARGE_S = 0.2
# An engine that cannot connect within this time is not taken. Gloo is what is left then, so it is waited for longer,
# as for a rank of a host that has too much to do; all ranks are about to connect.
PATIENCE, GLOO_PATIENCE = timedelta(seconds=5), timedelta(seconds=30)
_TAG = 7


@dataclass(frozen=True)
class Times:
    """What was measured of an engine; of several ranks, the longest times.

    Attributes:
        small_s, large_s: how long one round took, of the small and of the large size.
        small_nbytes, large_nbytes: these sizes.
        failed: why there are no times; empty if there are.
    """

    small_s: float = 0.0
    large_s: float = 0.0
    small_nbytes: int = SMALL_BYTES
    large_nbytes: int = PROBE_BYTES
    failed: str = ""


def measured(
    store: Store, layout: Layout, rank: int, engines: Mapping[str, Engine], timeout: timedelta
) -> dict[str, Times]:
    """Measure the engines. Every rank of the group calls it, once all have made their engines, and gets the same.

    Args:
        store: where the leaders exchange their times.
        layout, rank: where the ranks are, and this process's rank.
        engines: the engines by their names, in one order on all ranks; unused so far.
        timeout: the engines' own, set again afterwards.
    """
    if layout.leader:
        times = _joined(store, "connected", layout, rank, timeout, _connect(layout, engines, timeout))
        usable = {name: engine for name, engine in engines.items() if not times[name].failed}
        times |= _joined(store, "probe", layout, rank, timeout, _probe(layout, usable))
        usable = {name: engine for name, engine in engines.items() if not times[name].failed}
        slowest = max((times[name].large_s for name in usable), default=0.0)
        base = max((times[name].small_s for name in usable), default=0.0)
        expected = (base + max(slowest - base, 0.0) * LARGE_BYTES / PROBE_BYTES) * LARGE_ROUNDS * len(usable)
        if len(usable) > 1 and expected < LARGE_S:
            times |= _joined(store, "large", layout, rank, timeout, _large(layout, usable, times))
        if rank == 0:
            store.set("times", json.dumps({name: asdict(each) for name, each in times.items()}))
        for engine in engines.values():
            engine.set_timeout(timeout)
    store.wait(["times"], timeout + PATIENCE)
    return {name: Times(**each) for name, each in json.loads(store.get("times")).items()}


def _connect(layout: Layout, engines: Mapping[str, Engine], timeout: timedelta) -> dict[str, Times]:
    """Which engines carry anything. The leaders compare that before they go on, since a failure takes its time."""
    found: dict[str, Times] = {}
    for name, engine in engines.items():
        found[name] = Times()
        engine.set_timeout(min(timeout, GLOO_PATIENCE if isinstance(engine, GlooEngine) else PATIENCE))
        try:
            _rounds(layout, {name: engine}, SMALL_BYTES, 2)
        except TransferFailed as error:
            found[name] = Times(failed=str(error))
        engine.set_timeout(min(timeout, PATIENCE))
    return found


def _probe(layout: Layout, engines: Mapping[str, Engine]) -> dict[str, Times]:
    """Small rounds, and a few that tell how fast the link is."""
    try:
        small = _rounds(layout, engines, SMALL_BYTES, SMALL_ROUNDS)
        probe = _rounds(layout, engines, PROBE_BYTES, PROBE_ROUNDS)
    except TransferFailed as error:
        return {name: Times(failed=str(error)) for name in engines}
    return {name: Times(small[name], probe[name]) for name in engines}


def _large(layout: Layout, engines: Mapping[str, Engine], before: Mapping[str, Times]) -> dict[str, Times]:
    try:
        large = _rounds(layout, engines, LARGE_BYTES, LARGE_ROUNDS)
    except TransferFailed as error:
        return {name: Times(failed=str(error)) for name in engines}
    return {name: Times(before[name].small_s, large[name], large_nbytes=LARGE_BYTES) for name in engines}


def _rounds(layout: Layout, engines: Mapping[str, Engine], nbytes: int, rounds: int) -> dict[str, float]:
    """The median time of a round of each engine."""
    leaders, count = layout.leaders, len(layout.leaders)
    after, before = leaders[(layout.host + 1) % count], leaders[(layout.host - 1) % count]
    outgoing, incoming = torch.zeros(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, engine in engines.items():
            began = time.perf_counter()
            transfers = [engine.recv(incoming, before, _TAG), engine.send(outgoing, after, _TAG)]
            for transfer in transfers:
                transfer.wait()
            times[name].append(time.perf_counter() - began)
    return {name: _median(each) for name, each in times.items()}


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _joined(
    store: Store, name: str, layout: Layout, rank: int, timeout: timedelta, own: Mapping[str, Times]
) -> dict[str, Times]:
    """Of the times of all leaders the longest, and every failure."""
    store.set(f"{name}/{rank}", json.dumps({engine: asdict(each) for engine, each in own.items()}))
    keys = [f"{name}/{leader}" for leader in layout.leaders]
    store.wait(keys, timeout + PATIENCE)
    joined: dict[str, Times] = {}
    for said in (json.loads(store.get(key)) for key in keys):
        for engine, values in said.items():
            one, other = Times(**values), joined.get(engine, Times())
            joined[engine] = Times(
                max(one.small_s, other.small_s),
                max(one.large_s, other.large_s),
                one.small_nbytes,
                one.large_nbytes,
                one.failed or other.failed,
            )
    return joined
