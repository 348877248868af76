"""Name the branch or loop that has taken one rank elsewhere than those that wait for it, from stacks and source text.

Two ranks' stacks are equal down to a function in which they stand at different lines. Statements around one of these
lines, or jumps in front of it (``return``, ``continue``), can have parted them. One is named if it alone can have, or
if it alone has a condition on the rank. Where the awaited rank may just be slow, because it stands at an earlier line
or in a loop with the other, only a condition on the rank counts.
"""

from __future__ import annotations

import ast
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from phalanx.diagnosis.diagnose import HangDiagnosis, RankSnapshot
from phalanx.system.folder import beside

__all__ = ["divergence"]

_LARGEST = 1 << 20  # bytes of a file
_MOST_STACKS = 8  # of each side that differ; with more there is no one statement that parts them
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Match, ast.Try)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_JUMPS = (ast.Return, ast.Continue, ast.Break, ast.Raise)
_OF_RANK = re.compile(r"rank|master|main_process")


class _Step(NamedTuple):
    """A line on a rank's way through the user's program, and whether a library called the function that it is in."""

    file: str
    line: int
    through_library: bool


class _Statement(NamedTuple):
    """A statement that decides what is run."""

    file: str
    word: str
    line: int
    is_of_rank: bool


def divergence(diagnosis: HangDiagnosis, ranks: Sequence[RankSnapshot], folder: str, unchanged_since: float) -> str:
    """Find the statement that parted the ranks, as "the `if` in line 55"; empty if it cannot be told.

    Args:
        diagnosis: who waits for whom.
        ranks: all ranks, with the frames of those that were asked.
        folder: which the sites of operations are relative to.
        unchanged_since: a time of day. Files that have changed since may not be what the ranks run.
    """
    seen = {rank.rank: rank for rank in ranks}
    awaited = [seen[rank] for rank in diagnosis.awaited if rank in seen]
    waiting = [seen[rank] for rank in diagnosis.waiting if rank in seen and rank not in diagnosis.awaited]
    if awaited and {*diagnosis.awaited} <= {*diagnosis.waiting}:  # they wait for each other
        sites = {rank.rank: rank.operation.site if rank.operation is not None else "" for rank in awaited}
        waiting = [rank for rank in awaited if sites[rank.rank] != sites[awaited[0].rank]]
        awaited = [rank for rank in awaited if rank not in waiting]
    if any(rank.state in ("T", "t") for rank in awaited):
        return ""  # something else has stopped it
    if any(rank.operation is not None and rank.operation.is_message for rank in (*awaited, *waiting)):
        return ""  # the two ends of a message are different calls
    sides = []
    for side in (awaited, waiting):
        if any(rank.ended and not rank.ended_well for rank in side):
            return ""  # one that fails ends the job, and is no riddle
        # Of the ranks that wait at one line only one is asked for its stack.
        sides.append({() if rank.ended else _steps(rank, folder) for rank in side if rank.ended or rank.frames})
    if not all(0 < len(side) <= _MOST_STACKS for side in sides) or () in sides[1]:
        return ""
    read = lru_cache(lambda file: _read(file, unchanged_since))
    endings = any(rank.ended for rank in awaited)
    found = {_parted(one, other, read, ended=endings) for one in sides[0] for other in sides[1]}
    statement = found.pop() if len(found) == 1 else None
    if statement is None:
        return ""
    elsewhere = {other[-1].file for other in sides[1]} != {statement.file}
    return (
        f"the `{statement.word}` in line {statement.line}{f' of {beside(statement.file, folder)}' if elsewhere else ''}"
    )


def _parted(
    awaited: tuple[_Step, ...], waiting: tuple[_Step, ...], read: Callable[[str], ast.Module | None], *, ended: bool
) -> _Statement | None:
    """Find the one statement that parts a rank from another; a rank whose script has ended is nowhere."""
    at = next((i for i, (one, other) in enumerate(zip(awaited, waiting, strict=False)) if one != other), -1)
    if ended:
        at = 0
    elif at < 0 or awaited[at][::2] != waiting[at][::2]:
        return None
    trees = [read(step.file) for step in waiting]
    if not all(trees):
        return None
    paths = [_path(tree, step.line) for tree, step in zip(trees, waiting, strict=True) if tree is not None]
    left_out = {each for i in range(at + 1, len(paths)) for each in _deciding(paths[i], waiting[i])}
    if ended:
        return _chosen(left_out | _deciding(paths[0], waiting[0]), only_of_rank=False)
    theirs, ours = paths[at], _path(trees[at], awaited[at].line)  # type: ignore[arg-type]
    if theirs.function is not ours.function:
        return None
    shared = [one for one, other in zip(ours.arms, theirs.arms, strict=False) if one == other]
    rest = ours.arms[len(shared) :], theirs.arms[len(shared) :]
    if all(rest) and rest[0][0][0] is rest[1][0][0]:
        return _statement(rest[0][0][0], waiting[at].file)  # two arms of one statement
    above = [arm for path in paths[:at] for arm in path.arms] + shared
    loops = any(isinstance(node, _LOOPS) for node, _ in above) or any(
        step.through_library for step in waiting[: at + 1]
    )
    is_behind = awaited[at].line < waiting[at].line
    file = waiting[at].file
    found = {_statement(node, file) for node, _ in rest[0]} if loops or is_behind else set()  # that hold it up
    if loops or not is_behind:  # it has left out the others' call
        found |= left_out | {_statement(node, file) for node, _ in rest[1]}
    if loops:
        found |= _deciding(theirs, waiting[at]) - {_statement(node, file) for node, _ in shared}
    return _chosen(found, only_of_rank=loops or is_behind)


