"""docs/tutorials.md: its programs, under its commands, print what the page says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "tutorials.md").read_text()
PROGRAMS = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = re.findall(r"^```console\n\$ (.*?)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


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
