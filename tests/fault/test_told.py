"""What every rank and the launcher say when something breaks on one host, on our backend and on Gloo."""

from __future__ import annotations

import os
import platform
import re
import signal
from pathlib import Path

import pytest
from tests.launch_support import Launcher, launcher
from tests.support.faults import (
    ENDS,
    KILLED_WITHIN,
    LATE,
    MISTAKES,
    PASSES,
    PASSES_RIGHTLY,
    UNUSED,
    known_of,
    told_by,
)
from tests.support.golden import (
    FOLDER,
    MOST_LINES,
    await_facts,
    block_of,
    check_facts,
    check_mistakes,
    check_told,
    ending_of,
)

__all__ = ["launcher"]  # a fixture

DIFFERENT = r"^ +the ranks called different operations:$"


def known(launcher: Launcher, script: str, text: str, size: int = 3) -> dict[str, object]:
    return {**known_of(launcher.directory, script, text, size), "host": platform.node()}


def test_no_golden_text_is_longer_than_a_user_reads() -> None:
    texts = {path.name: path.read_text() for path in FOLDER.glob("*.txt")}
    assert {name: text for name, text in texts.items() if len(text.splitlines()) > MOST_LINES} == {}


@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.long) for size in (2, 5))])
def test_every_rank_says_which_calls_differ_or_who_did_not_come(launcher: Launcher, size: int) -> None:
    script = launcher.script(MISTAKES)
    done = launcher.run("-n", str(size), script, str(launcher.directory))
    assert done.code == 0, done.err_text
    facts = known(launcher, script, MISTAKES, size)
    check_mistakes(launcher.directory, facts, size)
    for told in told_by(launcher.directory, "late", [rank for rank in range(size) if rank != 1]):
        check_told("late", told, facts)


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_every_survivor_names_the_rank_that_ended(launcher: Launcher, how: str) -> None:
    script = launcher.script(ENDS)
    done = launcher.run("-n", "3", "--grace", "60", script, str(launcher.directory), "phalanx", how)
    assert done.code != 0
    facts = known(launcher, script, ENDS)
    ended = {
        "killed": r"has ended by signal 9 \(SIGKILL\)",
        "raises": rf"has failed \(ValueError: no item 12 in data\.bin at script\.py:{facts['line raise']}\)",
    }
    for told in told_by(launcher.directory, how, [0, 2]):
        check_facts(
            told,
            rf"PeerLost: rank 1 of the group \(pid {facts['pid 1']} on {facts['host']}\) {ended[how]} "
            rf"while rank [02] was in all_reduce\(float32\[4\], sum\) at script\.py:{facts['line call']}\. ",
            rf"last operation was all_reduce #1 \(float32, 16 B, sum\) at script\.py:{facts['line before']}\. ",
        )
    check_told(f"{how}.launcher", block_of(done.err_text), facts)


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_a_rank_that_was_killed_within_a_call_is_said_with_it(launcher: Launcher, backend: str) -> None:
    script = launcher.script(KILLED_WITHIN)
    done = launcher.run("-n", "3", "--grace", "60", script, str(launcher.directory), backend)
    assert done.code != 0
    facts = known(launcher, script, KILLED_WITHIN)
    call = rf"t was in all_reduce #2 \(float32, 16\.0 MiB, sum\) at script\.py:{facts['line call']}"
    for told in told_by(launcher.directory, "within", [0, 2]) if backend == "phalanx" else []:
        check_facts(
            told, rf"rank 1 of the group \(pid {facts['pid 1']} on .*\) has ended by signal 9 \(SIGKILL\).*\. I{call}\."
        )
    check_facts(
        block_of(done.err_text), "^phalanx: rank 1 of 3 failed$", ending_of(facts), rf"^  i{call}, for [\d.]+ s$"
    )


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_at_the_timeout_it_is_said_that_a_rank_is_stopped(launcher: Launcher, backend: str) -> None:
    script = launcher.script(ENDS)
    done = launcher.run("-n", "3", "--grace", "60", script, str(launcher.directory), backend, "stopped")
    assert done.code == 1
    facts = known(launcher, script, ENDS)
    if backend == "phalanx":
        for told in told_by(launcher.directory, "stopped", [0, 2]):
            check_facts(
                told,
                rf"CollectiveTimeout: rank 1 of the group \(pid {facts['pid 1']} on .*\), which is stopped "
                rf"\(state T\), did not come within 5 s .* at script\.py:{facts['line call']}\. ",
                rf"kill -CONT {facts['pid 1']}\)",
            )
    else:
        check_facts(
            block_of(done.err_text),
            "^phalanx: rank [02] of 3 failed: ",
            r"^  rank 1, which was stopped \(state T\), had not come to all_reduce #2 at "
            rf"script\.py:{facts['line call']}; its last operation was all_reduce #1 ",
        )


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_parameters_that_a_rank_leaves_unused_are_named(launcher: Launcher, backend: str) -> None:
    script = launcher.script(UNUSED)
    done = launcher.run("-n", "3", "--grace", "60", script, str(launcher.directory), backend)
    assert done.code == 1
    facts = known(launcher, script, UNUSED)
    first, of_rank_1, last = told_by(launcher.directory, "unused", [0, 1, 2])
    unused = r"UnusedParameters: rank 1 of the group: no gradient came .* for other_head\.weight, other_head\.bias"
    check_facts(of_rank_1, rf"^phalanx\.errors\.{unused}$")
    check_facts(block_of(done.err_text), rf"^phalanx: rank 1 of 3 failed: phalanx\.errors\.{unused}$")
    for told in (first, last) if backend == "phalanx" else ():
        check_facts(told, rf"PeerLost: rank 1 .* has failed \({unused} at script\.py:{facts['line forward']}\)")


