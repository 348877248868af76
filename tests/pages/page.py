"""Blocks of a Markdown page, run as a reader would: files are written, commands are called, their output is compared.

========================  ==========================================================================================
block                     what is done with it
========================  ==========================================================================================
``python``, ``sh``, …     If its first line is ``# name.py``, the file is written, for a later command to use. Other
                          Python is run by ``python``; other YAML is parsed.
``console``               Each line that begins with ``$`` is called by bash, and the lines below are its output.
``sh``                    Run by ``bash -e``; it must succeed.
``text``                  The output of the command in the comment before it: ``<!-- output of: phalanx env -->``.
``<!-- setup`` … ``-->``  Shell lines that the reader does not see. ``cp $ROOT/tests/pages/stand_ins/ssh bin`` lets a
                          stand-in take the place of a command that needs other machines.
``<!-- with`` … ``-->``   Lines of Python before those of the next block, which is a fragment.
========================  ==========================================================================================

In an expected output ``...`` stands for anything, alone in its line for any lines. Times, sizes, pids, ports and dates
may differ; so may the order of lines that begin with the numbers of different ranks.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>[^\s]*)[^\n]*\n(?P<body>.*?)^ *```$"
    r"|^ *<!-- (?P<kind>setup|with|output of:)(?P<hidden>.*?)-->",
    re.MULTILINE | re.DOTALL,
)
_NAME = re.compile(r"# ([\w./-]+\.\w+)\n")
_VARYING = (
    (r"\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d(?:\.\d{3})?", "TIME"),
    (r"(?<=pid )\d+", "N"),
    (r"(?<=:)\d{4,5}\b", "PORT"),
    (r"\b[0-9a-f]{12}\b", "ID"),
    (r"[\d,.]+ ?((?:[µmn]?s|[KMGT]?i?B|samples/s)\b|(?=[%×]))", r"N \1"),
    (r"[ ─-]{2,}", "  "),
    (r"(?m)(?<=^ID  )\d+|(?<=^  \d  )\d{2,7}(?=  )|(?<=  )\d\.\d\d(?=  )|(?<=  cpu  )\d+", "N"),  # in tables
)


@dataclass(frozen=True)
class Block:
    """A block of a page, and the line where it begins."""

    kind: str
    text: str
    line: int


def blocks(page: str) -> Iterator[Block]:
    """Find the blocks of a page, hidden ones too, in their order."""
    for found in _BLOCK.finditer(page):
        kind, text = found["kind"] or found["language"] or "no language", found["hidden"] or found["body"] or ""
        lines = [line.removeprefix(found["indent"] or "") for line in text.splitlines(keepends=True)]
        yield Block(kind.rstrip(":"), "".join(lines).lstrip("\n"), page.count("\n", 0, found.start()) + 1)


def commands(console: str) -> list[tuple[str, str]]:
    """Part what a console shows into commands and the output of each."""
    parts = re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n?)*)", console, re.MULTILINE)
    return [(command.replace("\\\n", ""), output) for command, output in parts]


def run_page(page: Path, folder: Path, timeout_s: float = 600.0) -> None:
    """Run all blocks of a page in a folder.

    Raises:
        AssertionError: a block has no language, fails, or prints something else than the page says.
    """
    (folder / "bin").mkdir()
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "ROOT": str(ROOT)}

    def call(shell: str) -> tuple[int, str]:
        ended = subprocess.run(
            ["bash", "-c", shell], cwd=folder, env=own, stdin=-3, stdout=-1, stderr=-2, text=True, timeout=timeout_s
        )
        return ended.returncode, ended.stdout

    before, expected_of = "", ""
    for block in blocks(page.read_text()):
        if block.kind.startswith("{"):  # a directive of the site
            continue
        where, named = f"{page.name}:{block.line}", _NAME.match(block.text)
        match block.kind:
            case "with":
                before = block.text
            case "output of":
                expected_of = block.text.strip()
            case "setup" | "sh" if not named:
                status, output = call(f"set -e\n{block.text}")
                assert status == 0, f"{where}: exit status {status}\n{output}"
            case "console":
                for command, expected in commands(block.text):
                    _compare(where, command, expected, call(command)[1], folder)
            case "text":
                assert expected_of, f"{where}: a text without the command whose output it is"
                _compare(where, expected_of, block.text, call(expected_of)[1], folder)
                expected_of = ""
            case _ if named:
                (folder / named[1]).parent.mkdir(parents=True, exist_ok=True)
                (folder / named[1]).write_text(block.text)
            case "python":
                (folder / "fragment.py").write_text(before + block.text)
                status, output = call("python fragment.py")
                assert status == 0, f"{where}: exit status {status}\n{output}"
                before = ""
            case "yaml":
                list(yaml.safe_load_all(block.text))
            case kind:
                raise AssertionError(f"{where}: a block of {kind}, which cannot be run")


def _compare(where: str, command: str, expected: str, actual: str, folder: Path) -> None:
    wanted = _plain(expected, folder).splitlines()
    got = _plain(actual, folder).splitlines()
    pattern = "\n".join(r"(?s:.*)" if line == "..." else _line(line) for line in sorted(wanted, key=_rank))
    pattern = pattern.replace("(?s:.*)\n", r"(?s:(?:.*\n)?)").replace("\n(?s:.*)", r"(?s:(?:\n.*)?)")
    assert re.fullmatch(pattern, "\n".join(sorted(got, key=_rank))), (
        f"{where}: $ {command}\n--- the page says\n{expected}--- it printed\n{actual}"
    )


def _line(line: str) -> str:
    return ".*".join(map(re.escape, line.split("...")))


def _rank(line: str) -> str:
    """Sort by the rank's prefix alone, so that the lines of one rank stay in their order."""
    found = re.match(r"\[(?:rank )?(\d+)\]", line)
    return found[1].rjust(5) if found else ""


def _plain(output: str, folder: Path) -> str:
    text = output.replace(f"{folder}/", "").replace(str(folder), "FOLDER").replace(socket.gethostname(), "h1")
    for pattern, replacement in _VARYING:
        text = re.sub(pattern, replacement, text)
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())
