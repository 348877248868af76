"""What a user reads when something breaks: its facts, or a golden text with names for what differs between runs.

A golden text is a file in ``tests/fault/told``, compared whole but for what differs between runs:

- ``<name>``: what the test knows under this name, such as ``<pid 1>``, the process id of rank 1;
- ``<seconds>``: any time in seconds;
- ``<error of torch's>``, ``<others over torch's>``: what Gloo or torch's store says, and lines on the two other ranks,
  which depend on what Gloo says to each;
- ``{one way|another}``: either of these, where both are right and the moment decides which it is.

All else, also ``<module>`` of a traceback, is literal.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.launch_support import Launcher, wait_for
from tests.support.faults import known_of
from tests.support.remote import RemoteLauncher

__all__ = ["FOLDER", "MOST_LINES", "Job", "block_of", "check_facts", "check_told", "last_error", "without_frames"]

MOST_LINES = 12  # of one error
FOLDER = Path(__file__).parent.parent / "fault" / "told"
_ANY = {
    "seconds": r"\d+(?:\.\d+)?",
    "error of torch's": r"(?:RuntimeError: \[|torch\.distributed\.DistStoreError: wait timeout).*",
    "others over torch's": (
        r"  ranks? [\d, -]+ then failed(?:: |, rank \d with ).*(?:\n  rank \d then failed: .*)?"
        # Gloo may wait for ever for the rest of a message of another size, and lets no handler of a signal run.
        r"(?:\n  rank \d ended by the launcher\n"
        r"phalanx: rank \d did not end within \d+ s and was killed; --grace gives ranks longer)?"
    ),
}
_PART = re.compile(r"<(?P<name>[^<>\n]+)>|\{(?P<ways>[^{}\n]*\|[^{}\n]*)\}")


class Job:
    """A job of three ranks by ``phalanx run``, on one host or several, that is looked at while it runs.

    Args:
        launcher: what starts it.
        text: the script. Lines are known by the comment at their end.
        arguments: of the script, behind the folder.
        options: of ``phalanx run``.
    """

    def __init__(self, launcher: Launcher | RemoteLauncher, text: str, *arguments: str, options: str = "") -> None:
        self.script = launcher.script(text)
        self._text = Path(self.script).read_text()
        self.folder = Path(self.script).parent
        self._err = self.folder / "said"
        command = [*options.split(), self.script, str(self.folder), *arguments]
        if isinstance(launcher, RemoteLauncher):
            self._err = launcher.folder / f"job-{len(launcher.jobs)}" / "err"
            self.process = launcher.start(*command).process
        else:
            with open(self._err, "wb") as err:
                self.process = launcher.start("-n", "3", *command, stderr=err).process

    def said(self) -> str:
        """What the launcher has said so far."""
        return self._err.read_text()

    def known(self, host: str = "") -> dict[str, object]:
        """What golden texts may name."""
        return {**known_of(self.folder, self.script, self._text, 3), "host": host}

    def at(self, mark: str) -> str:
        """The place of the line with this mark, as a pattern."""
        return rf"script\.py:{self.known()[f'line {mark}']}"

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def go(self, name: str = "go") -> None:
        """Let the ranks go on that wait for this file."""
        (self.folder / name).touch()

    def await_said(self, *facts: str) -> None:
        """Wait until all of this stands there. On a busy machine other ranks may be named before, that are late."""
        wait_for(
            lambda: not self._missing(facts) or self.process.poll() is not None, complaint=lambda: self._lack(facts)
        )
        assert not self._missing(facts), self._lack(facts)

    def _missing(self, facts: tuple[str, ...]) -> list[str]:
        return [fact for fact in facts if not re.search(fact, self.said(), re.MULTILINE)]

    def _lack(self, facts: tuple[str, ...]) -> str:
        return f"{self._missing(facts)} is not in:\n{self.said()}"

    def end(self) -> int:
        """Wait for the end; the exit code."""
        return self.process.wait(300)


def block_of(err: str) -> str:
    """What the launcher says of a failure, without what comes before it."""
    found = re.search(r"^phalanx: rank \d+ of \d+ failed", err, re.MULTILINE)
    assert found, err
    return err[found.start() :]


def without_frames(block: str) -> str:
    """A block without the frames of tracebacks. Their marks below a part of a line depend on Python's version."""
    return re.sub(r'^  File ".*\n(?: {4}.*\n)*', "", block, flags=re.MULTILINE)


def last_error(err: str) -> str:
    """The last line of a traceback in a text, without the one that says where the error is explained."""
    return re.sub(r"\nWhat this means and what to do: .*\n*$", "", err).splitlines()[-1]


def check_told(name: str, text: str, known: Mapping[str, object]) -> None:
    """Compare a text with a golden one.

    Args:
        name: of the golden text's file, without its ending. If there are files ``NAME.2.txt`` and so on, the text may
            be any of these as well: the moment decides which.
        text: what the user reads.
        known: what the placeholders stand for.
    """
    told = text.rstrip("\n")
    complaint = []
    for file in (FOLDER / f"{name}.txt", *sorted(FOLDER.glob(f"{name}.[2-9].txt"))):
        golden = file.read_text().rstrip("\n")
        if sys.version_info < (3, 11):  # which prints no notes below an error
            golden = re.sub(r"^What this means and what to do: .*\n", "", golden, flags=re.MULTILINE)
        if re.fullmatch(_pattern(golden, known), told):
            return
        expected = re.sub(r"<([^<>\n]+)>", lambda found: str(known.get(found[1], found[0])), golden)
        lines = difflib.unified_diff(expected.split("\n"), told.split("\n"), file.name, "told", lineterm="")
        complaint += [f"not what {file.name} says:", *lines]
    raise AssertionError("\n".join(complaint))


def check_facts(text: str, *facts: str) -> None:
    """Check that each of these patterns is in a text, whose ``^`` is the begin of a line, and that it is short."""
    missing = [fact for fact in facts if not re.search(fact, text, re.MULTILINE)]
    assert not missing, f"{missing} is not in:\n{text}"
    assert len(without_frames(text).splitlines()) <= MOST_LINES, text


def _pattern(golden: str, known: Mapping[str, object]) -> str:
    parts, at = [], 0
    for found in _PART.finditer(golden):
        parts.append(re.escape(golden[at : found.start()]))
        at = found.end()
        name = found["name"]
        if found["ways"] is not None:
            parts.append(f"(?:{'|'.join(_pattern(way, known) for way in found['ways'].split('|'))})")
        elif name in known:
            parts.append(re.escape(str(known[name])))
        else:
            parts.append(_ANY.get(name) or re.escape(found[0]))
    return "".join([*parts, re.escape(golden[at:])])
