"""Where a parameter rests: what is decided stays, the rest splits as it divides."""

from __future__ import annotations

import itertools

import pytest

from fxpar.sharding.mesh import Mesh
from fxpar.sharding.rest import at_rest

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
        ((3, 5), BOTH, "[_, _]"),
        ((1,), DP, "[_]"),
        ((), DP, "[]"),
        ((0, 4), DP, "[dp, _]"),
    ],
)
def test_what_does_not_divide_takes_fewer_axes_or_none(shape, mesh, want) -> None:
    assert str(at_rest(shape, mesh)) == want


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
    # the one open dim does not divide
    assert str(at_rest((8, 3), BOTH, dims, [True, False])) == "[tp, _]"


def test_axes_all_decided_or_of_one_rank_change_nothing() -> None:
    assert str(at_rest((8, 8), BOTH, [("dp",), ("tp",)])) == "[dp, tp]"
    assert str(at_rest((8, 8), Mesh.parse("dp=1,tp=1"))) == "[_, _]"
    assert str(at_rest((8, 8), Mesh.parse("dp=4,tp=1"))) == "[dp, _]"


def test_a_decided_axis_goes_nowhere_else() -> None:
    assert str(at_rest((8, 8), BOTH, decided={"tp"})) == "[dp, _]"
    assert str(at_rest((8, 8), BOTH, [(), ("tp",)], decided={"tp"})) == "[dp, tp]"
    assert str(at_rest((8, 8), BOTH, decided={"dp", "tp"})) == "[_, _]"


def test_any_shape_on_any_mesh_gets_an_even_spec_and_keeps_what_is_decided() -> None:
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
