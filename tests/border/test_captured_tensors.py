"""What a compiled function closes over, in local mode: alike on all ranks it is taken
whole, and where the program needs as many rows of it as of the batch it is a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fxpar.errors import InputMismatchError
from tests.helpers.spawn import shared_pool
from tests.helpers.training import gradients

ROWS, CLASSES = 8, 4  # as many classes as rows on a rank
OPTIONS = {"mesh": "dp=2", "inputs": "local", "codegen": "eager"}

Data = dict[str, torch.Tensor]
Loss = Callable[[torch.Tensor], torch.Tensor]


def data(is_rank: bool) -> Data:
    made = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 6, dtype=torch.float64, generator=made)
    labels = torch.randint(CLASSES, (ROWS,), generator=made)
    batch = {"x": x, "labels": labels}
    if is_rank:
        batch = {name: t.chunk(2)[dist.get_rank()] for name, t in batch.items()}
    weights = torch.rand(CLASSES, dtype=torch.float64, generator=made)
    return {**batch, "weights": weights, "table": torch.arange(6.0).double()}


def whole_tables(model: Any, d: Data) -> Loss:
    table, weights = d["table"], d["weights"]
    return lambda x: (model(x + table) * weights).square().mean() * table.sum()


def part_of_batch(model: Any, d: Data) -> Loss:
    labels = d["labels"]
    return lambda x: F.cross_entropy(model(x), labels)


def nothing_fed(model: Any, d: Data) -> Loss:
    x, labels = d["x"], d["labels"]
    return lambda *_: F.cross_entropy(model(x), labels)


def not_alike(model: Any, d: Data) -> Loss:
    labels = d["labels"]
    return lambda x: model(x).square().mean() * (1 + labels.sum())


def trained(script: str, is_rank: bool) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    d, model = data(is_rank), nn.Linear(6, CLASSES).double()
    loss = globals()[script](model, d)
    if is_rank:
        loss = torch.compile(loss, backend="fxpar", options=OPTIONS)
    try:
        loss(*([] if script == "nothing_fed" else [d["x"]])).backward()
    except InputMismatchError as error:
        return str(error)
    return gradients(model)


@pytest.mark.multiprocess
@pytest.mark.parametrize("script", ["whole_tables", "part_of_batch", "nothing_fed"])
def test_gradients_are_those_of_one_device(script: str) -> None:
    want = trained(script, is_rank=False)
    for got in shared_pool(2).run(trained, script, True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.multiprocess
def test_what_ranks_capture_must_be_alike() -> None:
    for error in shared_pool(2).run(trained, "not_alike", True):
        assert "labels" in error
        assert "argument" in error
