"""Communicators that the tests make without a process group, as if on several hosts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import PrefixStore, Store

from phalanx.transports.contract import Communicator
from phalanx.transports.gloo.engine import GlooOnDemand, lazy_gloo
from phalanx.transports.hosts.communicator import HostsCommunicator
from phalanx.transports.hosts.gloo_lane import UNLIMITED, GlooEngine
from phalanx.transports.hosts.lane import Engine
from phalanx.transports.hosts.layout import Layout
from phalanx.transports.hosts.sizes import Sizes
from phalanx.transports.hosts.ucx_lane import UcxEngine
from phalanx.transports.shm.communicator import SharedMemoryCommunicator
from phalanx.transports.shm.tuning import Tuning
from phalanx.transports.solo import SoloCommunicator

__all__ = ["PLACEMENTS", "gloo_engine", "needs_ucx", "over_hosts", "ucx_engine"]

TIMEOUT = timedelta(seconds=60)
# The large tensors of the tests go through a few chunks, and past the memory that the ranks of a host share.
SIZES = Sizes(frame_bytes=4_000, chunk_bytes=6_000, shared_bytes=30_000)


def gloo_engine(store: Store, rank: int, size: int, timeout: timedelta) -> Engine:
    """Gloo on loopback."""
    return GlooEngine(GlooOnDemand(lambda limit: lazy_gloo(store, rank, size, limit, one_host=True), timeout), timeout)


def _why_no_ucx() -> str:
    # In a process of its own: UCX in the parent would not work in ranks that are forked from it.
    program = "from phalanx.transports.hosts.ucx_library import open_library; open_library()"
    tried = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    return tried.stderr.strip().splitlines()[-1] if tried.returncode else ""


_WHY_NOT = _why_no_ucx()
needs_ucx = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "there is UCX")


def ucx_engine(store: Store, rank: int, size: int, timeout: timedelta) -> Engine:
    """UCX, on this machine's own address."""
    return UcxEngine(store, rank, timeout)


# How ranks are placed on hosts.
PLACEMENTS: dict[str, Callable[[int, int], int]] = {
    "two hosts": lambda rank, size: rank * 2 // size,
    "two hosts, cyclic": lambda rank, size: rank % 2,
    "three hosts": lambda rank, size: min(rank, 2),
}
EngineOf = Callable[[Store, int, int, timedelta], Engine]


def over_hosts(
    store: Store,
    rank: int,
    size: int,
    host_of: Callable[[int, int], int],
    timeout: timedelta = TIMEOUT,
    engine: EngineOf = gloo_engine,
) -> Communicator:
    """As if on several hosts: ranks of one host share memory, and an engine is between them."""
    layout = Layout([host_of(each, size) for each in range(size)], rank)
    local: Communicator = SoloCommunicator()
    if len(layout.here) > 1:
        own = PrefixStore(f"host{layout.host}", store)
        local = SharedMemoryCommunicator(
            own, layout.local, len(layout.here), timeout, Tuning(4096, stream_bytes=3000), layout.here
        )
    lanes = engine(PrefixStore("lanes", store), rank, size, timeout)
    ways = GlooOnDemand(
        lambda timeout: lazy_gloo(PrefixStore("messages", store), rank, size, timeout, one_host=True), timeout
    )
    ways.get()
    engines = lanes, GlooEngine(ways, UNLIMITED, awaits_what_came=True)
    return HostsCommunicator(layout, rank, local, *engines, PrefixStore("group", store), timeout, SIZES)
