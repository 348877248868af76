"""Which engine carries a group's bytes between its hosts: the one that the user names, or the quickest that all have.

The ranks say in the store what each of them could use. If that leaves more than one engine, the leaders of the hosts
measure them in turns, the slowest rank's times count, and rank 0 says which engine it is.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from phalanx import settings
from phalanx.errors import InitializationError
from phalanx.place.launchers import MPI_SIZES
from phalanx.transports.hosts.lane import Engine
from phalanx.transports.hosts.layout import Layout
from phalanx.transports.hosts.measuring import Times, measured
from phalanx.transports.hosts.mpi_lane import MpiEngine
from phalanx.transports.hosts.said import said_by_all
from phalanx.transports.hosts.ucx_lane import UcxEngine
from phalanx.transports.hosts.ucx_library import UcxFailed, open_library
from phalanx.transports.meeting_store import part_of
from phalanx.transports.mpi.runtime import MISSING, running, start
from phalanx.words import format_named

__all__ = ["Chosen", "choose_engine"]

AUTO, GLOO, MPI, UCX = "auto", "gloo", "mpi", "ucx"
_NAMES = (AUTO, GLOO, MPI, UCX)
# Gloo comes with torch and needs no setup, so another engine has to be quicker by more than the noise.
_MARGIN = 0.9

_LAST_WORD = timedelta(seconds=5)

# What this process has measured for its world; later groups of it use that.
_of_the_world: str = ""


@dataclass(frozen=True)
class Chosen:
    """An engine, and why it is that one.

    Attributes:
        engine: the engine.
        why: for the rank table; empty where there was no choice.
    """

    engine: Engine
    why: str


def choose_engine(
    store: Store,
    layout: Layout,
    rank: int,
    gloo: Callable[[], Engine],
    timeout: timedelta,
    *,
    world: bool,
) -> Chosen:
    """Agree with the other ranks of a group on an engine, and make it. Every rank of the group calls it.

    Args:
        store: where they agree, and no other group does.
        layout, rank: where the ranks are, and this process's rank.
        gloo: makes the engine that there always is.
        timeout: for all ranks to come, and for the engine's transfers.
        world: whether the group is the world. Its choice holds for other groups of its ranks.

    Raises:
        InitializationError: the engine that the user has named cannot be used, the ranks name different ones, or none
            of several connects the hosts.
    """
    global _of_the_world
    size = sum(map(len, layout.hosts))
    wanted = _wanted()
    if world:
        _of_the_world = ""
    mine = {"wanted": wanted, "chosen": _of_the_world, "lack": _lack(wanted, size)}
    told = [json.loads(said) for said in said_by_all(store, "engines", rank, size, timeout, json.dumps(mine))]
    refused = _differing([each["wanted"] for each in told]) or _lacking([each["lack"] for each in told], wanted)
    if refused:
        raise _refusal(store, rank, size, refused)
    names = [name for name in told[0]["lack"] if not any(each["lack"][name] for each in told)]
    if wanted != AUTO:
        names = [wanted]
    before = {each["chosen"] for each in told}
    if wanted == AUTO and len(before) == 1 and before <= set(names):
        names = list(before)
    makers: dict[str, Callable[[], Engine]] = {GLOO: gloo}
    if UCX in names:
        makers[UCX] = lambda: UcxEngine(PrefixStore(UCX, store), rank, timeout)
    if MPI in names:
        world_ranks, lack = _start_mpi(store, rank, size, timeout)
        if lack and wanted == MPI:
            raise _refusal(store, rank, size, f"{settings.ENGINE}={MPI}: {lack}")
        if lack:
            names.remove(MPI)
        else:
            name = f"{settings.BACKEND} {world_ranks}"
            makers[MPI] = lambda: MpiEngine(start(), world_ranks, name, timeout)
    if len(names) == 1:
        named = f"as {settings.ENGINE} says" if wanted != AUTO else ""
        return Chosen(makers[names[0]](), named)
    engines = {name: makers[name]() for name in names}
    try:
        # A rank that has gone before is named here. An engine that connects does not know, and waits for it.
        said_by_all(store, "made", rank, size, timeout, "")
        times = measured(part_of(store, "times"), layout, rank, engines, timeout)
        if all(each.failed for each in times.values()):
            why = "; ".join(f"{engines[name].name}: {each.failed}" for name, each in times.items())
            raise InitializationError(f"no engine can connect the hosts of the group ({why})")
    except BaseException:
        for engine in engines.values():
            engine.abort()
        raise
    best = _quickest(times)
    for name, engine in engines.items():
        if name != best:
            if times[name].failed:
                engine.abort()  # a thread of it may still be connecting
            engine.close()
            with contextlib.suppress(RuntimeError):  # the store has gone
                engine.forget(rank)  # all have been measured, so no rank connects to it any more
    if world:
        _of_the_world = best
    return Chosen(engines[best], _explained(times, engines, best))


def _wanted() -> str:
    value = os.environ.get(settings.ENGINE) or AUTO
    if value not in _NAMES:
        raise InitializationError(f"{settings.ENGINE}={value!r}: it must be one of {', '.join(_NAMES)}")
    return value


def _lack(wanted: str, size: int) -> dict[str, str]:
    """For each engine that may be used: what this process lacks for it; empty if it can be used."""
    lack = {GLOO: ""}
    if wanted in (AUTO, MPI):
        lack[MPI] = _lack_of_mpi(wanted, size)
    if wanted in (AUTO, UCX):
        try:
            open_library()
            lack[UCX] = ""
        except UcxFailed as error:
            lack[UCX] = str(error)
    return lack


def _lack_of_mpi(wanted: str, size: int) -> str:
    runtime = running()
    if runtime is not None:
        return "" if runtime.usable else "MPI has ended in this process, and cannot be started again"
    if wanted == AUTO:  # a library that cannot start ends the process, so it is started only for a user who names it
        return "MPI is not running"
    sizes = [os.environ[name] for name in sorted(MPI_SIZES) if os.environ.get(name)]
    if not sizes:
        return "MPI has not started this rank: start the job with mpiexec, or with phalanx run --mpi mpiexec"
    if str(size) not in sizes:
        return f"MPI has started {sizes[0]} ranks, and the group has {size}: it starts on all ranks at once"
    return "" if importlib.util.find_spec("mpi4py") is not None else MISSING


def _start_mpi(store: Store, rank: int, size: int, timeout: timedelta) -> tuple[list[int], str]:
    """Start MPI on all ranks: their ranks in MPI's world, or what some of them lack."""
    try:
        mine: dict[str, Any] = {"rank": start().world.rank, "lack": ""}
    except InitializationError as error:
        mine = {"rank": -1, "lack": str(error)}
    told = [json.loads(said) for said in said_by_all(store, "mpi", rank, size, timeout, json.dumps(mine))]
    lack = next((f"rank {each}: {said['lack']}" for each, said in enumerate(told) if said["lack"]), "")
    ranks = [int(said["rank"]) for said in told]
    if not lack and len(set(ranks)) < size:
        lack = f"the ranks were started by several MPI jobs: their ranks in MPI are {ranks}"
    return ranks, lack


