"""Slurm's compressed lists of nodes and of tasks."""

from __future__ import annotations

import pytest

from phalanx.errors import LauncherEnvironmentError
from phalanx.place.node_lists import expand_node_list, expand_task_counts


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("node1", ["node1"]),
        ("a,b", ["a", "b"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("node[08-11]", ["node08", "node09", "node10", "node11"]),
        ("gpu[1-2]-ib,login", ["gpu1-ib", "gpu2-ib", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("rack-3[5]", ["rack-35"]),
    ],
)
def test_lists_of_nodes(text: str, nodes: list[str]) -> None:
    assert expand_node_list("SLURM_STEP_NODELIST", text) == nodes


@pytest.mark.parametrize(
    "text", ["", "a,", "n[1-", "n]", "n[]", "n[3-1]", "n[a-b]", "n[1-99999999999]", "n[0-999999]x[0-9]"]
)
def test_what_is_no_list_of_nodes_is_named(text: str) -> None:
    with pytest.raises(LauncherEnvironmentError, match=r"SLURM_STEP_NODELIST=.* is not a list of nodes"):
        expand_node_list("SLURM_STEP_NODELIST", text)


def test_counts_of_tasks() -> None:
    assert expand_task_counts("N", "4(x2),3") == [4, 4, 3]
    assert expand_task_counts("N", "1") == [1]
    assert expand_task_counts("N", "2,1(x3)") == [2, 1, 1, 1]
    for text in ("", "4(x", "four", "4(2)", "4,,3"):
        with pytest.raises(LauncherEnvironmentError, match=r"N=.* is not a list of tasks per node"):
            expand_task_counts("N", text)
