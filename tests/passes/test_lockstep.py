from __future__ import annotations

import operator
import weakref
from typing import Any

import pytest
import torch
from torch import fx

import fxpar
from fxpar.errors import PlanError
from fxpar.passes.simulate.emulate_collectives import gather, scatter
from fxpar.passes.simulate.lockstep import run_lockstep
from fxpar.sharding import rank_ints
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.spec import Spec

MESH = Mesh.parse("a=2,b=2")
aten, c10d = torch.ops.aten, torch.ops._c10d_functional
IOTA = torch.ops.prims.iota.default


def graph_of(build) -> fx.Graph:
    """A graph with one input; ``build(call, x)`` returns its output."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(build(lambda target, *args: graph.call_function(target, args), x))
    return graph


def test_ranks_compute_what_they_hold() -> None:
    graph = graph_of(lambda call, x: {"y": (call(aten.mul.Tensor, x, 2), None, 7)})
    out = run_lockstep(graph, MESH, [[torch.tensor(float(r))] for r in range(4)])
    assert [o["y"][0].item() for o in out] == [0, 2, 4, 6]
    assert all(o["y"][1:] == (None, 7) for o in out)


def test_what_is_shared_is_computed_once() -> None:
    calls = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x + 1

    graph = graph_of(lambda call, x: call(counted, call(counted, x)))
    same, other = torch.zeros(2), torch.ones(2)
    out = run_lockstep(graph, MESH, [[same], [other], [same], [same]])
    assert len(calls) == 4
    assert out[0] is out[2] is out[3] is not out[1]


def test_random_ops_draw_once_for_all_ranks() -> None:
    def build(call, x):
        draw = call(aten.rand.default, [3])
        return call(aten.add.Tensor, x, draw), draw

    graph = graph_of(build)
    out = run_lockstep(graph, MESH, [[torch.full((3,), float(r))] for r in range(4)])
    for r, (y, draw) in enumerate(out):
        assert draw is out[0][1]
        assert torch.equal(y, draw + r)
    again = run_lockstep(graph, MESH, [[torch.zeros(3)] for _ in range(4)])
    assert not torch.equal(again[0][1], out[0][1])


def test_offset_is_the_rank() -> None:
    graph = graph_of(
        lambda call, x: call(rank_ints.offset, str(MESH), ("b", "a"), 10, 1)
    )
    assert run_lockstep(graph, MESH, [[0]] * 4) == [1, 21, 11, 31]


@pytest.mark.parametrize(
    ("target", "args", "expected"),
    [
        (c10d.all_reduce.default, ("sum",), [[4, 6], [4, 6], [12, 14], [12, 14]]),
        (c10d.all_reduce.default, ("avg",), [[2, 3], [2, 3], [6, 7], [6, 7]]),
        (c10d.all_reduce.default, ("max",), [[3, 4], [3, 4], [7, 8], [7, 8]]),
        (c10d.all_reduce.default, ("min",), [[1, 2], [1, 2], [5, 6], [5, 6]]),
        (c10d.all_reduce.default, ("product",), [[3, 8], [3, 8], [35, 48], [35, 48]]),
        (c10d.reduce_scatter_tensor.default, ("sum", 2), [[4], [6], [12], [14]]),
        (
            c10d.all_gather_into_tensor.default,
            (2,),
            [[1, 2, 3, 4]] * 2 + [[5, 6, 7, 8]] * 2,
        ),
        (
            c10d.all_to_all_single.default,
            ([1, 1], [1, 1]),
            [[1, 3], [2, 4], [5, 7], [6, 8]],
        ),
        (torch.ops.fxpar.permute.default, ([1, 0],), [[3, 4], [1, 2], [7, 8], [5, 6]]),
    ],
    ids=str,
)
def test_collectives(target, args, expected) -> None:
    parts = [[torch.tensor([2.0 * r + 1, 2.0 * r + 2])] for r in range(4)]

    def build(call, x):
        return call(c10d.wait_tensor.default, call(target, x, *args, "fxpar:b"))

    out = run_lockstep(graph_of(build), MESH, parts)
    assert [o.tolist() for o in out] == expected


def test_coalesced_collectives_and_groups_over_the_major_axis() -> None:
    def build(call, x):
        pair = call(c10d.all_reduce_coalesced.default, [x, x], "sum", "fxpar:a")
        return call(c10d.wait_tensor.default, call(operator.getitem, pair, 1))

    parts = [[torch.tensor(float(r))] for r in range(4)]
    out = run_lockstep(graph_of(build), MESH, parts)
    assert [o.item() for o in out] == [2, 4, 2, 4]


def test_unknown_collectives_are_refused() -> None:
    graph = graph_of(lambda call, x: call(c10d.broadcast.default, x, 0, "fxpar:a"))
    with pytest.raises(PlanError, match="broadcast"):
        run_lockstep(graph, MESH, [[torch.zeros(1)]] * 4)


def test_changes_in_place_stay_on_their_rank() -> None:
    def build(call, x):
        rank = call(rank_ints.offset, str(MESH), ("a", "b"), 1)
        changed = call(aten.fill_.Scalar, x, rank)
        return changed, x

    shared = torch.full((2,), -1.0)
    out = run_lockstep(graph_of(build), MESH, [[shared]] * 4)
    assert [[y.tolist() for y in o] for o in out] == [[[r, r]] * 2 for r in range(4)]


@pytest.mark.parametrize(
    ("target", "args", "axes", "sources"),
    [
        (torch.ops.fxpar.permute.default, ([1, 0],), "b", (1, 0, 3, 2)),
        (c10d.all_reduce.default, ("sum",), "one", (0, 1, 2, 3)),
    ],
    ids=["permute", "a group of one rank"],
)
def test_what_a_collective_gives_has_memory_of_its_own(
    target: Any, args: Any, axes: str, sources: tuple[int, ...]
) -> None:
    """A rank that writes over what it sent changes nothing that another one got."""

    def build(call, x):
        got = call(c10d.wait_tensor.default, call(target, x, *args, f"fxpar:{axes}"))
        call(aten.copy_.default, x, call(aten.neg.default, x))
        return got

    parts = [[torch.tensor([r + 1.0])] for r in range(4)]
    out = run_lockstep(graph_of(build), Mesh.parse("a=2,b=2,one=1"), parts)
    assert [o.item() for o in out] == [r + 1.0 for r in sources]


def test_values_are_freed_after_their_last_use() -> None:
    alive = []

    def made(x: torch.Tensor) -> torch.Tensor:
        out = x + 1
        alive.append(weakref.ref(out))
        return out

    def check(x: torch.Tensor) -> torch.Tensor:
        assert [ref() is None for ref in alive] == [True, False]
        return x

    graph = graph_of(lambda call, x: call(check, call(made, call(made, x))))
    run_lockstep(graph, MESH, [[torch.zeros(1)]] * 4)


def test_attributes_come_from_the_module() -> None:
    graph = fx.Graph()
    graph.output(graph.get_attr("inner.weight"))
    root = torch.nn.Module()
    root.inner = torch.nn.Linear(1, 1)
    module = fx.GraphModule(root, graph)
    for given in (module, module.graph):
        assert run_lockstep(given, MESH, [[]] * 4)[3] is root.inner.weight


def test_many_ranks_run_in_reasonable_time() -> None:
    """64 ranks, 1000 nodes; slow only if each node costs milliseconds."""
    mesh = Mesh.parse("a=8,b=8")

    def build(call, x):
        for _ in range(499):
            x = call(c10d.all_reduce.default, x, "max", "fxpar:a")
            x = call(aten.neg.default, x)
        return x

    parts = [[torch.tensor(float(r))] for r in range(64)]
    out = run_lockstep(graph_of(build), mesh, parts)
    assert len({id(o) for o in out}) == 8


@pytest.mark.parametrize(
    "spec",
    [
        "[_, _]",
        "[b+a, _]",
        "[a, b]",
        "[_, b] partial(sum: a)",
        "[_, _] partial(max: a)",
    ],
)
def test_scatter_and_gather_are_inverse(spec: str) -> None:
    x = torch.randn(4, 6)
    parts = scatter(x, Spec.parse(spec), MESH)
    assert torch.equal(gather(parts, Spec.parse(spec), MESH), x)


def test_scatter_shares_replicas_and_keeps_the_order_of_dims() -> None:
    x = torch.randn(6, 4).t()
    parts = scatter(x, Spec("a", None), MESH)
    assert parts[0] is parts[1] is not parts[2]
    assert parts[0].stride() == (1, 2)
    assert scatter(x, Spec(None, None), MESH)[3] is x


def test_gather_refuses_replicas_that_differ() -> None:
    spec = Spec("a")
    parts = [part.clone() for part in scatter(torch.randn(4), spec, MESH)]
    parts[3][1] += 1
    with pytest.raises(AssertionError, match=r"ranks 2 and 3 .* shard \(1,\) of \[a\]"):
        gather(parts, spec, MESH)
    with pytest.raises(AssertionError, match="float64"):
        gather([parts[0], parts[1].double(), parts[2], parts[2]], spec, MESH)
    with pytest.raises(AssertionError, match="ranks disagree"):
        gather([1, 1, 2, 1], Spec(), MESH)
    assert gather([1, 1, 1, 1], Spec(), MESH) == 1


def test_gather_takes_nan_for_equal() -> None:
    parts = [torch.tensor([float("nan"), 1.0]) for _ in range(4)]
    assert gather(parts, Spec(None), MESH).isnan().tolist() == [True, False]


@pytest.mark.parametrize("lies", [("tp", None), (None, "tp")])
def test_numbers_that_torch_counts_in_compiled_code_alone(lies: Any) -> None:
    """The rows of an identity matrix of more than 255, as Inductor counts them."""

    def masked(x: torch.Tensor) -> torch.Tensor:
        return x * torch.eye(260, dtype=x.dtype)

    x = torch.rand(260, 260, dtype=torch.float64)
    plan = fxpar.plan(masked, x, mesh="tp=2", in_specs=[lies], mode="propagate")
    counts = plan.result.normalized.find_nodes(op="call_function", target=IOTA)
    assert torch.uint16 in {node.kwargs["dtype"] for node in counts}
    torch.testing.assert_close(plan.simulate(x), masked(x))
