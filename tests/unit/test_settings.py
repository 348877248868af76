"""The ``PHALANX_`` variables: each stands in ``settings.py`` with its meaning, is used, and is documented for users."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "phalanx"
SETTINGS = (PACKAGE / "settings.py").read_text()
OTHERS = {path: path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "settings.py"}
# The documents for users. CONTRIBUTING also names variables of the tests.
DOCUMENTS = "".join(path.read_text() for path in [*ROOT.glob("README*.md"), *(ROOT / "docs").rglob("*.md")])
TABLES = (ROOT / "docs" / "reference" / "variables.md").read_text()
DEFINED = re.findall(r'^([A-Z_]+) = "(PHALANX_[A-Z_]+)"(?:  # (.+))?$', SETTINGS, re.MULTILINE)
NAMES = {name for _, name, _ in DEFINED}
VARIABLE = re.compile(r"PHALANX_[A-Z_]+")


def test_each_variable_has_a_meaning_and_a_use() -> None:
    assert set(VARIABLE.findall(SETTINGS.partition("VERSION")[2])) == NAMES
    texts = "".join(OTHERS.values())
    used = set(re.findall(r"\bsettings\.([A-Z_]+)\b", texts))
    wrong = [name for python, name, why in DEFINED if name != f"PHALANX_{python}" or not why or python not in used]
    assert not wrong, f"not of that name in Python, without a comment on its line, or not used: {wrong}"


def test_no_other_module_spells_a_variable_in_code() -> None:
    spelled = [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path, text in OTHERS.items()
        for name in re.findall(r"""["'](PHALANX_[A-Z_]+)["']""", text)
    ]
    assert not spelled, f"say settings.NAME instead: {spelled}"


def test_documents_name_the_variables_that_exist() -> None:
    assert set(VARIABLE.findall(DOCUMENTS + "".join(OTHERS.values()))) <= NAMES
    rows = re.findall(r"^\| `(PHALANX_[A-Z_]+)` \|", TABLES, re.MULTILINE)
    assert rows == [name for _, name, _ in DEFINED], (
        "the tables of docs/reference/variables.md, in the order of settings"
    )


def test_the_first_table_has_those_that_users_set() -> None:
    of_users, _, of_launcher = TABLES.partition("## Set by Phalanx")
    assert f'"{VARIABLE.findall(of_users)[-1]}"' in SETTINGS.partition("# Set by the launcher")[0]
    assert f'"{VARIABLE.findall(of_launcher)[0]}"' in SETTINGS.partition("# Set by the launcher")[2]
