"""A signal to the launcher at the moment in which the last of its processes is gone."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from phalanx.launch import supervisor
from phalanx.launch.supervisor import Supervisor


def test_a_signal_that_comes_as_the_zygote_is_reaped_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler continues the zygote, in case somebody has stopped it: not one that has been waited for."""
    launch = object.__new__(Supervisor)
    launch.zygote = os.fork()
    if not launch.zygote:
        os._exit(0)
    for name in ("descriptors", "selector", "job", "console", "watch", "patience", "reader"):
        setattr(launch, name, MagicMock())
    launch.ranks, launch.strangers, launch.ending, launch.started_at = [], [], False, 1.0
    launch.interrupted = launch.settle_until = None
    handled = []

    def wait(pid: int, options: int) -> tuple[int, int]:
        found = os.waitpid(pid, options)
        signal.raise_signal(signal.SIGTERM)  # as one that comes meanwhile
        return found

    def handler(*arguments: object) -> None:
        launch._on_signal(*arguments)  # type: ignore[arg-type]
        handled.append(arguments)

    before = signal.signal(signal.SIGTERM, handler)
    monkeypatch.setattr(supervisor, "os", SimpleNamespace(**{**vars(os), "waitpid": wait}))
    try:
        launch._on_zygote_gone()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert handled
