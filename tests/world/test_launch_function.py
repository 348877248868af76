"""``phalanx.launch(function)``: ranks for a function of a running interpreter."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.launch_support import MARK, comm, marked, wait_for

import phalanx
from phalanx.errors import ArgumentError, LaunchError

PATIENCE_S = 300.0  # no busy machine needs as long


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    phalanx.launch(int, n=1)  # the first call imports modules, and opens what they keep open


def total(scale: float, *, shift: float = 0.0) -> tuple[int, int, str, torch.Tensor]:
    world = phalanx.init()
    tensor = torch.full((3,), scale * (world.rank + 1) + shift)
    world.all_reduce(tensor)
    phalanx.close()
    return world.rank, world.size, world.launcher, tensor


def test_results_come_back_by_rank() -> None:
    results = phalanx.launch(total, (2.0,), {"shift": 1.0}, n=3)
    for rank, (own, size, launcher, tensor) in enumerate(results):
        assert (own, size, launcher) == (rank, 3, "phalanx")
        assert tensor.tolist() == [15.0] * 3
    for rank, tensor in enumerate(phalanx.launch(lambda: torch.full((4_000_000,), float(os.environ["RANK"])), n=2)):
        assert torch.equal(tensor, torch.full((4_000_000,), float(rank)))
    assert phalanx.launch(sys.exit, (0,), n=2) == phalanx.launch(sys.exit, n=2) == [None, None]


def test_fresh_interpreters_give_the_same() -> None:
    shift = 5
    results = phalanx.launch(
        lambda: (total(2.0), shift, os.environ["OWN"]), n=2, start_method="spawn", variables={"OWN": "set"}
    )
    for rank, ((own, size, launcher, tensor), *others) in enumerate(results):
        assert (own, size, launcher, tensor.tolist()) == (rank, 2, "phalanx", [6.0] * 3)
        assert others == [5, "set"]


def test_ranks_compute_with_their_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.randn(2_000_000).exp()  # OpenMP has threads in this process

    def threads() -> tuple[int, float]:
        product = torch.ones(400, 400).matmul(torch.ones(400, 400))[0, 0]
        return torch.get_num_threads(), ((torch.ones(2_000_000) + 1).sum() + product).item()

    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert phalanx.launch(threads, n=2) == [(3, 4_000_400.0)] * 2


def test_output_comes_line_by_line_with_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    def speak() -> None:
        print("out ä")
        print("err", file=sys.stderr)
        os.write(1, b"no end")

    assert phalanx.launch(speak, n=2, variables={"LANG": "C"}) == [None, None]
    said = capsys.readouterr()
    assert sorted(said.out.splitlines()) == [
        f"[rank {rank}] {text}" for rank in range(2) for text in ("no end", "out ä")
    ]
    assert sorted(said.err.splitlines()) == ["[rank 0] err", "[rank 1] err"]
    phalanx.launch(print, ("plain",), n=1, prefix=False, quiet=False)
    said = capsys.readouterr()
    assert said.out == "plain\n"
    assert said.err.startswith("phalanx.launch: 1 rank of print")


def test_what_ranks_have_of_this_interpreter_and_what_not() -> None:
    """Exit handlers, finalisers and children are this process's; random numbers differ where processes' would."""
    kept: list[Any] = []

    def look() -> tuple[str, str, float, bool, str]:
        kept.append(other := tempfile.TemporaryDirectory())
        handler = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        return sys.stdin.read(), other.name, random.random(), handler, os.environ["OWN"]

    with tempfile.TemporaryDirectory() as folder, subprocess.Popen(["sleep", "600"]) as child:
        first, second = phalanx.launch(look, n=2, variables={"OWN": "set"})
        assert Path(folder).is_dir()
        assert child.poll() is None
        child.kill()
    assert "OWN" not in os.environ
    for stdin, made, _, handler, own in (first, second):
        assert (stdin, handler, own) == ("", True, "set")
        assert not Path(made).exists()  # the rank's own finalisers have run
    assert first[2] != second[2]


def fail() -> None:
    world = phalanx.init()
    if world.rank == 1:
        raise ValueError(f"one of {world.size}")
    torch.distributed.barrier()


def test_first_failure_is_raised_with_its_traceback() -> None:
    with pytest.raises(phalanx.RankFailed, match=r"rank 1 of 3 failed: ValueError: one of 3") as raised:
        phalanx.launch(fail, n=3)
    assert (raised.value.rank, raised.value.exit_code) == (1, 1)
    assert 'raise ValueError(f"one of' in str(raised.value)
    assert "phalanx/launch" not in str(raised.value)
    assert phalanx.launch(int, n=2) == [0, 0]


def test_rank_that_does_not_return() -> None:
    ends: list[tuple[Any, int, str]] = [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), 137, "SIGKILL"),
        (lambda: sys.exit(3), 3, "sys.exit"),
        (lambda: sys.exit("the reason"), 1, "failed: the reason"),
        (lambda: os._exit(4), 4, "exit code 4"),
        (lambda: os._exit(0), 0, "ended without a result"),
        (lambda: (number for number in range(3)), 1, "generator that cannot be pickled"),
    ]
    for end, code, said in ends:
        with pytest.raises(phalanx.RankFailed) as raised:
            phalanx.launch(
                lambda end=end, code=code: end() if os.environ["RANK"] == "1" else time.sleep(600 if code else 0), n=2
            )
        assert (raised.value.rank, raised.value.exit_code) == (1, code)
        assert said in str(raised.value)


class _Hollow:
    def __reduce__(self) -> Any:
        return int, ("not a number",)


def test_results_for_cloudpickle_and_those_that_cannot_be_rebuilt() -> None:
    assert [double(4) for double in phalanx.launch(lambda: lambda number: 2 * number, n=2)] == [8, 8]
    with pytest.raises(phalanx.RankFailed, match=r"result of rank 0 of 1 cannot be rebuilt here: ValueError"):
        phalanx.launch(_Hollow, n=1)


def test_arguments_that_cannot_be_right_are_refused() -> None:
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((total,), {"n": 0}, "n=0"),
        ((total,), {"n": True}, "n=True"),
        ((total,), {"n": "many"}, "n='many'"),
        (("total",), {"n": 1}, "takes function: Callable"),
        ((total, 2.0), {"n": 1}, "got 2.0 (float). Write [2.0]"),
        ((total, "ab"), {"n": 1}, "got 'ab' (str). Write ['ab']"),
        ((total,), {"n": 1, "start_method": "forkserver"}, "'forkserver'"),
    ]
    for arguments, options, said in wrong:
        with pytest.raises(ArgumentError, match=re.escape(said)):
            phalanx.launch(*arguments, **options)


def test_rank_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="ranks"):
        phalanx.launch(total, n=10**6)  # nor is there room for as many
    with pytest.raises(phalanx.RankFailed, match="called in a process that is a rank itself"):
        phalanx.launch(lambda: phalanx.launch(int, n=1), n=2)
    with monkeypatch.context() as patched:
        for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
            patched.setenv(name, value)
        with pytest.raises(LaunchError, match="is a rank itself"):
            phalanx.launch(int, n=2)


def test_process_group_is_not_shared_with_forks() -> None:
    phalanx.init()
    try:
        with pytest.raises(LaunchError, match=r"phalanx\.close\(\)"):
            phalanx.launch(total, (1.0,), n=2, start_method="fork")
        with pytest.raises(LaunchError, match=r"phalanx\.close\(\).*fresh interpreter"):  # a lock has no pickle
            phalanx.launch(print, (threading.Lock(),), n=2)
    finally:
        phalanx.close()
    assert [size for _, size, *_ in phalanx.launch(total, (1.0,), n=2)] == [2, 2]


def test_accelerator_that_was_used_prevents_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    opener = os.getpid()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    module = SimpleNamespace(_is_in_bad_fork=lambda: os.getpid() != opener)
    monkeypatch.setattr(torch, "get_device_module", lambda name: module)
    with pytest.raises(LaunchError, match="has used cuda already"):
        phalanx.launch(int, n=2, start_method="fork")
    with pytest.raises(LaunchError, match=r"has used cuda already.*fresh interpreter"):
        phalanx.launch(print, (threading.Lock(),), n=2)
    module._is_in_bad_fork = lambda: False
    assert phalanx.launch(int, n=2, start_method="fork") == [0, 0]


def test_from_another_thread_and_from_two_at_once() -> None:
    results: dict[int, list[Any]] = {}

    def work(number: int) -> None:
        results[number] = phalanx.launch(lambda: (number, os.environ["RANK"]), n=2)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert results == {number: [(number, "0"), (number, "1")] for number in range(3)}


# In a process of its own, which is interrupted and killed.
PROMPT = """
import time, phalanx

