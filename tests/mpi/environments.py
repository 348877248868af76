"""The MPIs that the tests run with: virtual environments, each with an MPI library, mpi4py, torch and Phalanx.

``make mpi`` makes them and names them in PHALANX_MPI_VENVS, a list of directories separated by colons. Without it the
tests that need an MPI are skipped.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

VARIABLE = "PHALANX_MPI_VENVS"
# Each library reads its own and ignores the rest: more ranks than cores, no binding, root in a container.
SETTINGS = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "I_MPI_PIN": "0",
}


@dataclass(frozen=True)
class MpiEnvironment:
    """One virtual environment."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def mpiexec(self) -> str:
        return str(self.folder / "bin" / "mpiexec")

    @property
    def is_hydra(self) -> bool:
        return (self.folder / "bin" / "hydra_pmi_proxy").exists()

    @property
    def is_mpich(self) -> bool:
        return (self.folder / "bin" / "mpichversion").exists()

    @property
    def is_openmpi(self) -> bool:
        return (self.folder / "bin" / "ompi_info").exists()


def mpi_parameters() -> list[object]:
    """A parameter for each environment; one that is skipped, with the reason, if there is none."""
    listed = [Path(folder) for folder in os.environ.get(VARIABLE, "").split(":") if folder]
    if not listed:
        reason = f"no MPI to test with; make mpi sets some up, or name virtual environments in {VARIABLE}"
        return [pytest.param(None, id="no-mpi", marks=pytest.mark.skip(reason=reason))]
    parameters: list[object] = []
    for folder in listed:
        environment = MpiEnvironment(folder)
        present = os.access(environment.mpiexec, os.X_OK) and os.access(environment.python, os.X_OK)
        marks = () if present else (pytest.mark.skip(reason=f"{folder} has no python and mpiexec"),)
        parameters.append(pytest.param(environment, id=environment.name, marks=marks))
    return parameters
