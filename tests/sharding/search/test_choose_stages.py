"""Stages that a search chooses: what a part of a batch costs, what a pipeline takes and
holds, and when stages are taken at all."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fxpar
from fxpar.errors import HintError, PlanError
from fxpar.sharding import candidates
from fxpar.sharding.candidates import Candidate, choose, fastest_staged
from fxpar.sharding.cost.hardware_table import Hardware, Level, Peak
from fxpar.sharding.cost.program_kernels import ProgramKernels, kernels_of, seconds
from fxpar.sharding.decide import cut_in_time
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.pipeline_axis import split_off
from fxpar.sharding.plan_request import Request, staged_candidates
from fxpar.sharding.program import Program
from fxpar.sharding.search import price_stages as price_stages_module
from fxpar.sharding.search.batch_parts import PartProgram
from fxpar.sharding.search.formulate import cost_of
from fxpar.sharding.search.memory_constraints import Entry, entries
from fxpar.sharding.search.price_stages import (
    StagedStep,
    StageMemory,
    estimate_stages,
    least_staged,
    price_stages,
    stage_memory,
)
from fxpar.sharding.search.run_search import SearchOptions, SearchResult, search
from fxpar.sharding.search.too_large import least_held
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import Strategy
from tests.helpers.machines import machine
from tests.helpers.programs import program_of
from tests.helpers.wide_layers import FREE, LAYERS, ROWS, WIDTH, found_for, layers, rows

# A rank sends weights for longer than it computes, beside that.
STARVED = replace(machine(), levels=(Level(0, 2e5, 0.0, 0.0),), beside=0.0)


@functools.cache
def trained() -> Program:
    x = rows().requires_grad_()  # so that the first layer does as much as others
    program: Program = program_of(layers(), x, mesh="dp=2", grad=True)
    return program


def part_of(
    program: Program, count: int, places: int = 1, flying: int = 1
) -> PartProgram:
    cut = cut_in_time(program)
    assert cut is not None and cut.rows == ROWS
    return PartProgram(program, cut, count, places, flying)


def whole_entries(program: Program) -> list[Entry]:
    return entries(program, kernels_of(program))


def least_bytes(*args: Any) -> float:
    return sum(nbytes for _, nbytes in least_held(*args))


def staged(
    places: int, parts: int, schedule: str = "1f1b", on: Hardware = FREE
) -> tuple[SearchResult, StagedStep]:
    mesh, pipeline = split_off(Mesh.parse(f"pp={places}"))
    assert pipeline is not None
    flying = parts if schedule == "gpipe" else min(places, parts)
    program = trained()
    part = part_of(program, parts, places, flying)
    found = search(program, mesh, SearchOptions(on), {}, parts=part)
    step = price_stages(found, pipeline, schedule, on)
    assert step is not None
    return found, step


# -- a part of a batch ---------------------------------------------------------------


def test_a_batch_in_one_part_is_priced_as_it_is() -> None:
    program = trained()
    whole = found_for(program, "dp=2", machine())
    one = found_for(program, "dp=2", machine(), part_of(program, 1))
    assert one.predicted == pytest.approx(whole.predicted, rel=1e-12)


@pytest.mark.parametrize("count", [2, 8])
def test_parts_share_what_is_done_once(count: int) -> None:
    """Where nothing has a fixed price all parts together take what the batch takes, the
    reduction of gradients included; weights are read again for each."""
    program = trained()
    whole = found_for(program, "dp=2", STARVED)
    part = found_for(program, "dp=2", STARVED, part_of(program, count))
    assert count * part.predicted == pytest.approx(whole.predicted, rel=0.05)


def test_ops_on_a_part_are_as_small_as_it_is() -> None:
    """A rate that falls with the rows of a product falls in a part of the batch; light
    ops run over fewer elements."""
    slow = replace(
        FREE,
        peaks=(("float64", Peak(1e6, half_dim=8.0)), ("float32", Peak(1e12))),
        light=(("step", 1e3), ("exp", 1e2)),
    )
    mesh = slow.on(Mesh.parse("dp=2"))

    def paid(program: Program, kernels: ProgramKernels) -> list[float]:
        return [
            seconds(op, work, Strategy(((factor, ("dp",)),)), mesh, slow)
            for op, work in zip(program.ops, kernels.works, strict=True)
            for factor in op.rule.factors[:1]
        ]

    few = program_of(layers(), rows(ROWS // 4).requires_grad_(), mesh="dp=2", grad=True)
    part = part_of(trained(), 4)
    assert paid(part.program, part.kernels) == paid(few, kernels_of(few))


def test_what_does_not_follow_the_batch_stays_whole() -> None:
    program = trained()
    part = part_of(program, 4).program
    for declared, v in zip(program.signature.inputs, program.inputs, strict=True):
        assert v is not None
        before, after = program.values[v].shape, part.values[v].shape
        weight = declared.kind == "parameter"
        assert after == (before if weight else (before[0] // 4, *before[1:]))
    cut = part_of(program, 4).cut
    gradients = [
        v
        for out, v in zip(program.signature.outputs, program.outputs, strict=True)
        if out.kind == "gradient" and program.signature.inputs[out.of].kind != "input"
    ]
    assert gradients and not any(cut.dims[v] for v in gradients if v is not None)


def test_a_program_without_a_batch_is_not_cut() -> None:
    program = program_of(layers(1), rows(1), mesh="dp=2", grad=True)
    assert cut_in_time(program) is None


# -- the price -----------------------------------------------------------------------


@pytest.mark.parametrize(("places", "parts"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 8)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_bubbles_are_those_of_the_closed_form(
    places: int, parts: int, schedule: str
) -> None:
    """Equal stages wait (p - 1) / (m + p - 1) of a step (GPipe, arXiv 1811.06965)."""
    found, step = staged(places, parts, schedule)
    assert max(step.forward) == pytest.approx(min(step.forward), rel=0.02)
    assert step.bubble == pytest.approx((places - 1) / (parts + places - 1), rel=0.03)
    least = least_staged(found.predicted, places, parts)
    assert least <= step.seconds * (1 + 1e-6)
    assert step.seconds == pytest.approx(least, rel=0.03)


def test_interleaved_stages_wait_less() -> None:
    """With v stages a place (p - 1) / (v m + p - 1) (arXiv 2104.04473)."""
    _, step = staged(4, 8, "interleaved")
    assert len(step.forward) == 8
    assert step.bubble == pytest.approx(3 / (2 * 8 + 3), rel=0.05)


def test_stages_hold_the_parts_in_flight() -> None:
    """1F1B: as many as there are places behind; GPipe: all."""
    _, one = staged(4, 8)
    _, all_ = staged(4, 8, "gpipe")
    assert list(one.memory[:3]) == sorted(one.memory[:3], reverse=True)
    assert min(all_.memory) > max(one.memory)


def test_messages_and_reductions_are_paid() -> None:
    _, free = staged(4, 8)
    _, paid = staged(4, 8, on=replace(FREE, levels=(Level(0, 1e5, 0.0, 0.0),)))
    assert paid.sending == pytest.approx(ROWS // 8 * WIDTH * 8 / 1e5)
    # There and back, across the three borders, at least.
    assert paid.seconds >= free.seconds + 6 * paid.sending * 0.99


def as_planned(program: Program, along: str) -> Program:
    """The program with parameters that rest ``along`` the axis of stages."""
    shapes = {v: len(program.values[v].shape) for v in program.inputs if v is not None}
    inputs = tuple(
        replace(
            declared,
            at_rest=None if along == "own" else Spec.whole(shapes[v]),
            stage_dim=0 if along == "split" else None,
        )
        if declared.kind == "parameter" and v is not None
        else declared
        for declared, v in zip(program.signature.inputs, program.inputs, strict=True)
    )
    return replace(program, signature=replace(program.signature, inputs=inputs))


# Of all weights, what a place exchanges with three others: nothing; the gradients of
# three stages; three parts in four of its weights, and of its gradients as much.
def test_messages_take_from_stages_at_both_ends() -> None:
    """Where cores that compute also send (``Hardware.beside``)."""
    link = (Level(0, 1e6, 0.0, 0.0),)
    alone, together = (
        staged(2, 4, on=replace(machine(), levels=link, beside=share))[1]
        for share in (0.0, 0.5)
    )
    assert alone.sending == together.sending > 0
    for kind in ("forward", "backward"):
        lost = sum(getattr(together, kind)) - sum(getattr(alone, kind))
        assert lost == pytest.approx(2 * 0.5 * alone.sending)


@pytest.mark.parametrize(
    ("along", "exchanged", "held"),
    [("own", 0.0, 4 / 4), ("whole", 3 / 4, 4.0), ("split", 3 / 8, 4 / 4 + 2 / 4)],
)
def test_weights_are_exchanged_and_held_as_they_rest(
    along: str, exchanged: float, held: float
) -> None:
    """Weights, gradients and Adam's state, along stages whole, split, or at the stage
    that reads them."""
    speed, places, parts = 1e6, 4, 8
    on = replace(FREE, levels=(Level(0, speed, 0.0, 0.0),))
    mesh, pipeline = split_off(Mesh.parse(f"pp={places}"))
    assert pipeline is not None
    weights = sum(p.nbytes for p in layers().parameters())
    once, bytes_ = [], []
    for program in (as_planned(trained(), "own"), as_planned(trained(), along)):
        cut = cut_in_time(program)
        assert cut is not None
        part = PartProgram(program, cut, parts, places, places)
        found = search(program, mesh, SearchOptions(on), {}, parts=part)
        step = price_stages(found, pipeline, "1f1b", on)
        assert step is not None
        once.append(step.once)
        bytes_.append(min(step.memory))
    assert once[1] - once[0] == pytest.approx(exchanged * weights / speed, rel=1e-6)
    assert bytes_[1] - bytes_[0] == pytest.approx((held - 1) * weights, rel=1e-3)


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    # What is added is read, its sum read and written in float32; a product in the dtype
    # of its sum adds to it itself.
    [(torch.bfloat16, 2 + 4 + 4), (torch.float64, 0)],
)
def test_adding_to_sums_of_parts_is_priced(
    dtype: torch.dtype, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, pipeline = split_off(Mesh.parse("pp=2,dp=2"))
    assert pipeline is not None
    parts, x = 4, rows().to(dtype).requires_grad_()
    program = program_of(layers().to(dtype), x, mesh="dp=2", grad=True)
    part = part_of(program, parts, 2, 2)
    found = search(program, mesh, SearchOptions(FREE), {}, parts=part)
    step = price_stages(found, pipeline, "1f1b", FREE)
    monkeypatch.setattr(PartProgram, "added", {})
    unadded = part_of(program, parts, 2, 2)
    free = search(program, mesh, SearchOptions(FREE), {}, parts=unadded)
    without = price_stages(free, pipeline, "1f1b", FREE)
    assert step is not None and without is not None
    weights = sum(p.numel() for p in layers().parameters())
    # A rank adds its half: of rows of weights, or of columns.
    adding = weights / 2 * nbytes / FREE.bandwidth * (parts - 1) / parts
    assert found.predicted - free.predicted == pytest.approx(adding, rel=0.02)
    more = sum(step.backward) - sum(without.backward)
    assert more == pytest.approx(adding, rel=0.02)
    assert step.forward == without.forward
    assert step.once == pytest.approx(without.once)


def test_strategies_are_chosen_by_what_adding_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients that are partial over tp are added up whole with every part: it takes
    less to send activations instead."""
    peaks = tuple((name, Peak(1e9)) for name, _ in FREE.peaks)
    on = replace(FREE, peaks=peaks, levels=(Level(0, FREE.bandwidth, 0.0, 0.0),))
    x = rows(256).to(torch.bfloat16).requires_grad_()
    program = program_of(layers(2).to(torch.bfloat16), x, mesh="tp=2", grad=True)
    cut = cut_in_time(program)
    assert cut is not None
    found = found_for(program, "tp=2", on, PartProgram(program, cut, 8, 2, 2))
    with monkeypatch.context() as patch:
        patch.setattr(PartProgram, "added", {})
        free = found_for(program, "tp=2", on, PartProgram(program, cut, 8, 2, 2))
    assert free.strategies != found.strategies
    whole = cost_of(found.formulation, free.strategies)
    assert 1.2 * found.solution.cost < whole.cost


