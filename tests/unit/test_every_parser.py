"""Of every module that makes values of bytes it is known whose bytes they are; those of others are attacked."""

from __future__ import annotations

import ast
import contextlib
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support.parsers import parsers
from tests.support.reading import ATTACKED, TRUSTED

import phalanx

SOURCES = Path(phalanx.__file__).parent
TESTS = Path(__file__).parents[2]
# What makes values of bytes: functions of these modules, and methods and functions of these names.
LOADING, FORMATS = {"load", "loads"}, {"json", "pickle", "tomllib", "torch"}
READING = {
    "b64decode", "from_buffer_copy", "from_bytes", "fromhex", "iter_unpack", "literal_eval", "read_json", "unpack",
    "unpack_from",
}  # fmt: skip


def reads(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            of = called.value.id if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) else ""
            if name in READING or (name in LOADING and of in FORMATS):
                return True
    return False


def readers() -> set[str]:
    return {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        if reads(ast.parse(path.read_text(encoding="utf-8")))
    }


def test_whose_bytes_each_module_reads_is_known() -> None:
    assert readers() - ATTACKED.keys() - TRUSTED.keys() == set(), "put them down in tests/support/reading.py"
    assert ATTACKED.keys() | TRUSTED.keys() == readers(), "these read no bytes any more"
    assert not ATTACKED.keys() & TRUSTED.keys()


def test_attacked_modules_are_run_by_their_attacks() -> None:
    """A parser that is named for a module comes to it with its valid bytes; another test names its package."""
    ran: dict[str, set[str]] = {}
    with parsers() as every:
        names = {parser.name for parser in every}
        for parser in every:
            files = ran[parser.name] = set()

            def note(frame: FrameType, event: str, arg: Any, files: set[str] = files) -> None:
                files.add(frame.f_code.co_filename)

            sys.setprofile(note)
            try:
                for data in parser.valid:
                    with contextlib.suppress(*parser.refusals):
                        parser.feed(data)
            finally:
                sys.setprofile(None)
    for module, attacks in ATTACKED.items():
        for attack in attacks:
            if attack.startswith("tests/"):
                package = "phalanx." + module.rpartition("/")[0].replace("/", ".")
                assert package in (TESTS / attack).read_text(encoding="utf-8"), (module, attack)
            else:
                assert attack in names
                assert str(SOURCES / module) in ran[attack], (module, attack)
