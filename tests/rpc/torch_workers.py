"""What the tests of torch's names for calls run on their ranks, and what they ask torch's module for."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.ranks import Member

WAIT_S = 60.0


def started(member: Member, *, size: int | None = -1, timeout_s: float = 60.0) -> Any:
    """torch's module, in which this rank is a worker."""
    import phalanx.rpc.torch_api as rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{member.folder}/rpc", rpc_timeout=timeout_s)
    world_size = member.size if size == -1 else size
    rpc.init_rpc(f"worker{member.rank}", rank=member.rank, world_size=world_size, rpc_backend_options=options)
    return rpc


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that another process brings about."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def debug_info() -> dict[str, str]:
    from torch.distributed import rpc

    found: dict[str, str] = rpc._rref_context_get_debug_info()  # type: ignore[attr-defined]
    return found


def owned_values() -> int:
    return int(debug_info()["num_owner_rrefs"])


def forks() -> int:
    return int(debug_info()["num_forks"])


def add_rank(rank: int, number: int = 1) -> int:
    return rank + number


class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    def add(self, number: int) -> int:
        self.count += number
        return self.count


def wait_for_file(path: str) -> None:
    until(Path(path).exists)
