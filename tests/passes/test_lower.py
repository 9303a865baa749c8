from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import fx

from fxpar._torch.fake import new_fake_mode
from fxpar.graph.builder import Builder
from fxpar.graph.collective_nodes import emit
from fxpar.passes.lower import lower_graph
from fxpar.passes.simulate.emulate_collectives import gather, scatter
from fxpar.passes.simulate.lockstep import run_lockstep
from fxpar.sharding.cost.hardware_table import lookup
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.reshard.route import steps
from fxpar.sharding.spec import Spec
from tests.helpers.every_spec import every_spec


def lowered(
    mesh: Mesh,
    source: Spec,
    target: Spec,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    itemsize: int = 10**6,
) -> fx.Graph:
    """The local graph of one reshard. The large itemsize makes bandwidth decide."""
    graph, mode = fx.Graph(), new_fake_mode()
    x = graph.placeholder("x")
    with mode:
        x.meta["val"] = torch.empty(source.local_shape(mesh, shape), dtype=dtype)
    route = steps(source, target, mesh, shape, itemsize)
    graph.output(emit(Builder(graph, mode, mesh), x, route, source, shape))
    return lower_graph(graph, mesh, mode)


def text(graph: fx.Graph) -> str:
    """One line per op; values are numbered, an op without overload is the default."""
    names: dict[str, str] = {"x": "x"}
    lines = []
    for node in graph.nodes:
        if node.op == "call_function":
            op = getattr(node.target, "__name__", "").removesuffix(".default")
            arguments = [names.get(str(a), str(a)) for a in node.args]
            arguments += [f"{key}={value}" for key, value in node.kwargs.items()]
            names[node.name] = f"%{len(names)}"
            lines.append(f"{names[node.name]} = {op}({', '.join(arguments)})")
    return "\n".join(lines)


def resharded(graph: fx.Graph, x: torch.Tensor, source: Spec, mesh: Mesh) -> list:
    parts = scatter(x, source, mesh)
    out = run_lockstep(graph, mesh, [[part] for part in parts])
    # What later nodes are built on must be what runs.
    fake = next(iter(reversed(graph.nodes))).args[0].meta["val"]
    for part in out:
        assert (part.shape, part.dtype) == (fake.shape, fake.dtype)
        assert part.is_contiguous() == fake.is_contiguous()
    return out


def case(mesh: str, source: str, target: str) -> tuple[Mesh, Spec, Spec]:
    return Mesh.parse(mesh), Spec.parse(source), Spec.parse(target)


@pytest.mark.parametrize("shape", [(7,), (3, 5), (6, 2), (2, 7)])
@pytest.mark.parametrize("axes", ["a=4", "a=2,b=2", "a=3,b=2"])
@pytest.mark.parametrize("machine", ["", "h100"])
def test_every_reshard_of_uneven_dims(
    axes: str, machine: str, shape: tuple[int, ...]
) -> None:
    """All pairs of specs, sums on their way too: each rank ends with its own rows. On
    unlike links axes that neither spec has share the work."""
    mesh = Mesh.parse(axes)
    if machine:
        mesh = lookup(machine).on(mesh)
    specs = every_spec(mesh, len(shape))
    summed = [spec for spec in every_spec(mesh, len(shape), "sum") if spec.partial]
    x = torch.arange(1.0, math.prod(shape) + 1).view(shape)
    rng = random.Random(0)
    pairs = list(itertools.product(specs + summed, specs))
    for source, target in rng.sample(pairs, min(len(pairs), 20)):
        graph = lowered(mesh, source, target, shape)
        out = run_lockstep(graph, mesh, [[part] for part in scatter(x, source, mesh)])
        for rank, part in enumerate(out):
            assert part.shape == target.rank_shape(mesh, shape, rank), (source, target)
            assert part.is_contiguous()
        assert torch.equal(gather(out, target, mesh), x), (source, target)


