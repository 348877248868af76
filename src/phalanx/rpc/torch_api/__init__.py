"""``torch.distributed.rpc`` over Phalanx: the same names, with the same meaning.

    import phalanx.rpc.torch_api as rpc

Importing this has ``torch.distributed.rpc`` itself run over Phalanx in this process, so libraries that import it do so as
well. ``phalanx run --replace rpc`` does the same for a script that does not know Phalanx.
"""

from phalanx.rpc.torch_api.install import install

install()

from torch.distributed.rpc import (  # noqa: E402
    BackendType,
    RRef,
    TensorPipeRpcBackendOptions,
    WorkerInfo,
    backend_registry,
    functions,
    get_rpc_timeout,
    get_worker_info,
    init_rpc,
    is_available,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)

__all__ = [
    "BackendType",
    "RRef",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "backend_registry",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "install",
    "is_available",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]
