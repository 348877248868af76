"""The page of a report in Chromium: it fits, can be read, answers a touch, and runs nothing of others."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.support.reports import EVIL, report

from phalanx.diagnosis.render import report_page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATH = next((path for name in NAMES if (path := shutil.which(name))), "")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PATH, reason="there is no Chromium (on Debian: apt-get install chromium)"),
]
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom")
WIDE, NARROW = "--window-size=1280,800", "--window-size=390,844"
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')

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
FOUND = f"""
(() => {{
  const bars = Array.from(document.querySelectorAll(".row rect"), bar => bar.getBoundingClientRect().width);
  const open = document.querySelectorAll(".row")[1].querySelector("rect.open"), at = open.getBoundingClientRect();
  open.dispatchEvent(new MouseEvent("click", {{bubbles: true}}));
  return {{
    inner: innerWidth, width: document.documentElement.scrollWidth,
    top: document.querySelector("h1").getBoundingClientRect().top, contrasts: {CONTRASTS.strip()},
    bars: bars.length, narrowest: Math.min(...bars), left: at.x, title: open.querySelector("title").textContent,
    about: document.getElementById("about").textContent, chosen: document.querySelectorAll(".chosen").length,
  }};
}})()
"""


def shown(folder: Path, text: str, *options: str) -> str:
    """What the page is when it has been drawn, as text."""
    file = folder / "hang.html"
    file.write_text(text)
    command = [PATH, *OPTIONS, f"--user-data-dir={folder / 'profile'}", *options, file.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


def title_of(text: str) -> Any:
    return re.search("<title>(.*?)</title>", text, re.DOTALL)[1]  # type: ignore[index]


@pytest.mark.parametrize(("window", "scheme"), [(WIDE, "--force-dark-mode"), (NARROW, "--force-color-profile=srgb")])
def test_the_page_fits_can_be_read_and_answers_a_touch(tmp_path: Path, window: str, scheme: str) -> None:
    asks = f"<script>document.title = JSON.stringify({FOUND})</script>"
    text = POLICY.sub("", report_page(report(5, 100))) + asks  # whose policy would refuse to be asked
    found = json.loads(html.unescape(title_of(shown(tmp_path, text, window, scheme))))
    assert found["width"] <= found["inner"]
    assert 0 <= found["top"] < 200
    assert len(found["contrasts"]) > 50
    assert [text for contrast, text in found["contrasts"] if contrast < 4.5] == []
    assert (found["bars"], found["narrowest"] > 0) == (500, True)
    # The end of the rows, where the job stands still, is in the window at first.
    assert 0 < found["left"] < found["inner"]
    assert (found["about"], found["chosen"]) == (f"rank 1\n{found['title']}", 1)


def test_the_page_runs_no_script_of_the_job_or_of_others(tmp_path: Path) -> None:
    """By what is written, and by the policy within the page, which is the second guard."""
    text = report_page(report(3, 6, text=EVIL, site=f"/{EVIL}:7"))
    intruder = "<script>document.title = 'mine'</script>"
    for title, changed in (("mine", POLICY.sub("", text)), (html.unescape(title_of(text)), text)):
        found = shown(tmp_path, changed.replace("</h1>", f"</h1>{intruder}"))
        assert html.unescape(title_of(found)) == title
        assert found.count("<script>") == 2  # the page's own and the intruder
