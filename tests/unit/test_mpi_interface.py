"""Which variables tell the MPI libraries of the interface that the user chose."""

from __future__ import annotations

import pytest

from phalanx.errors import InitializationError
from phalanx.transports.mpi.interface import tell_libraries


def test_without_a_choice_nothing_is_said() -> None:
    environment: dict[str, str] = {}
    tell_libraries(environment)
    assert environment == {}


def test_every_library_is_told_and_what_the_user_has_set_stays() -> None:
    environment = {"PHALANX_INTERFACE": "lo", "FI_TCP_IFACE": "ib7"}
    tell_libraries(environment)
    assert environment == {
        "PHALANX_INTERFACE": "lo",
        "FI_TCP_IFACE": "ib7",
        "UCX_NET_DEVICES": "lo",
        "OMPI_MCA_btl_tcp_if_include": "lo",
    }


def test_an_interface_that_is_not_there_is_named() -> None:
    with pytest.raises(InitializationError, match=r"PHALANX_INTERFACE=ib9: .* has no interface of that name"):
        tell_libraries({"PHALANX_INTERFACE": "ib9"})
