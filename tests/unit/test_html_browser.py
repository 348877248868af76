"""The page of a report in a real browser: it fits, can be read, answers a touch, and loads and runs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.browser import Browser, browser_path, opened
from tests.support.reports import EVIL, report

from phalanx.watch.html_page import page

pytestmark = pytest.mark.skipif(not browser_path(), reason="there is no Chromium (on Debian: apt-get install chromium)")

DESK, PHONE = (1280, 800), (390, 844)

# Of every piece of text that is shown: the contrast of its colour with what lies behind it, by the formula of the Web
# Content Accessibility Guidelines 2.2, which ask for 4.5.
CONTRASTS = """
(() => {
  const channel = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const numbers = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = element => {
    for (; element; element = element.parentElement) {
      const colour = numbers(getComputedStyle(element).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    if (!text || !parent.checkVisibility() || ["SCRIPT", "STYLE", "title"].includes(parent.tagName)) continue;
    const [a, b] = [light(numbers(getComputedStyle(parent).color)), light(behind(parent))];
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), text]);
  }
  return found;
})()
"""


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with opened(tmp_path / "profile") as running:
        yield running


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "hang.html"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("window", [DESK, PHONE], ids=["desk", "phone"])
def test_it_fits_the_window_and_every_text_can_be_read(
    browser: Browser, file: Path, window: tuple[int, int], dark: bool
) -> None:
    file.write_text(page(report(5, 200)))
    browser.show(file, *window, dark=dark, touch=window == PHONE)
    assert browser.ask("document.documentElement.scrollWidth") <= window[0]
    assert 0 <= browser.ask("document.querySelector('h1').getBoundingClientRect().top") < window[1] / 4
    contrasts = browser.ask(CONTRASTS)
    assert len(contrasts) > 50
    assert [text for contrast, text in contrasts if contrast < 4.5] == []
    bars = browser.ask("Array.from(document.querySelectorAll('.row rect')).map(e => e.getBoundingClientRect().width)")
    assert len(bars) == 5 * 200
    assert min(bars) > 0
    assert browser.requested == [file.as_uri()]
    assert browser.complaints == []


def test_a_bar_that_is_touched_is_described(browser: Browser, file: Path) -> None:
    file.write_text(page(report(3, 10)))
    browser.show(file, *PHONE, touch=True)
    # On a phone the end of the rows, where the job stands still, is in the window at first.
    x, y, title = browser.ask("""
        (() => {
          const bar = document.querySelectorAll(".row")[1].querySelector("rect.open"), at = bar.getBoundingClientRect();
          return [at.x + at.width / 2, at.y + at.height / 2, bar.querySelector("title").textContent];
        })()
    """)
    assert 0 < x < PHONE[0]
    assert 0 < y < PHONE[1]
    browser.click(x, y)
    assert browser.ask("document.getElementById('about').textContent") == f"rank 1\n{title}"
    assert browser.ask("document.querySelectorAll('.chosen').length") == 1
    assert browser.complaints == []


def test_what_the_job_has_written_runs_nothing_and_loads_nothing(browser: Browser, file: Path) -> None:
    file.write_text(page(report(3, 6, text=EVIL, site=f"/{EVIL}:7")))
    browser.show(file, *DESK)
    assert browser.requested == [file.as_uri()]
    assert browser.complaints == []
    assert browser.ask("document.scripts.length") == 1
    assert browser.ask("document.images.length") == 0
    assert "<script>alert(1)</script>" in browser.ask("document.body.innerText")


def test_page_refuses_a_script_or_an_image_of_others(browser: Browser, file: Path) -> None:
    """By the policy within the page, which is the second guard."""
    intruder = "<script>alert(1)</script><img src=http://127.0.0.1:9/x onload=alert(2)></h1>"
    file.write_text(page(report(3, 6)).replace("</h1>", intruder))
    browser.show(file, *DESK)
    assert browser.requested == [file.as_uri()]
    assert browser.complaints
    assert not [complaint for complaint in browser.complaints if "Content Security Policy" not in complaint]
