"""``inputs="local"``, a loop over a ``DataLoader`` whose last batch is smaller, on one
rank more than on the other: training and evaluation are those of one device, which
reads the batches of both ranks as one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, default_collate

import fxpar
from tests.helpers.spawn import shared_pool

pytestmark = pytest.mark.multiprocess

WIDTH, CLASSES, EPOCHS = 6, 3, 2

Batch = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    """With its loss, as models of transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm = nn.Linear(WIDTH, 8), nn.LayerNorm(8)
        self.down = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Batch:
        scores = self.down(self.norm(self.up(x)).tanh())
        return F.cross_entropy(scores, y), scores


def samples(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (count,), generator=generator)
    return list(zip(x, y, strict=True))


def collate(rows: list[Batch]) -> Batch:
    if rows:
        return default_collate(rows)
    return torch.empty(0, WIDTH, dtype=torch.float64), torch.empty(0, dtype=torch.long)


def loader(sizes: list[list[int]], rank: int | None) -> DataLoader:
    """Batches of ``sizes[i][rank]`` samples, or of all ranks' in one."""
    data = samples(sum(map(sum, sizes)))
    parts, start = [], 0
    for each in sizes:
        ends = [start + sum(each[: i + 1]) for i in range(len(each))]
        starts = [start, *ends[:-1]]
        whole = range(start, ends[-1])
        parts.append(whole if rank is None else range(starts[rank], ends[rank]))
        start = ends[-1]
    return DataLoader(data, batch_sampler=parts, collate_fn=collate)


def rows_of(sizes: list[list[int]], rank: int) -> list[int]:
    """Where the samples of a rank lie among all."""
    ids = iter(range(sum(map(sum, sizes))))
    taken = [[next(ids) for _ in range(n)] for each in sizes for n in each]
    mine = taken[rank :: len(sizes[0])]
    return [i for part in mine for i in part]


def evaluated(run: Any, batches: DataLoader) -> tuple[list[float], torch.Tensor]:
    with torch.no_grad():
        pairs = [run(x, y) for x, y in batches]
    return [loss.item() for loss, _ in pairs], torch.cat([z for _, z in pairs])


def loop(sizes: list[list[int]], local: bool) -> Iterator[tuple[str, Any]]:
    """What each epoch shows: losses, all gradients, and evaluations of each rank's own
    samples and of all samples on one rank."""
    torch._dynamo.reset()
    rank = dist.get_rank() if local else None
    model = Net().double()
    options = {"codegen": "eager", "inputs": "local"}
    run = torch.compile(model, backend="fxpar", options=options) if local else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(EPOCHS):
        model.train()
        for x, y in loader(sizes, rank):
            loss, scores = run(x, y)
            assert len(scores) == len(y)
            loss.backward()
            yield "loss", loss.item()
            yield "gradients", [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        yield "evaluated", evaluated(run, loader(sizes, rank))
        if not rank:
            with fxpar.alone():
                yield "on one rank", evaluated(run, loader(sizes, None))


def shown(sizes: list[list[int]], local: bool) -> list[tuple[str, Any]]:
    return list(loop(sizes, local))


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([[4, 4], [4, 3]], id="4 and 3"),
        pytest.param([[2, 2], [2, 1], [1, 0]], id="1 and 0", marks=pytest.mark.slow),
    ],
)
def test_a_loop_is_that_of_one_device(sizes: list[list[int]]) -> None:
    want = shown(sizes, False)
    for rank, got in enumerate(shared_pool(2).run(shown, sizes, True, timeout=200.0)):
        wanted = want if rank == 0 else [x for x in want if x[0] != "on one rank"]
        for (what, a), (other, b) in zip(got, wanted, strict=True):
            assert what == other
            if what == "evaluated":
                b = b[0], b[1][rows_of(sizes, rank)]
            torch.testing.assert_close(a, b, msg=lambda m: f"{what}: {m}")  # noqa: B023
