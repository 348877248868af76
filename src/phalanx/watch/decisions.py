"""What decides whether a line of a program is run: the branches and loops around it, and the jumps past it.

All of it follows from the program's text alone. Frames of a stack have a file and a line, so a place is a line here. If
a line has several statements of different branches, it is not known which of them is meant, and there is no place.
"""

from __future__ import annotations

import ast
import os
import stat
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Decision", "Place", "Program", "read_program"]

_LARGEST = 1 << 20  # bytes; the launcher reads the text while a job hangs, and has more to do
# A condition that names one of these is expected to differ between ranks: rank, local_rank, is_main_process.
_OF_RANKS = ("rank", "main_process", "master")
_TRIES = tuple(getattr(ast, name) for name in ("Try", "TryStar") if hasattr(ast, name))  # the second from Python 3.11
_EXITS = ("sys.exit", "exit", "quit", "os._exit")
# What cannot take long, so that no rank is found there if the line has more than that.
_QUICK = (ast.Name, ast.Attribute, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp)
_QUICK_PARTS = (ast.expr_context, ast.cmpop, ast.boolop, ast.unaryop, ast.Mod)


@dataclass(frozen=True)
class Decision:
    """A statement that decides what is run.

    Attributes:
        word: ``if``, ``for``, ``while``, ``match`` or ``try``.
        line, column: where it begins.
        is_of_rank: whether its condition names a rank.
        is_constant: whether its condition is the same everywhere, as of ``while True``.
    """

    word: str
    line: int
    column: int
    is_of_rank: bool = False
    is_constant: bool = False


@dataclass(frozen=True)
class Arm:
    """One part of such a statement.

    Attributes:
        decision: the statement.
        number: which of its alternatives; of two with different numbers a pass runs only one, and of ``try`` the whole
            of one.
        is_conditional: whether it is run only under a condition, unlike the body of ``try``.
        is_loop: whether it is run several times.
        can_be_cut_short: whether an exception in it is caught by this statement.
    """

    decision: Decision
    number: int
    is_conditional: bool = True
    is_loop: bool = False
    can_be_cut_short: bool = False


@dataclass(frozen=True)
class Place:
    """A statement, or the head of one with a body.

    Attributes:
        first, last: its lines.
        function: where the function begins in which it stands; 0 for the file itself.
        arms: those in which it stands within the function, the outermost first.
        is_quick: whether nothing in it can take long.
    """

    first: int
    last: int
    function: int
    arms: tuple[Arm, ...]
    is_quick: bool = False

    @property
    def loops(self) -> int:
        """In how many loops of its function it stands."""
        return sum(arm.is_loop for arm in self.arms)

    def shared_with(self, other: Place) -> int:
        """How many of the outermost arms both stand in."""
        for index, (own, others) in enumerate(zip(self.arms, other.arms, strict=False)):
            if (own.decision, own.number) != (others.decision, others.number):
                return index
        return min(len(self.arms), len(other.arms))


@dataclass(frozen=True)
class _Jump:
    """``break``, ``continue``, ``return`` or an exit; ``loop`` is the statement of the first two."""

    word: str
    place: Place
    loop: Decision | None


