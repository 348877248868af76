"""torch's legacy profiler in a program written for torch.distributed.rpc."""

# mypy: disable-error-code="attr-defined,no-any-return,untyped-decorator,no-untyped-call"

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.autograd import profiler_legacy

import phalanx.rpc.autograd.engine  # noqa: F401 - once, and not on every forked rank
from tests.rpc.torch_workers import started
from tests.support.ranks import Member, run_ranks, values


def test_what_a_call_ran_comes_after_the_call_also_if_the_profile_begins_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own: Any = profiler_legacy._enable_profiler_legacy

    def slow(config: Any) -> None:
        own(config)
        time.sleep(0.2)  # as on a busy machine

    def rank(member: Member) -> bool:
        api, to = started(member), f"worker{1 - member.rank}"
        monkeypatch.setattr(profiler_legacy, "_enable_profiler_legacy", slow)
        with profiler_legacy.profile() as profile:
            api.rpc_sync(to, torch.add, args=(torch.ones(2), 1))
        api.shutdown()
        [call] = [each for each in profile.function_events if "rpc_sync" in each.name and not each.is_remote]
        return all(each.time_range.start >= call.time_range.start for each in profile.function_events if each.is_remote)

    assert values(run_ranks(rank, 2)) == [True] * 2
