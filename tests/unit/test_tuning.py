"""Switch points come from a file that is written whole, and a file that makes no sense is said and ignored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.transports.shm import tuning as tunings
from phalanx.transports.shm.tuning import Tuning, load_tuning, save_tuning


@pytest.fixture(autouse=True)
def _own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PHALANX_TUNING", str(tmp_path / "deep" / "tuning.json"))
    tunings._read.cache_clear()
    yield
    tunings._read.cache_clear()


def test_what_is_saved_is_loaded() -> None:
    assert load_tuning() == Tuning()
    path = save_tuning(Tuning(chunk_bytes=131072, small_bytes=4096, stream_bytes=1024))
    assert load_tuning() == Tuning(chunk_bytes=131072, small_bytes=4096, stream_bytes=1024)
    assert [file.name for file in path.parent.iterdir()] == ["tuning.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"chunk_bytes": 1, "small_bytes": 1}', '{"chunk_bytes": "x"}'])
def test_a_file_that_makes_no_sense_is_ignored_with_a_warning(tmp_path: Path, text: str) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "tuning.json").write_text(text)
    with pytest.warns(UserWarning, match="is ignored"):
        assert load_tuning() == Tuning()


def test_a_chunk_has_a_cache_line_for_every_rank() -> None:
    assert Tuning(chunk_bytes=100).for_size(1) == (64, 16384, 16 << 20)
    assert Tuning(chunk_bytes=100).for_size(8) == (512, 16384, 16 << 20)
    assert Tuning().for_size(1024) == (524288, 16384, 16 << 20)