@pytest.mark.parametrize(
    "mesh", ["a=2,b=2", "a=4,b=2", "a=2,b=2,c=2", "a=2,b=6", "a=6,b=4", "a=1,b=2"]
)
@pytest.mark.parametrize("ndim", [0, 1, 2, 3])
def test_every_reshard_gives_the_same_value(mesh: str, ndim: int) -> None:
    m, draw = Mesh.parse(mesh), random.Random(0)
    shape = (m.size,) * ndim
    x = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(0)).float()
    specs = every_spec(m, ndim, "sum")
    pairs = [(source, target) for source in specs for target in specs]
    for source, target in draw.sample(pairs, min(len(pairs), 20)):
        graph = lowered(m, source, target, shape, itemsize=draw.choice([4, 10**7]))
        parts = resharded(graph, x, source, m)
        assert torch.equal(gather(parts, target, m), x), (source, target, text(graph))


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
@pytest.mark.parametrize("end", ["[a, b]", "[_, b+a]", "[_, _]"])
def test_every_reduction(op: str, end: str) -> None:
    mesh, _, target = case("a=2,b=3", "[_, _]", end)
    source = Spec(None, None, partial={"a": op, "b": op})
    x = torch.randn(6, 6, dtype=torch.float64)
    graph = lowered(mesh, source, target, (6, 6), x.dtype)
    parts = [torch.randn(6, 6, dtype=torch.float64) for _ in range(mesh.size)]
    out = run_lockstep(graph, mesh, [[part] for part in parts])
    torch.testing.assert_close(gather(out, target, mesh), gather(parts, source, mesh))
    # whole -> partial, the inverse
    graph = lowered(mesh, Spec.whole(2), source, (6, 6), x.dtype)
    out = resharded(graph, x, Spec.whole(2), mesh)
    torch.testing.assert_close(gather(out, source, mesh), x)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("end", ["[a, _]", "[_, a]", "[_, _]"])
def test_dtypes_are_kept(dtype: torch.dtype, end: str) -> None:
    x = torch.arange(16).view(4, 4).remainder(3).to(dtype)
    for start in ("[_, _] partial(sum: a)", "[b, a]", "[_, _] partial(max: a+b)"):
        mesh, source, target = case("a=2,b=2", start, end)
        parts = resharded(lowered(mesh, source, target, (4, 4), dtype), x, source, mesh)
        assert torch.equal(gather(parts, target, mesh), x)


def test_zeros_times_infinity_do_not_arise() -> None:
    mesh, source, target = case("a=2", "[_]", "[_] partial(sum: a)")
    x = torch.tensor([float("inf"), float("nan"), -1.0, 0.0])
    parts = resharded(lowered(mesh, source, target, (4,)), x, source, mesh)
    assert torch.equal(parts[1], torch.zeros(4))
    torch.testing.assert_close(gather(parts, target, mesh), x, equal_nan=True)


def test_nothing_to_do_is_nothing() -> None:
    mesh, source, target = case("a=1,b=2", "[a, b]", "[_, b]")
    assert text(lowered(mesh, source, target, (4, 4))) == ""


