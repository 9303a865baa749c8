"""Memory: what a plan says a rank holds, what the search counts, what is simulated."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

import fxpar
from fxpar.fusion.choose_schedule import Attempts
from fxpar.passes.order.forward_backward import as_run, regather
from fxpar.passes.simulate.simulate_step import by_kind
from fxpar.runtime.steps import plan_steps
from fxpar.sharding.cost.hardware_table import lookup
from fxpar.sharding.cost.program_kernels import kernels_of
from fxpar.sharding.decide import Decision, decide
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Program
from fxpar.sharding.propagate.at_rest import at_rest
from fxpar.sharding.propagate.propagation import Seed
from fxpar.sharding.search.formulate import Formulation, cost_of, formulate
from fxpar.sharding.search.memory_constraints import MOMENTS
from fxpar.sharding.search.run_search import SearchOptions, search
from fxpar.sharding.solver import evaluate
from tests.helpers.models import NAMES, build_loss
from tests.helpers.programs import local_graph

# What moves collectives about, which holds buffers for longer: of small models, all.
MOVES = "bucket,sink_waits,prefetch,drain"


def planned(fn: Any, *args: Any, mesh: str = "dp=2", **kwargs: Any) -> Any:
    kwargs = {"mode": "propagate", "grad": True, **kwargs}
    return fxpar.plan(fn, *args, mesh=mesh, **kwargs)


def decided(*args: Any, **kwargs: Any) -> Decision:
    return planned(*args, **kwargs).result.decision


def told(*args: Any, **kwargs: Any) -> dict[str, int]:
    """What a plan says a rank holds, by kind."""
    return dict(planned(*args, **kwargs).memory)


def held_by(decision: Decision, *, keep: bool = False) -> dict[str, int]:
    """The same of a decision."""
    graph = local_graph(decision)
    if not keep:
        regather(graph)
    run = as_run(graph, disable=MOVES.split(","))
    return dict(by_kind(run, decision.program.signature))


def at_rest_on(program: Program, mesh: Mesh) -> Program:
    """The program with its parameters, and their gradients, sharded at rest."""
    signature = program.signature
    inputs = [
        i
        if v is None or i.kind != "parameter"
        else replace(i, at_rest=at_rest(program.values[v].shape, mesh))
        for i, v in zip(signature.inputs, program.inputs, strict=True)
    ]
    outputs = [
        o
        if o.kind != "gradient" or o.of is None
        else replace(o, at_rest=inputs[o.of].at_rest)
        for o in signature.outputs
    ]
    signature = replace(signature, inputs=tuple(inputs), outputs=tuple(outputs))
    return replace(program, signature=signature)


class Two(nn.Module):
    """Products whose operands both need gradients."""

    def __init__(self, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(width, width, bias=False) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


# By hand


@pytest.mark.slow
def test_what_a_schedule_was_chosen_by_is_not_ordered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its memory is told of the graph that was simulated."""
    monkeypatch.setenv("FXPAR_HARDWARE", "cpu")
    loss, batch = build_loss("llama")
    options = {**batch, "schedule": "auto"}
    with mock.patch.object(plan_steps, "as_run", side_effect=as_run) as ordered:
        plan = planned(loss, **options)
        assert not ordered.called
        with mock.patch.object(Attempts, "_run_of", return_value=None):
            assert planned(loss, **options).memory == plan.memory
        assert ordered.called


def test_kinds_by_hand() -> None:
    """Whole on every rank: two layers, one product of each kept for its relu."""
    x = torch.randn(2, 16)
    held = told(Two(), x, mode="replicate")
    weight, act = 16 * 16 * 4, 2 * 16 * 4
    assert held["parameters"] == 2 * weight
    assert held["optimizer state"] == MOMENTS * 2 * weight
    # The peak is at the product that makes the last gradient.
    assert held["gradients"] == 2 * weight
    assert "gathered parameters" not in held and "buffers of collectives" not in held
    assert held["inputs and buffers"] == act + 4  # x, and what the loss is scaled by
    assert held["passing"] == act + 4  # what the product reads, and the loss


def test_without_gradients_there_is_no_optimizer() -> None:
    held = told(Two(), torch.randn(8, 16), grad=False)
    assert "optimizer state" not in held and "gradients" not in held
    assert "saved for the backward" not in held


