"""``phalanx env``: what it prints, where, and how it exits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest

from phalanx.place.environment import read_environment
from phalanx.place.launchers import LAUNCHERS

FIELDS = ["launcher", "rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes"]
FIELDS += ["master_addr", "master_port", "device", "backend"]
env_command: Any = import_module("phalanx.commands.env")
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


def phalanx_env(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command with these variables and nothing else of a launcher's."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ}
    command = [sys.executable, "-m", "phalanx", "env", *arguments]
    return subprocess.run(command, env={**kept, **variables}, capture_output=True, text=True, timeout=600)


def test_json_has_every_fact_and_null_where_only_the_joined_world_can_tell() -> None:
    done = phalanx_env("--json", **HYDRA)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert list(shown) == FIELDS
    assert (shown["launcher"], shown["rank"], shown["world_size"]) == ("mpich", 1, 4)
    assert (shown["local_rank"], shown["local_world_size"]) == (0, 2)
    assert shown["node_rank"] is shown["num_nodes"] is None
    text = phalanx_env(**HYDRA).stdout
    for words in ("mpich", "PMI_RANK=1, PMI_SIZE=4", "MPI_LOCALRANKID=0, MPI_LOCALNRANKS=2", "once the ranks have met"):
        assert words in text
    done = phalanx_env("--json", PMI_PORT="node1:4711", PMI_ID="1", MPI_LOCALRANKID="1", MPI_LOCALNRANKS="2")
    shown = json.loads(done.stdout)  # where only MPI knows the world size it says so
    assert (done.returncode, shown["launcher"], shown["rank"], shown["world_size"]) == (0, "mpich", 1, None)
    assert "start it without -pmi-port" in done.stderr
    done = phalanx_env("--json", RANK="3")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "WORLD_SIZE is not set" in done.stderr


def test_the_help_names_every_launcher() -> None:
    shown = phalanx_env("--help").stdout
    assert "\n    mpiexec -n 2 phalanx env\n" in shown
    assert "Exit codes: 0; 2 if" in shown
    text = " ".join(shown.split())
    names = re.search(r"launcher is one of ([\w, ]+) and none", text)
    assert names
    assert names[1].split(", ") == list(dict.fromkeys(row.name for row in LAUNCHERS))
    for row in LAUNCHERS:
        assert f"{row.example} phalanx env" in text


def test_a_missing_module_for_the_quick_calls_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_command, "quick_entry", lambda: "the module could not be loaded (for a test)")
    notes = env_command.view(read_environment({})).notes
    assert any("ctypes" in note and "(for a test)" in note for note in notes)
