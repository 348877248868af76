"""After every test: no process, thread, descriptor or shared memory is left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.leaks import Holdings

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before = Holdings.now()
    yield
    left = before.left_by(Holdings.now())
    assert not left, f"the test left behind: {', '.join(left)}"
