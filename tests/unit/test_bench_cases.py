"""What the command line of phalanx bench means."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

import pytest
from click.testing import CliRunner

from phalanx.bench.cases import (
    OPERATIONS,
    BenchOptions,
    Case,
    format_size,
    parse_dtypes,
    parse_operations,
    parse_sizes,
)
from phalanx.bench.operations import make_operation
from phalanx.commands.bench import bench


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4", (4,)),
        ("4,64K,1M", (4, 65536, 1048576)),
        ("2g", (2 << 30,)),
        ("1KiB, 2kb,3B", (1024, 2048, 3)),
        ("1K,1024", (1024,)),
    ],
)
def test_sizes_are_read(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "4,", "0", "-4", "1.5M", "4T", "K", "four"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size; write bytes"):
        parse_sizes(text)


@pytest.mark.parametrize("text", ["1", "1023", "1K", "1536", "64K", "1M", "3G"])
def test_sizes_are_written_as_they_are_read(text: str) -> None:
    assert parse_sizes(format_size(*parse_sizes(text))) == parse_sizes(text)


def test_operations_and_dtypes_are_names_that_are_known() -> None:
    assert parse_operations(["barrier", "reduce", "barrier"]) == ("barrier", "reduce")
    assert parse_operations(["all"]) == OPERATIONS
    assert parse_dtypes("float32,bfloat16") == ("float32", "bfloat16")
    with pytest.raises(ValueError, match="'allreduce' is no operation that can be measured; choose from all_reduce,"):
        parse_operations(["allreduce"])
    with pytest.raises(ValueError, match="'float' is no dtype"):
        parse_dtypes("float")


def make_plan(**changes: object) -> BenchOptions:
    fields = {
        "operations": ("all_reduce", "barrier"),
        "sizes": (4, 8),
        "dtypes": ("float32", "int8"),
        "ranks": (2,),
        "against": ("gloo",),
        "rounds": 3,
        "round_s": 0.01,
        "asynchronous": False,
        "patience_s": 0.0,
    }
    return BenchOptions.from_json({**fields, **changes})


def test_a_barrier_is_one_case_and_the_rest_is_every_combination() -> None:
    assert list(make_plan().cases()) == [
        Case("all_reduce", "float32", 4),
        Case("all_reduce", "float32", 8),
        Case("all_reduce", "int8", 4),
        Case("all_reduce", "int8", 8),
        Case("barrier", "", 0),
    ]


def test_a_plan_survives_json() -> None:
    options = make_plan()
    assert BenchOptions.from_json(json.loads(json.dumps(asdict(options)))) == options


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["allreduce"], "'allreduce' is no operation"),
        (["--sizes", "big"], "'big' is no size"),
        (["--ranks", "2,x"], "'2,x' are no numbers of ranks"),
        (["--ranks", "1"], "a group of one rank moves nothing"),
        (["--against", "nccl"], "'nccl' cannot be measured beside Phalanx"),
        (["--mpi", "/nowhere/mpiexec"], "'/nowhere/mpiexec' is no program"),
        (["--load", "pyproject.toml"], "is not what this version of phalanx bench --json prints"),
    ],
)
def test_mistakes_on_the_command_line_are_told(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(bench, arguments, terminal_width=200)
    assert result.exit_code == 2
    assert complaint in result.output


def test_help_shows_examples_and_every_operation() -> None:
    text = CliRunner().invoke(bench, ["--help"]).output
    assert "phalanx bench --load here.json --plot here.png" in text
    assert all(name in text for name in OPERATIONS)


def test_the_command_line_loads_neither_the_bench_nor_torch_before_they_are_needed() -> None:
    code = (
        "import sys, phalanx.commands.main; print('phalanx.bench' in sys.modules);"
        "import phalanx.commands.bench; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "barrier"])
def test_an_operation_that_has_not_run_counts_as_wrong(name: str, dtype: str) -> None:
    """The check must not be satisfied by the values that were there before; rank 1, because it is never the root."""
    operation = make_operation(name, 1, 3, dtype, 96)
    operation.fill()
    expected = operation.expected()
    assert bool(operation.wrong()) is (expected is not None)
    if expected is not None and operation.recv is not None:
        operation.recv.copy_(expected)
        assert operation.wrong() == ""
        operation.recv[-1] += 1
        assert f"element {len(operation.recv) - 1}" in operation.wrong()


def test_the_expected_sums_are_the_sums_of_the_values() -> None:
    operation = make_operation("all_reduce", 0, 5, "float16", 200)
    assert operation.sums(3, 50).tolist() == sum(operation.values(rank, 3, 50) for rank in range(5)).tolist()  # type: ignore[union-attr]


def test_blocks_share_a_size_and_never_vanish() -> None:
    assert make_operation("all_gather", 0, 3, "float32", 1024).nbytes == 1020
    assert make_operation("all_gather", 0, 3, "float32", 4).nbytes == 12
    assert make_operation("all_reduce", 0, 3, "float64", 4).nbytes == 8
