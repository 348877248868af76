"""Which variables tell the MPI libraries of the interface that the user chose."""

from __future__ import annotations

import pytest

from phalanx.errors import InitializationError
from phalanx.transports.mpi.runtime import tell_libraries


def test_every_library_is_told_of_a_choice_and_what_the_user_has_set_stays() -> None:
    nothing: dict[str, str] = {}
    tell_libraries(nothing)
    assert nothing == {}
    given = {"PHALANX_INTERFACE": "lo", "FI_TCP_IFACE": "ib7"}
    environment = dict(given)
    tell_libraries(environment)
    assert environment == {**given, "UCX_NET_DEVICES": "lo", "OMPI_MCA_btl_tcp_if_include": "lo"}
    with pytest.raises(InitializationError, match=r"PHALANX_INTERFACE=ib9: .* has no interface of that name"):
        tell_libraries({"PHALANX_INTERFACE": "ib9"})
