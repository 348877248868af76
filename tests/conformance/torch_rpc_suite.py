"""torch's own tests of RPC, remote references and distributed autograd, over Phalanx or over torch's TensorPipe agent.

torch ships them inside its wheel, as classes without an agent that a fixture completes. Those that are tied to no
agent, and those written for TensorPipe's options, 436 in all, run here over either agent. CUDA's are left out, and so
are those of the agent that injects faults, because they test that agent's C++; over Phalanx also those of TorchScript.

    python -m tests.conformance.torch_rpc_suite --agent tensorpipe -k rref --jobs 2

Ends with 1 if a test fails that is not listed in ``EXPECTED``, or passes although it is.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import tempfile
import time
import unittest
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

# agent -> test -> why it cannot pass
EXPECTED: dict[str, dict[str, str]] = {
    "tensorpipe": {},
    "phalanx": {
        "RpcTest.test_non_cont_tensors": (
            "a tensor with more gaps than elements is sent without them, so it arrives contiguous"
        ),
        "DistAutogradTest.test_backward_unused_send_function": (
            "it requires that backward waits for ever if the result of a call is not used; here it ends"
        ),
        "DistAutogradTest.test_no_grad_copy": (
            "it requires that each leaf gets a copy; here the last takes the buffer, as in a backward of one process"
        ),
        "RpcTest.test_rref_leak": "it requires that shutdown complains of references that others hold; they are freed",
        "RpcTest.test_server_process_global_profiler": "there is no profiler of all that a worker runs for others",
        "RpcTest.test_shutdown_errors": "it requires that shutdown goes by torch's own messages, which it disturbs",
        **dict.fromkeys(
            (
                "DistAutogradTest.test_backward_simple_script_call",
                "DistAutogradTest.test_trainer_ps_torchscript_functions",
                "RpcTest.test_async_record_function_cbs_jit_call",
                "RpcTest.test_profiler_with_script_async_rpc",
                "RpcTest.test_profiler_with_script_async_rpc_single_threaded",
                "RpcTest.test_profiler_with_script_remote_rpc",
                "RpcTest.test_profiler_with_script_remote_rpc_single_threaded",
                "RpcTest.test_profiler_with_script_sync_rpc",
                "RpcTest.test_profiler_with_script_sync_rpc_single_threaded",
                "RpcTest.test_rref_get_future",
                "RpcTest.test_stress_heavy_rpc_torchscript",
                "RpcTest.test_wait_all_exit_early_script_function",
                "TensorPipeAgentDistAutogradTest.test_backward_simple_script_call_sparse",
                "RemoteModuleTest.test_forward_async",
                "RemoteModuleTest.test_forward_async_script",
                "RemoteModuleTest.test_forward_sync",
                "RemoteModuleTest.test_forward_sync_script",
                "RemoteModuleTest.test_remote_module_py_pickle_not_supported_script",
                "ThreeWorkersRemoteModuleTest.test_send_remote_module_over_the_wire_script_not_supported",
            ),
            "it calls a script function or sends a script module; Phalanx has no RPC of TorchScript",
        ),
    },
}
# Classes of tests that are wholly TorchScript's, for which Phalanx has no RPC.
LEFT_OUT = {"tensorpipe": (), "phalanx": ("JitRpcTest.", "JitDistAutogradTest.")}


class Outcome(NamedTuple):
    """Tell what became of one test: its name, ``pass``, ``fail`` or ``skip``, and the reason."""

    name: str
    status: str
    reason: str


def arguments() -> argparse.Namespace:
    """The command line; read before torch is imported, because the agent is chosen at ``import torch``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agent", choices=["phalanx", "tensorpipe"], default="phalanx")
    parser.add_argument("-k", dest="word", default="", metavar="REGEX", help="only tests whose Class.name matches")
    parser.add_argument("--jobs", type=int, default=2, help="how many tests run at a time")
    parser.add_argument("--test-timeout", type=int, default=90, metavar="SECONDS")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep each test's output in this folder")
    return parser.parse_args()


def cases() -> dict[str, unittest.TestCase]:
    """The tests by name, each completed by the fixture and made to fork its ranks, ten times quicker than spawning."""
    import torch
    from torch.testing._internal.distributed import rpc_utils
    from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture

    def fork(self: Any) -> None:
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    rpc_utils.SpawnHelper._spawn_processes = fork  # type: ignore[method-assign]
    classes: dict[str, Any] = rpc_utils.generate_tests(
        "", TensorPipeRpcAgentTestFixture, rpc_utils.GENERIC_TESTS + rpc_utils.TENSORPIPE_TESTS, __name__
    )
    loader = unittest.TestLoader()
    found = {}
    for name, case in classes.items():
        globals()[name] = case  # so that functions of the test class can be found where their pickle is read
        for test in loader.getTestCaseNames(case):
            found[f"{name}.{test}"] = case(test)
    return found


