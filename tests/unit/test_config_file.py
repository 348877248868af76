"""``phalanx run --config FILE`` and ``--save-config FILE``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from phalanx.commands import main
from phalanx.commands.run import run
from phalanx.launch.job.config_file import format_config

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))  # what a command line can hold


def dry(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(run, ["--dry-run", "--json", *words])
    assert done.exit_code == 0, done.output
    described: dict[str, Any] = json.loads(done.stdout)
    return described


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "other.py").write_text("")
    (tmp_path / "job.toml").write_text(
        """
        # four ranks
        ranks = 4
        log-dir = "logs"
        tee = true
        quiet = false
        variables = ["A=1"]
        target = "train.py"
        arguments = ["--lr", "0.1"]
        """
    )
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_file_is_as_good_as_a_command_line_but_what_is_typed_counts_more() -> None:
    job = dry("--config", "job.toml")
    assert (job["world_size"], job["target"]["argv"]) == (4, ["train.py", "--lr", "0.1"])
    job = dry("--config", "job.toml", "-np", "2", "other.py")
    assert (job["world_size"], job["target"]["argv"]) == (2, ["other.py"])
    # An option that excludes one of the file takes its place.
    assert dry("--config", "job.toml", "--rehearse", "2x3")["world_size"] == 6
    variables = run.make_context("run", ["--config", "job.toml", "-x", "B=2"]).params["variables"]
    assert set(variables) == {"A=1", "B=2"}  # those of both


def test_a_saved_file_says_the_same(folder: Path) -> None:
    words = ["-np", "3", "--log_dir", 'lögs "1"\\', "--only=0-1", "-q", "-x", "A=b\tc", "-x", "PATH", "--grace", "2.5"]
    words += ["--warn-after", "0.5", "--report-dir", "reports"]
    words += ["train.py", "-n", "", "two\nlines", "007"]
    before = dry(*words, "--save-config", "no")  # after the target: the script's own
    assert before["target"]["argv"][-2:] == ["--save-config", "no"]
    before = dry("--save-config", "saved.toml", *words)
    after = dry("--config", "saved.toml", "--save-config", "again.toml")
    assert before == after
    assert before["target"]["argv"] == ["train.py", "-n", "", "two\nlines", "007"]
    saved = (folder / "saved.toml").read_text()
    assert saved == (folder / "again.toml").read_text()
    assert 'warn-after = 0.5\nreport-dir = "reports"\n' in saved


@given(TEXTS, st.lists(st.one_of(TEXTS, st.integers().map(str))), st.lists(TEXTS))
def test_any_words_come_back_from_a_saved_file(target: str, arguments: list[str], variables: list[str]) -> None:
    words = [word for variable in variables for word in ("-x", variable)]
    typed = run.make_context("run", ["-n", "2", *words, "--", target, *arguments])
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(format_config(typed))
        file.flush()
        read = run.make_context("run", ["--config", file.name])
    assert {**read.params, "config": None} == typed.params


MISTAKES = {
    "rank = 4": "'rank'; did you mean ranks?",
    "n = 4": "its name in a file is ranks",
    "frobnicate = 1": "phalanx run --help",
    "dry-run = true": "--dry-run belongs on the command line",
    "quiet = 1": "quiet = 1: is not true or false",
    "variables = 'A=1'": "is not a list of texts",
    "ranks = true": "is not a text or a number",
    "ranks 4": "is not TOML",
    "ranks = 'many'": "-n many",
    "arguments = ['1']": 'add target = "train.py"',
}


@pytest.mark.parametrize("content", [*MISTAKES, "", "# to save"])
def test_mistake_in_a_file_is_one_line(
    folder: Path, content: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "job.toml").write_text(content)
    words = ["--config", "job.toml" if content else "missing.toml", *([] if "arguments" in content else ["train.py"])]
    if content == "# to save":
        words = ["--save-config", "no/such.toml", "train.py"]
    monkeypatch.setattr("sys.argv", ["phalanx", "run", *words])
    assert main.main() == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert MISTAKES.get(content, "No such file") in err
