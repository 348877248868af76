"""``python -m tests.differential [SIZE] [WORD]``: a line for each program whose name has WORD, without pytest."""

from __future__ import annotations

import sys
import time

from tests.differential.suite import all_programs, verdict
from tests.differential.worlds import run_programs


def main(size: int, word: str) -> None:
    chosen = [program for program in all_programs() if word in program.name and size in program.sizes]
    outcomes = {}
    for backend in ("gloo", "phalanx"):
        start = time.monotonic()
        outcomes[backend] = run_programs(backend, size, chosen)
        print(f"{len(chosen)} programs on {size} ranks over {backend}: {time.monotonic() - start:.1f} s")
    wrong = {p: verdict(p, outcomes["gloo"][p.name], outcomes["phalanx"][p.name]) for p in chosen}
    for program, text in wrong.items():
        if text:
            print(f"{program.name}: {text}" if word else f"{program.name}: {' '.join(text.split())[:300]}")
    print(f"{sum(map(bool, wrong.values()))} of {len(chosen)} are wrong")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2, sys.argv[2] if len(sys.argv) > 2 else "")
