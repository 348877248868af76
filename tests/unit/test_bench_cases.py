"""What the command line of phalanx bench means, the table of operations behind it, and what a tuning run chooses."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from phalanx.bench import tune as tuning_run
from phalanx.bench.cases import BenchOptions, Case, parse_rate, parse_sizes, tuning_label
from phalanx.bench.operations import OPERATIONS, Buffers, SizeOf
from phalanx.commands.bench import bench
from phalanx.doctor.probe import Listener, probe
from phalanx.transports.shm.tuning import Tuning


def test_sizes_and_rates_are_read() -> None:
    assert parse_sizes("4,64K,1M") == (4, 65536, 1048576)
    assert parse_sizes("1KiB, 2kb,3B") == (1024, 2048, 3)
    assert parse_sizes("1K,1024") == (1024,)
    for text in ("", "4,", "0", "1.5M"):
        with pytest.raises(ValueError, match="is not a valid size; write a number of bytes"):
            parse_sizes(text)
    rates = {"1gbit": 125e6, "100mbit": 12.5e6, "2.5Gbit/s": 312.5e6, "56kbit": 7e3}
    assert [parse_rate(text) for text in rates] == list(rates.values())


def test_barrier_is_one_case_and_others_one_for_each_size_and_dtype() -> None:
    options = BenchOptions(("all_reduce", "barrier"), (4, 8), ("float32", "int8"), (2,), (), 3, 0.01, False, 0.0)
    sizes = [Case("all_reduce", dtype, size) for dtype in ("float32", "int8") for size in (4, 8)]
    assert list(options.cases()) == [*sizes, Case("barrier", "", 0)]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--sizes", "big"], "'big' is not a valid size"),
        (["--dtypes", "float"], "'float' is not a dtype"),
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


def test_command_line_loads_neither_bench_nor_torch_too_early() -> None:
    code = (
        "import sys, phalanx.commands.main; print('phalanx.bench' in sys.modules);"
        "import phalanx.commands.bench; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def make_buffers(name: str, rank: int, dtype: str, nbytes: int) -> Buffers:
    return Buffers(OPERATIONS[name], rank, 3, dtype, nbytes)


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_that_has_not_run_counts_as_wrong_and_its_size_is_right(name: str) -> None:
    """The check must not be satisfied by the values that were there before; rank 1, because it is never the root."""
    operation = OPERATIONS[name]
    used = max(make_buffers(name, rank, "float32", 1024).nbytes for rank in range(3))
    assert used == {SizeOf.TENSOR: 1024, SizeOf.BLOCKS: 1020, SizeOf.NOTHING: 0}[operation.size_of]
    if operation.size_of is SizeOf.NOTHING:
        return
    for dtype in ("bfloat16", "int8"):
        buffers = make_buffers(name, 1, dtype, 96)
        buffers.fill()
        expected = operation.expected(buffers)
        assert (buffers.difference(expected) is None) is (expected is None)
        if expected is not None and buffers.recv is not None:
            buffers.recv.copy_(expected)
            assert buffers.difference(expected) is None
            buffers.recv[-1] += 1
            assert f"element {len(buffers.recv) - 1}" in (buffers.difference(expected) or "")


def test_link_is_measured_for_who_brings_the_token_alone() -> None:
    listener = Listener()
    strangers = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(3)]
    for stranger in strangers[:2]:
        stranger.sendall(bytes(1 << 16))
    strangers[2].close()
    assert probe("127.0.0.1", listener.port, listener.token).bytes_per_s > 0
    assert "did not answer" in probe("127.0.0.1", listener.port, "0" * 32).error
    listener.close()
    for stranger in strangers:
        stranger.close()


# -- tuning --------------------------------------------------------------------------------------------

QUIET = {"probe_spread": 0.0, "stolen": 0.0, "others": 0.0}


def test_candidate_that_loses_least_is_chosen_if_it_is_clearly_better() -> None:
    first = {1: 10.0, 2: 20.0, 3: 11.0}
    second = {1: 14.0, 2: 20.0, 3: 10.0}
    chosen, slowdown = tuning_run.choose((1, 2, 3), 2, [first, second])
    assert chosen == 3
    assert slowdown[3] == pytest.approx((1.1 * 1.0) ** 0.5)
    assert slowdown[1] == pytest.approx((1.0 * 1.4) ** 0.5)
    assert tuning_run.choose((1, 2), 2, [{1: 9.8, 2: 10.0}])[0] == 2
    assert tuning_run.choose((1, 2), 2, [{1: 9.0, 2: 10.0}])[0] == 1
    points = [(1 << e, 1.0 + (1 << e) / 1000, 41.0) for e in range(9, 19)]
    chosen, slowdown = tuning_run.choose_switch(points, 16384)
    assert chosen == 32768  # 33.8 against 41; the next, 65536, costs 66.5
    assert slowdown[chosen] == pytest.approx(1.0)


@pytest.mark.parametrize("loud", [True, False])
def test_only_what_a_quiet_machine_showed_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, loud: bool
) -> None:
    monkeypatch.setenv("PHALANX_TUNING", str(tmp_path / "tuning.json"))
    noise = {**QUIET, "probe_spread": 0.9 if loud else 0.0}

    def measure(options: BenchOptions, *_: object) -> dict[str, Any]:
        samples = {tuning_label(tuning): [10.0] for tuning in options.tunings}
        row = {"samples_us": samples, "noise": noise, "wrong": []}
        return {"exit_code": 0, "jobs": [{"size": 2, "rows": [{**row, "used_nbytes": size} for size in options.sizes]}]}

    monkeypatch.setattr(tuning_run, "measure", measure)
    options = BenchOptions(("all_reduce",), (4,), ("float32",), (2,), (), 1, 0.01, False, 0.0)
    found = tuning_run.tune(options, [], quiet=True)
    assert found["path"] == (None if loud else str(tmp_path / "tuning.json"))
    assert Tuning(**found["tuning"]) == Tuning()
    assert ("too noisy" if loud else "Written to") in tuning_run.format_tuning(found)
