"""A search pays for an op under a strategy what a simulation says of the op that a rank
then runs: over the samples of every op that multiplies matrices, whatever is split."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from fxpar.features.experts import local_experts  # noqa: F401  (register fxpar's own)
from fxpar.graph import custom_ops  # noqa: F401  (register fxpar's own)
from fxpar.passes.simulate.check_user_rules import OneOp
from fxpar.passes.simulate.launches import launches_of
from fxpar.sharding.cost.hardware_table import Hardware, Peak, lookup
from fxpar.sharding.cost.op import is_contraction
from fxpar.sharding.cost.program_kernels import seconds, work_alone
from fxpar.sharding.factors import Rule
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.strategy import Strategy, fits
from tests.helpers import samples_core, samples_nn

PEAK = Peak(1e6, half_flops=50.0, half_dim=2.0, half_contracted=5.0)
DTYPES = ("float64", "float32", "float16", "bfloat16", "float8")
# Nothing but arithmetic takes time.
MACHINE = replace(
    lookup("cpu"),
    peaks=tuple((dtype, PEAK) for dtype in DTYPES),
    bandwidth=math.inf,
    launch=0.0,
    masked=0.0,
)

SAMPLES: dict[Any, list[Any]] = {}
for _module in (samples_core, samples_nn):
    for _table in (_module.SAMPLES, _module.UNRUNNABLE):
        for _op, _calls in _table.items():
            if isinstance(_op, str) and _op.startswith("aten::"):
                _name, _, _overload = _op.removeprefix("aten::").partition(".")
                _packet = getattr(torch.ops.aten, _name)
                _op = getattr(_packet, _overload or "default")
            if not isinstance(_op, str) and is_contraction(_op):
                SAMPLES.setdefault(_op, []).extend(_calls)


def strategies(rule: Rule, mesh: Mesh, axes: tuple[str, ...]) -> list[Strategy]:
    """Nothing split, and each factor over each axis."""
    free = [f for f in rule.factors if f not in rule.whole]
    splits = [(), *(((f, (x,)),) for x in axes for f in free)]
    return [s for s in map(Strategy, splits) if fits(rule, s.axes_of, mesh)]


def arithmetic(local: fx.Graph, machine: Hardware) -> float:
    """Seconds that a simulation gives the contractions of a local graph."""
    return sum(
        machine.kernel(0.0, x.flops, x.dims, x.dtype, x.family)
        for x in launches_of(local).launches
        if x.kind == "contraction"
    )


@pytest.mark.parametrize("op", SAMPLES, ids=str)
def test_a_search_pays_what_a_rank_takes(op: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("fxpar.sharding.shift_messages.seconds", lambda *_: 0.0)
    mesh = MACHINE.on(Mesh.parse("even=2,odd=3"))
    tried, samples = 0, SAMPLES[op]
    for args, kwargs in samples[:: max(1, len(samples) // 9)]:
        one = OneOp(op, args, kwargs)
        if one.rule is None:
            continue
        (call,) = one.program.ops
        work = replace(work_alone(call, one.program.values), moved=())
        # What a rank with fewer rows sees under a causal mask, each rounds its way.
        axes = ("even",) if work.hidden_flops else mesh.names
        for strategy in strategies(one.rule, mesh, axes):
            taken = arithmetic(one.localized(strategy, mesh), MACHINE)
            paid = seconds(call, work, strategy, mesh, MACHINE)
            assert paid == pytest.approx(taken, rel=1e-9), (str(one.rule), strategy)
            tried += 1
    assert tried


X, Y = torch.randn(2, 96, 1024)


@pytest.mark.parametrize("name", ["cpu", "h100"])
@pytest.mark.parametrize(
    ("op", "args"),
    [
        (torch.ops.aten.mul.Tensor, (X, Y)),
        (torch.ops.aten.div.Tensor, (X, Y)),
        (torch.ops.aten.exp.default, (X,)),
        (torch.ops.aten.tanh.default, (X,)),
        (torch.ops.aten.sum.dim_IntList, (X, [1])),
    ],
    ids=["mul", "div", "exp", "tanh", "sum"],
)
def test_light_ops_cost_what_their_kernels_take(op: Any, args: Any, name: str) -> None:
    """Caches hold what they move, and some take longer to compute than to move."""
    machine = lookup(name)
    mesh, one = machine.on(Mesh.parse("even=2,odd=3")), OneOp(op, args, {})
    assert one.rule is not None
    (call,) = one.program.ops
    work = work_alone(call, one.program.values)
    for strategy in strategies(one.rule, mesh, ("even", "odd")):
        kernels = launches_of(one.localized(strategy, mesh)).launches
        taken = sum(
            machine.fused(x.moved, x.light) - machine.launch
            for x in kernels
            if x.kind == "fused"
        )
        paid = seconds(call, work, strategy, mesh, machine)
        assert paid == pytest.approx(taken, rel=0.05), strategy
