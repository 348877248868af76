"""What a user reads when something breaks: its facts, or a golden text with names for what differs between runs.

The blocks that every user meets are golden texts; of all else :func:`check_facts` asks for the facts. A golden text is
a file in ``tests/fault/told``. It is compared whole. In it stand for what differs:

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
from tests.support.faults import told_by

__all__ = [
    "FOLDER",
    "MOST_LINES",
    "await_facts",
    "block_of",
    "check_facts",
    "check_mistakes",
    "check_told",
    "ending_of",
    "warnings_of",
    "without_frames",
]

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


def check_facts(text: str, *facts: str) -> None:
    """Check that each of these patterns is in a text, whose ``^`` is the begin of a line, and that it is short."""
    missing = [fact for fact in facts if not re.search(fact, text, re.MULTILINE)]
    assert not missing, f"{missing} is not in:\n{text}"
    assert len(without_frames(text).splitlines()) <= MOST_LINES, text


def await_facts(said: Callable[[], str], has_ended: Callable[[], bool], facts: Callable[[], str]) -> None:
    """Wait until a job that runs has said this in a line. On a busy machine it names others before, that are late.

    Args:
        said: gives what it has said so far.
        has_ended: whether the job has ended.
        facts: gives the pattern.
    """

    def is_said() -> bool:
        return re.search(facts(), said(), re.MULTILINE) is not None

    wait_for(lambda: is_said() or has_ended(), complaint=lambda: f"{facts()} is not in:\n{said()}")
    assert is_said(), f"{facts()} is not in:\n{said()}"


# The rows of ``faults.MISTAKES``: the call of the other ranks, and that of rank 1.
_SUM = "all_reduce(float32[4], sum)"
_MISTAKES = {
    "size": (_SUM, "all_reduce(float32[8], sum)"),
    "shape": ("all_reduce(float32[2, 3], sum)", "all_reduce(float32[3, 2], sum)"),
    "dtype": (_SUM, "all_reduce(int32[4], sum)"),
    "operation": (_SUM, "all_reduce(float32[4], max)"),
    "root": ("broadcast(float32[4], src=0)", "broadcast(float32[4], src=1)"),
    "kind": (_SUM, "broadcast(float32[4], src=0)"),
    "batches": ("barrier()", "all_reduce(float32[10], sum)"),
}


def check_mistakes(folder: Path, known: Mapping[str, object], size: int) -> None:
    """Check that every rank of a job that ran ``faults.MISTAKES`` has listed the calls, and said for whom it waited."""
    for row, (usual, odd) in _MISTAKES.items():
        line = known[f"line {row}"]
        for told in told_by(folder, row, [*range(size)]):
            check_facts(
                told,
                r"^phalanx\.errors\.CollectiveMismatch: the ranks of a group called different operations:$",
                rf"^  {known['others']}: {re.escape(usual)} at script\.py:{line}$",
                rf"^  rank 1: {re.escape(odd)} at script\.py:{known.get(f'line {row} of rank 1', line)}$",
                "^Every rank of a group must make the same calls in the same order",
            )
    for told in told_by(folder, "late", [rank for rank in range(size) if rank != 1]):
        check_facts(
            told,
            rf"^phalanx\.errors\.CollectiveTimeout: rank 1 of the group \(pid {known['pid 1']} on {known['host']}\)",
            r"did not come within 3 s while rank [02] was in all_reduce\(float32\[4\], sum\) at "
            rf"script\.py:{known['line late']}\. .*A longer timeout is set with phalanx\.init\(timeout_s=",
        )


def ending_of(known: Mapping[str, object]) -> str:
    """The line of the launcher's block that says where rank 1 was and that it was killed."""
    return rf"^  host {known['host']}, pid {known['pid 1']}, [\d.]+ s after the start, ended by signal 9 \(SIGKILL\)$"


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
