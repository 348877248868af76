"""The commands: a command is a file in ``commands/`` and its name in ``COMMANDS``, and nothing else names it."""

from __future__ import annotations

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


def test_help_lists_every_command() -> None:
    shown = CliRunner().invoke(main.command, ["-h"])
    listed = shown.output.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == sorted(main.COMMANDS)