def test_pinned_parameters_are_heeded() -> None:
    found, free = staged(2, 4)
    mesh, pipeline = split_off(Mesh.parse("pp=2"))
    assert pipeline is not None and len(set(free.begins)) == 1
    pinned = {"1.up.weight": 1}
    step = price_stages(found, pipeline, "1f1b", FREE, pinned=pinned)
    assert step is not None
    first, last = step.forward
    assert 7 * first == pytest.approx(last, rel=0.02) and step.begins != free.begins
    pinned = {"0.up.weight": 1, "1.up.weight": 0}
    with pytest.raises(HintError, match="no cut of"):
        price_stages(found, pipeline, "1f1b", FREE, pinned=pinned)


def test_stages_are_cut_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first op holds as much as two layers, its stage gets fewer of them."""
    found, _ = staged(2, 8)
    mesh, pipeline = split_off(Mesh.parse("pp=2"))
    assert pipeline is not None
    layer = 4 * sum(p.nbytes for p in layers(1).parameters())

    def laden(*args: Any) -> StageMemory:
        memory = stage_memory(*args)
        return replace(memory, throughout=[*memory.throughout, (2.0 * layer, (0,))])

    monkeypatch.setattr(price_stages_module, "stage_memory", laden)
    free = price_stages(found, pipeline, "1f1b", FREE)
    assert free is not None and max(free.memory) > min(free.memory) + 1.9 * layer
    room = 6.6 * layer
    tight = price_stages(found, pipeline, "1f1b", FREE, room)
    assert tight is not None and max(tight.memory) <= room
    assert tight.forward[0] < free.forward[0] and tight.seconds > free.seconds
    none = price_stages(found, pipeline, "1f1b", FREE, room / 2)
    assert none is not None and none.memory == free.memory


def test_fewer_ops_than_stages_have_no_price() -> None:
    mesh, pipeline = split_off(Mesh.parse("pp=32"))
    assert pipeline is not None
    program = program_of(layers(1), rows(), mesh=str(mesh), grad=True)
    found = search(
        program, mesh, SearchOptions(FREE), {}, parts=part_of(program, 32, 32, 32)
    )
    assert price_stages(found, pipeline, "1f1b", FREE) is None


# -- the choice ----------------------------------------------------------------------


def planned(
    on: Hardware, path: Path, monkeypatch: pytest.MonkeyPatch, mesh: str = "auto:4"
) -> Any:
    on.save(path / "machine.json")
    monkeypatch.setenv("FXPAR_HARDWARE", str(path / "machine.json"))
    return fxpar.plan(
        layers(), rows(), mesh=mesh, mode="search", grad=True, schedule="none"
    )


def test_meshes_with_stages() -> None:
    texts = [str(mesh) for mesh in staged_candidates(8, machine())]
    assert texts == ["pp=2,dp=4", "pp=2,dp=2,tp=2", "pp=4,dp=2", "pp=8"]


def test_stages_are_chosen_where_weights_are_dear_to_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice, _ = chosen_of(STARVED, 4)
    assert choice is not None and str(choice.request.whole_mesh) == "pp=4,dp=1"
    plan = planned(STARVED, tmp_path, monkeypatch, "pp=4,dp=1")
    assert len(plan.stages) == 4
    got, want = plan.simulate(rows()), plan.reference(rows())
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)

    # Stages begin where they were priced to.
    begins = tuple(stage.begin for stage in plan.stages[1:])
    assert plan.result.decision.stages_begin == begins

    plan.save(tmp_path / "plan.json")
    again = fxpar.plan(
        layers(),
        rows(),
        mesh="pp=4,dp=1",
        mode=str(tmp_path / "plan.json"),
        grad=True,
        schedule="none",
    )
    assert again.mesh.axes == plan.mesh.axes and again.hash == plan.hash
    assert again.microbatches == plan.microbatches


@pytest.mark.parametrize(
    ("on", "microbatches", "note"),
    [
        # Nothing but arithmetic takes time, and without stages ranks share all of it.
        (replace(FREE, bandwidth=1e30), "", "none of 2 meshes can be faster"),
        pytest.param(
            FREE,
            "4",
            "0 of 2 meshes tried, 2 cannot be faster",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_win_is_not_searched(
    on: Hardware,
    microbatches: str,
    note: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if microbatches:
        monkeypatch.setenv("FXPAR_MICROBATCHES", microbatches)
    with mock.patch.object(candidates, "priced") as priced:
        plan = planned(on, tmp_path, monkeypatch)
    assert not priced.called and not plan.stages and "pp" not in str(plan.mesh)
    assert f"stages: {note}" in plan.notes


def staged_choice(
    on: Hardware, ranks: int, seconds: float = 30.0, bar: float = math.inf
) -> tuple[Candidate | None, str]:
    options = SearchOptions(on, seconds)
    line = Mesh((("dp", ranks),))
    meshes = staged_candidates(ranks, on)
    request = Request(line, trained().signature, mode=options, staged=meshes)
    request = request.with_options(pipeline="1f1b")
    choice, (note,) = fastest_staged(trained(), request, bar)
    return choice, note


def chosen_of(*args: Any, **kwargs: Any) -> tuple[Candidate, str]:
    choice, note = staged_choice(*args, **kwargs)
    assert choice is not None and choice.step is not None
    return choice, note


def test_as_many_microbatches_as_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages take 5/4, 9/8, 17/16 of their arithmetic in 4, 8, 16 parts; another
    3 % do not pay. Where a kernel has a price of its own, fewer do."""
    monkeypatch.setattr(candidates, "PARTS_A_PLACE", (2, 1))
    choice, _ = chosen_of(replace(FREE, bandwidth=1e30, launch=0.0), 2)
    assert choice is not None and choice.step.parts == 16
    dear, _ = chosen_of(replace(FREE, bandwidth=1e30, launch=1e-2), 2)
    assert dear is not None and dear.step.parts < 4


