"""How soon a job whose rank was killed works again, against what Phalanx promises; ``benchmarks/restarts.py`` measures.

On a busy machine the bound is multiplied by how late everything is there (``tests/support/lateness.py``).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.lateness import Lateness

pytestmark = pytest.mark.fault

RESTARTS = Path(__file__).parents[2] / "benchmarks" / "restarts.py"
BOUND_S = 1.5
PATIENCE_S = 3000.0  # a quiet machine needs half a minute


@pytest.mark.parametrize(("ranks", "jobs", "kills"), [(8, 5, 10), (8, 10, 1), (3, 5, 10)])
@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_every_kill_is_recovered_in_time(
    backend: str, ranks: int, jobs: int, kills: int, record_property: Callable[[str, object], None]
) -> None:
    words = ["--rounds", jobs, "--kills", kills, "--ranks", ranks, "--backend", backend, "--seed", 16, "--json"]
    with Lateness() as lateness:
        ended = subprocess.run(
            [sys.executable, str(RESTARTS), *map(str, words)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr
    (found,) = json.loads(ended.stdout)
    factor = lateness.factor(0.99)
    record_property("longest_s", max(found["taken_s"]))
    record_property("factor", factor)
    assert len(found["taken_s"]) == found["kills"] == jobs * kills
    assert max(found["taken_s"]) <= BOUND_S * factor, f"{found['taken_s']}, times {factor:.2f}"