class Program:
    """The text of one file.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: it cannot be parsed.
    """

    def __init__(self, text: bytes) -> None:
        self._places: list[Place] = []
        self._jumps: list[_Jump] = []
        tree = ast.parse(text)
        self._of_ranks = _names_of_ranks(tree)
        self._read(tree.body, 0, ())

    def place_at(self, line: int) -> Place | None:
        """The place on this line; None if there is none, or if it cannot be known which of several is meant."""
        found = [place for place in self._places if place.first <= line <= place.last]
        found = [place for place in found if not place.is_quick] or found
        stands_in = {(place.function, *((arm.decision, arm.number) for arm in place.arms)) for place in found}
        return (
            found[-1] if len(stands_in) == 1 else None
        )  # the last one, if the head of a loop and its body are one line

    def decisions(
        self,
        place: Place,
        *,
        other: Place | None = None,
        in_another_pass: bool = False,
        after_return: bool = False,
        after_exit: bool = False,
        after_error: bool = False,
    ) -> set[Decision]:
        """What can have had a process leave out a place.

        Args:
            place: the place.
            other: where in the same function the process is now; None if it has left the function.
            in_another_pass: whether it may be in a later pass of a loop that has both places.
            after_return: whether it may have left the function on its way.
            after_exit: whether it may have ended.
            after_error: whether an exception may have kept it from the place.
        """
        shared = place.shared_with(other) if other is not None else 0
        found = {
            arm.decision for arm in place.arms[shared:] if arm.is_conditional or (after_error and arm.can_be_cut_short)
        }
        own = {arm.decision: index for index, arm in enumerate(place.arms) if arm.is_loop}
        for jump in self._jumps:
            if jump.place.function != place.function:
                continue
            before = jump.place.first < place.first
            if jump.loop is not None:
                index = own.get(jump.loop)
                if index is None:
                    continue
                if jump.word == "break":
                    leads_past = index >= shared
                else:
                    leads_past = before and (index >= shared or in_another_pass)
            else:
                is_in_loop = any(arm.decision in own for arm in jump.place.arms)
                leads_past = (before or is_in_loop) and (after_exit if jump.word == "exit" else after_return)
            if leads_past:
                found |= _reasons(jump, place)
        return {decision for decision in found if not decision.is_constant}

    def _read(self, block: Iterable[ast.stmt], function: int, arms: tuple[Arm, ...]) -> None:
        for statement in block:
            self._read_one(statement, function, arms)

    def _read_one(self, node: ast.stmt, function: int, arms: tuple[Arm, ...]) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self._head(node, node.body, function, arms, node.decorator_list)
            self._read(node.body, node.lineno, ())
        elif isinstance(node, ast.If):
            self._read_if(node, function, arms)
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            self._read_loop(node, function, arms)
        elif isinstance(node, ast.Match):
            guards = [case.guard for case in node.cases if case.guard is not None]
            decision = self._decision(
                "match", node, [node.subject, *guards, *(case.pattern for case in node.cases)], ()
            )
            self._places.append(Place(node.lineno, _last_line(node.subject), function, arms, _is_quick([node.subject])))
            for number, case in enumerate(node.cases):
                self._read(case.body, function, (*arms, Arm(decision, number)))
        elif isinstance(node, _TRIES):
            self._read_try(node, function, arms)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            self._head(node, node.body, function, arms, [item.context_expr for item in node.items])
            self._read(node.body, function, arms)
        else:
            place = Place(node.lineno, _last_line(node), function, arms)
            self._places.append(place)
            self._note_jump(node, place)

    def _read_if(self, node: ast.If, function: int, arms: tuple[Arm, ...]) -> None:
        # A chain of elif is one statement with many arms for people, and several within each other for the parser.
        chain = [node]
        while _is_elif(chain[-1]):
            chain.append(chain[-1].orelse[0])  # type: ignore[arg-type]
        tests = [part.test for part in chain]
        decision = self._decision("if", node, tests, tests)
        for number, part in enumerate(chain):
            self._head(part, part.body, function, arms, [part.test])
            self._read(part.body, function, (*arms, Arm(decision, number)))
        self._read(chain[-1].orelse, function, (*arms, Arm(decision, len(chain))))

    def _read_loop(self, node: ast.For | ast.AsyncFor | ast.While, function: int, arms: tuple[Arm, ...]) -> None:
        is_while = isinstance(node, ast.While)
        condition = node.test if isinstance(node, ast.While) else node.iter
        decision = self._decision("while" if is_while else "for", node, [condition], [condition] if is_while else ())
        # The head is evaluated whether or not there is a pass, and again before each.
        self._head(
            node, node.body, function, (*arms, Arm(decision, 0, is_conditional=False, is_loop=True)), [condition]
        )
        self._read(node.body, function, (*arms, Arm(decision, 0, is_loop=True)))
        self._read(node.orelse, function, (*arms, Arm(decision, 1)))

    def _read_try(self, node: Any, function: int, arms: tuple[Arm, ...]) -> None:
        decision = self._decision("try", node, (), ())
        body = Arm(decision, 0, is_conditional=False, can_be_cut_short=bool(node.handlers))
        self._read(node.body, function, (*arms, body))
        self._read(node.orelse, function, (*arms, Arm(decision, 0)))
        for number, handler in enumerate(node.handlers, 1):
            self._read(handler.body, function, (*arms, Arm(decision, number)))
        self._read(node.finalbody, function, arms)

    def _head(
        self, node: ast.stmt, body: list[ast.stmt], function: int, arms: tuple[Arm, ...], parts: list[ast.expr]
    ) -> None:
        first = min([node.lineno, *(part.lineno for part in parts)])
        last = max([node.lineno, body[0].lineno - 1, *(_last_line(part) for part in parts)])
        self._places.append(Place(first, last, function, arms, _is_quick(parts)))

    def _decision(
        self, word: str, node: ast.stmt, parts: Iterable[ast.AST], conditions: Iterable[ast.expr]
    ) -> Decision:
        names = [name for part in parts for name in _names(part)]
        constants = [isinstance(test, ast.Constant) or "__name__" in _names(test) for test in conditions]
        is_of_rank = any(_is_of_rank(name) or name in self._of_ranks for name in names)
        return Decision(word, node.lineno, node.col_offset, is_of_rank, bool(constants) and all(constants))

    def _note_jump(self, node: ast.stmt, place: Place) -> None:
        if isinstance(node, (ast.Break, ast.Continue)):
            loop = next((arm.decision for arm in reversed(place.arms) if arm.is_loop), None)
            self._jumps.append(_Jump("break" if isinstance(node, ast.Break) else "continue", place, loop))
        elif isinstance(node, ast.Return):
            self._jumps.append(_Jump("return", place, None))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            is_exit = ast.unparse(node.value.func) in _EXITS
            self._jumps += [_Jump("exit", place, None)] if is_exit else []


