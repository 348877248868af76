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
        suite = suite_for(options)
        names = {name_of(test) for test in suite}
        result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(suite)
    skipped = Counter(reason for _, reason in result.skipped)
    for reason, count in skipped.most_common():
        print(f"skipped {count:4}  {reason}")
    failed = {name_of(test) for test, _ in [*result.failures, *result.errors]}
    passed = names - failed - {name_of(test) for test, _ in result.skipped}
    unexpected = sorted(failed - EXPECTED.keys()) + sorted(f"{name} (passes)" for name in passed & EXPECTED.keys())
    for name in sorted(failed & EXPECTED.keys()):
        print(f"expected: {name}: {EXPECTED[name]}")
    for name in unexpected:
        print(f"UNEXPECTED: {name}")
    under = f" under the name of {options.under}" if options.under else ""
    under += f" of {options.hosts} hosts" if options.hosts > 1 else ""
    print(f"{options.ranks} ranks{under}: {len(passed)} passed, {len(failed)} failed, {sum(skipped.values())} skipped")
    return 1 if unexpected else 0


def name_of(test: unittest.TestCase | unittest.TestSuite) -> str:
    assert isinstance(test, unittest.TestCase)
    return test.id().rpartition(".")[2]


if __name__ == "__main__":
    sys.exit(main())
