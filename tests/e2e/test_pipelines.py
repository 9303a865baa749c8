"""Training in stages, on ranks: losses, gradients, buffers and the optimizer's state
are those of one device, compiled and as a whole step, in every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxpar
from tests.helpers.dying_rank import (
    check_that_ranks_end,
    check_that_the_stage_is_named,
)
from tests.helpers.spawn import ranks_of, shared_pool
from tests.helpers.whole_steps import whole_steps

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("propagated")]

STEPS = 3


@pytest.mark.parametrize(
    ("mesh", "schedule", "inputs"),
    [
        ("pp=2", "1f1b", "global"),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("pp=2", "gpipe", "global"),
                ("pp=2", "interleaved", "global"),
                ("pp=2", "zero_bubble", "global"),
                ("pp=4", "zero_bubble", "global"),
                ("pp=2", "zbv", "global"),
                ("pp=2", "dualpipev", "global"),
                ("pp=2,dp=2", "interleaved", "global"),
                ("pp=2,tp=2", "1f1b", "global"),
            )
        ],
    ],
)
def test_whole_steps_are_those_of_one_device(
    mesh: str, schedule: str, inputs: str
) -> None:
    options = {"mesh": mesh, "codegen": "eager", "microbatches": 4, "inputs": inputs}
    options |= {"plan": "propagate", "pipeline": schedule}
    want = whole_steps(None, STEPS)
    for got in ranks_of(mesh).run(whole_steps, options, STEPS, timeout=900.0):
        assert any(f"{schedule}, 4 microbatches" in note for note in got["notes"])
        # Each stage has the backward of its forward, which costs more where no axis
        # splits either.
        alone = "," not in mesh
        for forward, backward in got["stages"]:
            assert backward > (forward if alone else 0) and forward > 0
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-12)
        for kind in ("state", "moments", "buffers"):
            for name, x in want[kind].items():
                torch.testing.assert_close(got[kind][name], x, rtol=1e-9, atol=1e-11)


def broken(options: dict[str, Any]) -> tuple[list[torch.Tensor], list[str]]:
    """Results and gradients of a program that Dynamo breaks, the first graph small;
    what its plans say of stages."""
    torch.manual_seed(0)
    before = len(fxpar.plans())
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    x = torch.randn(4, 8)

    def program(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        return model(x).sum()

    run = (
        torch.compile(program, backend="fxpar", options=options) if options else program
    )
    loss = run(x)
    loss.backward()
    notes = [note for plan in fxpar.plans()[before:] for note in plan.notes]
    of_stages = [note for note in notes if "stages" in note]
    return [loss.detach(), *(p.grad for p in model.parameters())], of_stages


@pytest.mark.slow
def test_a_graph_too_small_for_stages_runs_on_all_ranks() -> None:
    options = {"mesh": "pp=2", "codegen": "eager", "plan": "propagate"}
    want, _ = broken({})
    for got, notes in shared_pool(2).run(broken, options):
        (note,) = (
            x for x in notes if x.startswith("this graph is not cut into stages")
        )
        assert "0 ops on the batch" in note and "fullgraph=True" in note
        assert f"at: {__file__}" in note and ": x = x * 2" in note
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


class Writes(nn.Module):
    """Every stage writes to buffers, and one of them is read before, for a result."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU())
            for _ in range(4)
        )
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("rows", torch.zeros(5, 8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = self.calls * 2
        for block in self.blocks:
            x = block(x) + x
        self.calls += 1
        self.rows[1:3] = x[2:4].detach() + self.rows[:2]
        return x, before


def written(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What a model writes in two training steps and one call after."""
    torch.manual_seed(0)
    model = Writes().double()
    run = torch.compile(model, backend="fxpar", options=options) if options else model
    before = []
    for step in range(3):
        model.train(step < 2)
        x = torch.randn(8, 8, dtype=torch.float64)
        with torch.set_grad_enabled(step < 2):
            result, count = run(x)
        before.append(count.detach())
        if step < 2:
            result.square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {**dict(model.named_buffers()), **grads, "before": torch.stack(before)}


@pytest.mark.parametrize("microbatches", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_all_ranks_write_what_one_stage_makes(microbatches: int) -> None:
    options = {"mesh": "pp=2", "codegen": "eager", "plan": "propagate"}
    want = written({})
    assert want["before"].tolist() == [0, 2, 4]
    options["microbatches"] = microbatches
    for got in shared_pool(2).run(written, options):
        for name, x in want.items():
            torch.testing.assert_close(got[name], x, rtol=1e-9, atol=1e-11)


def batch_gradients(options: dict[str, Any]) -> list[torch.Tensor]:
    """Of batches that are cut in fewer parts than is usual."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).double()
    run = torch.compile(model, backend="fxpar", options=options) if options else model
    for rows in (6, 4):
        run(torch.randn(rows, 8, dtype=torch.float64)).square().sum().backward()
    return [p.grad for p in model.parameters()]


def test_a_searched_cut_is_followed_whatever_the_batch_divides() -> None:
    options = {"codegen": "eager", "plan": "search", "search_seconds": 2}
    want = batch_gradients({})
    pool = shared_pool(2)
    for got in pool.run(batch_gradients, options | {"mesh": "pp=2"}):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


class Checkpointed(nn.Module):
    """What crosses between stages lies in a region that is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def all_but_the_last(x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks[:-1]:
                x = nn.functional.gelu(block(x)).sin()
            return x

        return self.blocks[-1](checkpoint(all_but_the_last, x, use_reentrant=False))


def checkpointed_gradients(options: dict[str, Any]) -> list[torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Checkpointed().double()
    run = torch.compile(model, backend="fxpar", options=options) if options else model
    run(torch.randn(8, 8, dtype=torch.float64)).square().sum().backward()
    return [p.grad for p in model.parameters()]


def test_what_arrives_in_a_checkpointed_region_is_sent_once() -> None:
    options = {"codegen": "eager", "plan": "propagate", "mesh": "pp=2"}
    want = checkpointed_gradients({})
    for got in shared_pool(2).run(checkpointed_gradients, options):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def batches_of_two_sizes(mesh: str | None, codegen: str) -> list[torch.Tensor]:
    """Results and gradients of one compiled function that calls a model at rest on two
    batches, of which one is cut into microbatches; its parameters are gathered for all
    stages, and read in different order by each."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    batches = [torch.randn(rows, 8, dtype=torch.float64) for rows in (8, 4)]
    if mesh is not None:
        model = fxpar.shard(model, mesh=mesh)

    def both(batches: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        results = [model(x) for x in batches]
        return results, results[0].sum()

    options = {"codegen": codegen, "mesh": mesh, "plan": "propagate"}
    run = torch.compile(both, backend="fxpar", options=options) if mesh else both
    results, total = run(batches)
    (sum(x.square().sum() for x in results) + total).backward()
    grads = [p.grad for p in model.parameters()]
    whole = [g.full_tensor() if mesh else g for g in grads if g is not None]
    return [*results, total, *whole]


@pytest.mark.parametrize(
    ("mesh", "codegen"),
    [
        ("pp=2", "eager"),
        pytest.param("pp=2,dp=2", "eager", marks=pytest.mark.slow),
        pytest.param("pp=2", "inductor", marks=pytest.mark.slow),
    ],
)
def test_what_all_stages_gather_waits_for_no_message(mesh: str, codegen: str) -> None:
    want = batches_of_two_sizes(None, "")
    for got in ranks_of(mesh).run(batches_of_two_sizes, mesh, codegen):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


class DrawsInOneStage(nn.Module):
    def __init__(self, last: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.last = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = torch.tanh(block(x)) + x
            if i == (len(self.blocks) - 1 if self.last else 0):
                x = nn.functional.dropout(x, 0.5) + torch.randperm(8)
        return x


def drawn(options: dict[str, Any], last: bool) -> list[torch.Tensor]:
    """Results and gradients of two steps, and what the generator gives after them."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = DrawsInOneStage(last).double()
    run = torch.compile(model, backend="fxpar", options=options)
    out = []
    for _ in range(2):
        result = run(torch.ones(8, 8, dtype=torch.float64))
        result.square().sum().backward()
        out.append(result.detach())
    return [*out, *(p.grad for p in model.parameters()), torch.rand(3)]


@pytest.mark.parametrize("last", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_one_stage_draws_is_drawn_by_all_ranks(last: bool) -> None:
    """It comes from rank 0, so that every rank takes part; and the numbers that a
    script draws next are alike."""
    pool, options = shared_pool(2), {"codegen": "eager", "plan": "replicate"}
    want = pool.run(drawn, options | {"mesh": "dp=2"}, last)[0]
    options |= {"plan": "propagate", "mesh": "pp=2", "microbatches": 2}
    for got in pool.run(drawn, options, last):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others() -> None:
    stage = "rank 1, at position 1 of the pipeline,"
    check_that_ranks_end("pp=2", f"{stage} ended or hangs")


@pytest.mark.parametrize(
    ("victim", "end", "stages"),
    [
        (1, "dies", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (0, "dies", 2),
                *((victim, "raises", 2) for victim in (0, 1)),
                (1, "hangs", 2),
                (1, "dies", 4),
                *((victim, "raises", 4) for victim in (0, 2, 3)),
                *((victim, "hangs", 4) for victim in (1, 3)),
            ]
        ),
    ],
)
def test_a_rank_that_ends_in_its_stage_is_named(
    victim: int, end: str, stages: int
) -> None:
    check_that_the_stage_is_named(victim, end, stages)
