"""After every test no process, thread, descriptor or shared memory is left; and where the tests' CPU time goes."""

from __future__ import annotations

import os
import signal
import zlib
from collections.abc import Generator, Iterator

import hypothesis
import pytest
import torch

from tests.support.leaks import Holdings
from tests.support.worlds import workers_hosts, world

__all__ = ["workers_hosts", "world"]  # fixtures

torch.set_num_threads(1)

# Ranks without a launcher say for whom they wait when that has lasted for long, as it may on a busy machine.
os.environ["PHALANX_WARN_AFTER"] = "0"

# Whether there is a GPU is asked of NVML: after CUDA has started in this process, no rank that it forks can use one.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

# A shell that starts the tests in the background, or nohup, has these ignored, and every process inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _signum in (signal.SIGQUIT, signal.SIGHUP):
    signal.signal(_signum, signal.SIG_DFL)

# No example is late on a busy machine.
hypothesis.settings.register_profile("phalanx", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("phalanx")

_cpu_s: dict[str, float] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-times", type=int, metavar="N", help="list the N tests that took the most CPU time (-n 0)")
    parser.addoption("--share", metavar="K/N", help="run one of N shares of the tests, K from 0 to N-1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--share"):
        own, shares = map(int, config.getoption("--share").split("/"))
        kept = [item for item in items if zlib.crc32(item.nodeid.encode()) % shares == own]
        config.hook.pytest_deselected(items=set(items) - set(kept))
        items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    before = cpu_s()
    try:
        return (yield)
    finally:
        _cpu_s[item.nodeid] = cpu_s() - before


def cpu_s() -> float:
    """The CPU time of this process and of all that it has waited for, in seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--cpu-times"):
        terminalreporter.section(f"CPU time: {sum(_cpu_s.values()):.0f} s")
        for name in sorted(_cpu_s, key=_cpu_s.__getitem__, reverse=True)[: config.getoption("--cpu-times")]:
            terminalreporter.line(f"{_cpu_s[name]:7.2f}s {name}")


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before = Holdings.now()
    yield
    left = before.left_in_time(Holdings.now, 10.0)  # in which threads that were told to end have closed what they had
    assert not left, f"the test left behind: {', '.join(left)}"
