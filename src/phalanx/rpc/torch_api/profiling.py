"""torch's legacy profiler across calls: what ran on the callee appears in the caller's profile.

While ``torch.autograd.profiler_legacy.profile`` is on, a call has the callee profile what it runs. The answer brings
the events, which join the caller's when its profile ends, as ``KEY#remote_op: NAME``. torch does this in C++.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from phalanx.rpc.torch_api.torch_names import autograd, profiler_legacy, profiler_util, stand_in

__all__ = ["Profile", "follow_profiles", "profiled", "sending"]

REMOTE = "#remote_op: "
_FLAGS = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")


class Profile:
    """A profile of this thread that is on.

    Attributes:
        flags: what it records; keywords of ``profiler_legacy.profile``.
        began: when; not later than torch's own time, so no event of a call seems to come before the call.
        remote: the events of its calls.
    """

    def __init__(self, profile: Any, began: float) -> None:
        self.flags = {name: getattr(profile, name) for name in _FLAGS}
        self.began = began
        self.remote: list[Any] = []

    def add(self, key: str, sent_at: float, events: list[Any]) -> None:
        """Add what the callee of a call recorded that was sent under ``key`` at this time."""
        at_us = (sent_at - self.began) * 1e6
        for event in events:
            event.name = f"{key}{REMOTE}{event.name}"
            event.time_range = profiler_util.Interval(event.time_range.start + at_us, event.time_range.end + at_us)
            event.is_remote = True
        self.remote += events


class _Here(threading.local):
    def __init__(self) -> None:
        self.key: str | None = None  # of the next call
        self.profiles: list[Profile] = []  # the innermost last


_here = _Here()


@stand_in
class RemoteProfilerManager:
    """Stand in for torch's class of that name."""

    @staticmethod
    def set_current_profiling_key(key: str) -> None:
        """The next call of this thread appears under this key."""
        _here.key = key


def sending() -> tuple[Profile, str] | None:
    """The profile of the call that this thread makes now, and its key there; None if it has none."""
    key, _here.key = _here.key, None
    if key is None or not _here.profiles or not autograd._profiler_enabled():
        return None
    return _here.profiles[-1], key


def follow_profiles() -> None:
    """Have ``profiler_legacy.profile`` tell this module when it begins and ends."""
    kind = profiler_legacy.profile
    own_start, own_exit = kind._start_trace, kind.__exit__

    def start_trace(self: Any) -> None:
        began = time.monotonic()
        own_start(self)
        _here.profiles.append(Profile(self, began))

    def leave(self: Any, *error: Any) -> Any:
        left = own_exit(self, *error)
        remote = _here.profiles.pop().remote if self.enabled else []
        if remote:
            events = [*_alone(self.function_events), *remote]
            events.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
            device = "cuda" if self.use_cuda else None
            self.function_events = profiler_util.EventList(
                events, use_device=device, profile_memory=self.profile_memory, with_flops=self.with_flops
            )
            self.function_events._build_tree()
        return left

    kind._start_trace, kind.__exit__ = start_trace, leave


def _alone(events: list[Any]) -> list[Any]:
    for event in events:
        event.cpu_children, event.cpu_parent = [], None
    return list(events)


@contextlib.contextmanager
def profiled(flags: dict[str, bool] | None) -> Iterator[list[Any]]:
    """Profile the body on this thread if ``flags`` are given; the list that this returns is filled at the end."""
    events: list[Any] = []
    if flags is None:
        yield events
        return
    with profiler_legacy.profile(**flags) as profile:
        yield events
    events += _alone(profile.function_events)
