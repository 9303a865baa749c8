"""The backend in one process: what it leaves as upstream made it."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import fxpar
from fxpar import compilation

pytestmark = pytest.mark.usefixtures("propagated")


class Stack(nn.Module):
    def __init__(self, again: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.again = again
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Tanh())
            for _ in range(3)
        )

    def forward(self, x):
        for layer in self.layers:
            again = self.again
            x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        return x.square().sum()


def graphs_of(model: nn.Module, monkeypatch) -> list[fx.Graph]:
    """Forward and backward, as they are handed to be run."""
    seen: list[fx.Graph] = []
    run = compilation.run_op_by_op

    def watch(gm, examples):
        seen.append(gm.graph)
        return run(gm, examples)

    monkeypatch.setattr(compilation, "run_op_by_op", watch)
    torch._dynamo.reset()
    options = {"codegen": "eager", "mesh": "dp=1,tp=1"}
    compiled = torch.compile(model, backend="fxpar", options=options)
    compiled(torch.randn(8, 8)).backward()
    monkeypatch.undo()
    return seen


def test_activation_checkpointing_saves_less(monkeypatch) -> None:
    """The tags that say what to recompute survive every stage."""
    kept, again = (graphs_of(Stack(flag), monkeypatch) for flag in (False, True))
    saved = [len(graphs[0].output_node().args[0]) for graphs in (kept, again)]
    assert saved[1] < saved[0]
    assert len(again[1].nodes) > len(kept[1].nodes)


def test_the_backend_is_listed() -> None:
    assert "fxpar" in torch._dynamo.list_backends()


def test_nodes_keep_the_line_they_come_from(monkeypatch) -> None:
    forward = graphs_of(Stack(False), monkeypatch)[0]
    lines = [n.meta.get("stack_trace", "") for n in forward.nodes if n.op[:4] == "call"]
    assert all("x = " in line or "square" in line for line in lines)


def test_one_rank_compiles_without_a_trace_of_hints() -> None:
    def hinted(x):
        return fxpar.constrain(x.sin(), "dp").cos()

    torch._dynamo.reset()
    x = torch.randn(4)
    before = len(fxpar.plans())
    torch.testing.assert_close(torch.compile(hinted, backend="fxpar")(x), hinted(x))
    assert len(fxpar.plans()) == before


def test_what_is_compiled_is_saved_whole_and_loaded() -> None:
    torch._dynamo.reset()
    options = {"codegen": "eager", "mesh": "dp=1,tp=1"}
    compiled = torch.compile(nn.Linear(8, 4), backend="fxpar", options=options)
    x, file = torch.randn(2, 8), io.BytesIO()
    want = compiled(x)
    torch.save(compiled, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    torch.testing.assert_close(loaded(x), want)
    hooks = (x.dynamo_ctx.enter_exit_hooks for x in (compiled, loaded))
    assert len(set(map(len, hooks))) == 1  # it is watched


def test_a_deep_copy_is_watched_as_one_of_its_own() -> None:
    """Of a compiled module that was called: it computes on its own parameters, and
    calls of the copy are no calls of the original."""
    torch._dynamo.reset()
    options = {"codegen": "eager", "mesh": "dp=1,tp=1"}
    compiled = torch.compile(nn.Linear(8, 4), backend="fxpar", options=options)
    x = torch.randn(2, 8)
    compiled(x).sum().backward()
    twin = copy.deepcopy(copy.deepcopy(compiled))
    with torch.no_grad():
        twin.weight.zero_()
    torch.testing.assert_close(twin(x), twin.bias.expand(2, 4))
    assert not torch.equal(compiled(x), twin(x))
    hooks, copied = (x.dynamo_ctx.enter_exit_hooks for x in (compiled, twin))
    assert len(hooks) == len(copied) and not set(hooks) <= set(copied)


@pytest.fixture
def modes_restored() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.set_float32_matmul_precision("high"),
    ],
    ids=["dtype", "deterministic", "precision"],
)
def test_modes_that_change_a_program_compile_it_again(
    change, modes_restored, monkeypatch
) -> None:
    """Dynamo gives the same text for a graph under any of them."""

    def tenths(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ x, torch.full((3,), 0.1)

    compiled_graphs = []
    run = compilation.run_op_by_op

    def count(gm, examples):
        compiled_graphs.append(gm)
        return run(gm, examples)

    monkeypatch.setattr(compilation, "run_op_by_op", count)
    torch._dynamo.reset()
    options = {"codegen": "eager", "mesh": "dp=1"}
    compiled = torch.compile(tenths, backend="fxpar", options=options)
    x = torch.ones(2, 2)
    before = compiled(x)
    change()
    after = compiled(x)
    assert len(compiled_graphs) == 2
    assert [y.dtype for y in after] == [y.dtype for y in tenths(x)]
    assert [y.dtype for y in before] == [torch.float32, torch.float32]