def test_other_meshes_get_fewer_microbatches_too() -> None:
    """Where weights are slow to read, eight stages begin with four times as many
    microbatches as are good for them, and take twice as long as other meshes then; with
    16 they take less than these with any number."""
    on = replace(machine(), levels=(Level(0, 2e6, 0.0, 0.0),), beside=0.0)
    choice, note = chosen_of(on, 8)
    assert choice is not None and choice.step.parts == 16, note
    assert choice.request.whole_mesh.axes[0] == ("pp", 8)


def tried(of: SearchResult, mesh: str, step: StagedStep) -> Candidate:
    """A mesh with a plan in stages."""
    decision = mock.Mock(search=of)
    on = Mesh.parse(mesh)
    return Candidate(on, mock.Mock(), step.parts, decision=decision, step=step)


def test_more_microbatches_promise_what_memory_forbids_now() -> None:
    """Where a limit makes a plan slow, one for half as many rows may fit."""
    program, mesh = trained(), Mesh.parse("dp=4")
    options = replace(SearchOptions(machine()), equal_layers=True)
    free = search(program, mesh, options, {})
    less = replace(options, memory=0.97 * free.solution.peak)
    tight = search(program, mesh, less, {})
    assert tight.predicted > free.predicted
    assert tight.unlimited == free.predicted
    _, step = staged(2, 8)
    promises = [
        candidates._in_twice_the_parts(tried(x, "pp=2,dp=4", step))
        for x in (free, tight)
    ]
    assert promises[0] == promises[1] == least_staged(free.predicted / 2, 2, 16)


