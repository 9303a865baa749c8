"""Crossings of parameters at rest leave a graph; what rests where is kept beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from fxpar.choose_plan import fastest_plan
from fxpar.errors import MeshError, PlanError
from fxpar.features.at_rest import crossings as _crossings  # noqa: F401  (kernels)
from fxpar.passes.boundaries import Boundaries, absorb
from fxpar.passes.simulate.emulate_collectives import gather, scatter
from fxpar.passes.simulate.lockstep import run_lockstep
from fxpar.runtime.steps.pipeline_state import JointState
from fxpar.runtime.tracing import TracedCall, read_signature
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan_request import Request
from fxpar.sharding.program import Output, Signature
from fxpar.sharding.spec import Spec
from tests.helpers.pairs import diagonal

aten = torch.ops.aten
CONVERT = torch.ops.prims.convert_element_type.default
MESH = Mesh.parse("dp=2,tp=2")
SHAPE = (8, 4)

Use = Callable[["Layer", torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    """Holds rank 0's part of a weight, as a sharded module does, and uses it."""

    def __init__(self, use: Use, spec: str, **how: Any) -> None:
        super().__init__()
        self.use, self.spec, self.how = use, spec, how
        part = Spec.parse(spec).local_shape(MESH, SHAPE)
        self.weight = nn.Parameter(torch.zeros(part))

    def whole(self, local: torch.Tensor | None = None) -> torch.Tensor:
        how = {"mesh": str(MESH), "hint": "?,?", "reduce": ""} | self.how
        return torch.ops.fxpar.to_global(
            self.weight if local is None else local,
            list(SHAPE),
            self.spec,
            how["hint"],
            how["mesh"],
            how["reduce"],
            -1,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self, x).square().mean()


