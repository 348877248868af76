"""The ``PHALANX_`` variables: each stands in ``settings.py`` with its meaning, is used, and is documented for users."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "phalanx"
SETTINGS = PACKAGE / "settings.py"
OTHERS = sorted(path for path in PACKAGE.rglob("*.py") if path != SETTINGS)
# The documents for users. CONTRIBUTING also names variables of the tests.
DOCUMENTS = sorted([*ROOT.glob("README*.md"), *(ROOT / "docs").glob("*.md")])
VARIABLE = re.compile(r"PHALANX_[A-Z_]+")
FOR_USERS, FOR_RANKS = "Set by users.", "Set by the launcher for its ranks."


def sections() -> dict[str, dict[str, tuple[str, str]]]:
    """The sections of ``settings.py`` by their comments: variables, each with its name in Python and its meaning."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    section = ""
    for line in SETTINGS.read_text().splitlines():
        if line.startswith("# "):
            section = line.removeprefix("# ")
        elif match := re.match(r'([A-Z_]+) = "(PHALANX_[A-Z_]+)"(?:  # (.+))?$', line):
            found.setdefault(section, {})[match[2]] = match[1], match[3] or ""
    return found


VARIABLES = {name: (python, meaning) for part in sections().values() for name, (python, meaning) in part.items()}


def literals(module: Path) -> Iterator[tuple[int, str]]:
    """The strings of a module that name a variable, each with its line, but for docstrings and help texts."""
    tree = ast.parse(module.read_text())
    for_people: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):  # a string by itself is a docstring
            for_people.add(node.value)
        elif isinstance(node, ast.keyword) and node.arg == "help":
            for_people.update(ast.walk(node.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in for_people:
            yield from ((node.lineno, name) for name in VARIABLE.findall(node.value))


def test_the_file_is_read_as_it_is_written() -> None:
    assert list(sections()) == [FOR_USERS, FOR_RANKS]
    assert set(VARIABLES) == set(VARIABLE.findall(SETTINGS.read_text().partition("VERSION")[2]))


def test_no_other_module_spells_a_variable() -> None:
    spelled = [f"{path.relative_to(PACKAGE)}:{line}: {name}" for path in OTHERS for line, name in literals(path)]
    assert not spelled, f"say settings.NAME instead: {spelled}"


def test_each_variable_has_a_meaning_and_a_use() -> None:
    texts = "".join(path.read_text() for path in OTHERS)
    wrong = [
        name
        for name, (python, meaning) in VARIABLES.items()
        if name != f"PHALANX_{python}" or not meaning or not re.search(rf"\bsettings\.{python}\b", texts)
    ]
    assert not wrong, f"not of that name in Python, without a comment on its line, or not used: {wrong}"


def test_docstrings_and_documents_name_only_variables_that_exist() -> None:
    named = {name for path in (*OTHERS, *DOCUMENTS) for name in VARIABLE.findall(path.read_text())}
    assert named <= set(VARIABLES)


def test_each_variable_that_users_set_is_in_the_table_of_the_documents() -> None:
    page = (ROOT / "docs" / "launchers.md").read_text()
    section = re.search(r"^## Variables$(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert section, "docs/launchers.md has no section Variables"
    rows = re.findall(r"^\| `?(PHALANX_[A-Z_]+)`? \| (.+?) \| (.*?) \|$", section[1], re.MULTILINE)
    assert [name for name, _, _ in rows] == list(sections()[FOR_USERS])
