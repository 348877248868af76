"""``python -m tests.differential [SIZE] [WORD]``: a line for each program whose name has WORD, without pytest.

With ``--two-hosts`` first, Phalanx runs in worlds whose ranks take themselves for ranks of two hosts.
"""

from __future__ import annotations

import sys
import time

from tests.differential.suite import all_programs, verdict
from tests.differential.worlds import BETWEEN_HOSTS, run_programs


def main(size: int, word: str, ours: str) -> None:
    chosen = [program for program in all_programs() if word in program.name and size in program.sizes]
    outcomes = {}
    for backend in ("gloo", ours):
        start = time.monotonic()
        outcomes[backend] = run_programs(backend, size, chosen)
        print(f"{len(chosen)} programs on {size} ranks over {backend}: {time.monotonic() - start:.1f} s")
    wrong = {p: verdict(p, outcomes["gloo"][p.name], outcomes[ours][p.name]) for p in chosen}
    for program, text in wrong.items():
        if text:
            print(f"{program.name}: {text}" if word else f"{program.name}: {' '.join(text.split())[:300]}")
    print(f"{sum(map(bool, wrong.values()))} of {len(chosen)} are wrong")


if __name__ == "__main__":
    two_hosts = sys.argv[1:2] == ["--two-hosts"]
    words = sys.argv[1 + two_hosts :]
    main(int(words[0]) if words else 2, words[1] if words[1:] else "", BETWEEN_HOSTS if two_hosts else "phalanx")
