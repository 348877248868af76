"""Which values a tuning run chooses, given what it measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.bench import tune as tuning_run
from phalanx.bench.cases import BenchOptions, tuning_label
from phalanx.transports.shm.tuning import Tuning

QUIET = {"probe_spread": 0.0, "stolen": 0.0, "others": 0.0}
LOUD = {"probe_spread": 0.9, "stolen": 0.0, "others": 0.0}


def row(nbytes: int, us: dict[str, float], noise: dict[str, float] = QUIET) -> dict[str, Any]:
    samples = {name: [value] for name, value in us.items()}
    return {"used_nbytes": nbytes, "samples_us": samples, "noise": noise, "wrong": []}


def test_the_candidate_that_loses_least_over_all_rows_is_chosen() -> None:
    first = {1: 10.0, 2: 20.0, 3: 11.0}
    second = {1: 14.0, 2: 20.0, 3: 10.0}
    chosen, slowdown = tuning_run.choose((1, 2, 3), 2, [first, second])
    assert chosen == 3
    assert slowdown[3] == pytest.approx((1.1 * 1.0) ** 0.5)
    assert slowdown[1] == pytest.approx((1.0 * 1.4) ** 0.5)


def test_what_is_built_in_stays_unless_another_is_clearly_better() -> None:
    assert tuning_run.choose((1, 2), 2, [{1: 9.8, 2: 10.0}])[0] == 2
    assert tuning_run.choose((1, 2), 2, [{1: 9.0, 2: 10.0}])[0] == 1
    alike = [{1: 5.0, 2: 5.0}] * 99
    assert tuning_run.choose((1, 2), 2, [*alike, {1: 9.0, 2: 10.0}])[0] == 1


def test_a_switch_lies_where_the_other_way_begins_to_pay() -> None:
    points = [(1 << e, 1.0 + (1 << e) / 1000, 41.0) for e in range(9, 19)]
    chosen, slowdown = tuning_run.choose_switch(points, 16384)
    assert chosen == 32768  # 33.8 against 41; the next, 65536, costs 66.5
    assert slowdown[chosen] == pytest.approx(1.0)


def test_only_what_a_quiet_machine_showed_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PHALANX_TUNING", str(tmp_path / "tuning.json"))
    cases: tuple[tuple[dict[str, float], Path | None], ...] = ((LOUD, None), (QUIET, tmp_path / "tuning.json"))
    for noise, expected in cases:

        def measure(options: BenchOptions, *_: object, noise: dict[str, float] = noise) -> dict[str, Any]:
            us = {tuning_label(tuning): 10.0 for tuning in options.tunings}
            rows = [row(nbytes, us, noise) for nbytes in options.sizes]
            return {"exit_code": 0, "jobs": [{"size": 2, "rows": rows}]}

        monkeypatch.setattr(tuning_run, "measure", measure)
        options = BenchOptions(("all_reduce",), (4,), ("float32",), (2,), (), 1, 0.01, False, 0.0)
        finding = tuning_run.tune(options, [], quiet=True)
        assert finding.path == expected
        assert finding.tuning == Tuning()
        said = tuning_run.format_finding(finding)
        assert ("too noisy" in said) == (expected is None)
        assert ("Written to" in said) == (expected is not None)
