"""Two recommenders, plain objects, on one table of item vectors; one is retired: ... HOW."""

import sys

import torch
from torch import nn

from applications.measure import Storages, anonymous_mb, settle, tell
from torch_utils import Resource, release

HOW = sys.argv[1]
written: list[int] = []


class Log(Resource):
    """The questions of a recommender, which are written at its end."""

    def __init__(self) -> None:
        self.lines: list[int] = []

    def _release(self) -> None:
        written.extend(self.lines)


class Recommender:
    def __init__(self, items: torch.Tensor, users: int) -> None:
        self.items = items
        self.users = torch.rand(users, items.shape[1])
        self.rerank = nn.Linear(items.shape[1], items.shape[1])
        self.log = Log()

    @torch.inference_mode()
    def best(self, user: int) -> list[int]:
        self.log.lines.append(user)
        scores = self.items @ self.rerank(self.users[user])
        return scores.topk(5).indices.tolist()


def main() -> None:
    torch.manual_seed(0)
    settle()
    items = torch.rand(5000, 256)
    before = anonymous_mb()
    shops, films = Recommender(items, 70_000), Recommender(items, 10)
    expected = films.best(3)
    shops.best(7)
    users = Storages([shops.users, shops.rerank.weight])

    if HOW == "parts":
        release(shops.users, shops.rerank, shops.log)
    else:
        release(shops)

    tell(
        alive_mb=users.alive_mb(),
        grown_mb=anonymous_mb() - before,
        written=written,
        has_items=films.items.shape == (5000, 256),
    )
    tell(is_right=films.best(3) == expected)


if __name__ == "__main__":
    main()
