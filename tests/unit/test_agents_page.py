"""The page for coding agents is short, and its commands and options exist."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

from phalanx.commands.main import COMMANDS

PAGE = (Path(__file__).parents[2] / "AGENTS.md").read_text()
TYPED = re.findall(r"^\$ .*?\b(phalanx [^<\n]*)", PAGE, re.MULTILINE)
IN_TEXT = [call for call in re.findall(r"`(phalanx [a-z]+[^`]*)`", PAGE) if "..." not in call]


def test_page_is_short_and_its_commands_and_options_exist() -> None:
    assert len(PAGE.splitlines()) <= 100
    commands = {name: getattr(import_module(f"phalanx.commands.{name}"), name) for name in COMMANDS}
    calls = [shlex.split(call, comments=True)[1:] for call in TYPED + IN_TEXT]
    assert len(TYPED) > 5
    assert {name for name, *_ in calls} == set(COMMANDS)
    for name, *words in calls:
        commands[name].make_context(name, words, resilient_parsing=not words)
    known = {option for command in commands.values() for each in command.params for option in each.opts}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", PAGE)) - {"--lr", "--help"} <= known
