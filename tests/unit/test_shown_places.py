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

from phalanx.diagnosis import recorder
from phalanx.diagnosis.call_site import call_site, raised_at, running_at, shown
from phalanx.native.core import quick_entry
from phalanx.system.files import beside

JOB = "/home/ada/job"


@pytest.mark.parametrize(
    ("place", "folder", "expected"),
    [
        (f"{JOB}/models/net.py:7", JOB, "models/net.py:7"),
        ("/app/train.py:42", "/", "app/train.py:42"),
        (f"{JOB}2/train.py:42", JOB, f"{JOB}2/train.py:42"),
        (f"{JOB}/link/../train.py:42", JOB, f"{JOB}/link/../train.py:42"),
        ("<string>:1", JOB, "<string>:1"),
        (f"{JOB}/train.py:42", "", f"{JOB}/train.py:42"),
    ],
)
def test_a_file_below_the_folder_is_named_without_it(place: str, folder: str, expected: str) -> None:
    assert beside(place, folder) == expected


def test_a_rank_names_a_place_with_its_function_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_DIRECTORY", JOB)
    assert shown(f"predict ({JOB}/old (1)/serve.py:31)") == "predict (old (1)/serve.py:31)"
    assert shown("Model.<locals>.<lambda> (/srv/serve.py:31)") == "Model.<locals>.<lambda> (/srv/serve.py:31)"
    monkeypatch.delenv("PHALANX_DIRECTORY")
    monkeypatch.chdir(Path(__file__).parent)
    assert call_site().startswith(f"{__file__}:")
    assert running_at(None) == ""


def line_in(function: Any, text: str) -> str:
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(number for number, line in enumerate(lines) if text in line)}"


def test_places_in_pythons_own_library_are_the_programs_line() -> None:
    def look(_: Any) -> dict[str, Any]:
        places.append(running_at(sys._getframe(1)))  # without this function, which is the program's
        return {}

    places: list[str] = []
    json.loads("{}", object_hook=look)
    own = test_places_in_pythons_own_library_are_the_programs_line
    assert places == [f"{own.__name__} ({line_in(own, 'json.loads(')})"]
    with pytest.raises(json.JSONDecodeError) as raised:
        json.loads("[bad")
    assert raised_at(raised.value.__traceback__) == line_in(own, '"[bad"')


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
    with ThreadPoolExecutor(1) as pool:
        yield from pool.map(lambda _: (through(site), line()), range(2))
    for number in range(600):  # more functions than the entry keeps in mind
        scope: dict[str, Any] = {"through": through, "site": site, "__name__": "program"}
        exec(compile("\n" * number + "def call(): return through(site)", __file__, "exec"), scope)
        yield scope["call"](), number + 1


def test_the_place_of_a_call_is_the_line_of_the_program() -> None:
    entry: Any = quick_entry()
    if isinstance(entry, str):
        pytest.skip(entry)

    def body(member: Member) -> None:
        assert recorder.open_recorder()
        for number, expected in places_of(entry.site_number):
            assert recorder.place_of(number) == f"{__file__}:{expected}"

    on_ranks(body, 1)
