"""A tensor of a device arrives at another rank on that device, and comes back there."""

import torch

import phalanx
from phalanx import rpc

world = phalanx.init(backend="phalanx")


def doubled(tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    return str(tensor.device), 2 * tensor


rpc.init()
if world.rank == 0:
    for nbytes in (40, 4 << 20):
        sent = torch.arange(nbytes // 4, device=world.device)
        where, back = rpc.call(1, doubled, sent)
        assert (where, back.device) == (str(world.device), world.device)
        assert torch.equal(back, 2 * sent)
    print("all right")
rpc.shutdown()
phalanx.close()
