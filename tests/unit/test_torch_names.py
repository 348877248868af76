"""Every release of torch has each call that we serve, under its present or its older name.

``tests/data/torch_names.json`` was recorded from the wheels: the methods of ``ProcessGroup`` in its ``.pyi``, and the
functions of ``torch.distributed``.
"""

import json
from pathlib import Path

import pytest

from phalanx.c10d import torch_versions
from phalanx.c10d.dispatcher import OPERATIONS

NAMES = json.loads((Path(__file__).parents[1] / "data/torch_names.json").read_text())


@pytest.mark.parametrize("release", NAMES)
def test_release_has_each_call_under_one_of_its_names(release: str) -> None:
    methods, functions = NAMES[release]["methods"], NAMES[release]["functions"]
    for name in OPERATIONS:
        known = name in methods or torch_versions.OLDER_METHODS.get(name) in methods
        assert known or name == "gather_single", name  # of torch 2.14; ours has it everywhere
    for name, older in torch_versions.OLDER_FUNCTIONS.items():
        assert name in functions or older in functions


def test_every_tried_release_is_recorded() -> None:
    assert {tuple(map(int, release.split(".")[:2])) for release in NAMES} >= set(torch_versions.TRIED)
