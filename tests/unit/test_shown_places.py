"""How files and lines are named: below the folder of ``phalanx run`` without that folder, and never another file."""

from __future__ import annotations

import inspect
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from phalanx.system.folder import beside
from phalanx.watch.call_site import call_site, raised_at, running_at, shown


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


def _line_of(function: Any, text: str) -> str:
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(number for number, line in enumerate(lines) if text in line)}"


def test_where_a_thread_is_does_not_stop_at_pythons_own_library() -> None:
    def look(_: Any) -> dict[str, Any]:
        places.append(running_at(sys._getframe(1)))  # without this function, which is the program's
        return {}

    places: list[str] = []
    json.loads("{}", object_hook=look)
    place = "test_where_a_thread_is_does_not_stop_at_pythons_own_library"
    assert places == [f"{place} ({_line_of(globals()[place], 'json.loads(')})"]


def test_an_error_from_pythons_own_library_is_named_at_the_programs_line() -> None:
    with pytest.raises(json.JSONDecodeError) as raised:
        json.loads("[")
    assert raised_at(raised.value.__traceback__) == _line_of(
        test_an_error_from_pythons_own_library_is_named_at_the_programs_line, "json.loads("
    )


def test_a_program_that_is_all_an_installed_library_is_named_where_it_is() -> None:
    namespace: dict[str, Any] = {"sys": sys, "running_at": running_at}
    file = json.__file__
    exec(compile("def main():\n    return running_at(sys._getframe())", file, "exec"), namespace)
    with ThreadPoolExecutor(1) as pool:  # on a stack that has none of this file's functions
        assert pool.submit(namespace["main"]).result() == f"main ({file}:2)"
