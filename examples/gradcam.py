"""Explain an image classifier by Grad-CAM, then free the large feature maps that its hooks keep."""

import torch
from torch import nn

from torch_utils import SafePyTorchCleanup


class GradCAM:
    """Weights the feature maps of a layer by their gradients."""

    def __init__(self, layer):
        self.maps = {}
        self.hooks = [
            layer.register_forward_hook(self.keep_features),
            layer.register_full_backward_hook(self.keep_gradients),
        ]

    def keep_features(self, layer, inputs, output):
        self.maps["features"] = output.detach()

    def keep_gradients(self, layer, grad_inputs, grad_outputs):
        self.maps["gradients"] = grad_outputs[0].detach()

    def heat(self):
        weights = self.maps["gradients"].mean((2, 3), keepdim=True)
        return (weights * self.maps["features"]).sum(1).relu()

    def close(self):  # A release calls it first. The model must not call hooks without maps.
        for hook in self.hooks:
            hook.remove()


torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)),
    *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5)),
)
images = torch.rand(4, 3, 256, 256)
expected = model(images).detach()

with SafePyTorchCleanup() as scope:
    cam = scope.manage(GradCAM(model[2]))
    model(images)[:, 1].sum().backward()
    print("heat:", tuple(cam.heat().shape))

print(scope.report)  # freed 67.1 MB ...
print("same answer:", torch.equal(model(images), expected))
