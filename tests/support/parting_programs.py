"""Programs whose ranks part, for ``tests/unit/test_parting.py``: their texts, and what is marked in them.

``# A`` marks the lines of the awaited rank's stack and ``# W`` those of a rank that waits for it, which are listed in
the order of the calls: by default that of the lines, and ``# A2`` comes before ``# A10``.
"""

from __future__ import annotations

import re

__all__ = ["PROGRAMS", "expected", "ways"]

# Each: the program, and the line with the comment HERE is to be named; without one, nothing.
PROGRAMS = {
    "the arms of an if": """
        if rank == 0:  # HERE
            work()  # A
        else:
            all_reduce()  # W
        """,
    "an arm and what follows": """
        if rank == 0:  # HERE
            work()  # A
        all_reduce()  # W
        """,
    "an arm in which all may have been, and one is slow": """
        if saving:
            work()  # A
        all_reduce()  # W
        """,
    "an arm by a name that stands for the rank": """
        leads = rank == 0
        if leads:  # HERE
            work()  # A
        all_reduce()  # W
        """,
    "an arm on one line": """
        if rank == 0: work()  # A HERE
        all_reduce()  # W
        """,
    "a loop on one line": """
        if busy:
            for part in parts(): work()  # A
        all_reduce()  # W
        """,
    "a loop on one line, in the rank's arm": """
        if rank == 0:  # HERE
            for part in parts(): work()  # A
        all_reduce()  # W
        """,
    "two arms of a chain of elif": """
        if rank == 0:  # HERE
            pass
        elif rank == 1:
            work()  # A
        elif rank == 2:
            all_reduce()  # W
        """,
    "an arm of a chain of elif, and what follows": """
        if rank == 1:  # HERE
            pass
        elif b:
            work()  # A
        all_reduce()  # W
        """,
    "nested, of which one names the rank": """
        if saving:
            if world.rank == 0:  # HERE
                for part in parts:
                    work()  # A
        all_reduce()  # W
        """,
    "nested, and either may be it": """
        if saving:
            if changed:
                work()  # A
        all_reduce()  # W
        """,
    "nested in the same arm": """
        if saving:
            if changed:  # HERE
                work()  # A
            else:
                all_reduce()  # W
        """,
    "one after the other": """
        work()  # A
        all_reduce()  # W
        """,
    "a branch that the awaited rank has not come to": """
        work()  # A
        if rank:
            all_reduce()  # W
        """,
    "a branch in front of both": """
        if rank:
            pass
        work()  # A
        all_reduce()  # W
        """,
    "a return in front of the call": """
        def step():
            if rank == 3:  # HERE
                return
            all_reduce()  # W2
        step()  # W1
        work()  # A
        """,
    "a return that rank has gone past": """
        def step():
            if rank == 3:
                return
            work()  # A2
            all_reduce()  # W2
        step()  # A1 W1
        """,
    "two returns in front of the call": """
        def step():
            if not batch:
                return
            if loss.isnan():
                return
            all_reduce()  # W2
        step()  # W1
        work()  # A
        """,
    "a return behind the call": """
        def step():
            all_reduce()  # W2
            if rank == 3:
                return
        step()  # W1
        work()  # A
        """,
    "a return in front of the awaited rank's call": """
        def save():
            if rank:  # HERE
                return
            work()  # A2
        save()  # A1
        all_reduce()  # W
        """,
    "a call in a branch": """
        def step():
            all_reduce()  # W2
        if ready:  # HERE
            step()  # W1
        work()  # A
        """,
    "a loop that ends early": """
        for batch in batches:  # HERE
            all_reduce()  # W
        work()  # A
        """,
    "a loop in which one may be slow": """
        while pending():
            work()  # A
        all_reduce()  # W
        """,
    "a loop that lasts longer on one rank": """
        for _ in range(5 if rank else 9):  # HERE
            work()  # A
        all_reduce()  # W
        """,
    "a loop without an end, left by break": """
        while True:
            if not batches:  # HERE
                break
            all_reduce()  # W
        work()  # A
        """,
    "a loop left by break behind the call": """
        while True:
            all_reduce()  # W
            if converged:  # HERE
                break
        work()  # A
        """,
    "a loop that ends, or is left by a break": """
        for batch in batches:
            if bad(batch):
                break
            all_reduce()  # W
        work()  # A
        """,
    "a loop that ends, or passes over, which is the rank's": """
        for batch in batches:
            if rank == 3:  # HERE
                continue
            all_reduce()  # W
        work()  # A
        """,
    "the head of a loop around both": """
        for batch in batches():  # A
            all_reduce()  # W
        """,
    "a slow rank in the pass before": """
        for batch in batches:
            all_reduce()  # W
            work()  # A
        """,
    "a slow rank behind a call that not every pass makes": """
        for step in range(9):
            if step % 4 == 0:
                all_reduce()  # W
            work()  # A
        """,
    "a slow rank in front of a call that not every pass makes": """
        for step in range(9):
            work()  # A
            if step % 4 == 0:
                all_reduce()  # W
        """,
    "a slow rank in a function that is called in every pass": """
        def step():
            if bad:
                return
            all_reduce()  # W2
            work()  # A2
        for batch in batches:
            step()  # A1 W1
        """,
    "one rank's work in a loop, behind the call": """
        for step in range(9):
            all_reduce()  # W
            if rank == 0:  # HERE
                work()  # A
        """,
    "a slow rank in the arm of a pass before": """
        for step in range(9):
            if step % 4:
                work()  # A
            else:
                all_reduce()  # W
        """,
    "the rank's arm in a loop": """
        for step in range(9):
            if rank == 0:  # HERE
                work()  # A
            else:
                all_reduce()  # W
        """,
    "a case": """
        match command:  # HERE
            case "save":
                work()  # A
            case _:
                all_reduce()  # W
        """,
    "a case and what follows": """
        match rank:  # HERE
            case 0:
                work()  # A
        all_reduce()  # W
        """,
    "an exception's handler": """
        try:  # HERE
            all_reduce()  # W
        except ValueError:
            work()  # A
        """,
    "behind an exception's handler": """
        try:  # HERE
            read()
            all_reduce()  # W
        except ValueError:
            pass
        work()  # A
        """,
    "the body of a try is run by all": """
        try:
            work()  # A
        except ValueError:
            pass
        all_reduce()  # W
        """,
    "with is no branch": """
        with label("evaluation"):
            work()  # A
        all_reduce()  # W
        """,
    "two functions, called at different lines": """
        def evaluate():
            work()  # A2
        def step():
            all_reduce()  # W2
        if rank == 0:  # HERE
            evaluate()  # A1
        else:
            step()  # W1
        """,
    "two functions, called at one line": """
        def evaluate():
            if rank == 0:
                work()  # A2
        def step():
            if rank:
                all_reduce()  # W2
        evaluate() if rank == 0 else step()  # A1 W1
        """,
    "two arms of an expression on several lines": """
        (
            work()  # A
            if rank == 0
            else all_reduce()  # W
        )
        """,
    "the same line": """
        if rank == 0:
            x = all_reduce(work())  # A W
        """,
    "several statements on the line": """
        if load(): work()  # A
        all_reduce()  # W
        """,
    "a text that cannot be parsed": """
        if rank == 0:
            work()  # A
        else
            all_reduce()  # W
        """,
}


def ways(text: str, mark: str) -> list[int]:
    """The lines of a mark, the outermost call first."""
    found = [
        (int(match[1] or 0), number)
        for number, line in enumerate(text.splitlines(), 1)
        for match in re.finditer(rf"\b{mark}(\d*)\b", line.partition("#")[2])
    ]
    return [number for _, number in sorted(found)]


def expected(text: str) -> str:
    for number, line in enumerate(text.splitlines(), 1):
        if "HERE" in line:
            return f"the `{re.split(r'[ :]', line.strip())[0]}` in line {number}"
    return ""
