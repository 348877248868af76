"""What stands at a place of a program: the text of the call there, and the branches in which it is.

From these follows the *identity* of a place, a number that is equal on all ranks that run the same program. It is not
the line's number: the two arms of an ``if`` may hold the same calls, and the call ``all_reduce(a)`` of one arm is that
of the other. So a place is the file, the function, the text of the call, and which of the equal calls that come after
each other it is.
"""

from __future__ import annotations

import ast
import gc
import linecache
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from types import CodeType

from phalanx.diagnosis.call_site import CallSite

__all__ = ["are_alternatives", "call_text_at", "identity"]

_LONGEST_FILE = 20_000  # lines; the branches of a longer one are not looked at
_Span = tuple[
    int, int, int, int
]  # the first line, the last one, and columns in bytes, as ast and code objects have them
_Branches = tuple[tuple[int, int], ...]  # each a statement, by its number, and which of its arms


@dataclass(frozen=True)
class _Call:
    """A call in a file: where, in which function (by its number in the file), and in which arms of which statements."""

    span: _Span
    function: int
    branches: _Branches


def call_text_at(site: CallSite) -> str:
    """The call at a place, as ``dist.all_reduce(a)``, on one line; else the line; empty if there is no source text."""
    code = site[0]
    span = _span(site)
    lines = linecache.getlines(code.co_filename)
    if span is None or span[0] > len(lines):
        return ""
    return _segment(lines, span)


def identity(site: CallSite) -> int:
    """A number for a place of the program, from 1 to 2^32 - 1; without source text it stands for the line.

    0 for code that was generated: its file's name has a number that differs between ranks.
    """
    code = site[0]
    if code.co_filename.startswith("<"):
        return 0
    text = call_text_at(site)
    span = _span(site)
    which = _order(site, text) if text else (span[0] if span else site[1])
    name = getattr(code, "co_qualname", code.co_name)
    return zlib.crc32(f"{code.co_filename}\0{name}\0{text}\0{which}".encode(errors="replace")) or 1


def are_alternatives(one: CallSite, other: CallSite) -> bool:
    """Whether only one of two places is run, as two arms of one ``if``, ``match`` or ``try``.

    Also if that cannot be known: a place in a file whose text is not at hand, or that stands on one line with others
    where columns are not known.
    """
    if one[0].co_filename != other[0].co_filename:
        return False
    first, second = _calls_at(one), _calls_at(other)
    return not (first and second) or any(_exclude(a, b) for a in first for b in second)


def _order(site: CallSite, text: str) -> int:
    """How many calls of that text come before this one in its function, but for those that run in its place."""
    lines = linecache.getlines(site[0].co_filename)
    own = _call_at(site) if _is_long(site) or sum(text in line for line in lines) > 1 else None
    if own is None:  # hardly any text stands twice in a file, and to count is much quicker than to parse
        return 0
    return sum(
        call.function == own.function
        and call.span < own.span
        and not _exclude(call, own)
        and _segment(lines, call.span) == text
        for call in _calls(site[0].co_filename).values()
    )


def _is_long(site: CallSite) -> bool:
    span = _span(site)
    return span is not None and span[0] != span[1]


def _exclude(one: _Call, other: _Call) -> bool:
    arms = dict(one.branches)
    return one.function == other.function and any(arms.get(where, arm) != arm for where, arm in other.branches)


def _call_at(site: CallSite) -> _Call | None:
    found = _calls_at(site)
    return found[0] if len(found) == 1 else None


def _calls_at(site: CallSite) -> list[_Call]:
    """The call at a place; all that the line has a part of, where columns are not known."""
    span = _span(site)
    if span is None:
        return []
    calls = _calls(site[0].co_filename)
    if span[3] >= 0:
        return [calls[span]] if span in calls else []
    return [call for call in calls.values() if call.span[0] <= span[0] <= call.span[1]]


