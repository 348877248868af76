"""Writing the report on a job that hangs into its folder."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from tests.support.reports import report

from phalanx.watch.hang_report import latest_report, read_report, write_report


def test_nothing_stays_of_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most in (0, 1024):  # bytes: no file has room for any, or only the small ones for what they need
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                write_report(tmp_path, report(3, 60))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert list(tmp_path.iterdir()) == []


def test_an_earlier_report_stays_if_one_in_its_place_cannot_be_written(tmp_path: Path) -> None:
    first = write_report(tmp_path, report(3, 60))
    before = sorted(path.name for path in tmp_path.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_report(tmp_path, report(2, 60), over=first)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert latest_report(tmp_path) == first
    assert len(read_report(first).ranks) == 3