def _chosen(found: set[_Statement], *, only_of_rank: bool) -> _Statement | None:
    of_rank = [each for each in found if each.is_of_rank]
    if len(of_rank) == 1:
        return of_rank[0]
    return next(iter(found)) if len(found) == 1 and not only_of_rank else None


class _Path(NamedTuple):
    """The innermost function around a line, and the branches around it there, outermost first, each with its arm."""

    function: ast.AST
    arms: Sequence[tuple[ast.stmt, int]]


def _path(tree: ast.Module, line: int) -> _Path:
    functions = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS) and _spans([node], line)]
    function: ast.AST = functions[-1] if functions else tree
    arms = [
        (node, number)
        for node in _own_nodes(function)
        if isinstance(node, _BRANCHES)
        for number, arm in enumerate(_arms_of(node))
        if _spans(arm, line)
    ]
    return _Path(function, arms)


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function but for those of functions within it, outer ones first."""
    nodes = [function]
    for node in nodes:
        yield node
        nodes += [child for child in ast.iter_child_nodes(node) if not isinstance(child, _FUNCTIONS)]


def _arms_of(node: ast.stmt) -> list[list[ast.stmt]]:
    arms = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
    return arms + [part.body for name in ("handlers", "cases") for part in getattr(node, name, [])]


def _spans(nodes: Sequence[ast.stmt | ast.expr], line: int) -> bool:
    return bool(nodes) and nodes[0].lineno <= line <= (nodes[-1].end_lineno or 0)


def _deciding(path: _Path, step: _Step) -> set[_Statement]:
    """The branches around a line in its function, and those that jump past it."""
    found = {_statement(node, step.file) for node, _ in path.arms}
    for node in _own_nodes(path.function):
        if isinstance(node, ast.If) and (node.end_lineno or 0) < step.line:
            parts = [part for arm in _arms_of(node) for statement in arm for part in ast.walk(statement)]
            if any(isinstance(part, _JUMPS) or _is_exit(part) for part in parts):
                found.add(_statement(node, step.file))
    return found


def _is_exit(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("sys.exit", "exit", "quit", "os._exit")


def _statement(node: ast.stmt, file: str) -> _Statement:
    condition = getattr(node, "test", None) or getattr(node, "iter", None) or getattr(node, "subject", None)
    names = [part.id for part in ast.walk(condition) if isinstance(part, ast.Name)] if condition else []
    names += [part.attr for part in ast.walk(condition) if isinstance(part, ast.Attribute)] if condition else []
    word = type(node).__name__.removeprefix("Async").lower()
    return _Statement(file, word, node.lineno, any(map(_OF_RANK.search, names)))


def _steps(rank: RankSnapshot, folder: str) -> tuple[_Step, ...]:
    """The lines of the user's program in a rank's stack, the outermost first, down to the call that it is in."""
    found: list[_Step] = []
    through_library = False
    for frame in reversed(rank.frames):
        if frame.is_librarys:
            through_library = bool(found)  # what runs the program itself does not count
            continue
        found.append(_Step(os.path.abspath(frame.file), frame.line, through_library))
        through_library = False
    if rank.operation is not None:
        file, _, line = rank.operation.site.rpartition(":")
        at = [i for i, step in enumerate(found) if (step.file, str(step.line)) == (os.path.join(folder, file), line)]
        return tuple(found[: at[-1] + 1]) if at else ()
    return tuple(found)


def _read(path: str, unchanged_since: float) -> ast.Module | None:
    """Parse a file; None if it cannot be read, or has changed since, so that it may not be what the ranks run."""
    try:
        # A pipe would keep the launcher waiting.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC)) as file:
            about = os.fstat(file.fileno())
            # The kernel notes every change in the second time. A program can set the first one, as `cp -p` does.
            changed = max(about.st_mtime, about.st_ctime)
            if stat.S_ISREG(about.st_mode) and about.st_size <= _LARGEST and changed < unchanged_since:
                return ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    return None
