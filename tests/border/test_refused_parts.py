"""In local mode a program that takes something else for a part of the batch is told
which arguments were taken so, and where it fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpar
from fxpar.errors import FxparError, FxparWarning
from tests.helpers.spawn import shared_pool

pytestmark = pytest.mark.multiprocess

OPTIONS = {"mesh": "dp=2", "codegen": "eager", "inputs": "local"}


class States(nn.Module):
    """A cell whose first state comes from outside, with layers or the batch first."""

    def __init__(self, *, layers_first: bool) -> None:
        super().__init__()
        self.cell = nn.GRUCell(5, 6)
        self.layers_first = layers_first

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        state = h[0] if self.layers_first else h[:, 0]
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return state.square().mean()


class Histogram(nn.Module):
    """Counts that code in no graph makes of a rank's part, and a graph reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.linear(x)
        counts = torch.bincount(y * 6 + z.argmax(-1), minlength=36)
        return F.cross_entropy(z, y) + counts.view(6, 6).sum() * 0


def of_model(model: nn.Module, *batch: torch.Tensor) -> Any:
    return torch.compile(model, backend="fxpar", options=OPTIONS)(*batch)


def of_step(model: nn.Module, *batch: torch.Tensor) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = fxpar.train_step(model, nn.Module.__call__, optimizer, options=OPTIONS)
    return step(*batch)


def states(run: Any, layers_first: bool) -> Any:
    """The loss of all ranks, and of one device; what was said instead."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = States(layers_first=layers_first).double()
    x, h = torch.randn(8, 3, 5).double(), torch.randn(8, 2, 6).double()
    rank = torch.distributed.get_rank()
    mine = [part.chunk(2)[rank].clone() for part in (x, h)]
    if layers_first:
        mine[1] = mine[1].transpose(0, 1).contiguous()
    try:
        want = None if layers_first else model(x, h).item()
        return run(model, *mine).item(), want
    except FxparError as error:
        return str(error)


@pytest.mark.parametrize("run", [of_model, of_step])
def test_states_with_layers_first(run: Any) -> None:
    for told in shared_pool(2).run(states, run, True):
        assert "[8, 3, 5]" in told
        assert "[4, 4, 6]" in told
        assert "state = self.cell(x[:, t], state)" in told
        assert "FXPAR_INPUTS=global" in told


@pytest.mark.parametrize("run", [of_model, of_step])
def test_states_with_the_batch_first(run: Any) -> None:
    for got, want in shared_pool(2).run(states, run, False):
        assert got == pytest.approx(want, rel=1e-12)


def histogram() -> str:
    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        return str(of_model(Histogram(), torch.randn(4, 5), torch.randint(6, (4,))))
    except FxparError as error:
        return str(error)


def test_what_code_in_no_graph_made() -> None:
    for told in shared_pool(2).run(histogram):
        assert "counts.view(6, 6)" in told
        assert "[72]" in told


class Pairs(nn.Module):
    """Rows of the batch that belong together, by their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 6)

    def forward(self, x: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        z = self.linear(x)
        return (z * z[others]).sum(1).mean()


def pairs(run: Any) -> str:
    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        return str(run(Pairs(), torch.randn(4, 5), torch.randperm(4)))
    except FxparError as error:
        return str(error)


@pytest.mark.parametrize("run", [of_model, of_step])
def test_positions_in_a_rank_s_own_part(run: Any) -> None:
    """Of all ranks' rows they would say those of the first rank."""
    for told in shared_pool(2).run(pairs, run):
        assert "says which rows of the batch" in told
        assert "z * z[others]" in told
        assert "FXPAR_INPUTS=global" in told


def tokens(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of two documents, packed, and the document of each."""
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(4, 5, generator=draw), torch.tensor([0, 0, 1, 1])


def of_documents(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    same = (ids[:, None] == ids).float()
    return (same @ x / same.sum(1, True)).square().mean()


def of_a_table(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return (x @ table.T).logsumexp(1).mean()


def of_a_batch(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, y)


FEEDS: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "documents": lambda rank: (of_documents, *tokens(rank)),
    "a table": lambda rank: (of_a_table, tokens(rank)[0], torch.randn(3, 5)),
    "the same batch": lambda rank: (of_a_batch, *tokens(0)),
    "its own part": lambda rank: (of_a_batch, *tokens(rank)),
    "the same labels": lambda rank: (of_a_batch, tokens(rank)[0], torch.ones(4).long()),
}
SAID = {
    "documents": ("each row of ids is compared", "ids[:, None] == ids"),
    "a table": ("table is taken for a part", "close over"),
    "the same batch": ("x, y is taken for a part", "DistributedSampler"),
}


def warned(name: str) -> list[str]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    fn, *batch = FEEDS[name](torch.distributed.get_rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        of_model(fn, *batch)
    return [str(w.message) for w in caught if w.category is FxparWarning]


@pytest.mark.parametrize("name", FEEDS)
def test_what_may_be_no_part_of_the_batch_is_said(name: str) -> None:
    """Numbers are those of the parts, joined, which may be meant: a word, no error."""
    first, second = shared_pool(2).run(warned, name)
    assert second == []
    assert len(first) == (name in SAID)
    for text in SAID.get(name, ()):
        assert text in first[0]


def nested(inputs: str) -> str:
    torch._dynamo.reset()
    linear = nn.Linear(5, 6)

    def of_documents(rows: torch.Tensor) -> torch.Tensor:
        return linear(rows).values().square().mean()

    rows = torch.nested.nested_tensor(
        [torch.randn(2, 5), torch.randn(3, 5)], layout=torch.jagged
    )
    options = OPTIONS | {"inputs": inputs}
    try:
        torch.compile(of_documents, backend="fxpar", options=options)(rows)
    except FxparError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("inputs", ["local", "global"])
def test_a_nested_tensor_is_no_input(inputs: str) -> None:
    for told in shared_pool(2).run(nested, inputs):
        assert "input rows is a nested tensor" in told
        assert "linear(rows).values()" in told
        assert "nested_tensor_from_jagged" in told
