"""What ``phalanx run`` says of mistakes that Gloo lets pass, or waits in, held word for word against golden texts."""

from __future__ import annotations

import platform
import re
import signal
from pathlib import Path

import pytest
from tests.launch_support import Launcher, launcher
from tests.support.faults import PASSES, PASSES_RIGHTLY, UNUSED, known_of, told_by
from tests.support.golden import await_told, block_of, check_told, without_frames

__all__ = ["launcher"]  # a fixture


@pytest.mark.parametrize("row", ["dtype", "shape", "operation", "gathered", "scattered", "swapped", "skipped"])
def test_a_mistake_that_passes_is_said_once(launcher: Launcher, row: str) -> None:
    script = launcher.script(PASSES)
    done = launcher.run("-n", "3", "-q", "--warn-after", "0", script, str(launcher.directory), "gloo", row)
    assert done.code == 0, done.err_text
    facts = {**known_of(launcher.directory, script, PASSES, 3), "warning": "warning: "}
    told = [line for line in done.err_text.splitlines() if not line.startswith("[rank ")]  # torch's warnings
    check_told(f"{row}.gloo", "\n".join(told), facts)


def test_nothing_is_said_of_lines_if_the_user_wants_that(launcher: Launcher) -> None:
    script = launcher.script(PASSES)
    arguments = ("-n", "3", "-q", "--warn-after", "0", script, str(launcher.directory), "gloo", "swapped")
    done = launcher.run(*arguments, environment={"PHALANX_CALL_SITES": "ignore"})
    assert (done.code, "phalanx: " in done.err_text) == (0, False), done.err_text


def test_a_program_that_is_right_is_not_warned_of(launcher: Launcher) -> None:
    script = launcher.script(PASSES_RIGHTLY)
    done = launcher.run("-n", "3", "-q", "--warn-after", "0", script, str(launcher.directory / "cache"))
    assert (done.code, "phalanx: " in done.err_text) == (0, False), done.err_text


@pytest.mark.parametrize("row", ["dtype", "shape", "swapped"])
def test_strict_ends_the_job_with_the_mistake(launcher: Launcher, row: str) -> None:
    """Also if that is only found when the ranks have ended."""
    text = PASSES + ("time.sleep(600)\n" if row == "dtype" else "")
    script = launcher.script(text)
    done = launcher.run("-n", "3", "-q", "--strict", script, str(launcher.directory), "gloo", row)
    assert done.code == 1, done.err_text
    told = [line for line in done.err_text.splitlines() if not line.startswith("[rank ")]
    facts = {**known_of(launcher.directory, script, text, 3), "warning": ""}
    check_told(f"{row}.gloo", "\n".join(told), facts)


@pytest.mark.parametrize("row", ["root", "kind", "batches"])
def test_calls_that_differ_are_listed_while_the_ranks_wait(launcher: Launcher, row: str) -> None:
    script = launcher.script(PASSES)
    said = launcher.directory / "said"
    with open(said, "wb") as err:
        arguments = ("--warn-after", "0.5", script, str(launcher.directory), "gloo", row)
        job = launcher.start("-n", "3", "-q", *arguments, stderr=err)

    await_told(
        f"waits-{row}.gloo",
        said.read_text,
        lambda: known_of(launcher.directory, script, PASSES, 3),
        lambda: job.process.poll() is not None,
    )
    job.process.send_signal(signal.SIGINT)
    job.finish()


@pytest.mark.parametrize("size", [2, 3])
def test_parameters_that_a_rank_leaves_unused_are_named(launcher: Launcher, size: int) -> None:
    script = launcher.script(UNUSED)
    done = launcher.run("-n", str(size), "--grace", "60", script, str(launcher.directory), "gloo")
    assert done.code == 1
    facts = {**known_of(launcher.directory, script, UNUSED, size), "host": platform.node()}
    check_told("unused.rank-1", told_by(launcher.directory, "unused", [1])[0], facts)
    check_told("unused.gloo.launcher", without_frames(block_of(done.err_text)), facts)


LEAVES = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
if dist.get_rank() == 1:
    sys.exit() if sys.argv[1] == "sys" else os._exit(0)
dist.all_reduce(torch.ones(4))  # call
"""


@pytest.mark.parametrize("how", ["sys", "os"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_ended_with_code_0_is_said_to_have_ended(launcher: Launcher, size: int, how: str) -> None:
    """All that the others know is that a connection has ended."""
    script = launcher.script(LEAVES)
    done = launcher.run("-n", str(size), "-q", script, how)
    assert done.code == 1, done.err_text
    line = 1 + next(n for n, text in enumerate(Path(script).read_text().splitlines()) if text.endswith("# call"))
    told = rf"\n  rank 1, which ended \(exit code 0\), had not come to all_reduce #2 at \S*script\.py:{line}; "
    assert re.search(told, done.err_text), done.err_text


@pytest.mark.parametrize("call", ["dist.recv(x, 1)", "[dist.send(x, 1) for _ in range(9)]"])
def test_of_a_message_it_is_said_that_the_other_end_has_ended(launcher: Launcher, call: str) -> None:
    text = LEAVES.replace("dist.all_reduce(torch.ones(4))  # call", f"x = torch.ones(1 << 24)\n{call}")
    done = launcher.run("-n", "2", "-q", launcher.script(text), "sys")
    kind = "recv from" if "recv" in call else "send to"
    # A rank may be told before its launcher that the other one has gone.
    told = rf"\n  rank 1(, which ended \(exit code 0\),)? is the other end of {kind} rank 1 \(float32, 64\.0 MiB\) at "
    assert re.search(told, done.err_text), done.err_text