def _refusal(store: Store, rank: int, size: int, why: str) -> InitializationError:
    """The error of every rank. Rank 0 has the store, so it stays until all ranks know why."""
    store.set(f"refused/{rank}", "")
    if rank == 0:
        with contextlib.suppress(RuntimeError):
            store.wait([f"refused/{other}" for other in range(size)], _LAST_WORD)
    return InitializationError(why)


def _differing(wanted: Sequence[str]) -> str:
    """Who names which engine; empty if all name the same."""
    if len(set(wanted)) == 1:
        return ""
    who = {name: [rank for rank, own in enumerate(wanted) if own == name] for name in wanted}
    said = ", ".join(f"{name} on {format_named('rank', ranks)}" for name, ranks in who.items())
    return f"{settings.ENGINE} differs between the ranks ({said}): set it alike on all hosts"


def _lacking(lacks: Sequence[Mapping[str, str]], wanted: str) -> str:
    """Why some rank cannot use the engine that all name; empty if all can, or name none."""
    if wanted != AUTO:
        for rank, lack in enumerate(lacks):
            if lack[wanted]:
                return f"{settings.ENGINE}={wanted}: rank {rank} cannot use it: {lack[wanted]}"
    return ""


def _quickest(times: Mapping[str, Times]) -> str:
    """The engine that all hosts together find quickest."""
    usable = {name: each for name, each in times.items() if not each.failed}
    costs = {name: each.small_s * each.large_s for name, each in usable.items()}
    best = min(costs, key=lambda name: costs[name])
    if GLOO in costs and costs[best] > costs[GLOO] * _MARGIN**2:
        return GLOO
    return best


def _explained(times: Mapping[str, Times], engines: Mapping[str, Engine], best: str) -> str:
    def said(name: str) -> str:
        each = times[name]
        if each.failed:
            return f"{engines[name].name} failed"
        return f"{engines[name].name} {each.small_s * 1e6:.0f} µs, {each.large_s * 1e3:.1f} ms"

    order = [best, *(name for name in times if name != best)]
    return f"measured with {times[best].small_nbytes} B and {times[best].large_nbytes >> 10} KB: " + "; ".join(
        map(said, order)
    )
