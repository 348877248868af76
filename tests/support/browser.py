"""A real browser, Chromium without a window, that opens a page and answers what stands on it.

It is driven over two pipes (``--remote-debugging-pipe``): commands and events are JSON, each ended by a zero byte.
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

__all__ = ["Browser", "browser_path", "opened"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# The browser takes its commands from descriptor 3 and answers on 4.
_COMMANDS, _ANSWERS = 3, 4


def browser_path() -> str:
    """Where a Chromium is, or nothing."""
    return next((path for name in _NAMES if (path := shutil.which(name))), "")


class Browser:
    """One page of a running browser.

    Attributes:
        complaints: what the page's console said, exceptions, dialogs, and what the policy of the page refused.
        requested: every address that was asked for, but for those that the page's own policy has refused.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._number = 0
        self._unread = b""
        self._events: list[dict[str, Any]] = []
        self.complaints: list[str] = []
        self._requests: dict[str, str] = {}
        target = self._command("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = self._command("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._command(f"{domain}.enable", {}, self._session)

    @property
    def requested(self) -> list[str]:
        return list(self._requests.values())

    def show(self, page: Path, width: int, height: int, *, dark: bool = False, touch: bool = False) -> None:
        """Opens a file as a browser on a desk or a phone would, and waits until it is drawn."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": touch}
        self._command("Emulation.setDeviceMetricsOverride", size, self._session)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._command("Emulation.setEmulatedMedia", {"features": [scheme]}, self._session)
        self._events.clear()
        self._command("Page.navigate", {"url": page.as_uri()}, self._session)
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._read()

    def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript on the page, which the page's own policy does not bind."""
        asked = {"expression": expression, "returnByValue": True}
        answer = self._command("Runtime.evaluate", asked, self._session)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def click(self, x: float, y: float) -> None:
        """Presses and lets go the first button of the mouse at a point of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            at = {"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1}
            self._command("Input.dispatchMouseEvent", at, self._session)

    def close(self) -> None:
        self._command("Browser.close", {})

    def _command(self, method: str, parameters: dict[str, Any], session: str = "") -> dict[str, Any]:
        self._number += 1
        said = {"id": self._number, "method": method, "params": parameters}
        if session:
            said["sessionId"] = session
        text = json.dumps(said).encode() + b"\0"
        while text:
            text = text[os.write(self._commands, text) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]  # type: ignore[no-any-return]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            more = os.read(self._answers, 1 << 16)
            assert more, "the browser has ended"
            self._unread += more
        text, self._unread = self._unread.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self._events.append(message)
            self._note(message["method"], message["params"])
        return message

    def _note(self, method: str, said: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self._requests[said["requestId"]] = said["request"]["url"]
        elif method == "Network.loadingFailed" and said.get("blockedReason") == "csp":
            del self._requests[said["requestId"]]
        elif method == "Log.entryAdded":
            self.complaints.append(f"{said['entry']['level']}: {said['entry']['text']}")
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(f"exception: {said['exceptionDetails']['text']}")
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(f"console.{said['type']}")
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append(f"dialog: {said['message']}")


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Browser]:
    """A browser with a profile of its own in a folder, ended with all of its processes."""
    commands, to_browser = os.pipe()
    from_browser, answers = os.pipe()
    # Above those that it shall have, so that neither is closed before it is put in its place.
    commands_above, answers_above = (os.dup2(end, 100 + end, inheritable=True) for end in (commands, answers))
    words = [
        browser_path(),
        "--headless=new",
        "--no-sandbox",  # which root cannot have; the pages are the test's own
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--no-first-run",
        f"--user-data-dir={folder}",
        "--remote-debugging-pipe",
    ]
    placed = f"exec {_COMMANDS}<&{commands_above} {_ANSWERS}>&{answers_above}"
    process = subprocess.Popen(
        ["bash", "-c", f'{placed} {commands_above}<&- {answers_above}>&-; exec "$@"', "browser", *words],
        pass_fds=(commands_above, answers_above),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)},
    )
    for end in (commands, answers, commands_above, answers_above):
        os.close(end)
    try:
        browser = Browser(to_browser, from_browser)
        yield browser
        browser.close()
        process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):  # all of them have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(to_browser)
        os.close(from_browser)
