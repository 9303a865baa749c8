"""Every row of the rule table, tried: each factor of each sample call is split, each
passage is fed random summands. A row is tested by having a sample; see ``OneOp``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.inductor_prims  # noqa: F401  (registers prims::inductor_*)

from fxpar.errors import PlanError
from fxpar.features.at_rest import dtensor_ops  # noqa: F401  (registers an op)
from fxpar.features.experts import local_experts  # noqa: F401  (register fxpar's own)
from fxpar.graph import custom_ops  # noqa: F401  (register fxpar's own)
from fxpar.passes.normalize import random  # noqa: F401  (register fxpar's own)
from fxpar.passes.simulate.check_user_rules import (
    Case,
    OneOp,
    case,
    passing,
    reductions_of,
)
from fxpar.sharding.factors import Rule
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_table import Row, keys, parse_rule
from fxpar.sharding.ops import LOCAL, TABLE, own_op_rules, pointwise, row_of, sources
from fxpar.sharding.ops.reduction import over, over_all
from fxpar.sharding.strategy import Strategy, fits
from tests.helpers import samples_core, samples_linalg, samples_nn, samples_points

SAMPLES: dict[Any, list] = {}
for _table in (samples_core, samples_nn, samples_linalg, samples_points):
    for _samples in (_table.SAMPLES, _table.UNRUNNABLE):
        for _key, _calls in _samples.items():
            SAMPLES.setdefault(_key, []).extend(_calls)

SHAPES_ONLY = samples_core.SHAPES_ONLY | samples_points.SHAPES_ONLY

# Ops some of whose calls have no rule, and are computed whole.
UNRULED = {
    "aten.index_put.default",
    *("aten.as_strided.default", "aten.as_strided_copy.default"),
    *("aten._unsafe_index_put.default", "higher_order::with_effects"),
    *("aten._scaled_mm_v2.default", "aten.as_strided_scatter.default"),
    *("aten._scaled_dot_product_flash_attention.default",),
}

# Where ops of other namespaces are registered; there is no row to try without it.
REGISTERED = {
    "transformers": "transformers.integrations.moe",
    "torch_nn": "torch.nn.modules.linear_cross_entropy",
}


def op_of(key: Any) -> Any:
    """The overload that a key of the table stands for."""
    if not isinstance(key, str):
        return key
    namespace, _, name = key.partition("::")
    if namespace in REGISTERED:
        pytest.importorskip(REGISTERED[namespace])
    name, _, overload = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    return (
        packet
        if namespace == "higher_order"
        else getattr(packet, overload or "default")
    )


def name_of(key: Any) -> str:
    return key if isinstance(key, str) else str(key)


def single(one: OneOp, rule: Rule) -> Iterator[Case | None]:
    """One axis on one factor, or on none."""
    yield Mesh.parse("x=2"), Strategy()
    for factor in rule.free:
        n = next((n for n in (2, 3) if rule.size[factor] % n == 0), None)
        if n is not None and rule.size[factor]:
            yield case(rule, {factor: [("x", n)]})


def several(one: OneOp, rule: Rule) -> Iterator[Case | None]:
    """Two axes: on one factor, in both orders of the mesh; on two factors; a passage
    beside a split factor; more sizes."""
    free = [f for f in rule.free if rule.size[f] > 1]
    for factor in free:
        for n in (4, 3):
            if rule.size[factor] % n == 0:
                yield case(rule, {factor: [("x", n)]})
        yield case(rule, {factor: [("y", 2), ("x", 2)]})
    for first, second in itertools.combinations(free, 2):
        yield case(rule, {first: [("x", 2)], second: [("y", 2)]})
    for p, passage in enumerate(rule.passages):
        for factor in free:
            kinds = reductions_of(passage, one)
            if factor in rule.contracted:
                kinds = [op for op in kinds if op == rule.reduction.get(factor, "sum")]
            for reduction in kinds[:1]:
                yield case(rule, {factor: [("x", 2)]}, ("p", reduction, p))


def uneven(one: OneOp, rule: Rule) -> Iterator[Case | None]:
    """One axis on one factor that it does not divide: the last shard is short, or there
    is none on the last rank. A row that cannot do that is not split so."""
    for factor in rule.free:
        size = rule.size[factor]
        short = next(n for n in range(2, 99) if size % n)
        for n in dict.fromkeys((short, size + 1)):
            if size:
                found = case(rule, {factor: [("x", n)]})
                assert not (found and factor in rule.evenly)
                yield found


def uneven_on_two_axes(one: OneOp, rule: Rule) -> Iterator[Case | None]:
    """Two axes on one factor that do not divide it, and on two factors."""
    for factor in rule.free:
        yield case(rule, {factor: [("y", 2), ("x", 2)]})
        yield case(rule, {factor: [("x", 3), ("y", 2)]})
    for first, second in itertools.combinations(rule.free, 2):
        yield case(rule, {first: [("x", 3)], second: [("y", 2)]})


def unequal(one: OneOp, rule: Rule) -> Iterator[Case | None]:
    """One axis of unequal shares on one factor, the last rank with most of it."""
    for factor in rule.free:
        for shares in ((1.0, 2.0), (2.0, 1.0, 3.0)):
            found = case(rule, {factor: [("x", len(shares))]})
            mesh = Mesh((("x", len(shares)),), shares=(shares,))
            strategy = Strategy(((factor, ("x",)),))
            whole = found is None or len(found[0].axes) == 1
            if whole and rule.size[factor] and fits(rule, strategy.axes_of, mesh):
                yield mesh, strategy


def try_row(key: Any, *kinds: Any) -> None:
    """Run the cases of every sample of a row. Raises with the call at hand."""
    generator = torch.Generator().manual_seed(0)
    ruled = 0
    for args, kwargs in SAMPLES[key]:
        one = OneOp(op_of(key), args, kwargs)
        if one.rule is None:
            continue
        ruled += 1
        runs = not any(x.is_meta for x in one.operands)
        valued = runs and key not in SHAPES_ONLY
        expected = one.expected() if valued else None
        for mesh, strategy in (c for kind in kinds for c in kind(one, one.rule) if c):
            try:
                one.check(strategy, mesh, expected, generator)
            except Exception as error:
                called = f"{name_of(key)}(*{args}, **{kwargs}) under '{one.rule}'"
                error.add_note(f"{called} by {strategy} on {mesh}")
                raise
    assert ruled, "no sample of this row has a rule"
    assert (ruled < len(SAMPLES[key])) == (name_of(key) in UNRULED)


# These run graphs of their own: tests/passes/test_bodies.py splits them.
BODIES = {f"higher_order::flex_attention{x}" for x in ("", "_backward")}
# These stand between the shapes of a rank and global ones, or send something:
# tests/features/regions/test_shard_map.py runs them.
REGIONS = set(own_op_rules.ROWS)
ROWS = [key for key in {**TABLE, **SAMPLES} if key not in BODIES | REGIONS]


@pytest.mark.parametrize("key", ROWS, ids=name_of)
def test_row(key: Any) -> None:
    assert key in SAMPLES, f"give {key} a sample in tests/helpers/samples_*.py"
    try_row(key, single, passing)


# One row of each family, and those whose local form knows about such shards.
SOME = keys(
    "mm addmm mul.Tensor sum.dim_IntList mean mean.dim amax min sort embedding "
    "embedding_dense_backward index.Tensor index_put gather scatter_add index_add "
    "convolution view permute expand cat"
)


@pytest.mark.parametrize("key", SOME, ids=name_of)
def test_row_where_no_axis_divides(key: Any) -> None:
    try_row(key, uneven, unequal)


@pytest.mark.slow
@pytest.mark.parametrize("key", ROWS, ids=name_of)
def test_every_row_where_no_axis_divides(key: Any) -> None:
    try_row(key, uneven, uneven_on_two_axes, unequal)


@pytest.mark.slow
@pytest.mark.parametrize("key", ROWS, ids=name_of)
def test_row_on_two_axes(key: Any) -> None:
    try_row(key, several)


def test_every_sample_has_a_row() -> None:
    assert all(key in TABLE or row_of(op_of(key)) for key in SAMPLES)


def test_a_pointwise_op_needs_no_row() -> None:
    """Its tag says that it is pointwise, if it gives one tensor and draws nothing."""
    aten = torch.ops.aten
    assert row_of(aten.xlogy.Tensor) and row_of(aten.special_i1.default)
    assert aten.xlogy.Tensor not in TABLE
    assert row_of(aten.bernoulli.out) is None and row_of(aten.xlogy_.Tensor) is None


def test_a_minor_factor_is_split_only_below_complete_ones() -> None:
    rule = parse_rule("a b -> (a b)").with_sizes([(2, 4), (8,)])
    mesh = Mesh.parse("x=2,y=2")
    assert not fits(rule, {"b": ("x",)}, mesh)
    assert fits(rule, {"b": ("x",), "a": ("y",)}, mesh)


def added_by_every_rank(x: Any, dim: int, index: Any, *_: Any, **__: Any) -> str:
    return "s e, i, i e -> s e" if dim == 0 else "s e, i, s i -> s e"


# Rows that are wrong in one way each: the harness must notice.
_PLAIN = over(whole=False)
WRONG = {
    "reduced by another op": ("sum.dim_IntList", Row(_PLAIN, reduce="max")),
    "a mean added up": ("mean", Row(over_all(whole=False))),
    "a maximum added up": ("amax", Row(_PLAIN)),
    "not reduced": ("sum", Row("a b c -> ~a ~b ~c")),
    "sums through a kink": ("relu", Row(pointwise.broadcast, linear="0")),
    "maxima through a fall": ("neg", Row(pointwise.broadcast, monotone="0")),
    "both factors in parts": ("mul.Tensor", Row(pointwise.broadcast, linear="0+1")),
    "one summand in parts": ("sub.Tensor", Row(pointwise.broadcast, linear="0|1")),
    "rounding as movement": ("round", Row(pointwise.broadcast, movement="0")),
    "split sort": ("sort", Row(pointwise.broadcast_two)),
    "split flip": ("flip", Row(pointwise.broadcast)),
    "minor factor first": ("view", Row("a b c -> (b a) c", shape=1)),
    "bias on every rank": ("addmm", Row("m n, m k, k n -> m n")),
    "update on every rank": ("index_add", Row(added_by_every_rank)),
    "size not made local": ("full", Row(sources.filled)),
    "rows of a matrix": ("linalg_inv_ex", Row("b! m n! -> b! m n!, b! ~m")),
    "pivots of all rows": ("linalg_qr", Row("b! m n! -> b! m n!, b! n! _ ~m")),
    "rows of a system": (
        "linalg_solve_triangular",
        Row("a! b! m n!, a! b! m k! -> a! b! m k!"),
    ),
    "experts of a rank": ("_grouped_mm", Row("m! k!, g k! n!, g -> m! n!")),
    "bins of a shard": ("histogram.bin_ct", Row("a b -> _, _ ~a ~b")),
    "root of a part": ("_cdist_forward", Row("m! k, n! k -> m! n!")),
    "rank of a part": ("_pdist_forward", Row("m k! -> _")),
    "a part of the segments": ("segment_reduce", Row("s d!, t -> t d!")),
    "a part of the mask": ("masked_scatter_backward", Row("a b, a b -> _")),
    "rows of what is counted": ("nonzero_static", Row("a b! -> _ _")),
    "a part of an image": (
        "fractional_max_pool2d",
        Row("n! c! h! w, n! c! _ -> n! c! _ _, n! c! _ _"),
    ),
    "a bag of a rank": ("_embedding_bag", Row("s! e!, i, b! -> b! e!, ~")),
    "cut along the dim": ("as_strided_scatter", Row("a! b, c! d! -> a! b")),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_row_is_noticed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, wrong = WRONG[how]
    (key,) = keys(name)
    monkeypatch.setitem(TABLE, key, wrong)
    monkeypatch.setitem(SAMPLES, key, SAMPLES[key][:1])
    with pytest.raises((AssertionError, PlanError, RuntimeError)) as raised:
        try_row(key, single, passing)
    assert raised.value.__notes__, "no case failed"


@pytest.mark.parametrize(
    "name",
    [
        *("embedding", "index_add", "_grouped_mm", "diagonal", "diagonal_scatter"),
        *("unbind.int", "repeat"),
    ],
)
def test_a_missing_local_form_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (key,) = keys(name)
    monkeypatch.delitem(LOCAL, key)
    with pytest.raises((AssertionError, PlanError, RuntimeError, IndexError)) as raised:
        try_row(key, single)
    assert raised.value.__notes__, "no case failed"
