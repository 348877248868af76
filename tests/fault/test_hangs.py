"""Jobs that hang, each for one reason: the report's first sentence names the rank that keeps the others, and its line.

The line is found in the script by the comment ``# HERE``, so that no test counts lines.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest
from tests.launch_support import Launcher, RunningJob, launcher, wait_for

__all__ = ["launcher"]

# What all begin with.
FRAME = """\
import os, signal, sys, threading, time
import torch
import torch.distributed as dist
import phalanx

world = phalanx.init()
rank, x = world.rank, torch.ones(4)
pairs = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
everybody = dist.new_group()
lock = threading.Lock()


def compute():
    while True:
        time.sleep(0.01)  # THERE


for step in range(2):
    world.step(step)
    world.all_reduce(x)  # LAST
"""

# Each: the body, and what the first sentence says. HERE stands for the place of this comment, WAIT for that of the
# others' call, ALSO for that of another call, LAST for that of the last one before, and THERE for that in compute().
# The line with BRANCH is to be looked at, as the end of the sentence says; without one the sentence has no such end.
HANGS = {
    "the interpreter's lock held in C": (
        """
        if rank == 0:  # BRANCH
            9 ** 10**8  # HERE
        world.all_reduce(x)  # WAIT
        """,
        r"rank 0 is at HERE .*, in no operation; ranks 1-2 wait for it in all_reduce #\d+ at WAIT",
    ),
    "stopped": (
        """
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        world.all_reduce(x)  # WAIT
        """,
        r"rank 1 is stopped \(state T\), after all_reduce #\d+ at LAST; "
        r"ranks 0, 2 wait for it in all_reduce #\d+ at WAIT",
    ),
    "stopped in the operation": (
        """
        from phalanx.watch import recorder, records
        pids = world.all_gather_object(os.getpid())
        def stop_in_it():
            while not any(record.under_way for record in records.read_memory(recorder.own_memory()).records):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == 1:
            threading.Thread(target=stop_in_it).start()
        while rank == 0 and open(f"/proc/{pids[1]}/stat").read().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        world.all_reduce(torch.ones(1 << 20))  # WAIT
        """,
        r"rank 1 is stopped \(state T\), in all_reduce #\d+ at WAIT; ranks 0, 2 wait for it in all_reduce #\d+ at WAIT",
    ),
    "swapped calls of two groups": (
        """
        if rank == 0:  # BRANCH
            dist.all_reduce(x, group=pairs[0])  # HERE
            dist.all_reduce(x, group=everybody)
        else:
            dist.all_reduce(x, group=everybody)  # WAIT
            if rank == 1: dist.all_reduce(x, group=pairs[0])
        """,
        r"ranks 0-1 wait for each other: rank 0 is in all_reduce #1 of group '\S+' at HERE, "
        r"rank 1 is in all_reduce #1 of group '\S+' at WAIT",
    ),
    "a chain": (
        """
        if rank == 0:
            dist.all_reduce(x, group=pairs[0])  # WAIT
        if rank == 1:
            dist.all_reduce(x, group=pairs[1])  # ALSO
        if rank == 2:
            compute()
        """,
        r"rank 2 is at THERE time\.sleep\(0\.01\)  # \w+, in no operation; "
        r"ranks 0-1 wait for it in all_reduce #1 of group '\S+' at WAIT "
        r"and all_reduce #1 of group '\S+' at ALSO",
    ),
    "a message that is never sent": (
        """
        if rank == 0:
            dist.recv(x, 2)  # WAIT
        if rank == 2:
            compute()
        """,
        r"rank 2 is at THERE .*, in no operation; rank 0 waits for it in recv from rank 2 at WAIT",
    ),
    "a script that has ended, but for a thread": (
        """
        if rank == 1:
            threading.Thread(target=time.sleep, args=(300,), name="saver").start()
            sys.exit()
        world.all_reduce(x)  # WAIT
        """,
        r"rank 1 is at the end of its script, waiting for its other threads to end, in no operation; "
        r"ranks 0, 2 wait for it in all_reduce #\d+ at WAIT",
    ),
}

# One of each kind of sentence; the others differ in what keeps the rank.
USUAL = (
    "the interpreter's lock held in C",
    "stopped",
    "swapped calls of two groups",
    "a chain",
    "a message that is never sent",
)


def numbered(script: str, pattern: str) -> str:
    """The pattern with the places of the comments."""
    for number, line in enumerate(script.splitlines(), 1):
        mark = line.rpartition("# ")[2]
        if mark in ("HERE", "THERE", "WAIT", "ALSO", "LAST"):
            pattern = re.sub(rf"\b{mark}\b", rf"script\\.py:{number}", pattern)
    return pattern


def hint(script: str) -> str:
    for number, line in enumerate(script.splitlines(), 1):
        if line.endswith("  # BRANCH"):
            return f"the `{re.split('[ :]', line.strip())[0]}` in line {number}"
    return ""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in USUAL else [pytest.mark.long]) for name in HANGS]
)
def test_the_first_sentence_of_the_report_names_the_rank_and_the_line(launcher: Launcher, name: str) -> None:
    body, pattern = HANGS[name]
    script = FRAME + "\n".join(line.removeprefix(" " * 8) for line in body.splitlines()) + "\ntime.sleep(300)\n"
    path = launcher.script(script)
    folder = launcher.directory / "reports"
    options = ("--warn-after", "0.8", "--report-after", "1.5", "--report-dir", str(folder))
    expected = numbered(script, pattern)
    advice = f"; look at {hint(script)}" if hint(script) else ""
    errors = launcher.directory / "errors"
    with open(errors, "wb") as file:
        job = launcher.start("-n", "3", *options, path, stderr=file)
    interrupted_after(job, folder, expected, errors, rf"phalanx: {expected}, for \d+ s now{advice}\n")
    newest = max(folder.glob("hang-*.json"), key=lambda path: int(path.stem.split("-")[1]))
    assert json.loads(newest.read_text())["hint"] == hint(script)
    shown = phalanx("report", str(folder))
    assert shown.stdout.splitlines()[0].endswith(f"{advice}."), shown.stdout + shown.stderr


def interrupted_after(job: RunningJob, folder: Path, expected: str, errors: Path, line: str) -> None:
    """Wait for a report with a verdict, and for a line on standard error, and end the job.

    On a busy machine a rank may be so late in its first calls that there is a report on that before, and that the first
    line names it too; then the next one comes after the report.
    """

    def verdicts() -> list[str]:
        files = sorted(folder.glob("hang-*.json"), key=lambda path: int(path.stem.split("-")[1]))
        return [json.loads(path.read_text())["verdict"] for path in files]

    def is_there() -> bool:
        found = any(re.match(expected, verdict) for verdict in verdicts())
        return found and re.search(line, errors.read_text()) is not None

    def complaint() -> str:
        return f"{verdicts()}\ndo not end with\n{expected}, or no line is\n{line}\n{errors.read_text()}"

    wait_for(lambda: is_there() or job.process.poll() is not None, complaint=complaint)
    assert is_there(), complaint()
    job.process.send_signal(signal.SIGINT)
    job.finish()
    assert re.fullmatch(expected, verdicts()[-1]), complaint()


def phalanx(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "phalanx", *arguments], capture_output=True, text=True, timeout=240, env=os.environ
    )


def test_the_report_has_evidence_for_people_for_programs_and_for_torch(launcher: Launcher, tmp_path: Path) -> None:
    body = """
    if rank == 1:
        compute()
    with phalanx.label("evaluation"):
        world.all_reduce(x)
    """
    path = launcher.script(FRAME + indent(body, "").replace("\n    ", "\n"))
    folder = tmp_path / "reports"
    errors = tmp_path / "errors"
    options = ("--report-after", "1", "--warn-after", "0.5", "--report-dir", str(folder))
    with open(errors, "wb") as file:
        job = launcher.start("-n", "3", *options, path, stderr=file)
    there = r"rank 1 is at .*script\.py:\d+ time\.sleep\(0\.01\)  # THERE, in no operation; .*"
    interrupted_after(job, folder, there, errors, there)
    shown = phalanx("report", str(folder))
    assert shown.returncode == 0, shown.stderr
    first, *rest = shown.stdout.splitlines()
    assert re.match(r"Rank 1 is at .*script\.py:\d+ time\.sleep\(0\.01\)  # THERE, in no operation; ranks 0, 2 ", first)
    text = "\n".join(rest)
    assert "in all_reduce #" in text
    assert 'in step 1, "evaluation", for' in text
    assert "in compute" in text
    assert "rank 1 is at" in text
    assert "ranks 0, 2 are at" in text
    values = json.loads(phalanx("report", str(folder), "--json").stdout)
    assert values["awaited"] == [1]
    assert values["waiting"] == [0, 2]
    assert [rank["rank"] for rank in values["ranks"]] == [0, 1, 2]
    page = tmp_path / "page.html"
    written = phalanx("report", str(folder), "--html", str(page))
    assert written.stdout.startswith(f"phalanx report: wrote {page} ("), written.stderr
    assert re.search(r"<h1>Rank 1 is at .*look at the <code>if</code> in line \d+\.</h1>", page.read_text())
    assert all(f'aria-label="operations of rank {rank}"' in page.read_text() for rank in range(3))
    latest = max(folder.glob("hang-*-torch"), key=lambda path: int(path.name.split("-")[1]))
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(latest)]
    analysed = subprocess.run([*command, "--prefix", "rank_"], capture_output=True, text=True, timeout=240)
    assert analysed.returncode == 0, analysed.stderr
    assert "missing ranks: {1}" in analysed.stdout + analysed.stderr


@pytest.mark.long
def test_ranks_that_go_on_cause_no_line(launcher: Launcher) -> None:
    """For longer than one of them may wait."""
    path = launcher.script(FRAME + "for _ in range(100):\n    time.sleep(0.1)\n    world.all_reduce(x)\n")
    done = launcher.run("-n", "3", "--warn-after", "8", path)
    assert done.code == 0
    assert " wait" not in done.err_text


def test_a_rank_that_is_late_is_named_once_and_the_job_goes_on(launcher: Launcher, tmp_path: Path) -> None:
    """Also if the folder in which the job was started has gone meanwhile."""
    go_on, folder, reports = tmp_path / "go_on", tmp_path / "build", tmp_path / "reports"
    folder.mkdir()
    body = f"""
