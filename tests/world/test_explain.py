"""``phalanx explain``, from outside: what it shows of a call agrees with the plain formulas of docs/algorithms.md."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from phalanx.explain.errors import error_classes

N = 4
WHOLE = 256 * 1024
BLOCK = WHOLE // N
PHALANX = str(Path(sys.executable).with_name("phalanx"))


def call(*words: str, status: int = 0) -> str:
    ended = subprocess.run([PHALANX, "explain", *words], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == status, ended.stderr
    return ended.stderr if status else ended.stdout


@cache
def explained(*words: str) -> Any:
    return json.loads(call(*words, "--json"))


def links(*words: str) -> dict[tuple[int, int], int]:
    return {(link["from"], link["to"]): link["bytes"] for link in explained(*words)["links"]}


def moved(rank: int, *kinds: str, words: tuple[str, ...], steps: tuple[int, ...] = (0, 1, 2)) -> int:
    found = explained(*words)["steps"]
    moves = [move for number in steps if number < len(found) for move in found[number]["moves"]]
    return sum(move["bytes"] for move in moves if move["rank"] == rank and move["kind"] in kinds)


def sums(letters: str = "ABCD") -> list[list[str]]:
    return [[f"{letter}[0-3]"] for letter in letters]


# What each rank has in the end.
ENDS = {
    "all_reduce": [sums()] * N,
    "reduce": [sums(), *([[f"{letter}[{rank}]"] for letter in "ABCD"] for rank in range(1, N))],
    "broadcast": [[[f"{letter}[0]"] for letter in "ABCD"]] * N,
    "all_gather": [[["A[0]"], ["B[1]"], ["C[2]"], ["D[3]"]]] * N,
    "gather": [[["A[0]"], ["B[1]"], ["C[2]"], ["D[3]"]], [], [], []],
    "scatter": [[[f"{letter}[0]"]] for letter in "ABCD"],
    "reduce_scatter": [sums(letter) for letter in "ABCD"],
    "all_to_all": [[[f"{letter}[{rank}]"] for rank in range(N)] for letter in "ABCD"],
}
# How many bytes go from one rank to another on one host.
PAIRS = {
    "all_reduce": lambda one, other: 2 * WHOLE // N,
    "reduce": lambda one, other: WHOLE // N * (2 if other == 0 else 1),
    "broadcast": lambda one, other: WHOLE if one == 0 else 0,
    "all_gather": lambda one, other: BLOCK,
    "gather": lambda one, other: BLOCK if other == 0 else 0,
    "scatter": lambda one, other: BLOCK if one == 0 else 0,
    "reduce_scatter": lambda one, other: BLOCK,
    "all_to_all": lambda one, other: BLOCK,
}
# The others move their data as one of these does.
OPERATIONS = [
    each if each in ("all_reduce", "all_gather", "all_to_all") else pytest.param(each, marks=pytest.mark.long)
    for each in ENDS
]
# How many bytes leave each of two hosts of two ranks.
LEAVE = {
    "all_reduce": (WHOLE, WHOLE),
    "reduce": (0, WHOLE),
    "broadcast": (WHOLE, 0),
    "all_gather": (2 * BLOCK, 2 * BLOCK),
    "gather": (0, 2 * BLOCK),
    "scatter": (2 * BLOCK, 0),
    "reduce_scatter": (2 * BLOCK, 2 * BLOCK),
    "all_to_all": (4 * BLOCK, 4 * BLOCK),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_on_one_host_each_pair_moves_what_the_formula_says(operation: str) -> None:
    pairs = {(one, other): PAIRS[operation](one, other) for one in range(N) for other in range(N) if one != other}
    assert links(operation, "-n", "4") == {pair: nbytes for pair, nbytes in pairs.items() if nbytes}
    assert explained(operation, "-n", "4")["steps"][-1]["results"] == ENDS[operation]
    assert explained(operation, "-n", "4")["agreement_bytes"] == 0


@pytest.mark.parametrize("operation", OPERATIONS)
def test_between_hosts_each_host_sends_what_the_formula_says(operation: str) -> None:
    found = links(operation, "--hosts", "2x2")
    left = [sum(nbytes for (one, other), nbytes in found.items() if one // 2 == host != other // 2) for host in (0, 1)]
    assert tuple(left) == LEAVE[operation]
    assert explained(operation, "--hosts", "2x2")["steps"][-1]["results"] == ENDS[operation]


def test_all_reduce_copies_and_reads_as_little_as_its_bound() -> None:
    words = "all_reduce", "-n", "4"
    assert len(explained(*words)["steps"]) == 3
    for rank in range(N):
        copied = moved(rank, "puts", words=words, steps=(0,)) + moved(rank, "takes", words=words)
        assert copied == 2 * (N - 1) * WHOLE // N
        assert moved(rank, "adds", words=words) == (N - 1) * WHOLE // N  # and its own input


def test_small_all_reduce_takes_one_synchronisation() -> None:
    words = "all_reduce", "-n", "4", "--bytes", "4K"
    assert len(explained(*words)["steps"]) == 2
    assert set(links(*words).values()) == {4096}
    assert explained(*words)["steps"][-1]["results"] == ENDS["all_reduce"]


def test_small_calls_between_hosts_and_unequal_hosts_end_alike() -> None:
    for words in (("all_reduce", "--hosts", "2x2", "--bytes", "1K"), ("all_reduce", "--hosts", "1,3")):
        assert explained(*words)["steps"][-1]["results"] == ENDS["all_reduce"]


def test_barrier_moves_no_data_and_every_rank_sees_every_other() -> None:
    steps = explained("barrier", "-n", "3")["steps"]
    assert [{move["kind"] for move in step["moves"]} for step in steps] == [{"raises"}, {"sees"}]
    assert {(move["rank"], move["other"]) for move in steps[1]["moves"]} == {
        (one, other) for one in range(3) for other in range(3) if one != other
    }


def test_pictures_need_nothing_else_and_say_in_words_what_they_show(tmp_path: Path) -> None:
    svg, page = tmp_path / "steps.svg", tmp_path / "steps.html"
    assert call("all_gather", "-n", "2", "--svg", str(svg), "--html", str(page)) == ""
    drawn = svg.read_text()
    assert "<title" in drawn
    assert re.search(r"<desc.*Step 2: all ranks copy out of shared memory\. rank 0 has A\[0\] B\[1\]", drawn)
    assert "prefers-color-scheme: dark" in drawn
    text = page.read_text()
    assert "Content-Security-Policy" in text
    assert text.count("<section>") == 3
    assert not re.search(r"(?:src|href)=|url\(", text)


def test_every_error_says_what_it_means_and_what_to_do() -> None:
    listed = json.loads(call("--list", "--json"))
    assert listed["errors"] == sorted(error_classes())
    for name, error in error_classes().items():
        assert "What to do:\n" in (error.__doc__ or ""), name
    text = call("peerlost")
    assert text.startswith("phalanx.errors.PeerLost\n\nWhat it means\n")
    assert "\nExample\n" in text
    assert "\nWhat to do\n" in text
    assert "``" not in text
    page = (Path(__file__).parents[2] / "docs/reference/errors.md").read_text()
    assert not [name for name in error_classes() if f"\n## {name}\n" not in page]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("allreduce", "did you mean all_reduce?"),
        ("PeerLots", "did you mean PeerLost?"),
        ("all_reduce -n 3 --hosts 2x2", "leave -n out"),
        ("all_reduce --hosts 2y2", "--hosts 2y2: is neither"),
        ("all_reduce --bytes 1", "--bytes 1: give from 32 bytes"),
        ("PeerLost -n 3", "-n belongs to a collective"),
    ],
)
def test_what_cannot_be_explained_is_refused(words: str, said: str) -> None:
    assert said in call(*words.split(), status=2)