def _span(site: CallSite) -> _Span | None:
    """Where the expression of a place stands; a whole line if columns are not known (before Python 3.11)."""
    code, instruction = site
    positions = getattr(code, "co_positions", None)
    if positions is not None:
        line, last, column, end = next(islice(positions(), instruction // 2, None), (None,) * 4)
        if line is not None and last is not None and column is not None and end is not None:
            return line, last, column, end
    line = _line(code, instruction)
    return None if line is None else (line, line, 0, -1)


def _line(code: CodeType, instruction: int) -> int | None:
    return next((line for start, end, line in code.co_lines() if start <= instruction < end), None)


def _segment(lines: list[str], span: _Span) -> str:
    first, last, column, end = span
    part = [line.encode() for line in lines[first - 1 : last]]
    if not part:
        return ""
    if end >= 0:
        part[-1] = part[-1][:end]
    part[0] = part[0][column:]
    return " ".join(b"".join(part).decode(errors="replace").split())


@lru_cache(maxsize=64)
def _calls(file: str) -> dict[_Span, _Call]:
    """All calls of a file, by where they stand."""
    lines = linecache.getlines(file)
    if len(lines) > _LONGEST_FILE:
        return {}
    found: dict[_Span, _Call] = {}
    try:
        for node, function, branches in _walk(_parse("".join(lines)).body, 0, ()):
            for span in _spans(node):
                found.setdefault(span, _Call(span, function, branches))
    except (SyntaxError, ValueError, RecursionError):  # a chain of hundreds of `elif`, or of operators, is too deep
        return {}
    return found


def _parse(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SystemError:
        # CPython counts the depth of the tree in a place that all threads share. A garbage collection while a tree is
        # built may run code that parses too, here or on another thread, and then the count is wrong, though nothing
        # else is. Without a collection no other code runs before the tree is there.
        collects = gc.isenabled()
        gc.disable()
        try:
            return ast.parse(text)
        finally:
            if collects:
                gc.enable()


def _spans(node: ast.Call) -> Iterator[_Span]:
    last, end = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
    yield node.lineno, last, node.col_offset, end
    # Where a method's name stands on a later line than its object, the instruction begins there.
    if isinstance(node.func, ast.Attribute) and node.func.end_lineno and node.func.end_lineno != node.lineno:
        column = (node.func.end_col_offset or 0) - len(node.func.attr.encode())
        yield node.func.end_lineno, last, column, end


_Found = Iterator[tuple[ast.Call, int, _Branches]]


def _walk(block: list[ast.stmt], function: int, branches: _Branches) -> _Found:
    """The calls in a block of statements, each with its function and branches."""
    for statement in block:
        yield from _walk_node(statement, function, branches)
        # What follows `if a: ...; return` is run only where that arm was not.
        if isinstance(statement, ast.If):
            for arm, part in enumerate((statement.body, statement.orelse)):
                if part and _leaves(part[-1]):
                    branches = (*branches, (id(statement), 1 - arm))


def _leaves(statement: ast.stmt) -> bool:
    """Whether nothing that follows a statement is run."""
    if isinstance(statement, ast.With):
        return _leaves(statement.body[-1])
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return ast.unparse(statement.value.func) in ("sys.exit", "exit", "quit", "os._exit")
    return isinstance(statement, (ast.Return, ast.Continue, ast.Break, ast.Raise))


def _walk_node(node: ast.AST, function: int, branches: _Branches) -> _Found:
    if isinstance(node, ast.Call):
        yield node, function, branches
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        function, branches = id(node), ()
    for name, value in ast.iter_fields(node):
        inner = branches
        if isinstance(node, (ast.If, ast.IfExp)) and name in ("body", "orelse"):
            inner = (*branches, (id(node), int(name == "orelse")))
        # An arm of `try` may end anywhere, and then the handlers go on; what follows in the body was not run.
        if isinstance(node, ast.Try) and name in ("body", "orelse", "handlers"):
            inner = (*branches, (id(node), int(name == "handlers")))
        if isinstance(node, ast.Match) and name == "cases":
            for arm, case in enumerate(value):
                yield from _walk_node(case, function, (*branches, (id(node), arm)))
        elif isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield from _walk(value, function, inner)
        elif isinstance(value, list):
            for part in value:
                if isinstance(part, ast.AST):
                    yield from _walk_node(part, function, inner)
        elif isinstance(value, ast.AST):
            yield from _walk_node(value, function, inner)
