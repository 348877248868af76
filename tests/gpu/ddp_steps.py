"""DDP of ranks that share a device, whose gradients go over Gloo, takes the steps of one process with all the data."""

import torch

import phalanx

world = phalanx.init(backend="cpu:phalanx,cuda:gloo")
torch.manual_seed(1)
alone = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).to(world.device)
inputs, targets = torch.randn(6 * world.size, 8), torch.randn(6 * world.size, 4)
torch.manual_seed(1)
shared = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
together = world.data_parallel(shared)
for model, rows in ((alone, slice(None)), (together, slice(world.rank, None, world.size))):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        outputs = model(inputs[rows].to(world.device))
        torch.nn.functional.mse_loss(outputs, targets[rows].to(world.device)).backward()
        optimizer.step()
for one, other in zip(alone.parameters(), together.parameters(), strict=True):
    assert other.device == world.device
    torch.testing.assert_close(one, other)
world.print("all right")
phalanx.close()