class Traced:
    """A layer's joint graph, its crossings taken out."""

    def __init__(self, use: Use, spec: str = "[tp+dp, _]", **how: Any) -> None:
        self.x = torch.randn(16, SHAPE[1], generator=torch.Generator().manual_seed(1))
        self.call = TracedCall(Layer(use, spec, **how), (self.x,), {}, True)
        self.module, self.fake_mode = self.call.trace()
        self.graph = self.module.graph
        assert crossings(self.graph)
        self.found: Boundaries = absorb(self.graph, self.fake_mode, MESH)
        self.graph.lint()

    @property
    def signature(self) -> Signature:
        return read_signature(
            self.graph,
            lambda kind, payload, node: self.call.declare(kind, payload, node, [None]),
            lambda kind, name, of: Output(name, kind, of),
        )

    def planned(self) -> JointState:
        request = Request(MESH, self.found.declare(self.signature))
        return fastest_plan(self.graph, self.fake_mode, request)

    def train(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and gradient of the weight, computed by all ranks in lockstep."""
        result = self.planned()
        edges, program = result.decision.edges, result.decision.program
        values = {"input": self.x, "parameter": weight, "tangent": torch.ones(())}
        feeds = []
        for declared, v in zip(program.signature.inputs, program.inputs, strict=True):
            spec = edges.specs[v]
            feeds.append(scatter(values[declared.kind], spec, MESH))
        ranks = [list(parts) for parts in zip(*feeds, strict=True)]
        outs = run_lockstep(fx.GraphModule(self.module, result.local), MESH, ranks)
        got = {}
        for k, out in enumerate(program.signature.outputs):
            if edges.outputs[k] is not None:
                parts = [rank[k] for rank in outs]
                got[out.kind] = gather(parts, edges.outputs[k], MESH)
        return got["output"], got["gradient"]


def crossings(graph: fx.Graph) -> list[str]:
    return [n.name for n in graph.nodes if str(n.target).startswith("fxpar.to_")]


def calls(graph: fx.Graph) -> list[str]:
    return [
        str(n.target).removesuffix(".default")
        for n in graph.nodes
        if n.op == "call_function"
    ]


def linear(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return x @ layer.whole().t()


def test_crossings_become_specs_of_inputs_and_gradients() -> None:
    traced = Traced(linear)
    assert not crossings(traced.graph)
    spec = Spec(["tp", "dp"], None)
    assert list(traced.found.inputs.values()) == [(spec, None)]
    assert list(traced.found.gradients.values()) == [spec]
    shapes = {
        tuple(n.meta["val"].shape)
        for n in traced.graph.find_nodes(op="placeholder")
        if n.meta["val"].dim()
    }
    assert shapes == {SHAPE, (16, 4)}
    declared = traced.found.declare(traced.signature)
    (parameter,) = (i for i in declared.inputs if i.kind == "parameter")
    (gradient,) = (o for o in declared.outputs if o.kind == "gradient")
    assert parameter.at_rest == gradient.at_rest == spec
    assert parameter.use is None  # an open hint says nothing
    others = [i for i in declared.inputs if i.kind != "parameter"]
    assert [i.at_rest for i in others] == [None] * len(others)


def test_a_hint_is_where_its_use_starts() -> None:
    traced = Traced(linear, "[tp, dp]", hint="tp,?")
    declared = traced.found.declare(traced.signature)
    (parameter,) = (i for i in declared.inputs if i.kind == "parameter")
    assert parameter.at_rest == Spec("tp", "dp") and parameter.use == ("tp", "?")


def twice(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """As where two modules share a parameter: a crossing each."""
    return (x @ layer.whole().t()).tanh() @ layer.whole()


def aliased(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """As DTensor.to_local leaves it: a view between parameter and crossing."""
    return x @ layer.whole(layer.weight.view_as(layer.weight)).t()


def cast(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return (x.bfloat16() @ layer.whole().bfloat16().t()).float()


def plain(use: Use, weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Loss and gradient on one device."""

    class Whole(Layer):
        def whole(self, local: torch.Tensor | None = None) -> torch.Tensor:
            return self.weight

    layer = Whole(use, "[_, _]")
    layer.weight = nn.Parameter(weight.clone())
    loss = layer(x)
    loss.backward()
    return loss.detach(), layer.weight.grad


@pytest.mark.parametrize(
    ("use", "spec"),
    diagonal(
        [linear, twice, aliased, cast], ["[tp+dp, _]", "[tp, dp]", "[_, dp]", "[_, _]"]
    ),
)
def test_numbers_are_those_of_one_device(use: Use, spec: str) -> None:
    traced = Traced(use, spec)
    assert not crossings(traced.graph)
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    want = plain(use, weight, traced.x)
    rough = {"rtol": 2e-2, "atol": 1e-2} if use is cast else {}
    torch.testing.assert_close(traced.train(weight), want, **rough)


def test_a_shared_parameter_has_one_gradient() -> None:
    traced = Traced(twice)
    assert list(traced.found.gradients.values()) == [Spec(("tp", "dp"), None)]
    assert len(traced.found.inputs) == 1


@pytest.mark.parametrize("reduce", ["bfloat16", "float64"])
def test_a_gradient_is_reduced_in_the_dtype_asked_for(reduce: str) -> None:
    traced = Traced(linear, reduce=reduce)
    (x,) = (n for n in traced.graph.nodes if n.meta.get("fxpar_reduce_here"))
    assert x.target is CONVERT and x.args[1] is getattr(torch, reduce)
    (back,) = x.users
    assert back.target is CONVERT and back.args[1] is torch.float32
    local = traced.planned().local
    scattered = [n for n in local.nodes if "reduce_scatter" in str(n.target)]
    assert scattered
    assert {n.meta["val"].dtype for n in scattered} == {x.args[1]}


def test_no_cast_where_a_gradient_has_the_dtype_asked_for() -> None:
    traced = Traced(linear, reduce="float32")
    assert CONVERT not in {n.target for n in traced.graph.nodes}


class Unreduced(torch.autograd.Function):
    """The global value, with a gradient that is not reduced over dp."""

    SPEC = Spec("tp", None, partial={"dp": "sum"})

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, *how: Any) -> torch.Tensor:
        return torch.ops.fxpar.to_global(part, *how)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        how = str(Unreduced.SPEC), str(MESH), ""
        return torch.ops.fxpar.to_local(gradient, *how), *[None] * 6


