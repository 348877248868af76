"""Find the branch or loop that has taken one rank elsewhere than those that wait for it, from stacks and source text.

Two ranks' stacks are equal down to a function in which they stand at different lines. Statements around one of these
lines, or jumps in front of it (``return``, ``continue``), can have parted them. One is named if it alone can have, or
if it alone has a condition on the rank. Where the awaited rank may just be slow, because it stands at an earlier line
or in a loop with the other, only a condition on the rank counts.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import NamedTuple

from phalanx.diagnosis.diagnose import HangDiagnosis
from phalanx.diagnosis.snapshot import RankSnapshot
from phalanx.system.files import beside, source_lines

_MOST_STACKS = 8  # of each side that differ; with more there is no one statement that parts them
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_BRANCHES = (ast.If, ast.Match, ast.Try, *_LOOPS)
_JUMPS = (ast.Return, ast.Continue, ast.Break, ast.Raise)
_OF_RANK = re.compile(r"rank|master|main_process")

_Step = tuple[str, int]  # a line on a rank's way through the user's program, with its file
_Branch = tuple[str, ast.stmt]  # a statement that decides what is run, with its file
_Arm = tuple[ast.stmt, int]  # one of its arms


class _Place(NamedTuple):
    """The innermost function around a line, and the branches around it there, outermost first, each with its arm."""

    function: ast.AST
    arms: list[_Arm]


def divergence(diagnosis: HangDiagnosis, ranks: Sequence[RankSnapshot], folder: str, unchanged_since: float) -> str:
    """Find the statement that parted the ranks, as "the `if` in line 55"; empty if it cannot be told.

    Sites of operations are relative to ``folder``. Files that have changed since the time of day ``unchanged_since``
    may not be what the ranks run, and are not read.
    """
    awaited = [rank for rank in ranks if rank.rank in diagnosis.awaited]
    waiting = [rank for rank in ranks if rank.rank in diagnosis.waiting and rank not in awaited]
    if awaited and set(diagnosis.awaited) <= set(diagnosis.waiting):  # they wait for each other
        sites = {rank.rank: rank.operation.site if rank.operation is not None else "" for rank in awaited}
        waiting = [rank for rank in awaited if sites[rank.rank] != sites[awaited[0].rank]]
        awaited = [rank for rank in awaited if rank not in waiting]
    for rank in (*awaited, *waiting):
        if (rank.operation is not None and rank.operation.is_message) or (rank.ended and not rank.ended_well):
            return ""  # the ends of a message are different calls; a rank that fails ends the job, and is no riddle
    if any(rank.is_stopped for rank in awaited):
        return ""
    # Of the ranks that wait at one line only one is asked for its stack.
    ours = {() if rank.ended else _steps(rank, folder) for rank in awaited if rank.ended or rank.frames}
    theirs = {_steps(rank, folder) for rank in waiting if rank.frames}
    if not (0 < len(ours) <= _MOST_STACKS and 0 < len(theirs) <= _MOST_STACKS) or () in theirs:
        return ""
    read = lru_cache(lambda file: _read(file, unchanged_since))
    ended = any(rank.ended for rank in awaited)
    found = {_parted(one, other, read, ended=ended) for one in ours for other in theirs}
    branch = found.pop() if len(found) == 1 else None
    if branch is None:
        return ""
    file, node = branch
    elsewhere = f" of {beside(file, folder)}" if {other[-1][0] for other in theirs} != {file} else ""
    return f"the `{type(node).__name__.removeprefix('Async').lower()}` in line {node.lineno}{elsewhere}"


def _steps(rank: RankSnapshot, folder: str) -> tuple[_Step, ...]:
    """The lines of the user's program in a rank's stack, the outermost first, down to the call that it is in."""
    found = [(os.path.abspath(frame.file), frame.line) for frame in reversed(rank.frames) if not frame.is_librarys]
    if rank.operation is not None:
        file, _, line = rank.operation.site.rpartition(":")
        while found and (found[-1][0], str(found[-1][1])) != (os.path.join(folder, file), line):
            found.pop()
    return tuple(found)


def _parted(
    awaited: tuple[_Step, ...], waiting: tuple[_Step, ...], read: Callable[[str], ast.Module | None], *, ended: bool
) -> _Branch | None:
    """Find the one statement that parts a rank from another; a rank whose script has ended is nowhere."""
    pairs = zip(awaited, waiting, strict=False)
    at = 0 if ended else next((i for i, (one, other) in enumerate(pairs) if one != other), -1)
    trees = [tree for file, _ in waiting if (tree := read(file)) is not None]
    if at < 0 or len(trees) < len(waiting):
        return None
    places = [_place(tree, line) for tree, (_, line) in zip(trees, waiting, strict=True)]
    left_out = {each for i in range(at + 1, len(places)) for each in _deciding(places[i], waiting[i])}
    if ended:
        return _chosen(left_out | _deciding(places[0], waiting[0]), only_of_rank=False)
    (file, line), (other_file, other_line) = awaited[at], waiting[at]
    ours, theirs = _place(trees[at], line), places[at]
    if file != other_file or theirs.function is not ours.function:
        return None
    shared, own, other = _compared(ours, theirs)
    if own and other and own[0][0] is other[0][0]:
        return file, own[0][0]  # two arms of one statement
    around = [node for place in places[:at] for node, _ in place.arms] + shared
    loops, is_behind = any(isinstance(node, _LOOPS) for node in around), line < other_line
    found = {(file, node) for node, _ in own} if loops or is_behind else set()  # that hold it up
    if loops or not is_behind:  # it has left out the others' call
        found |= left_out | {(file, node) for node, _ in other}
    return _chosen(found, only_of_rank=loops or is_behind)


def _chosen(found: set[_Branch], *, only_of_rank: bool) -> _Branch | None:
    of_rank = []
    for file, node in found:
        condition = getattr(node, "test", None) or getattr(node, "iter", None) or getattr(node, "subject", None)
        if condition is not None and _OF_RANK.search(ast.unparse(condition)):
            of_rank.append((file, node))
    if len(of_rank) == 1:
        return of_rank[0]
    return next(iter(found)) if len(found) == 1 and not only_of_rank else None


def _deciding(place: _Place, step: _Step) -> set[_Branch]:
    """The branches around a line in its function, and those that jump past it."""
    jumps = [
        node
        for node in _own_nodes(place.function)
        if isinstance(node, ast.If) and (node.end_lineno or 0) < step[1] and any(map(_leaves, ast.walk(node)))
    ]
    return {(step[0], node) for node in (*jumps, *(node for node, _ in place.arms))}


# -- places in source text -----------------------------------------------------------------------------


def _place(tree: ast.Module, line: int) -> _Place:
    functions = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS) and _spans([node], line)]
    function: ast.AST = functions[-1] if functions else tree
    branches = [node for node in _own_nodes(function) if isinstance(node, _BRANCHES)]
    return _Place(
        function, [(node, i) for node in branches for i, arm in enumerate(_arms_of(node)) if _spans(arm, line)]
    )


def _compared(one: _Place, other: _Place) -> tuple[list[ast.stmt], list[_Arm], list[_Arm]]:
    """The branches of which two lines of a function are in the same arm, and what each has beyond these."""
    pairs = zip(one.arms, other.arms, strict=False)
    shared = [mine[0] for mine, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return shared, one.arms[len(shared) :], other.arms[len(shared) :]


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


def _leaves(node: ast.AST) -> bool:
    """Return whether nothing that follows a statement is run."""
    call = node.value if isinstance(node, ast.Expr) else node
    is_exit = isinstance(call, ast.Call) and ast.unparse(call.func) in ("sys.exit", "exit", "quit", "os._exit")
    return is_exit or isinstance(node, _JUMPS)


def _read(path: str, unchanged_since: float) -> ast.Module | None:
    """Parse a file; None if it cannot be read, or has changed since, so that it may not be what the ranks run."""
    lines = source_lines(path)
    with contextlib.suppress(OSError):
        about = os.stat(path) if lines else None
        # The kernel notes every change in the second time. A program can set the first one, as `cp -p` does.
        if about is not None and max(about.st_mtime, about.st_ctime) < unchanged_since:
            return _parse(lines)
    return None


def _parse(lines: Sequence[str]) -> ast.Module | None:
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError, SystemError):
        return ast.parse("".join(lines)) if lines else None
    return None


# -- lines of calls that ranks compare -----------------------------------------------------------------


def identity(place: str) -> int:
    """Number a place of this program, ``file:line``, by the text of its line: it is equal on all ranks.

    Equal lines in two arms of one branch have one number, and those that follow one another differ. 0 stands for
    generated code, the name of whose file differs between ranks.
    """
    file, _, line = place.rpartition(":")
    if file.startswith("<"):
        return 0
    lines = [text.strip() for text in linecache.getlines(file)[: int(line)]]
    equal = [number for number, text in enumerate(lines[:-1], 1) if text == lines[-1]]
    order = sum(not are_alternatives(f"{file}:{number}", place) for number in equal)
    return zlib.crc32(f"{file}\0{lines[-1] if lines else line}\0{order}".encode(errors="replace")) or 1


def are_alternatives(one: str, other: str) -> bool:
    """Return whether two places are alternatives, as two arms of one ``if``, ``match`` or ``try``.

    The places are as ``file:line``. They also count as such if that cannot be known, as of a file without text.
    """
    (file, _, first), (other_file, _, second) = one.rpartition(":"), other.rpartition(":")
    if file != other_file:
        return False
    tree = _own_tree(file)
    if tree is None or first == second:
        return True
    early, late = (_place(tree, line) for line in sorted((int(first), int(second))))
    if early.function is not late.function:
        return False
    _, before, behind = _compared(early, late)
    if before and behind and before[0][0] is behind[0][0]:
        return not isinstance(before[0][0], _LOOPS)
    # What follows `if a: ...; return` is run only where that arm was not.
    passed = takewhile(lambda arm: not isinstance(arm[0], _LOOPS), before)
    return any(isinstance(node, ast.If) and _leaves(_arms_of(node)[arm][-1]) for node, arm in passed)


@lru_cache(maxsize=64)
def _own_tree(file: str) -> ast.Module | None:
    return _parse(linecache.getlines(file))
