"""The options of ``phalanx run`` about ranks that hang: who asks for a report that cannot be written is told so."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

from phalanx.commands.run import run
from phalanx.launch.hang_watch import HangWatch
from phalanx.launch.job.job import Job
from phalanx.launch.job.options import Diagnosis
from phalanx.launch.protocol import Waits
from phalanx.launch.roster import AgentState

REPORTS = ["--report-dir", "reports"]
AFTER = ["--report-after", "9"]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("")
    return "script.py"


def decided(*words: str) -> tuple[Job, str]:
    """The job that these words describe, which is not started, and what is printed about it before it is."""
    done = CliRunner().invoke(run, list(words), standalone_mode=False, catch_exceptions=False)
    assert isinstance(done.return_value, Job)
    return done.return_value, done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-n", "2", *REPORTS, "true"], "--report-dir: no report will be written: only ranks of a Python script"),
        (["-n", "1", *REPORTS, "script.py"], "--report-dir: no report will be written: a single rank"),
        (["-n", "2", "--debug", "1", *REPORTS, "script.py"], "will be written: --debug turns off --warn-after"),
        (["-n", "2", *AFTER, "script.py"], "--report-after: no report will be written: it has no folder"),
        (["-n", "2", *REPORTS, *AFTER, "true"], "--report-dir and --report-after: no report will be written: only"),
    ],
)
def test_a_report_that_will_not_be_written_is_a_note(script: str, words: list[str], said: str) -> None:
    _, printed = decided(*words)
    assert printed.startswith("phalanx: note: ")
    assert said in printed
    assert printed.count("\n") == 1
    assert not Path("reports").exists()
    assert decided("-q", *words)[1] == ""


def test_the_folder_is_made_for_ranks_that_are_watched(script: str) -> None:
    job, printed = decided("-n", "2", *REPORTS, *AFTER, script)
    assert printed == ""
    assert Path("reports").is_dir()
    assert (job.diagnosis.report_dir, job.diagnosis.report_after_s) == (str(Path("reports").absolute()), 9.0)
    job, printed = decided("-n", "2", "--log-dir", "logs", *AFTER, script)
    assert printed == ""
    assert job.diagnosis.report_dir == str(Path("logs").absolute())
    for words in (["-n", "2", "true"], ["--log-dir", "logs", "true"], ["--warn-after", "0", script]):
        assert decided(*words)[1] == ""


def test_a_job_that_is_debugged_is_watched_only_if_the_user_says_so(script: str) -> None:
    """A line would stand between the debugger's prompt and the answer."""
    assert decided("-n", "2", "--debug", "1", script)[0].diagnosis.warn_after_s == 0.0
    assert decided("-n", "2", "--debug", "1", "--warn-after", "7", script)[0].diagnosis.warn_after_s == 7.0


def test_ranks_are_asked_before_the_wait_is_long_enough_for_a_line() -> None:
    job, send, clock = Mock(ranks=2, diagnosis=Diagnosis(warn_after_s=5.0)), Mock(), Mock(return_value=0.0)
    agent = AgentState(0, "here", [], link=Mock())
    watch = HangWatch(job, [agent], list, send, Mock(), clock)
    for waited_s, asks in ((4.5, False), (4.8, True)):
        clock.return_value += 10.0
        watch.hear_waits(agent, Waits(waited_s=waited_s, still_s=waited_s, stopped=[]))
        watch.look()
        assert send.called == asks
