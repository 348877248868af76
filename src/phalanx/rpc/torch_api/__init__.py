"""``torch.distributed.rpc`` over Phalanx: the same names, with the same meaning.

    import phalanx.rpc.torch_api as rpc

Importing this has ``torch.distributed.rpc`` itself run over Phalanx in this process, so libraries that import it do
so as well. ``phalanx run --replace rpc`` does the same for a script that does not know Phalanx.
"""

from __future__ import annotations

from typing import Any

import torch.distributed.rpc as _torch_rpc

from phalanx.rpc.torch_api.install import install

install()

__all__ = [
    "BackendType",
    "RRef",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "install",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]


def __getattr__(name: str) -> Any:
    return getattr(_torch_rpc, name)
