"""Writing the report on a job that hangs into its folder."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from tests.support.reports import report

from phalanx.diagnosis import report as reports
from phalanx.diagnosis.report import latest_report, read_report, write_report


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_nothing_changes_if_a_report_cannot_be_written(tmp_path: Path) -> None:
    """Neither an empty folder, nor an earlier report that this one was to replace."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for first in (None, write_report(tmp_path / "earlier", report(3, 60))):
        folder = tmp_path / ("earlier" if first else "empty")
        folder.mkdir(exist_ok=True)
        before = contents(folder)
        for most in (0, 16_384):  # bytes: there is room for nothing, or for a rank's operations but not for the report
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
            try:
                with pytest.raises(OSError, match="File too large"):
                    write_report(folder, report(4, 60), over=first)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert contents(folder) == before
        if first:
            assert latest_report(folder) == first
            assert len(read_report(first).ranks) == 3
        else:
            assert list(folder.iterdir()) == []


def test_jobs_that_write_into_one_folder_at_once_have_a_report_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "_reports", lambda folder: [])  # each has looked before another has written
    paths = [write_report(tmp_path, report(ranks, 60)) for ranks in (3, 4)]
    assert [len(read_report(path).ranks) for path in paths] == [3, 4]