def test_gradients_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where activations are large, the peak is before most gradients are there."""
    monkeypatch.setenv("FXPAR_DISABLE", MOVES)
    held = told(Two(layers=6), torch.randn(512, 16))
    assert held.get("gradients", 0) <= 16 * 16 * 4
    held = told(Two(layers=6), torch.randn(2, 16))
    assert held["gradients"] == 5 * 16 * 16 * 4  # and one is still to be reduced
    assert held["buffers of collectives"] == 16 * 16 * 4 + 4  # the loss too


def test_saved_activations_grow_with_layers() -> None:
    rows = 512
    saved = [
        told(Two(layers=n), torch.randn(rows, 16))["saved for the backward"]
        for n in (4, 8)
    ]
    # One activation a layer: relu's result, which tells where it passes, too.
    assert saved[1] - saved[0] == 4 * rows * 16 * 4 / 2


def lives(program: Program) -> tuple[set[str], set[str]]:
    """Names of what is written to memory, and of what the backward computes again."""
    found = kernels_of(replace(program, kernel_cache={}))  # tags may have changed
    written, again = (
        {program.values[v].name for v in values & program.producers.keys()}
        for values in (found.written, found.recomputed)
    )
    return written, again


def test_tags_of_checkpoints_hold() -> None:
    program = decided(Two(), torch.randn(8, 16)).program
    (relu, _) = (op for op in program.ops if op.name.startswith("relu"))
    assert relu.name not in lives(program)[1], "products of the backward read it"
    relu.node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    assert relu.name in lives(program)[1]

    again = lives(program)[1] - {relu.name}
    mask = next(op for op in program.ops if op.name in again and op.operands)
    mask.node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    written, again = lives(program)
    assert mask.name in written and mask.name not in again


def test_a_light_value_between_two_kernels_is_in_memory() -> None:
    """Read before a product and after it; not if all of it is one kernel."""

    def residual(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        kept = x + 1
        return kept.sin() @ w + kept

    def fused(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        kept = x + 1
        return (kept.sin() + kept) @ w

    x, w = torch.randn(8, 16), torch.randn(16, 16)
    for fn, is_written in ((residual, True), (fused, False)):
        program = decided(fn, x, w, grad=False).program
        first = program.ops[0]
        assert "add" in first.name
        assert (first.name in lives(program)[0]) == is_written


def test_what_the_forward_keeps_is_held_when_its_kernel_runs() -> None:
    """Norms are traced anew among the ops of the backward; the forward keeps them."""
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))
    for i in (3, 2, 1):
        model.insert(i, nn.LayerNorm(16))
    program = decided(lambda x: model(x).sum(), torch.randn(512, 16)).program
    on = lookup("cpu")
    mesh = on.on(Mesh.parse("dp=2"))
    found = formulate(program, mesh, on)
    turn = min(program.backward)
    saved = [entry for entry in found.memory_entries if entry.kind == "saved"]
    traced_late = [e for e in saved if program.producers[e.value][0] > turn]
    assert len(traced_late) == 3 and all(0 <= e.begin < turn for e in saved)
    # Each as its layer runs, not all as the backward begins.
    assert len({e.begin for e in traced_late}) == 3
    assert all(e.begin < e.end for e in found.memory_entries)


# Parameters at rest


def test_gathered_copies_live_in_their_phase() -> None:
    """One layer's at a time; all of them, as the backward begins, if they are kept."""
    mesh = Mesh.parse("dp=4")
    program = at_rest_on(decided(Two(64, 6), torch.randn(4, 64)).program, mesh)
    plan, weight = decide(program, mesh, {}), 64 * 64 * 4
    freed, kept = (held_by(plan, keep=keep) for keep in (False, True))
    for held in (freed, kept):
        assert held["parameters"] == 6 * weight // 4
        assert held["optimizer state"] == MOMENTS * held["parameters"]
    assert freed.get("gathered parameters", 0) <= weight
    # The first layer's is not read in the backward.
    assert kept["gathered parameters"] == 5 * weight


@pytest.mark.parametrize("keep", [False, True])
def test_the_search_counts_gathered_copies(keep: bool) -> None:
    mesh = Mesh.parse("dp=4")
    program = at_rest_on(decided(Two(64, 6), torch.randn(4, 64)).program, mesh)
    on = lookup("cpu").on(mesh)
    program = replace(program, keeps_gathered=keep)
    found = formulate(program, on, lookup("cpu"))
    copies = [entry for entry in found.memory_entries if entry.kind == "gathered"]
    backward = program.backward
    phases = [
        {t in backward for t in range(e.begin, min(e.end, len(program.ops)))}
        for e in copies
    ]
    if keep:
        assert len(copies) == 6 and phases.count({False, True}) == 5
    else:
        # Not again the first layer's, nor the last one's, which both phases hold.
        assert len(copies) == 10 and phases.count({False, True}) == 1
    plan = decide(program, mesh, {})
    searched = cost_of(found, plan.strategies).peak
    assert searched == pytest.approx(sum(held_by(plan, keep=keep).values()), rel=0.1)


