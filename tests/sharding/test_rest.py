"""Where a parameter rests: what is decided stays, the rest splits as it divides."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

import fxpar
from fxpar.features.at_rest.used_layouts import layouts_as_used, layouts_of
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.propagate.at_rest import (
    FEW,
    at_rest,
    is_worth_chunks,
)
from fxpar.sharding.propagate.gather_early import gather_before_views
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import Strategy, operand_spec

DP = Mesh.parse("dp=4")
TP = Mesh.parse("tp=4")
BOTH = Mesh.parse("dp=2,tp=2")
WIDE = Mesh.parse("dp=4,tp=2")


@pytest.mark.parametrize(
    ("shape", "mesh", "want"),
    [
        ((8, 6), DP, "[dp, _]"),
        ((8,), TP, "[tp]"),
        ((6, 8), DP, "[_, dp]"),  # the first dim that divides
        ((3, 3, 12), DP, "[_, _, dp]"),
        ((8, 6), BOTH, "[tp+dp, _]"),  # one dim for all, batch axes minor
        ((2, 4), BOTH, "[_, tp+dp]"),
    ],
)
def test_every_axis_goes_on_one_dim(shape, mesh, want) -> None:
    assert str(at_rest(shape, mesh)) == want


@pytest.mark.parametrize(
    ("shape", "mesh", "want"),
    [
        ((8, 6, 4), "dp=2,ep=2", "[ep+dp, _, _]"),
        ((4, 8, 4), "dp=4,ep=2", "[ep, dp, _]"),  # experts stay where they are used
        ((3, 8, 4), "dp=2,ep=2", "[_, dp+ep, _]"),
        ((8, 6), "dp=2,ep=2", "[dp+ep, _]"),
    ],
)
def test_stacked_matrices_of_experts(shape, mesh, want) -> None:
    assert str(at_rest(shape, Mesh.parse(mesh))) == want


def test_the_order_of_a_mesh_does_not_make_batch_axes_major() -> None:
    for text in ("dp=2,tp=2", "tp=2,dp=2"):
        assert str(at_rest((8,), Mesh.parse(text))) == "[tp+dp]"
    # without a batch axis by name the first axis is one
    assert str(at_rest((8,), Mesh.parse("a=2,b=2"))) == "[b+a]"


@pytest.mark.parametrize(
    ("shape", "mesh", "want"),
    [
        ((4, 3), WIDE, "[dp, _]"),  # 8 shards do not fit: the larger axis alone
        ((2, 3), WIDE, "[tp, _]"),
        ((6, 3), BOTH, "[dp, _]"),
        ((3, 3), BOTH, "[dp, _]"),
        ((1,), DP, "[_]"),
        ((5,), DP, "[_]"),
        ((), DP, "[]"),
        ((0, 4), DP, "[dp, _]"),
    ],
)
def test_what_does_not_divide_takes_fewer_axes_or_none(shape, mesh, want) -> None:
    assert str(at_rest(shape, mesh)) == want


@pytest.mark.parametrize(
    ("shape", "mesh", "want"),
    [
        ((37, 5), DP, "[dp, _]"),
        ((5, 37), DP, "[_, dp]"),  # shards of 5 rows are less alike
        ((3, 5), BOTH, "[_, dp+tp]"),  # 2, 1, 1, 1; not strided
        ((3, 3), DP, "[_, _]"),  # a rank would have none
    ],
)
def test_a_matrix_that_nothing_divides_is_cut_into_chunks(shape, mesh, want) -> None:
    assert str(at_rest(shape, mesh)) == want


def test_chunks_are_for_much_of_a_model() -> None:
    """A plan with shards that are not alike has no schedule."""
    odd, even, vector = ((37, 5), DP), ((37, 64), DP), ((37,), DP)
    assert is_worth_chunks([odd, vector])
    assert is_worth_chunks([odd, even])
    assert not is_worth_chunks([odd, even, even])
    assert not is_worth_chunks([even, vector])


def test_no_chunks_by_shares_and_by_parts_of_axes() -> None:
    assert str(at_rest((7, 5), Mesh.parse("dp=2[5,2]"))) == "[_, _]"
    parts = Mesh.parse("tp=4").refined(["tp:2"])
    assert str(at_rest((7, 5), parts)) == "[_, _]"
    # nor where the axes would stand in another order than in the mesh
    assert str(at_rest((8, 5), BOTH, [(), ("tp",)], [True])) == "[_, tp]"


def test_a_decided_dim_takes_what_is_left_as_minor() -> None:
    assert str(at_rest((8, 8), BOTH, [("tp",), ()])) == "[tp+dp, _]"
    assert str(at_rest((8, 8), BOTH, [(), ("tp",)])) == "[dp, tp]"
    # 2 does not divide over tp and dp: dp goes on the other dim
    assert str(at_rest((2, 8), BOTH, [("tp",)])) == "[tp, dp]"


def test_a_closed_dim_takes_no_more() -> None:
    dims = [("tp",), ()]
    assert str(at_rest((8, 8), BOTH, dims, [True, False])) == "[tp, dp]"
    assert str(at_rest((8, 8), BOTH, dims, [True, True])) == "[tp, _]"
    assert str(at_rest((8, 8), BOTH, [(), ()], [True])) == "[_, tp+dp]"
    assert str(at_rest((8, 8), BOTH, [(), ()], [True, True])) == "[_, _]"
    # the one open dim does not divide: chunks of 2 and 1 rows
    assert str(at_rest((8, 3), BOTH, dims, [True, False])) == "[tp, dp]"
    assert str(at_rest((8, 1), BOTH, dims, [True, False])) == "[tp, _]"


def test_axes_all_decided_or_of_one_rank_change_nothing() -> None:
    assert str(at_rest((8, 8), BOTH, [("dp",), ("tp",)])) == "[dp, tp]"
    assert str(at_rest((8, 8), Mesh.parse("dp=1,tp=1"))) == "[_, _]"
    assert str(at_rest((8, 8), Mesh.parse("dp=4,tp=1"))) == "[dp, _]"


def test_a_decided_axis_goes_nowhere_else() -> None:
    assert str(at_rest((8, 8), BOTH, decided={"tp"})) == "[dp, _]"
    assert str(at_rest((8, 8), BOTH, [(), ("tp",)], decided={"tp"})) == "[dp, tp]"
    assert str(at_rest((8, 8), BOTH, decided={"dp", "tp"})) == "[_, _]"


def test_any_shape_on_any_mesh_gets_a_spec_and_keeps_what_is_decided() -> None:
    meshes = [Mesh.parse(text) for text in ("dp=4", "dp=2,tp=2", "a=2,b=3,c=2")]
    shapes = [
        shape
        for ndim in range(4)
        for shape in itertools.product((1, 2, 3, 4, 12), repeat=ndim)
    ]
    for mesh, shape in itertools.product(meshes, shapes):
        spec = at_rest(shape, mesh)
        spec.check(mesh, shape)
        assert not spec.partial and sum(map(bool, spec.dims)) <= 1
        # nothing smaller was possible with the axes it used
        best = max((mesh.count(axes) for axes in spec.dims), default=1)
        fits = [mesh.size for size in shape if size % mesh.size == 0]
        assert best == mesh.size or not fits
        first, *rest = mesh.names
        if shape and shape[-1] % mesh.sizes[first] == 0:
            dims = [*[()] * (len(shape) - 1), (first,)]
            hinted = at_rest(shape, mesh, dims)
            hinted.check(mesh, shape)
            assert hinted.dims[-1][:1] == (first,)
            shut = at_rest(shape, mesh, dims, [True] * len(shape))
            assert shut.dims == tuple(dims)


# Views of parameters

WHOLE, ROWS = Spec(None, None), Spec("dp", None)


def gathered(
    fn: Callable[[torch.Tensor], Sequence[torch.Tensor]],
) -> tuple[list[str], list[Spec], list[Spec]]:
    """``fn`` of a parameter [dp] of 32 elements, each op split on its first dim and
    read whole in the end, then ``gather_before_views``: ops, where they settle, what
    they read."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, *fn(self.w)])

    mesh = Mesh.parse("dp=2")
    plan = fxpar.plan(Model(), torch.randn(4, 8), mesh=mesh, mode="replicate")
    program = plan.result.decision.program
    inputs = tuple(
        replace(i, at_rest=Spec("dp")) if i.kind == "parameter" else i
        for i in program.signature.inputs
    )
    program = replace(program, signature=replace(program.signature, inputs=inputs))
    ours = set(program.of_sharded)
    *ops, last = program.ops
    assert all(ours.issuperset(op.results) for op in ops), "the last op reads x"
    settled = [Spec.whole(len(value.shape)) for value in program.values]
    for v in ours:
        settled[v] = Spec("dp", *settled[v].dims[1:])
    strategies = [Strategy(((op.rule.results[0][0][0], ("dp",)),)) for op in ops]
    strategies.append(Strategy())
    gather_before_views(program, strategies, settled, mesh)
    assert strategies[-1] == Strategy(), "what reads x is left alone"
    return (
        [str(op.target).split(".")[1] for op in ops],
        [settled[op.results[0]] for op in ops],
        [operand_spec(op.rule, strategies[op.index], 0) for op in ops],
    )