def test_the_note_says_how_many_meshes_were_tried() -> None:
    _, note = chosen_of(FREE, 8)
    # Of a stage's axes on links that are alike one order is enough.
    assert note.endswith("4 of 4 meshes tried")
    best, hurried = chosen_of(FREE, 8, seconds=1e-9)
    assert best is not None
    assert hurried.endswith("1 of 4 meshes tried, 3 left out for want of time")


def test_one_of_each_order_of_axes_that_are_alike() -> None:
    program, on = trained(), FREE
    meshes = staged_candidates(16, on)
    assert {"pp=2,dp=2,tp=4", "pp=2,dp=4,tp=2"} <= set(map(str, meshes))
    options = SearchOptions(on)
    request = Request(meshes[0], program.signature, mode=options, staged=meshes)
    subject = candidates.Subject(program, request)
    texts = set(map(str, candidates._open(subject, meshes)))
    assert "pp=2,dp=2,tp=4" in texts and "pp=2,dp=4,tp=2" not in texts
    # A hint names an axis: which of them is it?
    request = replace(request, hints={"*": ("dp",)})
    named = candidates._open(candidates.Subject(program, request), meshes)
    assert tuple(named) == meshes


# -- a guess, and a glance -----------------------------------------------------------


def test_meshes_whose_stages_hold_their_weights_come_first() -> None:
    program = trained()
    cut = cut_in_time(program)
    assert cut is not None
    guess = estimate_stages(program, cut, whole_entries(program), 1.0)
    weights = sum(p.nbytes for p in layers().parameters())
    assert guess.used == 2 * weights and 3 * weights <= guess.resting < 3.1 * weights
    # Every layer exchanges what it reads, for its one weight, and makes, for the other.
    assert guess.exchanged == 2 * LAYERS * ROWS * WIDTH * 8
    slow = replace(machine(), levels=(Level(0, 1e3, 0.0, 0.0),))
    many, few = Mesh.parse("pp=8"), Mesh.parse("pp=2,dp=4")
    roomy, tight = 1e12, weights
    assert guess.seconds(few, 16, slow, roomy) < guess.seconds(many, 8, slow, roomy)
    assert guess.seconds(few, 16, slow, tight) > guess.seconds(many, 8, slow, tight)


