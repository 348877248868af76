"""torch's own distributed test suite, run against the backend ``phalanx``.

torch ships ``DistributedTest`` inside its wheel and decides by the backend's name which tests it runs. Under
the name of another backend (``--under mpi``, ``--under gloo``) the decorators that skip tests are evaluated for that
name while the tests still create Phalanx's backend, so that tests reserved for Gloo or MPI run as well.

    python -m tests.conformance.torch_suite --ranks 3
    python -m tests.conformance.torch_suite --ranks 3 --under mpi
    python -m tests.conformance.torch_suite --ranks 2 --under gloo

With ``--hosts`` the ranks take themselves for ranks of several hosts, so there is shared memory inside each of them
and Gloo between.

    python -m tests.conformance.torch_suite --ranks 4 --hosts 2

Ends with 1 if a test fails that is not listed in ``EXPECTED``, or passes although it is.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

from tests.support.islands import pretend_host

# test -> why it cannot pass under another name than Gloo's own
_NAMED_GLOO = "torch refuses monitored_barrier unless the backend is named gloo"
EXPECTED = {
    "test_monitored_barrier_gloo": _NAMED_GLOO,
    "test_monitored_barrier_gloo_rank_0_timeout": _NAMED_GLOO,
    "test_monitored_barrier_gloo_subgroup": _NAMED_GLOO,
}


def arguments() -> argparse.Namespace:
    """The command line; read before torch's suite is imported, which takes its settings from the environment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--under", choices=["gloo", "mpi"], help="evaluate skip conditions for this name")
    parser.add_argument("--hosts", type=int, default=1, help="the ranks take themselves for ranks of so many hosts")
    parser.add_argument("--filter", default="", metavar="REGEX", help="only the tests whose name matches")
    parser.add_argument("--test-timeout", type=int, default=60, metavar="SECONDS")
    return parser.parse_args()


class Report(unittest.TextTestResult):
    """Prints a line per test and keeps what happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.statuses: dict[str, tuple[str, str]] = {}
        self._started = 0.0

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        self._started = time.monotonic()
        super().startTest(test)

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().addSuccess(test)
        self._note(test, "pass")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        super().addSkip(test, reason)
        self._note(test, "skip", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        super().addFailure(test, err)
        self._note(test, "fail", self._reason(test, err))

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        super().addError(test, err)
        self._note(test, "fail", self._reason(test, err))

    def _note(self, test: unittest.TestCase, status: str, reason: str = "") -> None:
        name = test.id().rpartition(".")[2]
        self.statuses[name] = (status, reason)
        if status != "skip":
            print(f"{status}  {time.monotonic() - self._started:6.2f} s  {name}  {reason}", flush=True)

    def _reason(self, test: unittest.TestCase, err: Any) -> str:
        lines: list[str] = self._exc_info_to_string(err, test).splitlines()  # type: ignore[attr-defined]
        errors = [line for line in lines if re.match(r"\w*(\.\w+)*(Error|Exception|Mismatch|Lost|Timeout)\b", line)]
        return (errors or lines)[-1][:200]


def case_for(alias: str | None) -> Any:
    """Import torch's suite for phalanx, with the skip conditions of that name or of another one."""
    from torch.testing._internal import common_distributed as common

    for feature in ("ddp", "subgroup", "plugin"):
        common.DistTestCases.backend_feature[feature].update({"phalanx", alias or "phalanx"})
    common.DistTestCases.skip_collective["allgather_coalesced"].discard("mpi")
    from torch.testing._internal.distributed import distributed_test

    # torch's own MPI backend tells the profiler of its operations from C++, as asynchronous events. This one does not.
    for names in (
        distributed_test.PROFILING_SUPPORTED_BACKENDS,
        distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
    ):
        names[:] = [name for name in names if name != "mpi"]

    if alias:

        class Alias(str):
            """The backend's name, which also equals the other one where a test asks for it at run time."""

            def __eq__(self, other: object) -> bool:
                return str.__eq__(self, other) or other == alias

            def __ne__(self, other: object) -> bool:
                return not self == other

            def __hash__(self) -> int:
                return hash(alias)

        distributed_test.BACKEND = Alias("phalanx")

    class Case(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        pass

    return Case


def suite_for(options: argparse.Namespace) -> unittest.TestSuite:
    """The tests, made to fork their ranks, which is ten times quicker than spawning."""
    import torch

    case = case_for(options.under)

    class Forked(case):  # type: ignore[valid-type, misc]
        @classmethod
        def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **given: Any) -> None:
            if options.hosts > 1:
                pretend_host(rank * options.hosts // options.ranks)
            super()._run(rank, test_name, file_name, pipe, **given)

        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def tearDown(self) -> None:
            processes = list(self.processes)
            super().tearDown()
            for process in processes:
                process.join(2)
                if process.is_alive():
                    process.kill()
                    process.join(5)

    names = unittest.TestLoader().getTestCaseNames(Forked)
    return unittest.TestSuite(Forked(name) for name in names if re.search(options.filter, name))


def main() -> int:
    """Run the suite and print the counts, the reasons for skipping, and what is not as expected."""
    options = arguments()
    with tempfile.TemporaryDirectory(prefix="phalanx-conformance-") as folder:
        (Path(folder) / "barrier").mkdir()
        os.environ.update(
            BACKEND=options.under or "phalanx",
            WORLD_SIZE=str(options.ranks),
            TEMP_DIR=folder,
            DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(options.test_timeout),
            OMP_NUM_THREADS="1",
            GLOO_SOCKET_IFNAME="lo",
        )
        with open(os.devnull, "w") as nowhere:
            runner = unittest.TextTestRunner(stream=nowhere, resultclass=Report, verbosity=0)
            report = runner.run(suite_for(options))
    assert isinstance(report, Report)
    skipped = Counter(reason for status, reason in report.statuses.values() if status == "skip")
    for reason, count in skipped.most_common():
        print(f"skipped {count:4}  {reason}")
    failed = {name for name, (status, _) in report.statuses.items() if status == "fail"}
    passed = {name for name, (status, _) in report.statuses.items() if status == "pass"}
    unexpected = sorted(failed - EXPECTED.keys()) + sorted(f"{name} (passes)" for name in passed & EXPECTED.keys())
    for name in sorted(failed & EXPECTED.keys()):
        print(f"expected: {name}: {EXPECTED[name]}")
    for name in unexpected:
        print(f"UNEXPECTED: {name}")
    under = f" under the name of {options.under}" if options.under else ""
    under += f" of {options.hosts} hosts" if options.hosts > 1 else ""
    print(f"{options.ranks} ranks{under}: {len(passed)} passed, {len(failed)} failed, {sum(skipped.values())} skipped")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
