"""The commands: a command is a file in ``commands/`` and its name in ``COMMANDS``, and nothing else names it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from phalanx.commands import main
from phalanx.topology.environment import read_environment
from phalanx.topology.launchers import LAUNCHERS


def test_every_file_is_a_command() -> None:
    files = {path.stem for path in Path(main.__file__).parent.glob("*.py")}
    assert files - {"__init__", "main"} == set(main.COMMANDS)


@pytest.mark.parametrize("name", main.COMMANDS)
def test_a_command_is_the_function_of_its_files_name(name: str) -> None:
    command = getattr(import_module(f"phalanx.commands.{name}"), name)
    assert isinstance(command, click.Command)
    shown = CliRunner().invoke(main.command, [name, "--help"], prog_name="phalanx")
    assert shown.exit_code == 0
    assert shown.output.startswith(f"Usage: phalanx {name} ")


MISTAKES = {
    "rn -n 2 plain.py": "no such command rn; did you mean run? phalanx --help lists all",
    "run 2 plain.py": "and no program of that name on PATH; did you mean -n 2?",
    "run plan.py": "and no program of that name on PATH; did you mean plain.py?",
    "run missing.py": "missing.py: no such file",
    "run -m no.such.module": "no module of that name",
    "run .": "without a __main__.py",
    "run": "missing argument 'TARGET'; phalanx run --help says more",
    "run -n 0 plain.py": "-n 0",
    "run -n -1 plain.py": "-n -1",
    "run -n many plain.py": "-n many",
    "run -n 10000000 plain.py": "10000000 ranks need about",
    "run --json plain.py": "--dry-run",
    "run -n 2 --stdin 2 plain.py": "--stdin 2",
    "run -x NOT_SET_HERE plain.py": "NOT_SET_HERE",
    "run --tee plain.py": "--log-dir DIR",
    "run -n 2 : -n 1 plain.py": "a job here has one for all ranks",
    "run -n 1 plain.py : -n 1 plain.py": "a job here has one for all ranks",
    "run -hosts a,b,a plain.py": "a is listed twice",
    "run -machinefile nowhere plain.py": "nowhere",
    "run -ppn 1 -n 2 plain.py": "name the hosts, as in -H h1,h2, or leave it out",
    "run --bind cor plain.py": "invalid value for '--bind': 'cor' is not one of 'none', 'core', 'numa'; ",
    "run --bind core -n 100000 plain.py": "or let them share: --bind none",
    "run --device 3 plain.py": "--device 3 is not a device. Give cpu, cuda, cuda:1",
    "run --rehearse 0x4 plain.py": "at least one rank",
    "run --rehearse 2x plain.py": "Write --rehearse 2x4",
    "run --rehearse 2x4 -n 3 plain.py": "leave -n out",
    "run --rehearse 2x4 --device cuda plain.py": "leave --device or --rehearse out",
    "run --rehearse 2x4 --placement random plain.py": "'block', 'cyclic'",
    "run --placement cyclic plain.py": "add --rehearse 2x4",
    "run --rehearse 2x2 -H a:2,b:2 plain.py": "leave --rehearse or the hosts out",
    "run --rehearse 9999x9999 plain.py": "99980001 ranks need about",
    "run --address [2001:db8::9] plain.py": "--address [2001:db8::9]: is not an address of this host",
    "run --mpi -np 2 plain.py": "--mpi mpiexec",
    "run --mpi mpiexec --starter true --hosts a:2 true": "give one of them",
    "run --mpi no-such-mpiexec true": "no such program",
    "run --mpi true true": "not a launcher that Phalanx knows",
    "run --mpi mpiexec --hosts a --hostfile f true": "give one of them",
    "run --mpi mpiexec --hosts a,b,a true": "a is listed twice",
    "run --mpi mpiexec -n 3 --hosts a,b true": "the hosts take 2 ranks",
    "run --mpi mpiexec --ppn 2 true": "--ppn 2",
    "bench allreduce": "is not an operation that can be measured; did you mean all_reduce? choose from ",
    "bench --tune all_reduce": "--tune chooses what it measures",
    "top --zz": "no such option --zz; phalanx top --help lists all",
    "doctor --jsn": "no such option --jsn; did you mean --json? phalanx doctor --help lists all",
    "report --json --html page .": "show a report: give one of them; phalanx report --help says more",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistake_is_one_line_that_says_what_was_meant(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plain.py").touch()
    mpiexec = tmp_path / "bin" / "mpiexec"
    mpiexec.parent.mkdir()
    mpiexec.write_text("#!/bin/sh\necho 'HYDRA build details:'; echo '    Version: 4.3.1'\n")
    mpiexec.chmod(0o755)
    monkeypatch.setenv("PATH", f"{mpiexec.parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["phalanx", *words.split()])
    assert main.main() == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err.startswith("phalanx: ")) == ("", 1, True)
    assert MISTAKES[words] in err


def test_number_of_ranks_behind_the_script_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.py").touch()
    meant = {"plain.py -n 2": "-n 2", "plain.py a --nproc_per_node=2": "--nproc_per_node=2"}
    for words in (*meant, "-n 1 plain.py -n 2", "plain.py -n two"):
        done = CliRunner().invoke(main.command, ["run", "--dry-run", "--json", *words.split()])
        notes = [note.partition("did you mean ")[2] for note in json.loads(done.stdout)["notes"]]
        assert notes == ([f"phalanx run {meant[words]} plain.py …?"] if words in meant else [])


def test_help_lists_every_command() -> None:
    shown = CliRunner().invoke(main.command, ["-h"])
    listed = shown.output.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == sorted(main.COMMANDS)


FIELDS = ["launcher", "rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes"]
FIELDS += ["master_addr", "master_port", "device", "backend"]
env_command: Any = import_module("phalanx.commands.env")
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


def phalanx_env(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command with these variables and nothing else of a launcher's."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ}
    command = [sys.executable, "-m", "phalanx", "env", *arguments]
    return subprocess.run(command, env={**kept, **variables}, capture_output=True, text=True, timeout=600)


def test_json_has_every_fact_and_null_where_only_the_joined_world_can_tell(tmp_path: Path) -> None:
    picture = tmp_path / "place.svg"
    done = phalanx_env("--json", "--svg", str(picture), **HYDRA)
    assert done.returncode == 0, done.stderr
    assert "rank 1 (local rank 0, " in picture.read_text()
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
