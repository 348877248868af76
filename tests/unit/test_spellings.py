"""Command lines for torchrun, mpiexec, accelerate and horovodrun, given to ``phalanx run``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from phalanx.commands.run import run
from phalanx.errors import LaunchError
from phalanx.launch.job.spellings import translate
from phalanx.system.limits import usable_cores

OWN = {"-n": True, "--ranks": True, "-m": False, "-q": False, "-x": True, "-H": True, "--hosts": True, "--grace": True}
OWN |= {"--tee": False, "--restarts": True}
OWN |= dict.fromkeys(("--nnodes", "--node-rank", "--master-addr", "--master-port"), True)
OWN |= dict.fromkeys(("--log-dir", "--hostfile", "--ppn", "--bind", "--interface", "--stdin", "--device"), True)
TARGET = ["train.py", "--nproc-per-node", "9", "-hosts"]  # what stands after the target is its own


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--nproc-per-node 4", "-n 4"),
        ("--nproc-per-node gpu", "-n gpu"),
        ("--standalone --nproc_per_node 2 --max-restarts 0", "-n 2 --restarts 0"),
        ("--num_machines 2 --machine_rank=1", "--nnodes 2 --node-rank 1"),
        ("--main_process_ip h1 --main_process_port 1", "--master-addr h1 --master-port 1"),
        ("--rdzv-endpoint=h1:29400", "--master-addr h1:29400"),
        ("-hosts a:1,b:2", "--hosts a:1,b:2"),
        ("-f nodes -ppn 2", "--hostfile nodes --ppn 2"),
        ("--bind-to core --allow-run-as-root --oversubscribe", "--bind core"),
        ("--module", "-m"),
        ("--cpu", "--device cpu"),
        ("--shutdown-timeout 9", "--grace 9"),
        ("--log_dir=logs -r 3 --tee 3", "--log-dir=logs --tee"),
        ("--log-dir logs --redirects=3 -t 0", "--log-dir logs"),
        ("-genv A=1 --env B 2 -genv=C 3", "-x A=1 -x B=2 -x C=3"),
        ("--iface lo --prepend-rank --genvall -l", "--interface lo"),
        ("-s 1 -stdin 2 --stdin 0", "--stdin 1 --stdin 2 --stdin 0"),
        ("--output tag --display-map --bind-to-core", "--bind core"),
        ("--num_cpu_threads_per_process 3 --same_network", "-x OMP_NUM_THREADS=3"),
        ("--mpirun_hostfile nodes -binding core", "--hostfile nodes --bind core"),
    ],
)
def test_what_means_the_same_is_accepted(theirs: str, ours: str) -> None:
    assert translate([*theirs.split(), *TARGET], OWN) == ([*ours.split(), *TARGET], [])


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        ("--rdzv_backend=c10d", "--master-addr"),
        ("--rdzv-id 7", "--master-addr"),
        ("--monitor-interval 5", "told at once"),
        ("--start_method=spawn", "--no-preload"),
        ("--start-timeout 60", "waits"),
    ],
)
def test_what_is_not_needed_is_accepted_with_a_note_that_says_why(theirs: str, reason: str) -> None:
    ours, (note,) = translate([*theirs.split(), *TARGET], OWN)
    assert ours == TARGET
    assert reason in note


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ("--redirects 1", "--log-dir DIR"),
        ("--local-ranks-filter 0", "--only 0"),
        ("--rank 0", "-n says how many"),
        ("--gpu_ids 0,1", "-x CUDA_VISIBLE_DEVICES"),
        ("--map-by node", "--mpi 'mpirun"),
        ("--mca btl self", "--mpi 'mpiexec"),
        ("--output dir=logs", "tee"),
        ("--fsdp_sharding_strategy 1", "Phalanx works under it"),
        ("--mixed_precision bf16", "ACCELERATE_MIXED_PRECISION"),
        ("--min-num-proc 2", "fixed"),
        ("--timeout 60", "timeout SECONDS phalanx run"),
        ("--rnks 3", "did you mean --ranks?"),
        ("--frobnicate", "phalanx run --help"),
        ("-np", "needs a value"),
    ],
)
def test_what_is_otherwise_here_is_translated(theirs: str, said: str) -> None:
    words = theirs.split() if theirs == "-np" else [*theirs.split(), *TARGET]
    with pytest.raises(LaunchError) as error:
        translate(words, OWN)
    assert said in str(error.value)
    assert theirs.partition(" ")[0].partition("=")[0] in str(error.value)


def test_every_option_of_torchrun_is_known() -> None:
    """Those of the installed torch: none may be called unknown."""
    from torch.distributed.run import get_args_parser

    for action in get_args_parser()._actions:
        for option in action.option_strings:
            words = [option, "1", "x"] if action.nargs is None else [option, "x"]
            try:
                translate(words, {**OWN, "-h": False, "--help": False})
            except LaunchError as error:
                assert "lists all" not in str(error), option  # noqa: PT017 (some options are known and refused)


def test_on_the_command_line(tmp_path: Path) -> None:
    show = tmp_path / "show.py"
    show.touch()
    for words, ranks, arguments in (
        (["-np", "2", str(show)], 2, []),
        ([str(show), "--nproc-per-node", "3"], 1, ["--nproc-per-node", "3"]),
        (["-n", "cpu", str(show)], usable_cores(), []),
    ):
        described = json.loads(CliRunner().invoke(run, ["--dry-run", "--json", *words]).stdout)
        assert (described["world_size"], described["target"]["argv"][1:]) == (ranks, arguments)