def _reasons(jump: _Jump, place: Place) -> set[Decision]:
    """What decides whether the jump is made by a process that has come as far as both."""
    around = jump.place.arms[jump.place.shared_with(place) :]
    return {arm.decision for arm in around if arm.is_conditional}


def _names_of_ranks(tree: ast.AST) -> set[str]:
    """What is assigned from an expression that names a rank, as ``leads = rank == 0``."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            # The result of a call says nothing: `model = build(rank)`.
            is_condition = isinstance(node.value, (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.IfExp))
            if is_condition and any(_is_of_rank(name) for name in _names(node.value)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {name for target in targets for name in _names(target)}
    return found


def _is_of_rank(name: str) -> bool:
    return any(word in name.lower() for word in _OF_RANKS)


def _names(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr


def _is_elif(node: ast.If) -> bool:
    return len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If) and node.orelse[0].col_offset == node.col_offset


def _is_quick(parts: Iterable[ast.AST]) -> bool:
    return all(isinstance(node, (*_QUICK, *_QUICK_PARTS)) for part in parts for node in ast.walk(part))


def _last_line(node: ast.stmt | ast.expr) -> int:
    return node.end_lineno or node.lineno


def read_program(path: str, unchanged_since: float) -> Program | None:
    """The program in a file; None if it cannot be read, or may not be the text that the ranks run.

    Args:
        path: the file.
        unchanged_since: a time of day; the file must not have changed since. The ranks have read it later.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            about = os.fstat(file.fileno())
            # The kernel notes every change in the second time. A program can set the first one, as `cp -p` does.
            changed = max(about.st_mtime, about.st_ctime)
            if not stat.S_ISREG(about.st_mode) or about.st_size > _LARGEST or changed >= unchanged_since:
                return None
            return Program(file.read(_LARGEST + 1))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError, tokenize.TokenError):
        return None


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would keep the launcher waiting