def test_where_a_plan_lays_a_parameter_copies_are_told_apart() -> None:
    """Each pair of where it rests and where it settles is allowed once: as it rests, or
    as a copy, which takes memory."""
    mesh = lookup("cpu").on(Mesh.parse("dp=2"))
    program = decided(Two(4, 2), torch.randn(4, 4)).program
    found = formulate(program, mesh, lookup("cpu"))
    v = program.named("layers.1.weight")
    assert v is not None, "which both phases read"
    key = "input", program.inputs.index(v)
    rests = next(i for i, n in enumerate(found.nodes) if (n.kind, n.of) == key)
    settles = found.settling[v][0]
    have, node = found.nodes[rests].specs[:, 0], found.nodes[settles]
    (edge,) = (e for e in found.problem.edges if (e.i, e.j) == (rests, settles))
    table = found.problem.tables[edge.table]
    assert node.copies is not None and node.copies.any() and not node.copies.all()
    for i, j in itertools.product(range(len(have)), range(len(node.specs))):
        is_copy = have[i] != node.specs[j, 0]
        assert np.isfinite(table[i, j]) == (is_copy == node.copies[j])
    (row,) = (m for m in found.problem.memory if m.node == settles)
    assert (row.usage > 0).tolist() == node.copies.tolist()


# The search and the simulation


def solver_peak(found: Formulation, decision: Decision) -> float:
    return cost_of(found, decision.strategies).peak


def input_seeds(decision: Decision) -> dict[int, list[Seed]]:
    """Each input in the spec it is given in, and no other."""
    seeds = {}
    for v in decision.program.inputs:
        if v is not None:
            dims = decision.edges.specs[v].dims
            seeds[v] = [Seed(v, dims, (True,) * len(dims), "the plan")]
    return seeds


def ratio(plan: Any) -> float:
    """What the search counts over what is simulated; without the optimizer's state,
    which no graph has. Inputs rest as the plan has them: a search without a limit may
    lay images whole where that costs nothing."""
    on, decision = lookup("h100"), plan.result.decision
    held = dict(plan.memory)
    state = held.pop("optimizer state")
    assert sum(held.values()) == plan.predicted.peak_bytes
    seeds = input_seeds(decision)
    found = formulate(decision.program, on.on(decision.mesh), on, seeds=seeds)
    return (solver_peak(found, decision) - state) / plan.predicted.peak_bytes


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("gpt2", "tp=4"),
        *(
            pytest.param(name, mesh, marks=pytest.mark.slow)
            for name in NAMES
            for mesh in ("dp=4", "tp=4", "dp=2,tp=2")
            if (name, mesh) != ("gpt2", "tp=4")
        ),
    ],
)
def test_it_is_what_the_simulation_says(
    name: str, mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXPAR_DISABLE", MOVES)
    monkeypatch.setenv("FXPAR_HARDWARE", "cpu")
    model, batch = build_loss(name)
    plan = fxpar.plan(model, **batch, mesh=mesh, mode="propagate", grad=True)
    searched = ratio(plan)
    assert 0.8 < searched < 1.25


@pytest.mark.slow
def test_a_search_counts_what_its_plan_tells() -> None:
    """Under a limit that binds, its peak is that of the plan it makes."""
    mesh, on = Mesh.parse("dp=2"), lookup("cpu")
    decision = decided(Two(64, 4), torch.randn(64, 64))
    free = search(decision.program, mesh, SearchOptions(on), {})
    limit = 0.8 * free.solution.peak
    found = search(decision.program, mesh, SearchOptions(on, memory=limit), {})
    assert found.solution.peak <= limit
    problem = found.formulation.problem
    peak = evaluate(problem, found.solution.choice)[1]
    plan = fxpar.plan(
        Two(64, 4), torch.randn(64, 64), mesh="dp=2", mode="replicate", grad=True
    )
    from fxpar.sharding.reshard.route import connect

    program = found.formulation.program
    edges = connect(program, found.strategies, found.settled, found.mesh)
    made = replace(
        plan.result.decision,
        program=program,
        mesh=found.mesh,
        strategies=found.strategies,
        settled=found.settled,
        edges=edges,
    )
    assert sum(held_by(made).values()) == pytest.approx(peak, rel=0.2)
