"""Which values a tuning run chooses from what it measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.backends.tuning import Tuning
from phalanx.bench import tune as tuning_run
from phalanx.bench.plan import ALWAYS, Plan, tuning_label

SMALL = Tuning().small_bytes
QUIET = {"probe_spread": 0.0, "stolen": 0.0, "others": 0.0}
LOUD = {"probe_spread": 0.9, "stolen": 0.0, "others": 0.0}


def row(nbytes: int, us: dict[str, float], noise: dict[str, float] = QUIET) -> dict[str, Any]:
    samples = {name: [value] for name, value in us.items()}
    return {"used_nbytes": nbytes, "samples_us": samples, "noise": noise, "wrong": []}


def chunk_row(us: dict[int, float], noise: dict[str, float] = QUIET) -> dict[str, Any]:
    return row(1 << 20, {tuning_label((chunk, SMALL)): us[chunk] for chunk in tuning_run.CHUNKS}, noise)


def test_the_chunk_that_loses_least_over_all_rows_is_chosen() -> None:
    first = dict.fromkeys(tuning_run.CHUNKS, 20.0) | {65536: 10.0, 524288: 11.0}
    second = dict.fromkeys(tuning_run.CHUNKS, 20.0) | {65536: 14.0, 524288: 10.0}
    chosen, slowdown = tuning_run.choose_chunk([(2, chunk_row(first)), (4, chunk_row(second))])
    assert chosen == 524288
    assert slowdown[524288] == pytest.approx((1.1 * 1.0) ** 0.5)
    assert slowdown[65536] == pytest.approx((1.0 * 1.4) ** 0.5)


def test_what_is_built_in_stays_unless_another_is_clearly_better() -> None:
    close = dict.fromkeys(tuning_run.CHUNKS, 10.0) | {65536: 9.8}
    assert tuning_run.choose_chunk([(2, chunk_row(close))])[0] == Tuning().chunk_bytes
    clear = dict.fromkeys(tuning_run.CHUNKS, 10.0) | {65536: 9.0}
    assert tuning_run.choose_chunk([(2, chunk_row(clear))])[0] == 65536


def test_small_bytes_end_where_the_second_synchronisation_pays() -> None:
    once, twice = tuning_label((65536, ALWAYS)), tuning_label((65536, 0))
    rows = []
    for size in (2, 4):
        for nbytes in tuning_run.SMALL_SIZES:
            total = size * nbytes
            rows.append((size, row(nbytes, {once: 1.0 + total / 1000, twice: 1.0 + 40.0})))
    chosen, slowdown = tuning_run.choose_small(rows, 65536)
    assert chosen == 32768  # 33.8 against 41; the next candidate, 65536, costs 66.5
    assert slowdown[chosen] == pytest.approx(1.0)


def test_only_what_a_quiet_machine_showed_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PHALANX_TUNING", str(tmp_path / "tuning.json"))
    cases: tuple[tuple[dict[str, float], Path | None], ...] = ((LOUD, None), (QUIET, tmp_path / "tuning.json"))
    for noise, expected in cases:

        def measure(plan: Plan, *_: object, noise: dict[str, float] = noise) -> dict[str, Any]:
            us = {tuning_label(tuning): 10.0 for tuning in plan.tunings}
            rows = [row(nbytes, us, noise) for nbytes in plan.sizes]
            return {"exit_code": 0, "jobs": [{"size": 2, "rows": rows}]}

        monkeypatch.setattr(tuning_run, "measure", measure)
        plan = Plan(("all_reduce",), (4,), ("float32",), (2,), (), 1, 0.01, False, 0.0)
        finding = tuning_run.tune(plan, [], quiet=True)
        assert finding.path == expected
        assert finding.tuning == Tuning()
        said = tuning_run.format_finding(finding)
        assert ("too noisy" in said) == (expected is None)
        assert ("Written to" in said) == (expected is not None)
