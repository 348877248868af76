"""What the command line of phalanx bench means, and the table of operations behind it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from phalanx.bench.buffers import Buffers
from phalanx.bench.cases import BenchOptions, Case, parse_dtypes, parse_operations, parse_rate, parse_sizes
from phalanx.bench.operations import OPERATIONS, SizeOf
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


@pytest.mark.parametrize("text", ["", "4,", "0", "1.5M", "four"])
def test_a_text_that_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a valid size; write a number of bytes"):
        parse_sizes(text)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"), [("1gbit", 125e6), ("100mbit", 12.5e6), ("2.5Gbit/s", 312.5e6), ("56kbit", 7e3)]
)
def test_the_rate_of_a_link_is_read(text: str, bytes_per_s: float) -> None:
    assert parse_rate(text) == bytes_per_s


@pytest.mark.parametrize("text", ["", "1G", "0gbit", "fast"])
def test_a_text_that_is_not_a_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write one as in 100mbit, 1gbit or 25gbit"):
        parse_rate(text)


def test_operations_and_dtypes_are_names_that_are_known() -> None:
    assert parse_operations(["barrier", "reduce", "barrier"]) == ("barrier", "reduce")
    assert parse_operations(["all"]) == tuple(OPERATIONS)
    assert parse_dtypes("float32,bfloat16") == ("float32", "bfloat16")
    with pytest.raises(
        ValueError, match="'allreduce' is not an operation that can be measured; did you mean all_reduce"
    ):
        parse_operations(["allreduce"])
    with pytest.raises(ValueError, match="'float' is not a dtype"):
        parse_dtypes("float")


def make_options(**changes: object) -> BenchOptions:
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


def test_barrier_is_one_case_and_others_one_for_each_size_and_dtype() -> None:
    assert list(make_options().cases()) == [
        Case("all_reduce", "float32", 4),
        Case("all_reduce", "float32", 8),
        Case("all_reduce", "int8", 4),
        Case("all_reduce", "int8", 8),
        Case("barrier", "", 0),
    ]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["allreduce"], "'allreduce' is not an operation"),
        (["--sizes", "big"], "'big' is not a valid size"),
        (["--ranks", "2,x"], "'2,x' is not a list of numbers of ranks"),
        (["--ranks", "1"], "a single rank has nobody to talk to"),
        (["--link-rate", "1G"], "'1G' is not a rate"),
        (["--against", "nccl"], "'nccl' cannot be measured beside Phalanx"),
        (["--mpi", "/nowhere/mpiexec"], "'/nowhere/mpiexec' is not a program"),
        (["--load", "pyproject.toml"], "is not what this version of phalanx bench --json prints"),
    ],
)
def test_mistakes_on_the_command_line_are_reported(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(bench, arguments, terminal_width=200)
    assert result.exit_code == 2
    assert complaint in result.output


def test_help_shows_examples_and_every_operation() -> None:
    text = CliRunner().invoke(bench, ["--help"]).output
    assert "phalanx bench --load here.json --plot here.png" in text
    assert all(name in text for name in OPERATIONS)


def test_command_line_loads_neither_bench_nor_torch_too_early() -> None:
    code = (
        "import sys, phalanx.commands.main; print('phalanx.bench' in sys.modules);"
        "import phalanx.commands.bench; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def make_buffers(name: str, rank: int, size: int, dtype: str, nbytes: int) -> Buffers:
    return OPERATIONS[name].make_buffers(rank, size, dtype, nbytes)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", [row.name for row in OPERATIONS.values() if row.size_of is not SizeOf.NOTHING])
def test_an_operation_that_has_not_run_counts_as_wrong(name: str, dtype: str) -> None:
    """The check must not be satisfied by the values that were there before; rank 1, because it is never the root."""
    buffers = make_buffers(name, 1, 3, dtype, 96)
    buffers.fill()
    expected = OPERATIONS[name].expected(buffers)
    assert (buffers.difference(expected) is None) is (expected is None)
    if expected is not None and buffers.recv is not None:
        buffers.recv.copy_(expected)
        assert buffers.difference(expected) is None
        buffers.recv[-1] += 1
        assert f"element {len(buffers.recv) - 1}" in (buffers.difference(expected) or "")


def test_a_backend_without_gather_single_is_left_out_for_that_reason() -> None:
    call = OPERATIONS["gather_single"].torch(object(), make_buffers("gather_single", 0, 2, "float32", 8), False)
    with pytest.raises(NotImplementedError, match="has no gather_single"):
        call()


@pytest.mark.parametrize("name", OPERATIONS)
def test_size_of_blocks_is_a_multiple_of_the_ranks_and_of_tensors_not(name: str) -> None:
    used = max(make_buffers(name, rank, 3, "float32", 1024).nbytes for rank in range(3))
    assert used == {SizeOf.TENSOR: 1024, SizeOf.BLOCKS: 1020, SizeOf.NOTHING: 0}[OPERATIONS[name].size_of]


def test_the_expected_sums_are_the_sums_of_the_values() -> None:
    buffers = make_buffers("all_reduce", 0, 5, "float16", 200)
    assert buffers.sums(3, 50).tolist() == sum(buffers.values(rank, 3, 50) for rank in range(5)).tolist()  # type: ignore[union-attr]


def test_blocks_share_a_size_and_never_vanish() -> None:
    assert make_buffers("all_gather", 0, 3, "float32", 1024).nbytes == 1020
    assert make_buffers("all_gather", 0, 3, "float32", 4).nbytes == 12
    assert make_buffers("all_reduce", 0, 3, "float64", 4).nbytes == 8
