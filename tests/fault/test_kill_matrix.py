"""The kill matrix on one host: processes that fall before, in and after every operation (``support/kill_cases.py``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.launch_support import Launcher, launcher
from tests.support.kill_cases import Case
from tests.support.kill_draw import drawn, quick
from tests.support.kill_runs import run_case
from tests.support.remote import RemoteJob

__all__ = ["launcher"]

CASES = drawn("one host", 450)
QUICK = 5


def parameters() -> list[object]:
    """All of them, of which only a few quick ones run in ``make test``."""
    few = quick(CASES, QUICK)
    return [pytest.param(case, id=str(case), marks=[] if case in few else [pytest.mark.fault]) for case in CASES]


@pytest.mark.parametrize("case", parameters())
def test_a_fall_is_named_and_leaves_nothing(
    case: Case, launcher: Launcher, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    folder = tmp_path / "told"
    folder.mkdir()
    # torch makes a folder of that name for DDP, in the temporary files, with every backend.
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}

    def start(arguments: Sequence[str]) -> RemoteJob:
        with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
            started = launcher.start(*arguments, stdout=out, stderr=err, environment=environment)
        return RemoteJob(started.process, tmp_path)

    def find_victim(job: RemoteJob) -> int:
        return job.process.pid if case.victim == "launcher" else launcher.jobs[0].named("phalanx-zygote")

    for name, took_s in run_case(case, folder, start, find_victim).items():
        record_property(name, took_s)
