"""What a caller is told of an exception that a handler raised."""

from __future__ import annotations

import traceback

import pytest

from phalanx.rpc.failure import Failure


def test_an_error_whose_traceback_cannot_be_formatted_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython parses the lines of a traceback, and fails with a SystemError if another thread disturbs it."""

    def fail(*_: object) -> list[str]:
        raise SystemError("AST constructor recursion depth mismatch (before=60, after=55)")

    monkeypatch.setattr(traceback, "format_exception", fail)
    failure = Failure.decode(Failure.of(KeyError("weights")).encode())
    assert failure.type_name == "KeyError"
    assert failure.text == "'weights'"
    assert failure.traceback == "KeyError: 'weights'\n"
