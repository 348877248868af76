"""Golden texts: what a user reads when something breaks, word for word, with names for what differs between runs.

A golden text is a file in ``tests/fault/told``. It is compared whole. In it stand for what differs:

- ``<name>``: what the test knows under this name, such as ``<pid 1>``, the process id of rank 1;
- ``<seconds>``: any time in seconds;
- ``<explanation of torch's>``: the rest of a text, which has torch's own;
- ``<error of torch's>``, ``<others over torch's>``: what Gloo or torch's store says, and lines on the two other ranks,
  which depend on what Gloo says to each;
- ``{one way|another}``: either of these, where both are right and the moment decides which it is.

All else, also ``<module>`` of a traceback, is literal.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.launch_support import wait_for

__all__ = ["FOLDER", "MOST_LINES", "await_told", "block_of", "check_told", "warnings_of", "without_frames"]

MOST_LINES = 12  # of one error
FOLDER = Path(__file__).parent.parent / "fault" / "told"
_ANY = {
    "seconds": r"\d+(?:\.\d+)?",
    "error of torch's": r"(?:RuntimeError: \[|torch\.distributed\.DistStoreError: wait timeout).*",
    "explanation of torch's": r"(?:.+\n?)+",
    "others over torch's": (
        r"  ranks? [\d, -]+ then failed(?:: |, rank \d with ).*(?:\n  rank \d then failed: .*)?"
        # Gloo may wait for ever for the rest of a message of another size, and lets no handler of a signal run.
        r"(?:\n  rank \d ended by the launcher\n"
        r"phalanx: rank \d did not end within \d+ s and was killed; --grace gives ranks longer)?"
    ),
}
_PART = re.compile(r"<(?P<name>[^<>\n]+)>|\{(?P<ways>[^{}\n]*\|[^{}\n]*)\}")


def block_of(err: str) -> str:
    """What the launcher says of a failure, without what comes before it."""
    found = re.search(r"^phalanx: rank \d+ of \d+ failed", err, re.MULTILINE)
    assert found, err
    return err[found.start() :]


def warnings_of(err: str) -> dict[int, str]:
    """By rank what it has warned of in a launcher's output, in which each of its lines has the rank before it."""
    found: dict[int, list[str]] = {}
    for rank, line in re.findall(r"^\[rank (\d+)\] (.*)$", err, re.MULTILINE):
        if line.startswith("phalanx: warning: ") or int(rank) in found:
            found.setdefault(int(rank), []).append(line)
    return {rank: "\n".join(lines) for rank, lines in found.items()}


def without_frames(block: str) -> str:
    """A block without the frames of tracebacks. Their marks below a part of a line depend on Python's version."""
    return re.sub(r'^  File ".*\n(?: {4}.*\n)*', "", block, flags=re.MULTILINE)


def check_told(name: str, text: str, known: Mapping[str, object]) -> None:
    """Compare a text with a golden one.

    Args:
        name: of the golden text's file, without its ending. If there are files ``NAME.2.txt`` and so on, the text may
            be any of these as well: the moment decides which.
        text: what the user reads.
        known: what the placeholders stand for.
    """
    if any(re.fullmatch(_pattern(golden, known), text.rstrip("\n")) for golden in _ways(name).values()):
        return
    told = text.rstrip("\n")
    complaint = []
    for file, golden in _ways(name).items():
        expected = re.sub(r"<([^<>\n]+)>", lambda found: str(known.get(found[1], found[0])), golden)
        lines = difflib.unified_diff(expected.split("\n"), told.split("\n"), file.name, "told", lineterm="")
        complaint += [f"not what {file.name} says:", *lines]
    raise AssertionError("\n".join(complaint))


def await_told(
    name: str, said: Callable[[], str], known: Callable[[], Mapping[str, object]], has_ended: Callable[[], bool]
) -> None:
    """Wait until a job that runs has said this, in whole lines.

    On a busy machine it says other things before, of ranks that are not yet where the text has them.

    Args:
        name: see :func:`check_told`.
        said: gives what it has said so far.
        known: gives what is known so far.
        has_ended: whether the job has ended.
    """

    def is_told() -> bool:
        patterns = (_pattern(golden, known()) for golden in _ways(name).values())
        return any(re.search(f"^(?:{pattern})$", said(), re.MULTILINE) for pattern in patterns)

    wait_for(lambda: is_told() or has_ended(), complaint=said)
    if not is_told():
        check_told(name, said(), known())


def _ways(name: str) -> dict[Path, str]:
    files = [FOLDER / f"{name}.txt", *sorted(FOLDER.glob(f"{name}.[2-9].txt"))]
    return {file: file.read_text().rstrip("\n") for file in files}


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