GOLDEN = {
    # Dim 0, axes in mesh order: the collective alone.
    ("a=2,b=2", "[a+b, _]", "[_, _]"): """\
%1 = all_gather_into_tensor(x, 4, fxpar:a+b)
%2 = wait_tensor(%1)""",
    # Blocks arrive in mesh order a+b, the dim has them as b+a.
    ("a=2,b=2", "[_, b+a]", "[_, _]"): """\
%1 = all_gather_into_tensor(x, 4, fxpar:a+b)
%2 = wait_tensor(%1)
%3 = view(%2, [2, 2, 8, 2])
%4 = permute(%3, [2, 1, 0, 3])
%5 = clone(%4, memory_format=torch.contiguous_format)
%6 = view(%5, [8, 8])""",
    ("a=2,b=2", "[_, _] partial(sum: b)", "[_, a+b]"): """\
%1 = offset(a=2,b=2, ('a',), 4, 0)
%2 = offset(a=2,b=2, ('a',), 4, 4)
%3 = slice.Tensor(x, 1, %1, %2)
%4 = view(%3, [8, 2, 2])
%5 = permute(%4, [1, 0, 2])
%6 = clone(%5, memory_format=torch.contiguous_format)
%7 = view(%6, [16, 2])
%8 = reduce_scatter_tensor(%7, sum, 2, fxpar:b)
%9 = wait_tensor(%8)""",
    ("a=2,b=2", "[_] partial(avg: b)", "[_]"): """\
%1 = all_reduce(x, sum, fxpar:b)
%2 = wait_tensor(%1)
%3 = div.Scalar(%2, 2)""",
    # A sub-axis names its group like any axis.
    ("a=4,b=2", "[a, b]", "[b, a]"): """\
%1 = permute(x, [0, 4, 2, 6, 1, 5, 3, 7], fxpar:a+b)
%2 = view(%1, [2, 2, 2])
%3 = permute(%2, [1, 0, 2])
%4 = clone(%3, memory_format=torch.contiguous_format)
%5 = view(%4, [4, 2])
%6 = all_to_all_single(%5, [2, 2], [2, 2], fxpar:a:(2)2)
%7 = wait_tensor(%6)""",
    # A strided view would not do for what the graph may view it as.
    ("a=2,b=2", "[_, _]", "[_, a]"): """\
%1 = offset(a=2,b=2, ('a',), 4, 0)
%2 = offset(a=2,b=2, ('a',), 4, 4)
%3 = slice.Tensor(x, 1, %1, %2)
%4 = clone(%3, memory_format=torch.contiguous_format)""",
    ("a=2,b=2", "[_]", "[_] partial(sum: a)"): """\
%1 = offset(a=2,b=2, ('a',), 1, 0)
%2 = full([], %1, dtype=torch.int64, device=cpu)
%3 = full([], 0, dtype=torch.float32, device=cpu)
%4 = eq.Scalar(%2, 0)
%5 = where.self(%4, x, %3)""",
}


@pytest.mark.parametrize("key", GOLDEN, ids=" ".join)
def test_golden(key: tuple[str, str, str]) -> None:
    mesh, source, target = case(*key)
    graph = lowered(mesh, source, target, (8,) * len(source.dims))
    assert text(graph) == GOLDEN[key]


def test_the_graph_does_not_grow_with_the_ranks() -> None:
    sizes = set()
    for k in (2, 4, 32):
        mesh, source, target = case(f"a={k},b={k}", "[a, b]", "[b, a]")
        sizes.add(len(lowered(mesh, source, target, (k * k, k * k)).nodes))
    assert len(sizes) == 1


def test_every_kind_of_step_has_a_row_in_each_table() -> None:
    """What torch has for a kind stands beside what the kind does, under one name."""
    from fxpar.graph.collective_nodes import COLLECTIVE, MESSAGES, NODES
    from fxpar.passes.lower import LOWERINGS
    from fxpar.passes.simulate.launches import EXACT
    from fxpar.passes.simulate.launches import KINDS as LAUNCHED
    from fxpar.passes.simulate.lockstep import COLLECTIVES
    from fxpar.runtime.calibrate.measure import START
    from fxpar.sharding.cost import collectives
    from fxpar.sharding.reshard.steps import KINDS

    communicating = {kind for kind, row in KINDS.items() if not row.local}
    messages, moves = {"send", "recv"}, {"move_rows"}
    assert NODES.keys() == LOWERINGS.keys() == KINDS.keys() | messages | moves
    assert {NODES[kind] for kind in messages} == MESSAGES
    assert {NODES[kind] for kind in communicating | messages | moves} == COLLECTIVE
    assert set(LAUNCHED.values()) == communicating | moves
    assert set(collectives.KINDS) == communicating == set(START)
    assert LAUNCHED.keys() == COLLECTIVES.keys() | EXACT
    for kind, lowering in LOWERINGS.items():
        talks = kind in communicating | messages | moves
        assert bool(lowering.ops) == talks
        assert (lowering.arguments is not None) == talks
        assert (lowering.emulate is not None) == (kind in communicating | moves)