def test_the_launcher_shows_calls_that_differ_once(launcher: Launcher) -> None:
    script = launcher.script(ENDS)
    done = launcher.run("-n", "3", "--grace", "60", script, str(launcher.directory), "phalanx", "size")
    assert done.code == 1
    check_told("size.launcher", block_of(done.err_text), known(launcher, script, ENDS))


@pytest.mark.parametrize("how", ["killed", "late"])
def test_the_launcher_says_of_a_job_over_gloo_what_it_sees(launcher: Launcher, how: str) -> None:
    script = launcher.script(ENDS)
    done = launcher.run("-n", "3", "--grace", "60", script, str(launcher.directory), "gloo", how)
    assert done.code != 0
    check_told(f"{how}.gloo.launcher", block_of(done.err_text), known(launcher, script, ENDS))


def test_the_launcher_lists_calls_over_gloo_that_differ(launcher: Launcher) -> None:
    script = launcher.script(ENDS)
    done = launcher.run("-n", "3", "--grace", "60", script, str(launcher.directory), "gloo", "size")
    assert done.code != 0
    at = rf"at script\.py:{known(launcher, script, ENDS)['line call']}$"
    usual, odd = (rf"all_reduce #2 \(float32, {nbytes} B, sum\) {at}" for nbytes in (16, 32))
    check_facts(block_of(done.err_text), DIFFERENT, rf"^    ranks 0, 2: {usual}", rf"^    rank 1: {odd}")


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_a_rank_that_does_not_come_is_named_while_the_others_wait(launcher: Launcher, backend: str) -> None:
    script = launcher.script(LATE)
    said = launcher.directory / "said"
    with open(said, "wb") as err:
        job = launcher.start(
            "-n", "3", "-q", "--warn-after", "0.5", script, str(launcher.directory), backend, stderr=err
        )

    def await_line(does: str, number: int, call: str, then: str) -> None:
        def facts() -> str:
            lines = known(launcher, script, LATE)
            line = (
                rf"^phalanx: rank 1 is {does}; ranks 0, 2 wait for it in all_reduce #{number} at script\.py:{{{call}}}"
            )
            found = {name.replace(" ", "_"): value for name, value in lines.items()}
            return rf"{line.format(**found)}, for [\d.]+ s now{then.format(**found)}$"

        await_facts(said.read_text, lambda: job.process.poll() is not None, facts)

    at = r"at script\.py:({line_here}|{line_looks}) .*, in no operation"
    await_line(at, 2, "line_call", "; look at the `if` in line {line_branch}")
    (launcher.directory / "go").touch()
    await_line(r"stopped \(state T\), after all_reduce #2 at script\.py:{line_call}", 3, "line_last_call", "")
    os.kill(int(str(known(launcher, script, LATE)["pid 1"])), signal.SIGCONT)
    assert job.finish().code == 0, said.read_text()


def own_lines(err: str) -> str:
    """What the launcher has said: torch's own warnings have a prefix."""
    return "\n".join(line for line in err.splitlines() if not line.startswith("[rank "))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("row", ["dtype", "swapped"])
