"""How files and lines are named: below the folder of ``phalanx run`` without that folder, and never another file."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.ranks import Member, on_ranks

from phalanx.native.core import quick_entry
from phalanx.system.folder import beside
from phalanx.watch import recorder
from phalanx.watch.call_site import call_site, raised_at, running_at, shown, text_of


@pytest.mark.parametrize(
    ("place", "folder", "expected"),
    [
        ("/home/ada/job/train.py:42", "/home/ada/job", "train.py:42"),
        ("/home/ada/job/models/net.py:7", "/home/ada/job", "models/net.py:7"),
        ("/app/train.py:42", "/", "app/train.py:42"),
        ("/home/ada/job2/train.py:42", "/home/ada/job", "/home/ada/job2/train.py:42"),
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


# Code of a library that is passed over: it calls what it is given, at once, from C and in a generator.
LIBRARY = """
def through(call):
    return call()

def deeply(call, depth):
    return deeply(call, depth - 1) if depth else through(call)

def sorted_by(call):
    return min([call], key=lambda each: each())()

def yielding(call):
    yield through(call)
"""


def line() -> int:
    return sys._getframe(1).f_lineno


def places_of(site: Callable[[], int]) -> Iterator[tuple[int, int]]:
    """Calls of many forms: the number of the place, and the line where it should be."""
    library: dict[str, Any] = {"__name__": "torch.a_library_of_this_test"}
    exec(compile(LIBRARY, "a_library_of_this_test.py", "exec"), library)
    through = library["through"]
    yield site(), line()
    yield library["deeply"](site, 30), line()
    yield next(library["yielding"](site)), line()
    yield library["sorted_by"](site), line()
    yield through(partial(site)), line()
    yield from [(through(site), line()) for _ in range(2)]
    with ThreadPoolExecutor(1) as pool:
        yield from pool.map(lambda _: (through(site), line()), range(2))
    for number in range(300):  # more functions than the entry keeps in mind
        scope: dict[str, Any] = {"through": through, "site": site, "__name__": "program"}
        exec(compile("\n" * number + "def call(): return through(site)", __file__, "exec"), scope)
        yield scope["call"](), number + 1


@pytest.mark.parametrize("reads_frames", [True, False])
def test_the_place_of_a_call_is_the_line_of_the_program(reads_frames: bool) -> None:
    entry: Any = quick_entry()
    if isinstance(entry, str):
        pytest.skip(entry)

    def body(member: Member) -> None:
        assert recorder.open_recorder()
        entry.read_frames(reads_frames)
        for _ in range(2):
            for number, expected in places_of(entry.site_number):
                assert text_of(recorder.place_of(number)) == f"{__file__}:{expected}"

    on_ranks(body, 1)
