"""Which files the errors of ranks name, where a script or its user does something unusual with folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.launch_support import Launcher, launcher

__all__ = ["launcher"]  # a fixture

# Rank 0 calls from a file outside the folder of the job, rank 1 from one inside.
SCRIPT = """
import os, sys
elsewhere = sys.argv[1]
os.chdir(elsewhere)
sys.path.insert(0, elsewhere)
import torch, torch.distributed as dist
import helper

dist.init_process_group("phalanx")
try:
    if dist.get_rank() == 0:
        helper.reduce(torch.ones(4))
    else:
        dist.all_reduce(torch.ones(8))
except RuntimeError as error:
    print(error, flush=True)
"""
HELPER = """
import torch.distributed as dist

def reduce(tensor):
    dist.all_reduce(tensor)
"""


@pytest.fixture
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "helper.py").write_text(HELPER)
    (folder / "script.py").write_text("")  # what a name relative to this folder would mean
    return folder


def line_of(text: str, part: str) -> int:
    return 1 + next(number for number, line in enumerate(text.splitlines()) if part in line)


@pytest.mark.parametrize("is_program", [False, True])
def test_files_are_named_from_the_folder_of_the_launch(launcher: Launcher, elsewhere: Path, is_program: bool) -> None:
    """Also by a program that the launcher starts, and after the script has left that folder."""
    script = launcher.script(SCRIPT, "steps/script.py")
    program = Path(launcher.script(f'#!/bin/sh\nexec "{launcher.python}" "$@"\n', "start"))
    program.chmod(0o755)
    done = launcher.run("-n", "2", "-q", *([str(program)] if is_program else []), script, str(elsewhere))
    text = done.out.decode()
    outside = f"rank 0: all_reduce(float32[4], sum) at {elsewhere}/helper.py:{line_of(HELPER, 'all_reduce')}"
    inside = "rank 1: all_reduce(float32[8], sum) at steps/script.py"
    at = line_of(Path(script).read_text(), "dist.all_reduce")
    assert text.count(outside) == text.count(f"{inside}:{at}") == 2, text + done.err_text
