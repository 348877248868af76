"""torch's legacy profiler across calls: what ran on the callee appears in the caller's profile.

While ``torch.autograd.profiler_legacy.profile`` is on, a call asks the callee to profile what it runs. The answer
brings the events back, and they join the caller's when the profile ends, named ``KEY#remote_op: NAME`` as torch names
them. torch does this in C++, where its events can be merged; here they become plain objects with the same methods,
which is all that torch's parser asks of them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from phalanx.rpc.torch_api.torch_names import autograd, profiler_legacy

__all__ = [
    "Event",
    "Flags",
    "RemoteProfilerManager",
    "Sent",
    "follow_profiles",
    "global_profiler",
    "profiled",
    "sending",
]

REMOTE = "#remote_op: "
_here = threading.local()
_COPIED = (
    *("kind", "name", "handle", "node_id", "thread_id", "fwd_thread_id", "shapes", "stack", "scope", "sequence_nr"),
    *("flops", "is_async", "cpu_memory_usage", "cuda_memory_usage"),
)


class Flags(NamedTuple):
    """What a profile records; as in ``profiler_legacy.profile``."""

    record_shapes: bool
    profile_memory: bool
    with_stack: bool
    with_flops: bool
    with_modules: bool

    def config(self) -> Any:
        """The profiler's configuration in C++."""
        return autograd.ProfilerConfig(autograd.ProfilerState.CPU, *self, torch._C._profiler._ExperimentalConfig())


@dataclass
class Event:
    """An event of the legacy profiler, with the methods that its parser calls."""

    fields: dict[str, Any]
    at_us: float
    remote: bool = False

    @classmethod
    def of(cls, event: Any, start: Any) -> Event:
        """A copy of one of torch's events, or of one of these, with its time since ``start``."""
        return cls({name: getattr(event, name)() for name in _COPIED}, start.cpu_elapsed_us(event), event.is_remote())

    def __getattr__(self, name: str) -> Callable[[], Any]:
        if name.startswith("__") or name not in _COPIED:
            raise AttributeError(name)
        value = self.fields[name]
        return lambda: value

    def is_remote(self) -> bool:
        """Whether it happened on another worker."""
        return self.remote

    def has_cuda(self) -> bool:
        """Whether it has times of a device: events of calls have none."""
        return False

    def cpu_elapsed_us(self, later: Event) -> float:
        """The time between two events."""
        return later.at_us - self.at_us

    def on_caller(self, key: str, at_us: float) -> Event:
        """This event in the profile of the caller, whose call with this key began at ``at_us``."""
        return Event({**self.fields, "name": f"{key}{REMOTE}{self.fields['name']}"}, at_us + self.at_us, True)


@dataclass
class _Profile:
    flags: Flags
    began: float = field(default_factory=time.monotonic)
    remote: list[list[Event]] = field(default_factory=list)


class RemoteProfilerManager:
    """Stands in for torch's class of that name, which has the key of the next call of this thread."""

    @staticmethod
    def set_current_profiling_key(key: str) -> None:
        """The next call of this thread appears under this key."""
        _here.key = key


class Sent:
    """A call made while a profile is on.

    Args:
        profile: the profile.
        key: the call's name in it.
    """

    def __init__(self, profile: _Profile, key: str) -> None:
        self.flags = profile.flags
        self._profile, self._key = profile, key
        self._at_us = (time.monotonic() - profile.began) * 1e6

    def receive(self, events: list[list[Event]]) -> None:
        """What the callee recorded."""
        for thread in events:
            self._profile.remote.append([event.on_caller(self._key, self._at_us) for event in thread])


def sending() -> Sent | None:
    """The call that this thread makes now, if it is profiled."""
    key, _here.key = getattr(_here, "key", None), None
    profile = getattr(_here, "profile", None)
    if key is None or profile is None or not autograd._profiler_enabled():
        return None
    return Sent(profile, key)


def follow_profiles() -> None:
    """Have ``profiler_legacy.profile`` tell this module when it begins and ends."""
    own_start, own_disable = profiler_legacy.profile._start_trace, profiler_legacy._disable_profiler_legacy

    def start_trace(self: Any) -> None:
        began = time.monotonic()  # not later than torch's own, so no event of a call seems to come before the call
        own_start(self)
        outer = getattr(_here, "profile", None)
        _here.outer = [*getattr(_here, "outer", []), outer]
        _here.profile = _Profile(
            Flags(self.record_shapes, self.profile_memory, self.with_stack, self.with_flops, self.with_modules), began
        )

    def disable_profiler_legacy() -> Any:
        records = own_disable()
        profile = getattr(_here, "profile", None)
        outer = getattr(_here, "outer", [])
        _here.profile = outer.pop() if outer else None
        return _merged(records, profile.remote) if profile is not None and profile.remote else records

    profiler_legacy.profile._start_trace = start_trace
    profiler_legacy._disable_profiler_legacy = disable_profiler_legacy


def _merged(records: list[list[Any]], remote: list[list[Event]]) -> list[list[Event]]:
    start = next(event for thread in records for event in thread if event.name() == "__start_profile")
    return [[Event.of(event, start) for event in thread] for thread in records] + list(remote)


@contextlib.contextmanager
def profiled(flags: Flags | None) -> Iterator[list[list[Event]]]:
    """Profile the body on this thread if ``flags`` are given; the list that this returns is filled at the end."""
    events: list[list[Event]] = []
    if flags is None:
        yield events
        return
    own = _Profile(flags)
    outer, _here.profile = getattr(_here, "profile", None), own
    autograd._enable_profiler_legacy(flags.config())
    try:
        yield events
    finally:
        records = autograd._disable_profiler_legacy()
        _here.profile = outer
        kept = [[e for e in thread if e.fields["name"] not in ("__start_profile", "__stop_profile")]
                for thread in _merged(records, own.remote)]  # fmt: skip
        for thread in kept:
            for event in thread:
                event.remote = True
        events.extend(kept)


class _GlobalProfiler:
    """The profiles of everything that this worker runs for others; each collects while it is on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._profiles: list[tuple[Any, list[Any]]] = []

    def enable(self, config: Any) -> None:
        """Begin one; ``_enable_server_process_global_profiler``."""
        with self._lock:
            self._profiles.append((config, []))

    def disable(self) -> list[Any]:
        """End the innermost; ``_disable_server_process_global_profiler``."""
        with self._lock:
            _, events = self._profiles.pop()
            return events

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Profile one request, if a profile is on as it begins."""
        with self._lock:
            profiles = list(self._profiles)
        if not profiles:
            yield
            return
        autograd._enable_profiler_legacy(profiles[-1][0])
        try:
            yield
        finally:
            records = autograd._disable_profiler_legacy()
            with self._lock:
                for _, events in profiles:
                    events.append(records)


global_profiler = _GlobalProfiler()
