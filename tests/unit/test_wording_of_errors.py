"""The line below an error of Phalanx that says where it is explained."""

from __future__ import annotations

import pickle
import sys
import traceback

import pytest

from phalanx.bench.measurement import RanksFailed
from phalanx.errors import CallTimeout, PeerLost
from phalanx.explain.errors import error_classes
from phalanx.transports.shm.segment import NotOneHost

LINE = "What this means and what to do: phalanx explain {}\n"


def printed(error: BaseException) -> list[str]:
    return traceback.format_exception_only(type(error), error)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 prints no notes")
def test_a_traceback_ends_with_the_command_once_also_after_pickling() -> None:
    error = PeerLost("rank 1 is gone", group_rank=1)
    assert str(error) == "rank 1 is gone"
    assert printed(error) == ["phalanx.errors.PeerLost: rank 1 is gone\n", LINE.format("PeerLost")]
    error.__notes__.append("raised on worker1")  # as add_note() does
    copy = pickle.loads(pickle.dumps(error))
    assert copy.group_rank == 1
    assert printed(copy) == printed(error)
    assert printed(error)[1:] == [LINE.format("PeerLost"), "raised on worker1\n"]
    assert printed(CallTimeout("late", timeout_s=1.0))[1:] == [LINE.format("CallTimeout")]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 prints no notes")
def test_an_error_that_users_cannot_import_names_the_class_that_they_can() -> None:
    for kind, named in ((NotOneHost, "InitializationError"), (RanksFailed, "PhalanxError")):
        assert named in error_classes()
        assert PeerLost.__notes__.fget(kind.__new__(kind)) == [LINE.format(named).rstrip()]  # type: ignore[attr-defined]