if rank == 1:
    os.rmdir({str(folder)!r})
    while not os.path.exists({str(go_on)!r}):
        time.sleep(0.1)
world.all_reduce(x)
print(x[0].item())
"""
    options = ("--warn-after", "2", "--report-dir", str(reports))
    job = launcher.start("-n", "3", *options, launcher.script(FRAME + body), cwd=folder)
    assert job.process.stderr is not None
    told = re.compile(
        r"phalanx: rank 1 is at \S*script\.py:\d+ .*; ranks 0, 2 wait for it in all_reduce #\d+ at .*, for \d+ s now"
    )
    for line in iter(job.process.stderr.readline, b""):
        if told.search(line.decode()):
            break
    go_on.touch()
    done = job.finish()
    assert done.code == 0, done.err_text
    assert done.out.count(b"27.0") == 3
    assert not told.search(done.err_text), done.err_text
    assert "Traceback" not in done.err_text
    assert list(reports.iterdir()) == []


def test_the_warnings_can_be_turned_off(launcher: Launcher) -> None:
    path = launcher.script(FRAME + "if rank == 1:\n    time.sleep(7)\nworld.all_reduce(x)\n")
    done = launcher.run("-n", "3", "--warn-after", "0", path)
    assert done.code == 0
    assert " wait for it" not in done.err_text


def test_a_folder_without_a_report_and_a_file_that_is_none_are_refused(tmp_path: Path) -> None:
    empty = phalanx("report", str(tmp_path))
    assert empty.returncode == 2
    assert f"{tmp_path} has no report. phalanx run --report-dir" in empty.stderr
    assert f"--log-dir {tmp_path}" in empty.stderr
    (tmp_path / "hang-1.json").write_text("[]")
    wrong = phalanx("report", str(tmp_path))
    assert wrong.returncode == 2
    assert "not a report" in wrong.stderr
    for values in ('{"version": 2, "awaited": 5}', "[" * 100_000):
        (tmp_path / "hang-2.json").write_text(values)
        broken = phalanx("report", str(tmp_path))
        assert broken.returncode == 2
        assert "Traceback" not in broken.stderr
    gone = phalanx("report", str(tmp_path / "nothing"))
    assert gone.returncode == 2
    assert "No such file" in gone.stderr
