"""Measuring on ranks that something else has started, on one host or on several: torchrun, srun, ``phalanx run``.

Each of them calls ``phalanx bench`` with the same arguments. They meet as the ranks of any program do; rank 0 shows
what they measure.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from phalanx import settings, world
from phalanx.bench.cases import BenchOptions
from phalanx.bench.links import outward_interface
from phalanx.bench.measurement import Display, check_memory, collect, new_job
from phalanx.bench.rank import TIMEOUT, measure_cases

__all__ = ["measure_joined"]


def measure_joined(options: BenchOptions, command: Sequence[str], quiet: bool) -> dict[str, Any] | None:
    """Join the world of this process's launcher, and measure with its ranks. Every rank calls it.

    Args:
        options: what to measure; their ``ranks`` do not count.
        command: the arguments of the command line, to be kept with the results.
        quiet: show neither the rank table nor progress.

    Returns:
        The object that ``--json`` prints, on rank 0; None on the others.

    Raises:
        PhalanxError: the ranks do not meet. Once they have, rank 0 returns what was measured, and the others raise.
        LaunchError: a host cannot hold the buffers of its ranks.
    """
    torch.set_num_threads(1)
    # torch's own Gloo listens where the host's name says, which may be loopback.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", outward_interface())
    with world.init(settings.BACKEND, timeout_s=TIMEOUT.total_seconds(), quiet=quiet) as joined:
        check_memory(options, joined.local_world_size)
        if joined.rank:
            measure_cases(joined.rank, joined.size, options, lambda event: None, nodes=joined.nodes)
            joined.barrier()
            return None

        def run(display: Display, jobs: list[dict[str, Any]]) -> None:
            record = new_job(joined.size)
            jobs.append(record)
            measure_cases(0, joined.size, options, lambda event: display.take(event, record), nodes=joined.nodes)
            joined.barrier()

        return collect(options, command, quiet, 1, run)
