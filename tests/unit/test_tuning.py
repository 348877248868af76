"""Switch points come from a file that is written whole, and a file that makes no sense is said and ignored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.transports.shm import tuning as tunings
from phalanx.transports.shm.tuning import Tuning, load_tuning, save_tuning


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PHALANX_TUNING", str(tmp_path / "deep" / "tuning.json"))
    tunings._read.cache_clear()
    yield tmp_path / "deep" / "tuning.json"
    tunings._read.cache_clear()


def test_what_is_saved_is_loaded_and_nonsense_is_ignored_with_a_warning(file: Path) -> None:
    assert load_tuning() == Tuning()
    chosen = Tuning(chunk_bytes=131072, small_bytes=4096, stream_bytes=1024)
    assert save_tuning(chosen) == file
    assert load_tuning() == chosen
    for text in ("", "[]", '{"chunk_bytes": 1, "small_bytes": 1}', '{"chunk_bytes": "x"}'):
        file.write_text(text)
        tunings._read.cache_clear()
        with pytest.warns(UserWarning, match="is ignored"):
            assert load_tuning() == Tuning()


def test_chunk_has_a_cache_line_for_every_rank() -> None:
    assert Tuning(chunk_bytes=100).for_size(1) == (64, 16384, 16 << 20)
    assert Tuning(chunk_bytes=100).for_size(8) == (512, 16384, 16 << 20)
    assert Tuning().for_size(1024) == (524288, 16384, 16 << 20)
