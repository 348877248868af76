"""The place of a call is the same whether the entry reads the interpreter's frames or asks for objects of them."""

from __future__ import annotations

import asyncio
import os
import platform
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from phalanx.native.core import quick_entry
from phalanx.watch import recorder
from phalanx.watch.call_site import text_of

# Code of a library that is passed over: it calls what it is given, at once, from C and in a generator.
_LIBRARY = """
def through(call):
    return call()

def deeply(call, depth):
    return deeply(call, depth - 1) if depth else through(call)

def sorted_by(call):
    return min([call], key=lambda each: each())()

def yielding(call):
    yield through(call)

class Method:
    def __call__(self, call):
        return through(call)
"""
library: dict[str, Any] = {"__name__": "torch.a_library_of_this_test"}
exec(compile(_LIBRARY, "a_library_of_this_test.py", "exec"), library)

Found = tuple[int, int]  # the number of a place, and the line where it should be


def line() -> int:
    return sys._getframe(1).f_lineno


def places(site: Callable[[], int]) -> Iterator[Found]:
    """Calls of many forms."""
    through = library["through"]
    yield site(), line()
    yield through(site), line()
    yield library["deeply"](site, 30), line()
    yield next(library["yielding"](site)), line()
    yield library["Method"]()(site), line()
    yield library["sorted_by"](site), line()
    yield through(partial(site)), line()
    yield from [(through(site), line()) for _ in range(2)]
    yield from map(partial(within, through), [site, site])
    yield within(through, site)
    yield asyncio.run(awaited(through, site))
    other: list[Found] = []
    thread = threading.Thread(target=lambda: other.append((through(site), line())))
    thread.start()
    thread.join()
    yield from other
    for number in range(300):  # more functions than the entry keeps in mind
        scope: dict[str, Any] = {"through": through, "site": site, "__name__": "program"}
        exec(compile("\n" * number + "def call(): return through(site)", __file__, "exec"), scope)
        yield scope["call"](), number + 1


def within(through: Callable[[Callable[[], int]], int], site: Callable[[], int], depth: int = 3) -> Found:
    if depth:
        return within(through, site, depth - 1)
    return through(site), line()


async def awaited(through: Callable[[Callable[[], int]], int], site: Callable[[], int]) -> Found:
    await asyncio.sleep(0)
    return through(site), line()


def in_child(check: Callable[[Any], None]) -> None:
    """Run the check in a forked child with a recorder of its own."""
    entry: Any = quick_entry()
    if isinstance(entry, str):
        pytest.skip(entry)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            assert recorder.open_recorder()
            check(entry)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


def released_since(minor: int, before: int) -> bool:
    flags = getattr(sys, "abiflags", "") or sys.version_info.releaselevel != "final"
    return platform.python_implementation() == "CPython" and not flags and minor <= sys.version_info.minor < before


def test_frames_are_read_where_their_layout_is_known() -> None:
    def check(entry: Any) -> None:
        assert entry.read_frames(True) is released_since(11, 14)
        assert entry.read_frames(False) is False
        assert entry.read_frames(True) is released_since(11, 14)

    in_child(check)


@pytest.mark.parametrize("reads", [True, False])
def test_a_place_is_the_line_of_the_program(reads: bool) -> None:
    def check(entry: Any) -> None:
        entry.read_frames(reads)
        for _ in range(2):
            for number, expected in places(entry.site_number):
                place = recorder.place_of(number)
                assert text_of(place) == f"{__file__}:{expected}"

    in_child(check)


def test_both_ways_find_the_same_places() -> None:
    """Not only the same lines: two calls on one line are two places."""

    def check(entry: Any) -> None:
        site, through = entry.site_number, library["through"]
        found = set()
        for reads in (True, False, True, False):
            entry.read_frames(reads)
            found.add((through(site), through(site)))
        assert len(found) == 1
        assert len({*found.pop(), through(site)}) == 3

    in_child(check)


def test_a_traced_program_has_the_same_places() -> None:
    def check(entry: Any) -> None:
        def trace(frame: Any, event: str, argument: object) -> Any:
            return trace

        entry.read_frames(True)
        sys.settrace(trace)
        try:
            for number, expected in places(entry.site_number):
                assert text_of(recorder.place_of(number)) == f"{__file__}:{expected}"
        finally:
            sys.settrace(None)

    in_child(check)
