"""Parameters that may rest anywhere, but split over all ranks: the search finds along
which dims, at the price of bringing them to where they are used."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

import fxpar
from fxpar.sharding.cost.hardware_table import lookup
from fxpar.sharding.decide import decide_on
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan_request import Request
from fxpar.sharding.search.run_search import SearchOptions


def rests(rows: int, *, splits: bool) -> list[list[str]]:
    """Where both matrices of a perceptron rest on four ranks, by the plan that is found
    and by its rivals."""
    model = nn.Sequential(
        nn.Linear(512, 2048, bias=False), nn.ReLU(), nn.Linear(2048, 512, bias=False)
    )
    plan = fxpar.plan(model, torch.ones(rows, 512), mesh="tp=4", mode="replicate")
    program = plan.result.decision.program
    inputs = [
        replace(x, splits=splits and x.kind == "parameter")
        for x in program.signature.inputs
    ]
    program = replace(
        program, signature=replace(program.signature, inputs=tuple(inputs))
    )
    options = SearchOptions(lookup("h100"), 30.0)
    request = Request(Mesh.parse("tp=4"), program.signature, {}, options)
    decision = decide_on(program, request)
    pairs = zip(inputs, program.inputs, strict=True)
    values = [v for x, v in pairs if v is not None and x.kind == "parameter"]
    found = decision, *decision.rivals
    return [[str(each.settled[v]) for v in values] for each in found]


def test_few_rows_take_weights_where_they_are() -> None:
    assert rests(8, splits=True)[0] == ["[tp, _]", "[_, tp]"]


def test_many_rows_gather_weights_but_never_hold_them() -> None:
    rows = 1 << 17
    assert rests(rows, splits=False)[0] == ["[_, _]", "[_, _]"]
    assert all("tp" in spec for spec in rests(rows, splits=True)[0])


def test_what_an_expert_would_begin_with_is_split_where_it_rests() -> None:
    """Whole parameters would win, and would then not rest so."""
    found, *rivals = rests(1 << 17, splits=True)
    assert rivals
    assert all("tp" in spec for rest in rivals for spec in rest)
