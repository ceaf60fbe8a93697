"""Train two networks one after the other, and give back everything that a run took.

A run takes its weights, their gradients, and twice as much for the moments of the optimizer.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torch_utils import SafePyTorchCleanup

torch.manual_seed(0)
data = TensorDataset(torch.rand(256, 64))


def train(width, epochs=2):
    """Train an autoencoder; return its last loss and the report of the cleanup."""
    with SafePyTorchCleanup() as scope:
        network = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64))
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
        loader = DataLoader(data, batch_size=64, shuffle=True)  # the data itself stays
        for part in (network, optimizer, schedule, loader):
            scope.manage(part)
        for _ in range(epochs):
            for (batch,) in loader:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(network(batch), batch)
                loss.backward()
                optimizer.step()
            schedule.step()
        result = loss.item()
        del loss  # It names the graph, and so the weights.
        # Save checkpoints here: a released network has nothing to save.
    return result, scope.report


for width in (10_000, 20_000):
    loss, report = train(width)
    print(f"{width} wide: loss {loss:.3f}; {report}")
