"""docs/security.md lists every file of the package that opens a port."""

from __future__ import annotations

import ast
from pathlib import Path

import phalanx

PACKAGE = Path(phalanx.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "security.md"
# What makes a socket that listens: a socket's own method or Phalanx's function, Python's, Gloo's, and torch's store.
OPENS = {"listen", "create_server", "create_device", "TCPStore"}


def opens_a_port(source: str) -> bool:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            is_client = any(each.arg == "is_master" and ast.unparse(each.value) == "False" for each in node.keywords)
            if name in OPENS and not is_client:
                return True
    return False


def test_every_file_that_opens_a_port_is_on_the_page() -> None:
    page = PAGE.read_text()
    files = [path for path in PACKAGE.rglob("*.py") if opens_a_port(path.read_text())]
    assert len(files) > 5
    missing = [name for path in files if f"`{(name := path.relative_to(PACKAGE).as_posix())}`" not in page]
    assert not missing


def test_every_file_on_the_page_exists() -> None:
    named = {word for word in PAGE.read_text().split("`") if word.endswith((".py", ".c")) and "/" in word}
    roots = PACKAGE, PACKAGE.parents[1]
    assert not [name for name in named if not any((root / name).exists() for root in roots)]
