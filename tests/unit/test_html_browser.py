"""The page of a report in Chromium: it fits, can be read, answers a touch, and loads and runs nothing.

The browser has no window. It is driven over two pipes: commands and events are JSON, each ended by a zero byte.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.reports import EVIL, report

from phalanx.watch.html_page import page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATH = next((path for name in NAMES if (path := shutil.which(name))), "")
pytestmark = pytest.mark.skipif(not PATH, reason="there is no Chromium (on Debian: apt-get install chromium)")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
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
OPEN_BAR = """
(() => {
  const bar = document.querySelectorAll(".row")[1].querySelector("rect.open"), at = bar.getBoundingClientRect();
  return [at.x + at.width / 2, at.y + at.height / 2, bar.querySelector("title").textContent];
})()
"""


class Browser:
    """One page of a running browser.

    ``complaints`` is what its console said, exceptions, dialogs, and what the page's policy refused; ``requested``
    every address that was asked for, but for those that the policy has refused.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._number, self._unread = 0, b""
        self._loaded = False
        self.complaints: list[str] = []
        self.requested: dict[str, str] = {}
        target = self.command("Target.createTarget", session="", url="about:blank")["targetId"]
        attached = self.command("Target.attachToTarget", session="", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")

    def show(self, file: Path, size: tuple[int, int], *, dark: bool = False) -> None:
        """Open a file as a browser on a desk or a phone would, and wait until it is drawn."""
        self.complaints, self.requested, self._loaded = [], {}, False
        width, height = size
        size_set = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
        self.command("Emulation.setDeviceMetricsOverride", **size_set)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        self.command("Page.navigate", url=file.as_uri())
        while not self._loaded:
            self._read()

    def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript on the page, which the page's own policy does not bind."""
        answer = self.command("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def command(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        own = self._session if session is None else session
        said = {"id": self._number, "method": method, "params": parameters, **({"sessionId": own} if own else {})}
        text = json.dumps(said).encode() + b"\0"
        while text:
            text = text[os.write(self._commands, text) :]
        while (answer := self._read()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            more = os.read(self._answers, 1 << 16)
            assert more, "the browser has ended"
            self._unread += more
        text, self._unread = self._unread.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        method, said = message.get("method", ""), message.get("params", {})
        self._loaded |= method == "Page.loadEventFired"
        if method == "Network.requestWillBeSent":
            self.requested[said["requestId"]] = said["request"]["url"]
        elif method == "Network.loadingFailed" and said.get("blockedReason") == "csp":
            del self.requested[said["requestId"]]
        elif method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Page.javascriptDialogOpening"):
            self.complaints.append(f"{method}: {said}")
        elif method == "Log.entryAdded":
            self.complaints.append(said["entry"]["text"])
        return message


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    """A browser with a profile of its own, ended with all of its processes."""
    commands, to_browser = os.pipe()
    from_browser, answers = os.pipe()
    # It takes its commands from descriptor 3 and answers on 4; these lie above, so that neither is closed before.
    above = [os.dup2(end, 100 + end, inheritable=True) for end in (commands, answers)]
    placed = f'exec 3<&{above[0]} 4>&{above[1]} {above[0]}<&- {above[1]}>&-; exec "$@"'
    profile = str(tmp_path / "profile")
    own = dict.fromkeys(("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"), profile)
    process = subprocess.Popen(
        ["bash", "-c", placed, "browser", PATH, *OPTIONS, f"--user-data-dir={profile}", "--remote-debugging-pipe"],
        pass_fds=above,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, **own},
    )
    for end in (commands, answers, *above):
        os.close(end)
    try:
        running = Browser(to_browser, from_browser)
        yield running
        running.command("Browser.close", session="")
        process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):  # all of them have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(to_browser)
        os.close(from_browser)


def test_the_page_can_be_read_and_touched_and_runs_nothing_of_others(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "hang.html"
    file.write_text(page(report(5, 100)))
    for window, dark in ((DESK, False), (DESK, True), (PHONE, True), (PHONE, False)):
        browser.show(file, window, dark=dark)
        assert browser.ask("document.documentElement.scrollWidth") <= window[0]
        assert 0 <= browser.ask("document.querySelector('h1').getBoundingClientRect().top") < window[1] / 4
        contrasts = browser.ask(CONTRASTS)
        assert len(contrasts) > 50
        assert [text for contrast, text in contrasts if contrast < 4.5] == []
        widths = browser.ask("Array.from(document.querySelectorAll('.row rect'), e => e.getBoundingClientRect().width)")
        assert len(widths) == 5 * 100
        assert min(widths) > 0
        assert (list(browser.requested.values()), browser.complaints) == ([file.as_uri()], [])

    # On a phone the end of the rows, where the job stands still, is in the window at first.
    x, y, title = browser.ask(OPEN_BAR)
    assert 0 < x < PHONE[0]
    assert 0 < y < PHONE[1]
    for kind in ("mousePressed", "mouseReleased"):
        browser.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    assert browser.ask("document.getElementById('about').textContent") == f"rank 1\n{title}"
    assert browser.ask("document.querySelectorAll('.chosen').length") == 1

    file.write_text(page(report(3, 6, text=EVIL, site=f"/{EVIL}:7")))
    browser.show(file, DESK)
    assert (list(browser.requested.values()), browser.complaints) == ([file.as_uri()], [])
    assert browser.ask("[document.scripts.length, document.images.length]") == [1, 0]
    assert "<script>alert(1)</script>" in browser.ask("document.body.innerText")

    # The policy within the page is the second guard.
    intruder = "<script>alert(1)</script><img src=http://127.0.0.1:9/x onload=alert(2)></h1>"
    file.write_text(page(report(3, 6)).replace("</h1>", intruder))
    browser.show(file, DESK)
    assert list(browser.requested.values()) == [file.as_uri()]
    assert browser.complaints
    assert [complaint for complaint in browser.complaints if "Content Security Policy" not in complaint] == []
