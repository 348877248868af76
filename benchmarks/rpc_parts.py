"""Where the time of an empty call between two processes of one host goes.

    phalanx run -n 2 benchmarks/rpc_parts.py

Both processes note when a message is sent and taken; they have the same clock. Nothing else runs in them: torch's RPC,
beside which benchmarks/rpc.py measures, has threads that poll all the time and so take a core from each.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import phalanx
from phalanx import rpc
from phalanx.rpc.links.shared import SharedHub, SharedLink

CALLS = 3000
PARTS = (
    "caller: make the call and encode it",
    "caller: send it, until the callee has it",
    "callee: read it, run the function, encode the answer",
    "callee: send that, until the caller has it",
    "caller: read it and return",
    "the whole call",
)
sent: list[int] = []
taken: list[int] = []


def noting(times: list[int], function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that notes when it was called."""

    def run(*args: Any, **kwargs: Any) -> Any:
        times.append(perf_counter_ns())
        return function(*args, **kwargs)

    return run


def nothing() -> None:
    """The empty call."""


def noted() -> tuple[list[int], list[int]]:
    """What this process has noted."""
    return sent, taken


def main() -> None:
    """Measure, and print the table on rank 0."""
    for kind, name, times in ((SharedLink, "send", sent), (SharedHub, "_take", taken)):
        setattr(kind, name, noting(times, getattr(kind, name)))
    world = phalanx.init(device="cpu", quiet=True)
    rpc.init()
    if world.rank == 0:
        begun, ended = [], []
        for _ in range(2 * CALLS):
            begun.append(perf_counter_ns())
            rpc.call(1, nothing)
            ended.append(perf_counter_ns())
        theirs = rpc.call(1, noted)
        # The last messages are those of noted() itself; before them each list has one for each of these calls.
        columns = (begun, sent[:-1], theirs[1][:-1], theirs[0], taken[:-1], ended)
        for part, earlier, later in zip(PARTS, [*columns[:-1], begun], [*columns[1:], ended], strict=True):
            took = [end - start for start, end in zip(earlier[-CALLS:], later[-CALLS:], strict=True)]
            print(f"{part:55}{statistics.median(took) / 1000:6.1f} us")
    rpc.shutdown()


if __name__ == "__main__":
    main()
