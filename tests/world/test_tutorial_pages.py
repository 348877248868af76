"""Programs of docs/tutorials.md, docs/world.md and both READMEs: they run as printed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorials.md").read_text()
PROGRAMS = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = re.findall(r"^```console\n\$ (.*?)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
READMES = ("README.md", "README.zh-CN.md")


def test_the_page_has_a_command_for_every_program() -> None:
    assert len(PROGRAMS) == len(COMMANDS) == 5
    for program, (command, _) in zip(PROGRAMS, COMMANDS, strict=True):
        assert program in shlex.split(command)


@pytest.mark.long
@pytest.mark.parametrize(("command", "expected"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_command_of_the_page_prints_what_the_page_says(command: str, expected: str, tmp_path: Path) -> None:
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
    own = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    words = shlex.split(command)
    ended = subprocess.run(words, cwd=tmp_path, env=own, stdin=-3, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == sorted(expected.splitlines())


def test_readmes_are_short_and_in_step() -> None:
    english, chinese = [(ROOT / name).read_text() for name in READMES]
    assert max(english.count("\n"), chinese.count("\n")) <= 120
    for part in (r"^(?:#+|-|\||```\w*)", r"\]\(((?:docs|examples|C)[^)]*)\)", r"[\d.,]+ [µm]?s\b|[\d.]+×"):
        assert re.findall(part, english, re.MULTILINE) == re.findall(part, chinese, re.MULTILINE)


@pytest.mark.parametrize("command", ["phalanx run -n 2 train.py", "python train.py"])
@pytest.mark.parametrize("page", [*READMES, "docs/world.md"])
def test_program_of_a_first_page_runs_as_printed(page: str, command: str, tmp_path: Path) -> None:
    programs = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(programs[0])
    own = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    words = command.split()
    ended = subprocess.run(words, cwd=tmp_path, env=own, stdin=-3, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert re.findall(r"^(?:\[rank 0\] )?(\d) \{'loss'", ended.stdout, re.MULTILINE) == ["0", "1", "2"]