def run_in_child(case: unittest.TestCase, log: Path) -> None:
    """Run a test in this process, whose output goes to ``log``, and write the outcome beside that; then end."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    result = unittest.TestResult()
    case.run(result)
    line = "pass "
    if result.skipped:
        line = f"skip {result.skipped[0][1]}"
    elif result.errors or result.failures:
        report = (result.errors + result.failures)[0][1]
        print(report, flush=True)
        found = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception|Lost|Timeout|Failure)\b.*", report, re.MULTILINE)
        ranks = [line for line in found if "exited with error code" not in line and "terminated or timed" not in line]
        line = f"fail {(ranks or found or report.splitlines())[-1][:200]}"
    log.with_suffix(".outcome").write_text(line)
    os._exit(0)


def run_all(waiting: list[tuple[str, unittest.TestCase]], logs: Path, jobs: int, timeout_s: float) -> list[Outcome]:
    """Run every test in a process of its own, forked by the main thread, so many at a time."""
    outcomes: list[Outcome] = []
    running: dict[int, tuple[str, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name, case = waiting.pop(0)
            pid = os.fork()
            if pid == 0:
                run_in_child(case, logs / f"{name}.log")
            running[pid] = name, time.monotonic()
        time.sleep(0.02)
        for pid, (name, began) in list(running.items()):
            ended, took_s = os.waitpid(pid, os.WNOHANG)[0] != 0, time.monotonic() - began
            if not ended and took_s < timeout_s:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # and with it the ranks that are left
            if not ended:
                os.waitpid(pid, 0)
            del running[pid]
            file = logs / f"{name}.outcome"
            text = file.read_text() if file.exists() else f"fail {'its process died' if ended else 'it did not end'}"
            outcomes.append(Outcome(name, text[:4], text[5:]))
            if text[:4] != "skip":
                print(f"{text[:4]}  {took_s:6.2f} s  {name}  {text[5:]}", flush=True)
    return outcomes


def main() -> int:
    """Run the tests and print the counts, the reasons for skipping, and what is not as expected."""
    options = arguments()
    os.environ.update(
        PHALANX_REPLACE="rpc" if options.agent == "phalanx" else "",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(max(10, options.test_timeout - 10)),
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        TP_SOCKET_IFNAME="lo",
    )
    chosen = {
        name: case
        for name, case in cases().items()
        if re.search(options.word, name) and not name.startswith(LEFT_OUT[options.agent])
    }
    if not served_by(options.agent):
        print(f"torch.distributed.rpc does not run over {options.agent} here")
        return 1
    with tempfile.TemporaryDirectory(prefix="phalanx-conformance-") as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        outcomes = run_all(list(chosen.items()), logs, options.jobs, options.test_timeout)
    return report(options.agent, outcomes)


def served_by(agent: str) -> bool:
    """Whether RPC and distributed autograd are those of this agent: a replacement that failed must not pass torch's."""
    from torch.distributed import autograd, rpc

    torch_rpc: Any = rpc
    torch_autograd: Any = autograd
    names = [torch_rpc.TensorPipeAgent, torch_rpc.api._invoke_rpc_builtin, torch_autograd.backward]
    return {str(each.__module__).startswith("phalanx.") for each in names} == {agent == "phalanx"}


def report(agent: str, outcomes: list[Outcome]) -> int:
    """Print what is not as expected and the counts; return the exit status."""
    expected = EXPECTED[agent]
    by_status = {status: {each.name for each in outcomes if each.status == status} for status in ("pass", "fail")}
    skipped = Counter(each.reason for each in outcomes if each.status == "skip")
    for reason, count in skipped.most_common():
        print(f"skipped {count:4}  {reason}")
    for name in sorted(by_status["fail"] & expected.keys()):
        print(f"expected: {name}: {expected[name]}")
    unexpected = sorted(by_status["fail"] - expected.keys())
    unexpected += [f"{name} (passes)" for name in sorted(by_status["pass"] & expected.keys())]
    for name in unexpected:
        print(f"UNEXPECTED: {name}")
    passed, failed = len(by_status["pass"]), len(by_status["fail"])
    print(f"rpc over {agent}: {passed} passed, {failed} failed, {sum(skipped.values())} skipped")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
