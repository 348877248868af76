"""Files that a docstring, a comment or a document names exist under that name."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
LISTED = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
ENDING = r"\.(?:pyi?|c|h|md|toml|txt)"
# In a document every name; in a source those in the marks of code, and paths from the root.
IN_DOCUMENT = re.compile(rf"(?<![\w/.<*{{$~@-])((?:[\w.-]+/)*[\w-]+{ENDING})\b(?![\w*{{])")
IN_SOURCE = re.compile(rf"``([\w/-]+{ENDING})``|\b((?:docs|tests|src/phalanx|examples|benchmarks)/[\w./-]+{ENDING})\b")
# What examples call the program that somebody starts, and what a job writes.
OF_A_USER = {"train.py", "script.py", "ddp.py", "job.toml", "failure.txt"}
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def test_every_file_that_is_named_exists() -> None:
    listed = subprocess.run(LISTED, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    files = [name for name in listed if (ROOT / name).exists()]
    named = []
    for file in files:
        if file.endswith(".md"):
            named += [(file, name) for name in IN_DOCUMENT.findall(CODE.sub("", (ROOT / file).read_text()))]
        elif file.endswith((".py", ".c", ".h")):
            named += [(file, one or other) for one, other in IN_SOURCE.findall((ROOT / file).read_text())]
    assert len(named) > 100
    ends = {"/".join(file.split("/")[at:]) for file in files for at in range(file.count("/") + 1)}
    assert not [each for each in named if each[1].removeprefix("../").removeprefix("../") not in ends | OF_A_USER]
