"""Where a backward makes samples out of the gradient of a result that all ranks have,
and which strategies keep those of each rank apart."""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from fxpar.passes.builder import Builder
from fxpar.sharding.cost.hardware_table import lookup
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Input, Output, Program, Signature
from fxpar.sharding.read_program import read
from fxpar.sharding.sample_dims import where_samples_begin
from fxpar.sharding.search.problem_builder import FixedFacts, ProblemBuilder
from fxpar.sharding.spec import Spec

aten = torch.ops.aten
MESH = Mesh.parse("dp=2")


def cross_correlation(batch: tuple[str, ...]) -> Program:
    """A sum of squares of ``x.T @ x`` and the gradient of ``x``, of which ranks along
    ``batch`` feed rows: the tangent meets no sample before the last product."""
    graph, mode = fx.Graph(), FakeTensorMode()
    x, tangent = graph.placeholder("x"), graph.placeholder("tangent")
    with mode:
        x.meta["val"], tangent.meta["val"] = torch.empty(8, 4), torch.empty(())
    build = Builder(graph, mode)
    turned = build.call(aten.permute.default, x, [1, 0])
    product = build.call(aten.mm.default, turned, x)
    loss = build.call(aten.sum.default, build.call(aten.mul.Tensor, product, product))
    of_product = build.call(aten.mul.Tensor, product, tangent)
    of_x = build.call(aten.mm.default, x, of_product)
    graph.output((loss, of_x))
    rows = Spec.of([batch, ()])
    inputs = Input("x", rest=rows), Input("t", "tangent", rest=Spec.whole(0))
    outputs = (
        Output("loss", rest=Spec.whole(0)),
        Output("x", "gradient", 0, rest=rows),
    )
    return read(graph, Signature(inputs, outputs, ((1, 0),), batch))


def strategies_of_last(program: Program) -> list[Spec]:
    """What the last product's result may be made as."""
    build = ProblemBuilder(program, MESH, lookup("h100"), FixedFacts())
    node = build.nodes[build.op_nodes()[-1]]
    return [build.pool.specs[n] for n in node.specs[:, -1]]


def test_no_summands_of_samples_where_each_rank_has_a_loss_of_its_own() -> None:
    program = cross_correlation(("dp",))
    (begins,) = where_samples_begin(program).items()
    assert begins == (len(program.ops) - 1, ((program.ops[-1].results[0], 0),))
    made = strategies_of_last(program)
    assert Spec("dp", None) in made and not any(spec.partial for spec in made)


def test_global_mode_has_all_strategies() -> None:
    program = cross_correlation(())
    assert not where_samples_begin(program)
    assert any(spec.partial for spec in strategies_of_last(program))