def test_what_is_only_seen_in_another_shape_is_gathered_as_it_is_stored() -> None:
    assert gathered(lambda w: [w.view(4, 8)]) == (["view"], [WHOLE], [Spec(None)])
    ops, settled, reads = gathered(lambda w: [w.view(8, 4).permute(1, 0)])
    assert ops == ["view", "permute"]
    assert settled == [WHOLE, WHOLE] and reads == [Spec(None), WHOLE]


def test_a_cast_between_views_comes_before_its_gather() -> None:
    """Each rank casts its part; what is gathered is what the cast gave."""
    ops, settled, reads = gathered(
        lambda w: [w.view(8, 4).to(torch.float64).permute(1, 0)]
    )
    assert ops[0] == "view" and ops[2] == "permute" and len(ops) == 3
    assert settled == [ROWS, ROWS, WHOLE]
    assert reads == [Spec("dp"), ROWS, WHOLE]


def test_a_view_that_is_read_in_two_ways_stays_as_it_is() -> None:
    """One reader needs it whole, the other as it rests."""
    ops, settled, reads = gathered(lambda w: [v := w.view(4, 8), v.exp()])
    assert ops == ["view", "exp"]
    assert settled == [ROWS, ROWS] and reads == [Spec("dp"), ROWS]


def test_words_of_a_hint_hold_of_a_parameter_at_rest():
    model, mesh = nn.Linear(16, 32), BOTH
    for hint, rests, words in (
        (("!tp",), Spec("dp", None), "?,?,!tp"),
        (("tp p1", "|"), Spec("tp", "dp"), "tp p1,?,|"),
    ):
        table = {"weight": hint}
        layouts = layouts_of(model, mesh, table, {}, strict=True)
        layout = layouts[model.weight]
        assert (layout.spec, layout.hint) == (str(rests), words)