def wait(seconds):
    print("waits", flush=True)
    time.sleep(seconds)
    return seconds

print("got", phalanx.launch(wait, (0,), n=2), flush=True)
for _ in range(2):
    try:
        phalanx.launch(wait, (600,), n=2)
    except (KeyboardInterrupt, phalanx.PhalanxError) as error:
        print(repr(error), flush=True)
phalanx.launch(wait, (600,), n=2)
"""


def test_interpreter_goes_on_after_interrupts_and_kills() -> None:
    """A supervisor that is killed leaves no ranks, nor does the interpreter itself."""
    mark = f"prompt-{os.getpid()}-{time.monotonic_ns()}"
    prompt = subprocess.Popen(
        [sys.executable, "-c", PROMPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, MARK: mark},
        start_new_session=True,
    )
    assert prompt.stdout is not None
    said: Iterator[str] = iter(prompt.stdout.readline, "")

    def read_until(word: str) -> str:
        return next(line for line in said if word in line)

    def wait_for_ranks() -> None:
        for rank in range(2):
            assert read_until("waits").startswith("[rank "), rank

    try:
        assert "got [0, 0]" in read_until("got")
        wait_for_ranks()
        os.killpg(prompt.pid, signal.SIGINT)
        assert "phalanx: SIGINT: all 2 ranks have been ended" in read_until("SIGINT")
        assert "KeyboardInterrupt" in read_until("KeyboardInterrupt")
        wait_for_ranks()
        for pid in [pid for pid in marked(mark) if comm(pid) == "phalanx-launch"]:
            os.kill(pid, signal.SIGKILL)
        assert "SIGKILL" in read_until("LaunchError(")
        wait_for_ranks()
        assert list(map(comm, marked(mark))).count("rank-0") == 1  # that of before has gone
        prompt.kill()
        wait_for(lambda: marked(mark) == [])
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
        prompt.communicate()


def test_function_of_main_needs_cloudpickle_in_a_fresh_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    def own() -> None: ...

    own.__module__, own.__qualname__ = "__main__", "own"
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    refused = "own is defined in __main__; define it in a module, or install cloudpickle(?m:$)"
    with pytest.raises(LaunchError, match=refused):
        phalanx.launch(own, n=2, start_method="spawn")
    phalanx.init()  # so that the ranks cannot be forked
    try:
        with pytest.raises(LaunchError, match=refused):
            phalanx.launch(own, n=2)
    finally:
        phalanx.close()
