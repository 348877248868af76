"""CPU tensors are reduced while each rank holds memory of the device that was asked for."""

import torch
import torch.distributed as dist

import phalanx

world = phalanx.init()
held = torch.ones(1 << 20, device=world.device)
near = torch.full((1000,), world.rank + 1.0)
dist.all_reduce(near)
assert near.unique().tolist() == [world.size * (world.size + 1) / 2]
assert str(held.device) == "cuda:0"
assert held.sum().item() == 1 << 20
world.print("all right")
phalanx.close()
