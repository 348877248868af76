"""The kill matrix on two hosts: falls before, in and after every operation (``support/kill_cases.py``)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.hosts import why_no_hosts
from tests.support.kill_cases import Case
from tests.support.kill_draw import drawn, quick
from tests.support.kill_runs import run_case
from tests.support.remote import RemoteJob, RemoteLauncher, hosts, remote

__all__ = ["hosts", "remote"]  # fixtures

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

CASES = drawn("two hosts", 300)
QUICK = 3


def parameters() -> list[object]:
    """All of them, of which only a few quick ones run in ``make test``."""
    few = quick(CASES, QUICK)
    return [pytest.param(case, id=str(case), marks=[] if case in few else [pytest.mark.fault]) for case in CASES]


@pytest.mark.parametrize("case", parameters())
def test_a_fall_on_two_hosts_is_named_and_leaves_nothing(
    case: Case, remote: RemoteLauncher, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    folder = tmp_path / "told"
    folder.mkdir()
    placed = f"h0:{case.split},h1:{case.world - case.split}"

    def find_victim(job: RemoteJob) -> int:
        # The words before it have become the launcher by exec.
        return job.process.pid if case.victim == "launcher" else zygote_of(remote, case.seed % 2)

    for name, took_s in run_case(case, folder, lambda words: remote.start("-H", placed, *words), find_victim).items():
        record_property(name, took_s)


def zygote_of(remote: RemoteLauncher, host: int) -> int:
    for pid in remote.hosts.processes(host):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "phalanx-zygote":
                return pid
    pytest.fail(f"h{host} has no zygote")