def unreduced(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    how = list(SHAPE), layer.spec, "?,?", str(MESH), "", -1
    return x @ Unreduced.apply(layer.weight, *how).t()


def summed(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return unreduced(layer, x).sum(0)


@pytest.mark.parametrize("use", [summed, unreduced])
def test_a_gradient_may_stay_unreduced_over_batch_axes(use: Use) -> None:
    traced = Traced(use, "[tp, _]")
    (spec,) = traced.found.gradients.values()
    assert spec == Unreduced.SPEC
    result = traced.planned()
    assert spec in result.decision.edges.outputs
    size = 4 * 4 * 4  # bytes of a rank's gradient; sums of activations are smaller
    large = {(c.kind, c.axes) for c in result.plan.collectives if c.bytes >= size}
    assert not large


def of_a_part(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return x @ layer.whole(layer.weight * 2.0).t()


def sliced(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return x @ layer.whole(torch.cat([layer.weight[:1], layer.weight[1:]])).t()


@pytest.mark.parametrize(
    ("use", "name"), [(of_a_part, "aten.mul"), (sliced, "aten.cat")]
)
def test_computing_with_a_part_is_refused(use: Use, name: str) -> None:
    with pytest.raises(PlanError) as caught:
        Traced(use)
    assert name in caught.value.what and "one rank's part" in caught.value.what
    assert "module's attribute" in caught.value.fix
    assert __file__.rsplit("/", 1)[-1] in (caught.value.where or "")


class Doubled(torch.autograd.Function):
    """The identity, with twice the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2.0


def scaled_gradient(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return x @ layer.whole(Doubled.apply(layer.weight)).t()


def test_computing_with_the_gradient_of_a_part_is_refused() -> None:
    with pytest.raises(PlanError, match="one rank's part"):
        Traced(scaled_gradient)


def beside(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """Uses the global value, and one rank's part as well."""
    return x @ layer.whole().t() * layer.weight.sum()


def test_using_a_part_beside_the_global_value_is_refused() -> None:
    with pytest.raises(PlanError, match="one rank's part"):
        Traced(beside)


class Pair(Layer):
    """A second parameter with the gradient of the first."""

    def __init__(self, use: Use, spec: str) -> None:
        super().__init__(use, spec)
        self.other = nn.Parameter(torch.zeros_like(self.weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ (self.whole() + self.whole(self.other)).t()).square().mean()


def test_gradients_do_not_share_memory() -> None:
    call = TracedCall(Pair(linear, "[tp+dp, _]"), (torch.randn(16, 4),), {}, True)
    module, fake_mode = call.trace()
    absorb(module.graph, fake_mode, MESH)
    made = [x for x in module.graph.output_node().args[0] if x is not None][1:]
    assert {x.target for x in made} == {aten.alias.default, aten.clone.default}


def test_another_mesh_is_refused() -> None:
    with pytest.raises(MeshError) as caught:
        Traced(linear, mesh="tp=2,dp=2")
    assert "tp=2,dp=2" in caught.value.what and str(MESH) in caught.value.what
    assert "FXPAR_MESH" in caught.value.fix


def test_a_graph_without_crossings_is_left_alone() -> None:
    call = TracedCall(nn.Linear(4, 4), (torch.randn(4, 4),), {}, True)
    module, fake_mode = call.trace()
    before = str(module.graph)
    found = absorb(module.graph, fake_mode, MESH)
    assert str(module.graph) == before
    assert found == Boundaries()
