"""Places of a program: which calls run in each other's place, also where little is known of the text."""

from __future__ import annotations

import ast
import contextlib
import gc
import linecache
import sys
import types
from pathlib import Path

import pytest

from phalanx.watch.call_site import CallSite
from phalanx.watch.program_text import are_alternatives, identity

PROGRAMS = {
    "if": "if c:\n  a()\nelse:\n  b()\n",
    "expression": "a() if c else b()\n",
    "try": "try:\n  a()\nexcept ValueError:\n  b()\n",
    "exit": "import sys\ndef f():\n  if c:\n    a()\n    sys.exit()\n  b()\n",
    "return in with": "def f():\n  if c:\n    with x:\n      a()\n      return\n  b()\n",
    "one after the other": "def f():\n  a()\n  b()\n",
    "in a loop": "for i in r:\n  a()\n  if c:\n    b()\n",
}
IN_TURNS = ("if", "expression", "try", "exit", "return in with")


def codes(code: types.CodeType) -> list[types.CodeType]:
    found = [code]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found += codes(constant)
    return found


def sites(path: Path, text: str) -> dict[str, CallSite]:
    """Where ``a`` and ``b`` are called."""
    path.write_text(text)
    linecache.checkcache(str(path))
    called: dict[str, CallSite] = {}

    class Other:
        def __getattr__(self, name: str) -> object:
            return self

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    def note(name: str) -> None:
        frame = sys._getframe(2)
        called[name] = frame.f_code, frame.f_lasti
        if name == "a" and wanted == "try":
            raise ValueError

    program = compile(text, str(path), "exec")
    for wanted in ("once", "again", "try"):
        names = {"a": lambda: note("a"), "b": lambda: note("b"), "c": wanted != "again", "x": Other(), "r": range(1)}
        for run in (lambda names=names: exec(program, names), lambda names=names: names.get("f", lambda: None)()):
            with contextlib.suppress(SystemExit, ValueError):
                run()
    return called


@pytest.mark.parametrize("name", PROGRAMS)
def test_calls_of_which_only_one_is_run_are_alternatives(name: str, tmp_path: Path) -> None:
    found = sites(tmp_path / "program.py", PROGRAMS[name])
    assert are_alternatives(found["a"], found["b"]) == (name in IN_TURNS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_they_are_also_where_columns_are_not_known(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As before Python 3.11, and with PYTHONNODEBUGRANGES."""
    found = sites(tmp_path / "program.py", PROGRAMS[name])
    monkeypatch.setattr("phalanx.watch.program_text.getattr", lambda *_: None, raising=False)
    assert are_alternatives(found["a"], found["b"]) == (name in IN_TURNS)


def test_a_text_that_is_too_deep_for_the_parser_is_no_error(tmp_path: Path) -> None:
    deep = "if c:\n  a()\n" + "".join(f"elif c == {number}:\n  b()\n" for number in range(700)) + "a()\nb()\n"
    found = sites(tmp_path / "program.py", deep)
    assert identity(found["a"])
    assert are_alternatives(found["a"], found["b"])


def test_a_garbage_collection_that_parses_too_is_no_error(tmp_path: Path) -> None:
    """As where another thread formats a traceback meanwhile: CPython then takes its own count of depths for wrong."""
    found = sites(tmp_path / "program.py", PROGRAMS["if"] + "d = [\n" + "  [a, b],\n" * 60 + "]\n")

    def parse(phase: str, information: object, depth: int = 3) -> None:
        if depth:
            parse(phase, information, depth - 1)
        else:
            ast.parse("a + b")

    thresholds = gc.get_threshold()
    gc.callbacks.append(parse)
    gc.set_threshold(20)
    try:
        assert are_alternatives(found["a"], found["b"])
        assert gc.isenabled()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(parse)


def test_generated_code_has_no_place() -> None:
    code = compile("x = 1", "<eval_with_key>.7", "exec")
    assert identity((code, 0)) == 0
