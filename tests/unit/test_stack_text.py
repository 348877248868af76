"""Which frames of a stack are the user's program's."""

from __future__ import annotations

import sysconfig

import pytest
import torch

from phalanx.watch import stack_text
from phalanx.watch.stack_text import is_library


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("train.py", False),
        ("/home/ada/project/train.py", False),
        ("/home/ada/my-site-packages/train.py", False),
        ("<frozen runpy>", True),
        (stack_text.__file__, True),
        (f"{sysconfig.get_path('stdlib')}/threading.py", True),
        (torch.__file__, True),
        # Packages that this environment sees, and that are another one's.
        ("/opt/image/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", True),
        ("/usr/lib/python3/dist-packages/numpy/__init__.py", True),
    ],
)
def test_installed_packages_are_no_program_of_the_users(file: str, expected: bool) -> None:
    assert is_library(file) is expected
