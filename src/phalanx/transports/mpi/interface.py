"""The network interface that the user chose, as the MPI libraries and what they are built on want to be told."""

from __future__ import annotations

from collections.abc import MutableMapping

from phalanx.system.interfaces import chosen_interface, ucx_devices

__all__ = ["tell_libraries"]


def tell_libraries(environment: MutableMapping[str, str]) -> None:
    """Add variables by which MPI keeps to the interface of ``PHALANX_INTERFACE``; none if that is not set.

    MPI reads them when it starts. What the user has set stays as it is.

    - ``UCX_NET_DEVICES``: the interface, and the InfiniBand or RoCE adapters that it belongs to. MPICH and Open MPI
      over UCX.
    - ``FI_TCP_IFACE``: libfabric's provider for TCP, in MPICH and Intel MPI. Its providers for RDMA choose for
      themselves.
    - ``OMPI_MCA_btl_tcp_if_include``: Open MPI's own TCP.

    Args:
        environment: ``os.environ`` of a process that has not started MPI.

    Raises:
        InitializationError: this host does not have the interface; the message lists those that it has.
    """
    chosen = chosen_interface(environment)
    if chosen is None:
        return
    name = chosen[0]
    environment.setdefault("UCX_NET_DEVICES", ucx_devices(name))
    environment.setdefault("FI_TCP_IFACE", name)
    environment.setdefault("OMPI_MCA_btl_tcp_if_include", name)
