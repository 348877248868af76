"""``phalanx env``: what this process would be, if it called ``phalanx.init()`` now."""

from __future__ import annotations

import json

import click

from phalanx.topology.environment import read_environment
from phalanx.topology.show import as_text, view

__all__ = ["env"]


@click.command()
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object; null where only the joined world can tell."
)
@click.option(
    "--local_rank",
    "--local-rank",
    "local_rank",
    metavar="N",
    help="What an older launcher gives a script as an argument; -1 for not distributed.",
)
def env(as_json: bool, local_rank: str | None) -> None:
    """Say which launcher started this process, and what its place in the world would be.

    Put it where your script stands. Nothing is joined, no port is opened.

    \b
      phalanx env                             in this shell: usually a world of one
      mpiexec -n 2 phalanx env                what each rank of an MPI job would be
      srun -N 2 -n 8 phalanx env --json       one JSON object for each rank
      torchrun --nproc-per-node 2 --no-python phalanx env

    The variables behind each fact stand beside it. Launchers that do not say on which node a rank is (MPI's say it
    never) leave that open here: the ranks find it out together when phalanx.init() joins them.

    \b
    The object of --json has launcher, rank, world_size, local_rank, local_world_size, node_rank, num_nodes,
    master_addr, master_port, device and backend. launcher is one of torchrun, mpich, intelmpi, openmpi, mvapich,
    pals, slurm, lsf, kubeflow, sagemaker, azureml, tpu, horovod, pai, phalanx, env (RANK and WORLD_SIZE, set by
    hand) and none.

    torch is imported only on a machine with an accelerator, to name the device.

    \b
    Exit codes: 0; 2 if the variables describe no process (half set, no numbers, or two launchers that contradict
    each other), with the reason on standard error.
    """
    shown = view(read_environment(arguments=[] if local_rank is None else ["--local_rank", local_rank]))
    if as_json:
        click.echo(json.dumps(shown.values))
        for note in shown.notes:
            click.echo(f"phalanx: note: {note}", err=True)
        return
    click.echo(as_text(shown), nl=False)
