"""Explain an image classifier by Grad-CAM, whose hooks keep large feature maps: gradcam.py HOW."""

import sys

import torch
from torch import nn

from tests.examples.applications.measure import Storages, anonymous_mb, settle, tell
from torch_utils import release

HOW = sys.argv[1]
hook_calls: list[str] = []


class GradCAM:
    """Weights the feature maps of a layer by their gradients."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.maps: dict[str, torch.Tensor] = {}
        self._handles = [
            layer.register_forward_hook(self._keep_features),
            layer.register_full_backward_hook(self._keep_gradients),
        ]

    def _keep_features(self, layer, inputs, output) -> None:
        hook_calls.append("forward")
        self.maps["features"] = output.detach()

    def _keep_gradients(self, layer, grad_inputs, grad_outputs) -> None:
        hook_calls.append("backward")
        self.maps["gradients"] = grad_outputs[0].detach()

    def heat(self) -> torch.Tensor:
        weights = self.maps["gradients"].mean((2, 3), keepdim=True)
        return (weights * self.maps["features"]).sum(1).relu()

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()


class ClosableGradCAM(GradCAM):
    """Removes its hooks as contextlib.closing expects it."""

    def close(self) -> None:
        self.remove_hooks()


def build_classifier() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 5),
    )


def main() -> None:
    torch.manual_seed(0)
    settle()
    model, images = build_classifier(), torch.rand(4, 3, 256, 256)
    layer = model[2]
    model(images).sum().backward()
    model.zero_grad()
    before = anonymous_mb()
    expected = model(images).detach()

    cam = ClosableGradCAM(layer) if HOW == "closable" else GradCAM(layer)
    model(images)[:, 1].sum().backward()
    heat = cam.heat().shape
    maps = Storages(cam.maps.values())
    assert maps.alive_mb() > 60
    if HOW != "closable":
        cam.remove_hooks()
    release(cam.maps if HOW == "maps" else cam)

    tell(
        alive_mb=maps.alive_mb(),
        grown_mb=anonymous_mb() - before,
        heat=list(heat),
    )
    hook_calls.clear()
    answer = model(images)
    tell(is_right=torch.equal(answer, expected), trains=answer.sum().backward() is None)
    tell(hook_calls=hook_calls)


if __name__ == "__main__":
    main()
