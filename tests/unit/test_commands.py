"""The commands: a command is a file in ``commands/`` and its name in ``COMMANDS``, and nothing else names it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from phalanx.commands import main


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("rn -n 2 plain.py", "no such command rn; did you mean run? phalanx --help lists all"),
        ("run 2 plain.py", "and no program of that name on PATH; did you mean -n 2?"),
        ("run plan.py", "and no program of that name on PATH; did you mean plain.py?"),
        ("run -n 2 : -n 1 plain.py", "a job here has one for all ranks"),
        ("run -n 1 plain.py : -n 1 plain.py", "a job here has one for all ranks"),
        ("run -ppn 1 -n 2 plain.py", "name the hosts, as in -H h1,h2, or leave it out"),
        ("run", "missing argument 'TARGET'; phalanx run --help says more"),
        ("run --bind cor plain.py", "invalid value for '--bind': 'cor' is not one of 'none', 'core', 'numa'; "),
        ("bench allreduce", "is not an operation that can be measured; did you mean all_reduce? choose from "),
        ("top --zz", "no such option --zz; phalanx top --help lists all"),
        ("doctor --jsn", "no such option --jsn; did you mean --json? phalanx doctor --help lists all"),
        ("report --json --html page .", "show a report: give one of them; phalanx report --help says more"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_was_meant(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plain.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["phalanx", *words.split()])
    assert main.main() == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err.startswith("phalanx: ")) == ("", 1, True)
    assert said in err


def test_a_number_of_ranks_behind_the_script_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "plain.py").touch()
    meant = {"plain.py -n 2": "-n 2", "plain.py a --nproc_per_node=2": "--nproc_per_node=2"}
    for words in (*meant, "-n 1 plain.py -n 2", "plain.py -n two"):
        command = [sys.executable, "-m", "phalanx", "run", "--dry-run", "--json", *words.split()]
        notes = json.loads(subprocess.check_output(command, cwd=tmp_path))["notes"]
        assert [note.partition("did you mean ")[2] for note in notes] == [
            f"phalanx run {meant[words]} plain.py …?" for _ in range(words in meant)
        ]


def test_help_lists_every_command() -> None:
    shown = CliRunner().invoke(main.command, ["-h"])
    listed = shown.output.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == sorted(main.COMMANDS)
