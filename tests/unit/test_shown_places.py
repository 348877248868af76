"""How files and lines are named: below the folder of ``phalanx run`` without that folder, and never another file."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.system.folder import beside
from phalanx.watch.call_site import call_site, running_at, shown


@pytest.mark.parametrize(
    ("place", "folder", "expected"),
    [
        ("/home/ada/job/train.py:42", "/home/ada/job", "train.py:42"),
        ("/home/ada/job/train.py:42", "/home/ada/job/", "train.py:42"),
        ("/home/ada/job/models/net.py:7", "/home/ada/job", "models/net.py:7"),
        ("/home/ada/job/train.py", "/home/ada/job", "train.py"),
        ("/app/train.py:42", "/", "app/train.py:42"),
        ("/home/ada/job2/train.py:42", "/home/ada/job", "/home/ada/job2/train.py:42"),
        ("/home/ada/train.py:42", "/home/ada/job", "/home/ada/train.py:42"),
        ("/home/ada/job//train.py:42", "/home/ada/job", "/home/ada/job//train.py:42"),
        ("/home/ada/job/link/../train.py:42", "/home/ada/job", "/home/ada/job/link/../train.py:42"),
        ("train.py:42", "/home/ada/job", "train.py:42"),
        ("<string>:1", "/home/ada/job", "<string>:1"),
        ("/home/ada/job/train.py:42", "", "/home/ada/job/train.py:42"),
        ("", "/home/ada/job", ""),
    ],
)
def test_a_file_below_the_folder_is_named_without_it(place: str, folder: str, expected: str) -> None:
    assert beside(place, folder) == expected


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("/home/ada/job/serve.py:31", "serve.py:31"),
        ("predict (/home/ada/job/serve.py:31)", "predict (serve.py:31)"),
        ("predict (/home/ada/job/old (1)/serve.py:31)", "predict (old (1)/serve.py:31)"),
        ("Model.<locals>.<lambda> (/srv/serve.py:31)", "Model.<locals>.<lambda> (/srv/serve.py:31)"),
        ("", ""),
    ],
)
def test_a_rank_names_a_place_with_and_without_its_function(
    monkeypatch: pytest.MonkeyPatch, place: str, expected: str
) -> None:
    monkeypatch.setenv("PHALANX_DIRECTORY", "/home/ada/job")
    assert shown(place) == expected


def test_without_the_launcher_a_place_stays_as_python_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHALANX_DIRECTORY", raising=False)
    monkeypatch.chdir(Path(__file__).parent)
    assert call_site().startswith(f"{__file__}:")
    assert running_at(None) == ""
