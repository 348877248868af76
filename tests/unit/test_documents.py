"""Files that a docstring, a comment or a document names exist under that name."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = [
    name
    for name in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    if (ROOT / name).exists()
]
NAMED = re.compile(r"(?<![\w/.<*{$~@-])((?:[\w.-]+/)*[\w-]+\.(?:py|pyi|c|h|md|toml|txt))\b(?![\w*{])")
# What examples call the program that somebody starts, and what a job writes.
OF_A_USER = {"train.py", "script.py", "ddp.py", "job.toml", "failure.txt"}
C_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def prose(name: str) -> Iterator[str]:
    """The docstrings and comments of a source file; the text of a document."""
    text = (ROOT / name).read_text()
    if name.endswith(".py"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield ast.get_docstring(node) or ""
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.string
    elif name.endswith((".c", ".h")):
        yield from C_COMMENT.findall(text)
    elif name.endswith(".md"):
        yield CODE.sub("", text)


def exists(name: str) -> bool:
    return any(file == name or file.endswith(f"/{name}") for file in FILES)


def test_every_file_that_is_named_exists() -> None:
    missing = [
        f"{file}: {named}"
        for file in FILES
        if file.endswith((".py", ".c", ".h", ".md"))
        for text in prose(file)
        for named in NAMED.findall(text)
        if named not in OF_A_USER and not exists(named)
    ]
    assert not missing, "\n".join(missing)
