"""Changing a module when it is imported: once, wherever it comes from, and with its source where it was."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

import pytest

from phalanx.rpc.torch_api.late_imports import after_import


def test_module_is_changed_when_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "comes_late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    after_import("comes_late", lambda module: setattr(module, "value", module.value + 1))
    late = importlib.import_module("comes_late")
    assert late.value == 2
    assert sys.meta_path == before
    assert inspect.getsource(late) == "value = 1\n"
    after_import("comes_late", lambda module: setattr(module, "value", module.value + 1))
    assert late.value == 3
