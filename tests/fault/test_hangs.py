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
from tests.support.hang_cases import FRAME, HANGS, USUAL

__all__ = ["launcher"]


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
    options = ("--warn-after", "0.8", "--report-after", "2.5", "--report-dir", str(folder))
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


def test_ranks_that_go_on_cause_no_line(launcher: Launcher) -> None:
    path = launcher.script(FRAME + "for _ in range(20):\n    time.sleep(0.1)\n    world.all_reduce(x)\n")
    done = launcher.run("-n", "3", "--warn-after", "30", path)
    assert done.code == 0
    assert " wait" not in done.err_text


def test_a_rank_that_is_late_is_named_once_and_the_job_goes_on(launcher: Launcher, tmp_path: Path) -> None:
    go_on = tmp_path / "go_on"
    body = f"""
if rank == 1:
    while not os.path.exists({str(go_on)!r}):
        time.sleep(0.1)  # HERE
world.all_reduce(x)
print(x[0].item())
"""
    script = FRAME + body
    place = numbered(script, "HERE")
    folder = tmp_path / "reports"
    job = launcher.start("-n", "3", "--warn-after", "2", "--report-dir", str(folder), launcher.script(script))
    assert job.process.stderr is not None
    told = re.compile(
        rf"phalanx: rank 1 is at {place} .*; ranks 0, 2 wait for it in all_reduce #\d+ at .*, for \d+ s now"
    )
    for line in iter(job.process.stderr.readline, b""):
        if told.search(line.decode()):
            break
    go_on.touch()
    done = job.finish()
    assert done.code == 0
    assert done.out.count(b"27.0") == 3
    assert not told.search(done.err_text), done.err_text
    assert list(folder.iterdir()) == []


def test_a_job_whose_folder_is_removed_is_watched_on(launcher: Launcher, tmp_path: Path) -> None:
    folder, said = tmp_path / "build", tmp_path / "said"
    folder.mkdir()
    body = f"""
if rank == 1:
    os.rmdir({str(folder)!r})
    while not os.path.exists({str(said)!r}):
        time.sleep(0.1)
world.all_reduce(x)
"""
    job = launcher.start("-n", "3", "--warn-after", "1", launcher.script(FRAME + body), cwd=folder)
    assert job.process.stderr is not None
    for line in iter(job.process.stderr.readline, b""):
        if re.search(rb"rank 1 is at \S+:\d+ .*; ranks 0, 2 wait for it", line):
            break
    said.touch()
    done = job.finish()
    assert done.code == 0, done.err_text
    assert "Traceback" not in done.err_text


@pytest.mark.parametrize("option", [("--warn-after", "0"), ("--quiet", "--warn-after", "0")])
def test_the_warnings_can_be_turned_off(launcher: Launcher, option: tuple[str, ...]) -> None:
    path = launcher.script(FRAME + "if rank == 1:\n    time.sleep(7)\nworld.all_reduce(x)\n")
    done = launcher.run("-n", "3", *option, path)
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
