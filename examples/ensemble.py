"""Retire one of two classifiers that share a backbone; the other one goes on."""

import torch
from torch import nn

from torch_utils import release


class Classifier(nn.Module):
    def __init__(self, backbone, labels):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(512, labels)

    def forward(self, features):
        return self.head(self.backbone(features))


torch.manual_seed(0)
backbone = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
large, small = Classifier(backbone, 40_000), Classifier(backbone, 10)
features = torch.rand(4, 512)
expected = small(features).detach()

report = release(large)
print(report)  # The head is gone. The backbone is still held, because the small one uses it.

answer = small(features)
print("same answer:", torch.equal(answer, expected))
answer.sum().backward()
print("still trains:", backbone[0].weight.grad is not None)
