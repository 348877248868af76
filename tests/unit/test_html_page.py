"""A report as a page of HTML: everything is on it, nothing of the job becomes markup, and it stays small."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.support.reports import EVIL, report

from phalanx.diagnosis.render import report_page
from phalanx.diagnosis.report import write_report

LEAF = ("meta", "rect", "path", "br")  # without an end tag, or closed at once


class Page(HTMLParser):
    """What a reader finds on a page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in LEAF:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in LEAF:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def inside(self, tag: str) -> str:
        return "\n".join(text for name, text in self.texts if name == tag)

    @property
    def rows(self) -> list[str]:
        return [str(row["aria-label"]) for row in self.of("svg") if row["class"] == "row"]

    @property
    def text(self) -> str:
        return " ".join("".join(text for name, text in self.texts if name not in ("script", "style")).split())


def test_it_has_the_verdict_every_rank_its_stack_and_its_operations() -> None:
    found = Page(report_page(report(5, 40)))
    headline = "Rank 4 is in no operation; the others wait for it ; look at the `if` in line 55."
    assert "".join(text for tag, text in found.texts if tag in ("h1", "code")) == headline.replace("`", "")
    assert found.of("code")
    assert found.inside("title").startswith(headline.rstrip("."))
    assert found.rows == [f"operations of rank {rank}" for rank in range(5)]
    cells = [text for tag, text in found.texts if tag == "td"]
    for rank in range(5):
        assert {str(rank), str(5000 + rank)} <= set(cells)
    for stack in ("ranks 1, 4 (awaited)", "ranks 0, 3", "rank 2"):
        assert stack in found.inside("summary")
    for number in range(3):
        assert f"line {number}, in step" in found.inside("pre")
    assert "broadcast #40" in found.text
    assert "all_reduce #40" in found.text
    assert {"under way", "1 ms"} <= set(cells)


def test_page_has_a_bar_for_each_operation_and_marks_open_ones() -> None:
    text = report_page(report(3, 10))
    bars = [bar for bar in Page(text).of("rect") if "width" in bar and bar["height"] != "12"]
    assert len(bars) == 30
    assert sum("open" in str(bar["class"]) for bar in bars) == 2
    assert len({str(bar["class"]).split()[0] for bar in bars}) == 2  # all_reduce and broadcast
    titles = re.findall(r"<rect[^>]*><title>([^<]*)</title>", text)
    assert titles[0].splitlines() == [
        "all_reduce #1, operation 0",
        "float32, sum, 4.0 KiB",
        "at train.py:7 in step 3",
        "entered 40.0000 s before the report",
        "left 39.9990 s before it, after 1 ms",
    ]
    assert titles[9].splitlines()[-1] == "under way for 40 s"
    for bar in bars:
        left, width = float(bar["x"] or "nan"), float(bar["width"] or "nan")
        assert 0 <= left < left + width <= 1000.01


def test_what_the_job_has_written_is_text_and_nothing_else() -> None:
    plain, evil = report_page(report(3, 6)), report_page(report(3, 6, text=EVIL, site=f"/{EVIL}:7"))
    found = Page(evil)
    assert [tag for tag, _ in found.tags] == [tag for tag, _ in Page(plain).tags]
    assert len(found.of("script")) == 1
    assert "<script>alert(1)</script>" in found.text
    for letter in ("\0", "\x1b", "\u202e", "\ud800"):
        assert "before\N{REPLACEMENT CHARACTER}after" in report_page(report(2, 3, text=f"before{letter}after"))
    for _, attributes in found.tags:
        assert not any(name.startswith("on") or name in ("href", "src", "style") for name in attributes)


def test_page_refers_to_nothing_outside_and_runs_only_its_own_script() -> None:
    text = report_page(report(3, 6))
    assert not re.search(r"https?:|//\w|url\(|@import", text)
    found = Page(text)
    (policy,) = [str(one["content"]) for one in found.of("meta") if one.get("http-equiv") == "Content-Security-Policy"]
    script = re.search(r"<script>(.*)</script>", text, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert any(meta.get("name") == "viewport" for meta in found.of("meta"))
    assert "prefers-color-scheme: dark" in text


@pytest.mark.parametrize(("ranks", "operations"), [(64, 512), pytest.param(1500, 300, marks=pytest.mark.long)])
def test_its_size_is_bounded_and_each_rank_has_its_last_operations(ranks: int, operations: int) -> None:
    text = report_page(report(ranks, operations, text="x" * 2048, site="/" + "d" * 500 + "/train.py:7"))
    assert len(text) < 12_000_000
    assert set(Page(text).rows) == {f"operations of rank {rank}" for rank in range(ranks)}
    assert text.count(f"#{operations}, operation") + text.count(f"#{operations} of group") >= ranks
    assert re.search(r"[\d,]+ earlier operations of the report are not drawn", text)


def phalanx_report(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "phalanx", "report", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_the_command_writes_the_page_and_says_where(tmp_path: Path) -> None:
    write_report(tmp_path, report(3, 6))
    target = tmp_path / "page.html"
    done = phalanx_report(tmp_path, "--html", target)
    assert done.returncode == 0, done.stderr
    assert f"wrote {target} (" in done.stdout
    assert "Rank 2 is in no operation" in Page(target.read_text()).text
    nowhere = phalanx_report(tmp_path, "--html", tmp_path / "nothing" / "page.html")
    assert nowhere.returncode != 0
    assert "cannot be written: No such file" in nowhere.stderr


def test_a_folder_without_a_report_and_a_file_that_is_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, text, told in (
        ("empty", "", "has no report. phalanx run --report-dir"),
        ("no report", "[]", "not a report"),
        ("nonsense", '{"version": 2, "awaited": 5}', ""),
        ("deep", "[" * 100_000, ""),
    ):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        if text:
            (folder / "hang-1.json").write_text(text)
        refused = phalanx_report(folder)
        assert refused.returncode == 2
        assert told in refused.stderr
        assert "Traceback" not in refused.stderr