def test_a_glance_has_layers_alike() -> None:
    """And keeps to memory: what only fits in unlike layers is none."""
    program = trained()
    options = replace(SearchOptions(machine()), equal_layers=True)
    free = search(program, Mesh.parse("dp=4"), options, {})
    assert free.bound == free.formulation.launches and free.solution.gap == 1.0
    peak, tied = free.solution.peak, free.formulation.problem.tied
    assert tied is not None
    choice = free.solution.choice
    assert all(choice[i] == choice[head] for i, head in enumerate(tied))
    tight = search(
        program, Mesh.parse("dp=4"), replace(options, memory=0.97 * peak), {}
    )
    assert tight.solution.peak <= 0.97 * peak and tight.predicted > free.predicted
    assert all(
        tight.solution.choice[i] == tight.solution.choice[head]
        for i, head in enumerate(tied)
    )
    with pytest.raises(PlanError, match="no plan fits"):
        search(program, Mesh.parse("dp=4"), replace(options, memory=0.1 * peak), {})


def test_a_place_keeps_to_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def large(*args: Any) -> StagedStep:
        step = price_stages(*args)
        assert step is not None
        return replace(step, memory=(1e12,))

    monkeypatch.setattr(candidates, "price_stages", large)
    choice, note = staged_choice(STARVED, 4)
    assert choice is None and "pp=4 needs 1 TB a rank" in note