def test_layers_of_one_kind_are_laid_out_in_one_way() -> None:
    """Where memory would allow some of them to stay whole as they are used, and not
    all: layers that repeat are one."""
    mesh, split, whole = BOTH, Spec.parse("[tp, _]"), Spec.whole(2)
    for layers in (1, 2, 4, 8, 16):
        uses = {
            "up": (layers, (64, 64), split),
            "k": (layers, (16, 64), whole),
            "v": (layers, (16, 64), whole),
            "words": (1, (256, 64), split),
        }
        parameters = {
            (kind, i): (kind, shape, use)
            for kind, (n, shape, use) in uses.items()
            for i in range(n)
        }
        layouts = layouts_as_used(parameters, mesh, even=True)
        assert set(layouts) == set(parameters)
        specs = {kind: layouts[kind, 0] for kind in uses}
        assert all(spec == specs[kind] for (kind, _), spec in layouts.items())
        # A rank may hold so much more, for all layers of a kind at once.
        smallest = {
            kind: at_rest(shape, mesh, whole.dims, (), ())
            for kind, (_, shape, _) in uses.items()
        }
        least, most = (
            sum(
                n * math.prod(each[kind].local_shape(mesh, shape))
                for kind, (n, shape, _) in uses.items()
            )
            for each in (smallest, specs)
        )
        assert least <= most <= least * (1 + 1 / FEW)


@pytest.mark.parametrize("spec", ["[_, tp+dp]", "[tp+dp, _]", "[dp, tp]", "[tp, dp]"])
def test_a_layout_that_a_search_chose_is_taken_as_it_is(spec: str) -> None:
    """Its price, of gathers along one dim, is right for no other."""
    parameters = {"words": ("words", (64, 64), Spec.parse(spec))}
    assert layouts_as_used(parameters, BOTH, even=True) == {"words": Spec.parse(spec)}
