"""Every rank computes on the first device: right for one rank over NCCL, and refused for two."""

import torch
import torch.distributed as dist

torch.cuda.set_device(0)
dist.init_process_group("nccl")
tensor = torch.full((1000,), dist.get_rank() + 1.0, device="cuda")
for _ in range(3):
    dist.all_reduce(tensor)
assert tensor.unique().tolist() == [1.0]
print("all right")
dist.destroy_process_group()