@pytest.mark.slow
def test_a_batch_that_does_not_divide_is_cut_in_fewer_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it runs, so it is priced: 64 rows in 4 parts where 7 are asked for."""
    monkeypatch.setenv("FXPAR_MICROBATCHES", "7")
    plan = planned(STARVED, tmp_path, monkeypatch, "pp=4,dp=1")
    assert any("4 stages, gpipe, 4 microbatches" in note for note in plan.notes)
    assert any("the batch is cut in 4 microbatches" in note for note in plan.notes)


@pytest.mark.parametrize("parts", [1, 4])
def test_no_plan_holds_less_than_ranks_that_share_everything(parts: int) -> None:
    program = trained()
    part = part_of(program, parts) if parts > 1 else None
    least = least_bytes(program, whole_entries(program), 4, part)
    for mesh in ("dp=4", "tp=4", "dp=2,tp=2"):
        tight = SearchOptions(FREE, memory=2 * least)
        found = search(program, Mesh.parse(mesh), tight, {}, parts=part)
        assert least <= found.solution.peak * (1 + 1e-9) <= 2 * least


def test_weights_that_rest_whole_are_not_shared() -> None:
    program = as_planned(trained(), "whole")
    weights = 3 * sum(p.nbytes for p in layers().parameters())  # with Adam's state
    shared = least_bytes(trained(), whole_entries(trained()), 64)
    whole = least_bytes(program, whole_entries(program), 64)
    assert whole - shared == pytest.approx(weights * 63 / 64)


def test_without_room_for_any_plan_no_mesh_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte less than ranks need that share everything; with that, all are tried."""
    program = trained()
    least = least_bytes(program, whole_entries(program), 4)
    line = Mesh((("dp", 4),))
    options = SearchOptions(STARVED, memory=least - 1)
    request = Request(line, program.signature, mode=options, meshes=(line,))
    with mock.patch.object(candidates, "decide_on") as decide_on:
        with pytest.raises(PlanError, match="on 4 ranks every plan needs at least"):
            choose(program, request)
        assert not decide_on.called
        decide_on.side_effect = PlanError("no plan fits: tried")
        with pytest.raises(PlanError, match="tried"):
            enough = replace(options, memory=least)
            choose(program, replace(request, mode=enough))