def test_a_mistake_that_gloo_lets_pass_is_said_once(launcher: Launcher, row: str, strict: bool) -> None:
    """With ``--strict`` it ends the job."""
    script = launcher.script(PASSES)
    options = ("--strict",) if strict else ("--warn-after", "0")
    done = launcher.run("-n", "3", "-q", *options, script, str(launcher.directory), "gloo", row)
    assert done.code == strict, done.err_text
    facts = known(launcher, script, PASSES)
    begin = "^phalanx: " + ("" if strict else "warning: ")
    if row == "dtype":
        at = rf" at script\.py:{facts['line dtype']}$"
        listed = [
            rf"{begin}the ranks called different operations, and the backend gloo has let that pass",
            rf"^  ranks 0, 2: all_reduce #2 \(float32, 16 B, sum\){at}",
            rf"^  rank 1: all_reduce #2 \(int32, 16 B, sum\){at}",
        ]
    else:
        listed = [
            rf"{begin}ranks 0 and 1 of a group make the same calls in different orders",
            rf"at script\.py:{facts['line first']} was call #2 of rank 0 and #3 of rank 1$",
            rf"at script\.py:{facts['line second']} was call #3 of rank 0 and #2 of rank 1$",
            "PHALANX_CALL_SITES=ignore",
        ]
    told = own_lines(done.err_text)
    check_facts(told, *listed)
    assert told.count("phalanx: ") == 1, told


def test_nothing_is_said_of_lines_if_the_user_wants_that(launcher: Launcher) -> None:
    arguments = (
        "-n",
        "3",
        "-q",
        "--warn-after",
        "0",
        launcher.script(PASSES),
        str(launcher.directory),
        "gloo",
        "swapped",
    )
    done = launcher.run(*arguments, environment={"PHALANX_CALL_SITES": "ignore"})
    assert (done.code, "phalanx: " in done.err_text) == (0, False), done.err_text


def test_a_program_over_gloo_that_is_right_is_not_warned_of(launcher: Launcher) -> None:
    script = launcher.script(PASSES_RIGHTLY)
    done = launcher.run("-n", "3", "-q", "--warn-after", "0", script, str(launcher.directory / "cache"))
    assert (done.code, "phalanx: " in done.err_text) == (0, False), done.err_text


@pytest.mark.parametrize("row", ["root", "kind", *(pytest.param(row, marks=pytest.mark.long) for row in ("batches",))])
def test_calls_over_gloo_that_differ_are_listed_while_the_ranks_wait(launcher: Launcher, row: str) -> None:
    script = launcher.script(PASSES)
    said = launcher.directory / "said"
    with open(said, "wb") as err:
        arguments = ("--warn-after", "0.5", script, str(launcher.directory), "gloo", row)
        job = launcher.start("-n", "3", "-q", *arguments, stderr=err)
    usual, odd = {
        "root": (r"broadcast #2 \(float32, 16 B, src=0\)", r"broadcast #2 \(float32, 16 B, src=1\)"),
        "kind": (r"all_reduce #2 \(float32, 16 B, sum\)", r"broadcast #2 \(float32, 16 B, src=0\)"),
        "batches": ("barrier #2", r"all_reduce #2 \(float32, 40 B\)"),
    }[row]
    listed = (
        r"^phalanx: .* wait.*, for [\d.]+ s now.*\n"
        r"  the ranks called different operations:\n"
        rf"    ranks 0, 2: {usual} at script\.py:\d+\n    rank 1: {odd} at script\.py:\d+$"
    )
    await_facts(said.read_text, lambda: job.process.poll() is not None, lambda: listed)
    job.process.send_signal(signal.SIGINT)
    job.finish()


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
def test_a_rank_that_ended_with_code_0_is_said_to_have_ended(launcher: Launcher, how: str) -> None:
    """All that the others know is that a connection has ended."""
    script = launcher.script(LEAVES)
    done = launcher.run("-n", "3", "-q", script, how)
    assert done.code == 1, done.err_text
    line = 1 + next(n for n, text in enumerate(Path(script).read_text().splitlines()) if text.endswith("# call"))
    told = rf"\n  rank 1, which ended \(exit code 0\), had not come to all_reduce #2 at \S*script\.py:{line}; "
    assert re.search(told, done.err_text), done.err_text


def test_of_a_message_it_is_said_that_the_other_end_has_ended(launcher: Launcher) -> None:
    text = LEAVES.replace("dist.all_reduce(torch.ones(4))  # call", "x = torch.ones(1 << 24)\ndist.recv(x, 1)")
    done = launcher.run("-n", "2", "-q", launcher.script(text), "sys")
    # A rank may be told before its launcher that the other one has gone.
    told = (
        r"\n  rank 1(, which ended \(exit code 0\),)? is the other end of recv from rank 1 \(float32, 64\.0 MiB\) at "
    )
    assert re.search(told, done.err_text), done.err_text
