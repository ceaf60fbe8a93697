"""Distill a teacher into a student: in one run, or in two with a checkpoint between them."""

import csv
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.examples.applications.measure import Storages, anonymous_mb, settle, tell
from torch_utils import Resource, SafePyTorchCleanup

FOLDER = Path(sys.argv[2])
EPOCHS = 2


class Network(nn.Module):
    """A network of which the lower part can be shared."""

    def __init__(self, stem: nn.Module, width: int) -> None:
        super().__init__()
        self.stem = stem
        self.body = nn.Sequential(
            nn.Linear(512, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 512)
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.body(self.stem(features))


class History(Resource):
    """The losses of a run, as a file of comma-separated values."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", newline="")
        self._rows = csv.writer(self._file)

    def add(self, epoch: int, loss: float) -> None:
        self._rows.writerow([epoch, loss])

    def _release(self) -> None:
        self._file.close()


class Run:
    """A training run of a student; its losses remain for a comparison of the runs."""

    def __init__(self, teacher: Network, data: TensorDataset, name: str) -> None:
        torch.manual_seed(1)
        self.teacher = teacher
        self.checkpoint = FOLDER / f"{name}.pt"
        self.history = History(FOLDER / f"{name}.csv")
        self.student = Network(teacher.stem, 4000)
        self.optimizer = torch.optim.AdamW(self.student.body.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, EPOCHS)
        self.scaler = torch.amp.GradScaler("cpu")
        self.shuffle = torch.Generator()
        self.loader = DataLoader(
            data, batch_size=32, shuffle=True, num_workers=2, generator=self.shuffle
        )
        self.losses: list[float] = []
        self.first = 0
        if self.checkpoint.exists():
            self.resume()

    @property
    def parts(self) -> dict[str, Any]:
        return {
            "model": self.student.body,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "scaler": self.scaler,
        }

    def resume(self) -> None:
        saved = torch.load(self.checkpoint)
        for key, part in self.parts.items():
            part.load_state_dict(saved[key])
        self.first = saved["epoch"]

    def save(self, epoch: int) -> None:
        state = {key: part.state_dict() for key, part in self.parts.items()}
        torch.save({**state, "epoch": epoch}, self.checkpoint)

    def train(self, until: int) -> None:
        for epoch in range(self.first, until):
            torch.manual_seed(epoch)
            self.shuffle.manual_seed(epoch)
            loss = sum(self.step(features) for (features,) in self.loader)
            self.schedule.step()
            self.losses.append(loss)
            self.history.add(epoch, loss)
            self.save(epoch + 1)

    def step(self, features: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        with torch.no_grad():
            target = self.teacher(features)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(self.student(features), target)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()


def main() -> None:
    torch.manual_seed(0)
    teacher = Network(nn.Linear(64, 512), 64).eval().requires_grad_(False)
    data = TensorDataset(torch.rand(64, 64))
    expected = teacher(data.tensors[0])
    settle()
    runs: list[Run] = []
    alive_mb: list[float] = []
    resident_mb: list[float] = []  # The first step imports and prepares much, which stays.
    for name, until in (("resumed", 1), ("resumed", EPOCHS), ("whole", EPOCHS)):
        with SafePyTorchCleanup() as scope:
            run = Run(teacher, data, name)
            scope.manage(run.history)
            for part in (run.student, run.optimizer, run.schedule, run.scaler, run.loader):
                scope.manage(part)
            run.train(until)
            moments = [t for state in run.optimizer.state.values() for t in state.values()]
            weights = Storages([*run.student.body.parameters(), *moments])
            del moments
        runs.append(run)
        resident_mb.append(anonymous_mb())
        alive_mb.append(weights.alive_mb())

    resumed, whole = (torch.load(FOLDER / f"{name}.pt") for name in ("resumed", "whole"))
    tell(
        alive_mb=alive_mb,
        grown_mb=resident_mb[-1] - resident_mb[0],
        same_weights=all(torch.equal(resumed["model"][k], w) for k, w in whole["model"].items()),
        same_losses=runs[0].losses + runs[1].losses == runs[2].losses,
        same_files=(FOLDER / "resumed.csv").read_text() == (FOLDER / "whole.csv").read_text(),
        epochs=len((FOLDER / "resumed.csv").read_text().splitlines()),
        is_right=torch.equal(teacher(data.tensors[0]), expected),
    )


if __name__ == "__main__":
    main()
