"""Fixtures of the MPI tests."""

from __future__ import annotations

import pytest
from tests.mpi.environments import MpiEnvironment, mpi_parameters


@pytest.fixture(params=mpi_parameters())
def mpi(request: pytest.FixtureRequest) -> MpiEnvironment:
    """Each MPI that there is; skipped with a reason where there is none."""
    environment: MpiEnvironment = request.param
    return environment
