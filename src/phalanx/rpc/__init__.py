"""Call functions in other processes, keep objects there, and send gradients back.

This script runs by ``phalanx run -n 2 script.py``::

    import torch, phalanx
    from phalanx import rpc

    with phalanx.init() as world:
        rpc.init()  # on every rank; they are called worker0, worker1, ... from now on
        if world.rank == 0:
            print(rpc.call("worker1", torch.add, torch.ones(2), 1))
        rpc.shutdown()
"""

# A call goes verbs.py -> worker.py -> codec.py -> links/, and there links/ -> worker.py -> serving.py -> verbs.py.
# Begin with these. peer.py has what goes on with one other worker, connections.py makes links, members.py says who
# there is, and session.py begins and ends it all. Above them are objects.py, streams.py, services.py (typed),
# autograd/, parameter_server/ and torch_api/.

import inspect

from phalanx.rpc.autograd.engine import backward, context, get_gradients
from phalanx.rpc.connections import EncryptionMismatch
from phalanx.rpc.failure import RemoteError, RemoteTraceback
from phalanx.rpc.future import Cancelled, Future
from phalanx.rpc.members import Member
from phalanx.rpc.objects import ObjectInfo, RemoteObject, local, make, objects
from phalanx.rpc.parameter_server.trainer import Parameters, parameters
from phalanx.rpc.services import serve, service
from phalanx.rpc.session import init, shutdown
from phalanx.rpc.verbs import call, each, start
from phalanx.rpc.watching import Watch, describe, watch, workers
from phalanx.wrong_arguments import explained

__all__ = [
    "Cancelled",
    "EncryptionMismatch",
    "Future",
    "Member",
    "ObjectInfo",
    "Parameters",
    "RemoteError",
    "RemoteObject",
    "RemoteTraceback",
    "Watch",
    "backward",
    "call",
    "context",
    "describe",
    "each",
    "get_gradients",
    "init",
    "local",
    "make",
    "objects",
    "parameters",
    "serve",
    "service",
    "shutdown",
    "start",
    "watch",
    "workers",
]

for _name in __all__:
    if inspect.isfunction(globals()[_name]):
        globals()[_name] = explained(globals()[_name])
        globals()[_name].__module__ = __name__  # where pickle finds it