@pytest.mark.slow
def test_memory_of_a_named_mesh_is_that_of_a_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is too much for one device fits in stages, and is searched as such."""
    whole = 4 * sum(p.nbytes for p in layers().parameters())  # gradients, Adam's state
    tight = replace(FREE, memory=0.6 * whole)
    with pytest.raises(PlanError, match="no plan fits"):
        planned(tight, tmp_path, monkeypatch, "dp=1")
    plan = planned(tight, tmp_path, monkeypatch, "pp=4")
    assert len(plan.stages) == 4
    assert any("4 stages, gpipe, 16 microbatches" in note for note in plan.notes)


def test_a_search_in_stages_splits_nothing_unevenly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """4,097 rows on two ranks are faster in shards that are not alike, which stages
    refuse: without stages they are found."""
    monkeypatch.setenv("FXPAR_HARDWARE", "h100")
    monkeypatch.setenv("FXPAR_MICROBATCHES", "2")
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(4)]
        model, x = nn.Sequential(*layers), torch.randn(2, 4097, 1024)
    staged = fxpar.plan(model, x, mesh="pp=2,dp=2", mode="search", grad=True)
    assert len(staged.stages) == 2
    monkeypatch.delenv("FXPAR_MICROBATCHES")
    alone = fxpar.plan(model, x[:1], mesh="dp=2", mode="search", grad=True)
    assert "4097@dp" in str(alone)
    assert "4097@dp" not in str(staged)


def test_an_empty_batch_is_cut_nowhere() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    x = torch.randn(0, 8)
    plan = fxpar.plan(model, x, mesh="pp=2", mode="search")
    assert plan.simulate(x).shape == (0, 8)
