"""Options of a job that cannot both be carried out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from phalanx import settings
from phalanx.errors import LaunchError
from phalanx.launch.job.binding import Bind
from phalanx.launch.job.device_option import check_device
from phalanx.launch.job.host_slots import HostSlots
from phalanx.launch.job.rehearsal import Rehearsal

if TYPE_CHECKING:
    from phalanx.launch.job.mpi_launcher import MpiLauncher

__all__ = ["check_together"]


def check_together(
    ranks: int | None,
    mpi: MpiLauncher | None,
    hosts: Sequence[HostSlots],
    rehearsal: Rehearsal | None,
    bind: Bind,
    device: str | None,
    environment: Mapping[str, str],
) -> None:
    """Refuse options that cannot both be carried out."""
    if device is not None:
        check_device(device, f"--device {device}")
    elif environment.get(settings.DEVICE):
        check_device(environment[settings.DEVICE], f"{settings.DEVICE}={environment[settings.DEVICE]}")
    if mpi is not None and bind != "none":
        from phalanx.launch.job.mpi_launcher import how_to_bind

        raise LaunchError(f"--bind {bind}: an MPI launcher binds its ranks by options of its own: {how_to_bind(bind)}")
    if rehearsal is None:
        return
    if hosts:
        raise LaunchError("--rehearse places ranks on hosts that do not exist; leave --rehearse or the hosts out")
    if mpi is not None:
        raise LaunchError(
            "--rehearse places ranks on hosts that do not exist, which an MPI launcher cannot do; leave --rehearse or "
            "--mpi out"
        )
    if ranks is not None and ranks != rehearsal.ranks:
        raise LaunchError(
            f"-n {ranks} contradicts --rehearse {rehearsal.given}, which is {rehearsal.ranks} ranks; leave -n out"
        )
    if device not in (None, "cpu"):
        raise LaunchError(
            f"--device {device}: a rehearsal computes on the CPU in place of devices; leave --device or --rehearse out"
        )
