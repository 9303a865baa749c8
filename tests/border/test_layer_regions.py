"""Dynamo traces one of the layers that are alike: the graph and its guards are those of
tracing each. A layer that is not as the one that was traced is traced itself."""

from __future__ import annotations

import contextlib
import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from fxpar._torch import dynamo, flat_regions, layer_regions
from tests.helpers import models
from tests.helpers.patched import needs_patches

pytestmark = [needs_patches, pytest.mark.usefixtures("propagated")]

pytest.importorskip("torch._dynamo.variables.invoke_subgraph")

Tensor = torch.Tensor
LAYERS, WIDTH = 4, 8


@dataclass
class Traced:
    """What Dynamo made of calls. ``regions``: calls of each region, by graph."""

    graphs: list[fx.GraphModule] = field(default_factory=list)
    regions: list[list[int]] = field(default_factory=list)
    guards: list[Counter[Any]] = field(default_factory=list)
    result: Any = None


@pytest.fixture(autouse=True)
def _several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One alone traces as Dynamo does."""
    monkeypatch.setattr(dynamo, "is_only_rank", lambda: False)


def region_calls(gm: fx.GraphModule) -> list[int]:
    region = torch.ops.higher_order.invoke_subgraph
    return sorted(
        Counter(
            node.args[1]
            for node in gm.graph.find_nodes(op="call_function", target=region)
        ).values()
    )


@contextlib.contextmanager
def guards_seen(seen: list[Counter[Any]]) -> Iterator[None]:
    """Inside, guards are noted by frame: their source and what they say."""
    from torch._dynamo import guards

    plain = guards.CheckFunctionManager.__init__

    def init(self: Any, code: Any, output_graph: Any, *args: Any, **how: Any) -> None:
        named = ((g.originating_source.name, g) for g in output_graph.guards)
        seen.append(Counter((name, g.create_fn_name()) for name, g in named))
        plain(self, code, output_graph, *args, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards.CheckFunctionManager, "__init__", init)
        yield


def trace(call: Callable[..., Any], *args: Any, served: bool, **kwargs: Any) -> Traced:
    """What Dynamo gives a backend, and what the call gives."""
    traced = Traced()

    def backend(gm: fx.GraphModule, examples: Any) -> Any:
        traced.regions.append(region_calls(gm))
        traced.graphs.append(flat_regions.without_regions(gm))
        return traced.graphs[-1].forward

    if served:
        layer_regions.serve(backend)
    torch.compiler.reset()
    with guards_seen(traced.guards):
        traced.result = torch.compile(call, backend=backend)(*args, **kwargs)
    return traced


def said(
    gm: fx.GraphModule, keys: dict[str, str], *, is_body: bool = False
) -> list[Any]:
    """All that is said of each op, by place in the graph, and of its inputs, which may
    stand in another order; those of a body have any names."""
    at: dict[fx.Node, Any] = {}
    lines: list[Any] = []
    inputs = gm.graph.find_nodes(op="placeholder")
    if not is_body:
        inputs = sorted(inputs, key=lambda n: str(n.target))
    for node in [*inputs, *gm.graph.nodes]:
        if node in at:
            continue
        at[node] = len(at)
        what: Any = None if node.op == "placeholder" and is_body else node.target
        if node.op == "get_attr":
            held = getattr(gm, str(node.target))
            calls = isinstance(held, fx.GraphModule)
            what = said(held, keys, is_body=True) if calls else repr(held)
        meta, value = node.meta, node.meta.get("example_value")
        modules = meta.get("nn_module_stack") or {}
        if isinstance(value, Tensor):
            # Bodies that differ in what needs gradients alone are one to Dynamo.
            grad = value.requires_grad if node.op == "placeholder" else None
            value = value.shape, value.stride(), value.dtype, grad
        elif isinstance(value, fx.GraphModule):
            value = None
        line: list[Any] = [
            node.op,
            what,
            fx.node.map_arg((node.args, dict(node.kwargs)), at.__getitem__),
            value,
        ]
        if node.op.startswith("call_"):
            line += [
                [
                    (keys.get(key.split("@")[0]), *named)
                    for key, named in modules.items()
                ],
                meta.get("stack_trace"),
                [each[1] for each in meta.get("source_fn_stack", ())],
            ]
        lines.append(re.sub(r"0x[0-9a-f]+|wrap_body_\d+(_\d+)*", "", repr(line)))
    return lines


def assert_same(model: nn.Module, *args: Any, calls: list[int], **kwargs: Any) -> None:
    """That regions change no graph, leave no guard out, and are called so often."""
    keys = {str(id(m)): name for name, m in model.named_modules()}
    model(*args, **kwargs)  # some set attributes in their first forward
    state = copy.deepcopy(model.state_dict())
    torch.manual_seed(0)
    plain = trace(model, *args, served=False, **kwargs)
    model.load_state_dict(state)
    torch.manual_seed(0)
    ours = trace(model, *args, served=True, **kwargs)
    assert [n for graph in ours.regions for n in graph] == calls
    assert not any(plain.regions)
    assert len(ours.graphs) == len(plain.graphs)
    for mine, theirs in zip(ours.graphs, plain.graphs, strict=True):
        assert said(mine, keys) == said(theirs, keys)
    for mine, theirs in zip(ours.guards, plain.guards, strict=True):
        left_out = {g for g in theirs if "self" in g[0] and "type(" not in g[0]}
        left_out -= set(mine)
        # A class is known to be that of the first layer, or which it is.
        classes = {name for name, kind in mine if kind == "CLASS_MATCH"}
        left_out -= {(name, "DUPLICATE_INPUT") for name in classes}
        assert sorted(left_out) == []
    torch.testing.assert_close(ours.result, plain.result, rtol=0, atol=0)


class Layer(nn.Module):
    """A block of two products, with dropout that can be set."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.scale, self.drop = 1.0, 0.0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x)))) * self.scale
        if self.drop:
            y = F.dropout(y, self.drop, self.training)
        return x + y if mask is None else x + y * mask


class Stack(nn.Module):
    """Layers in a list, what they begin with, and what is made of their results."""

    def __init__(self, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))

    def forward(self, x: Tensor, **how: Any) -> Tensor:
        x = x * self.first
        for layer in self.layers:
            x = layer(x, **how)
        return x.square().mean()


def rows() -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("llama/4", [4]),
        pytest.param("gpt2/4", [4], marks=pytest.mark.slow),
        pytest.param("bert/4", [4], marks=pytest.mark.slow),
        pytest.param("vit/4", [4], marks=pytest.mark.slow),
        ("mixtral/3", [3]),
        # What its layers give has holes.
        pytest.param("t5/4", [], marks=pytest.mark.slow),
    ],
)
def test_models_of_transformers(name: str, calls: list[int]) -> None:
    model, batch = models.build_loss(name)
    assert_same(model, calls=calls, **batch)


def test_sizes_that_are_open() -> None:
    model, x = Stack(), rows()
    torch._dynamo.mark_dynamic(x, 0)
    assert_same(model, x, calls=[4])


def test_operands_in_containers_and_several_results() -> None:
    class Several(Layer):
        def forward(self, x: Tensor, pair: Any, *, more: Any) -> Any:  # type: ignore[override]
            y = super().forward(x * pair[0] + pair[1][0])
            return y, {"norm": y.square().mean(), "n": more["n"]}["norm"]

    class Of(Stack):
        def forward(self, x: Tensor, **how: Any) -> Tensor:
            x = x * self.first
            total = x.new_zeros(())
            for layer in self.layers:
                x, penalty = layer(x, (x.mean(), [x.sum()]), more={"n": 3})
                total = total + penalty
            return x.sum() + total

    assert_same(Of(Several), rows(), calls=[4])


def test_a_sequential_and_a_checkpoint_inside() -> None:
    class Inner(Layer):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False) + x

    model = nn.Sequential(nn.Linear(8, 8), *(Inner() for _ in range(LAYERS)))
    assert_same(model, rows(), calls=[4])


def test_buffers_that_layers_write() -> None:
    class Counting(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.bn = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return super().forward(self.bn(x)) + self.mean

    assert_same(Stack(Counting), rows(), calls=[4])


def test_shapes_of_parameters_that_are_not_read() -> None:
    class Shaped(Layer):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return x * self.up.weight.shape[0] + self.down(F.silu(x.repeat(1, 2)))

    model = Stack(Shaped)
    assert_same(model, rows(), calls=[4])


def set_in(index: int, name: str, value: Any) -> Callable[[Stack], None]:
    return lambda model: setattr(model.layers[index], name, value)


def hooked(model: Stack) -> None:
    model.layers[2].up.register_forward_hook(lambda m, x, y: y + 1)


def patched(model: Stack) -> None:
    model.layers[2].up.forward = lambda x: x.repeat(1, 2)  # type: ignore[method-assign]


def tied(model: Stack) -> None:
    for each in (0, 1):
        model.layers[each].down.bias = model.layers[each].norm.bias


def frozen(model: Stack) -> None:
    model.layers[2].requires_grad_(False)


def other_module(model: Stack) -> None:
    model.layers[1].norm = nn.RMSNorm(WIDTH)  # type: ignore[assignment]


def in_evaluation(model: Stack) -> None:
    for layer in model.layers:
        layer.drop = 0.5  # type: ignore[assignment]
    model.layers[3].eval()


@pytest.mark.parametrize(
    ("change", "calls"),
    [
        (set_in(1, "scale", 2.0), [3]),  # Dynamo itself inlines what is called once
        (set_in(2, "drop", 0.5), [3]),
        (hooked, [3]),
        (patched, [3]),
        (tied, [2, 2]),
        (frozen, [3]),
        (other_module, [3]),
        (in_evaluation, [3]),
    ],
)
def test_a_layer_that_is_other_is_traced_itself(
    change: Callable[[Stack], None], calls: list[int]
) -> None:
    model = Stack()
    change(model)
    assert_same(model, rows(), calls=calls)


class Settings:
    def __init__(self, scale: float) -> None:
        self.scale = scale


@pytest.mark.parametrize("other", [0, 2])
def test_one_object_in_all_layers_but_one(other: int) -> None:
    """Dynamo guards what an object says where it saw the object first."""

    class Set(Layer):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x) * self.settings.scale

    class Of(Stack):
        def forward(self, x: Tensor, **how: Any) -> Tensor:
            x = x * self.first
            return super().forward(x * self.settings.scale)

    model = Of(Set)
    model.settings = Settings(3.0)
    for layer in model.layers:
        layer.settings = model.settings
    model.layers[other].settings = Settings(5.0)
    assert_same(model, rows(), calls=[3])


class Place:
    """Which layer runs, as the model tells its layers."""

    at, seen = 0, [0]


def told_by_attribute(model: Stack, i: int) -> None:
    Place.at = i


def told_in_a_list(model: Stack, i: int) -> None:
    Place.seen[0] = i


def told_by_a_global(model: Stack, i: int) -> None:
    global PLACE
    PLACE = i


def told_by_the_layer(model: Stack, i: int) -> None:
    model.layers[i].scale = float(i)  # type: ignore[assignment]


def told_by_its_mode(model: Stack, i: int) -> None:
    model.layers[i].train(i % 2 == 0)


PLACE = 0


@pytest.mark.parametrize(
    "tell",
    [
        *(told_by_attribute, told_in_a_list, told_by_a_global),
        *(told_by_the_layer, told_by_its_mode),
    ],
)
def test_what_the_model_sets_between_its_layers(
    tell: Callable[[Stack, int], None],
) -> None:
    """Guards on a layer hold for what was there before the call."""

    class Told(Layer):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            told = Place.at + Place.seen[0] + PLACE + self.training
            return super().forward(x, mask) * (1 + told)

    class Telling(Stack):
        def forward(self, x: Tensor, **how: Any) -> Tensor:
            x = x * self.first
            for i, layer in enumerate(self.layers):
                tell(self, i)
                x = layer(x, **how)
            return x.square().mean()

    assert_same(Telling(Told), rows(), calls=[])


def test_modes_in_which_layers_are_called() -> None:
    class Of(Stack):
        def forward(self, x: Tensor, **how: Any) -> Tensor:
            x = x * self.first
            with self.mode():
                for layer in self.layers:
                    x = layer(x)
            for layer in self.layers:
                x = layer(x)
            return x.sum()

    model = Of()
    model.mode = torch.no_grad
    assert_same(model, rows().detach(), calls=[])
    model.mode = lambda: torch.autocast("cpu", torch.bfloat16)
    assert_same(model, rows(), calls=[])
    model.mode = contextlib.nullcontext
    assert_same(model, rows(), calls=[8])


def test_layers_of_many_kinds_are_traced_each() -> None:
    model = Stack()
    for i, layer in enumerate(model.layers):
        layer.scale = 1.0 + i  # type: ignore[assignment]
    assert_same(model, rows(), calls=[])


class Pair(Layer):
    """Reads two tensors, which may be one."""

    def forward(self, x: Tensor, other: Any = None) -> Tensor:
        return super().forward(x) + 2 * other


def test_operands_that_are_one_in_some_layers() -> None:
    class Of(Stack):
        def forward(self, x: Tensor, **how: Any) -> Tensor:
            x = x * self.first
            first = x = x * 2
            for layer in self.layers:
                x = layer(x, first)  # the same to the first layer
            return x.sum()

    assert_same(Of(Pair), rows(), calls=[3])

    class Typed(Stack):
        def forward(self, x: Tensor, **how: Any) -> Tensor:
            x = x * self.first
            whole = (x.detach() * 4).long()
            for layer, one in zip(self.layers, (1, 1.5, True, 1.0), strict=True):
                x = x + layer(whole, one)
            return x.sum()

    class Times(Layer):
        def forward(self, x: Tensor, other: Any = None) -> Tensor:
            return x * other // 2

    assert_same(Typed(Times), rows(), calls=[])


def test_an_operand_that_a_layer_also_holds() -> None:
    class Of(Stack):
        def forward(self, x: Tensor, **how: Any) -> Tensor:
            x = x * self.first
            for layer in self.layers:
                x = layer(x, self.layers[0].norm.weight)
            return x.sum()

    assert_same(Of(Pair), rows(), calls=[])


def test_results_that_are_written_to() -> None:
    class Of(Stack):
        def forward(self, x: Tensor, **how: Any) -> Tensor:
            x = x * self.first
            for layer in self.layers:
                x = layer(x)
                x += 1
            return x.sum()

    assert_same(Of(), rows(), calls=[4])


def test_results_in_a_list_or_twice() -> None:
    class Listed(Layer):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
            x = super().forward(x)
            return [x, x.sum()] if self.scale == 1.0 else (x, x)

    class Of(Stack):
        def forward(self, x: Tensor, **how: Any) -> Tensor:
            x = x * self.first
            for layer in self.layers:
                results = layer(x)
                results = results + (type(results)(results))
                x = results[0] + results[3].sum()
            return x.sum()

    assert_same(Of(Listed), rows(), calls=[])
    model = Of(Listed)
    for layer in model.layers:
        layer.scale = 2.0  # type: ignore[assignment]
    assert_same(model, rows(), calls=[])


def test_layers_under_transforms() -> None:
    class Of(Stack):
        def forward(self, x: Tensor, **how: Any) -> Tensor:
            x = x * self.first

            def each(row: Tensor) -> Tensor:
                for layer in self.layers:
                    row = layer(row)
                return row

            return torch.func.vmap(each)(x).sum()

    assert_same(Of(), rows(), calls=[])


class Writes(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.seen = x.mean()
        return super().forward(x)


class Itself(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x if self.scale == 1.0 else super().forward(x)


class GivesView(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x).view(2, 2, WIDTH).view(4, WIDTH) + x.view(4, WIDTH)


class Breaks(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


class Selects(Layer):
    """Reads as many rows as data say."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        large = (x.detach().mean(1) > 0).nonzero().flatten()
        return super().forward(x) + x[large].sum()


@pytest.mark.parametrize("layer", [Writes, Itself, Breaks, Selects])
def test_layers_that_are_no_regions_are_traced_each(layer: type[Layer]) -> None:
    settings = {"capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(settings):
        assert_same(Stack(layer), rows(), calls=[])


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * x**2


def test_bodies_of_other_ops_inside() -> None:
    class Bodies(Layer):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            y = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
            return super().forward(Cubed.apply(y))

    assert_same(Stack(Bodies), rows(), calls=[4])


def test_a_layer_that_fails_fails_as_without() -> None:
    class Fails(Layer):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x @ x)

    with pytest.raises(Exception) as plain:
        trace(Stack(Fails), rows(), served=False)
    with pytest.raises(type(plain.value)) as ours:
        trace(Stack(Fails), rows(), served=True)
    assert str(ours.value) == str(plain.value)


@pytest.mark.parametrize(
    ("change", "index"),
    [
        ("scale", 0),
        *(
            (change, LAYERS - 1)
            for change in ("scale", "drop", "tie", "freeze", "widen")
        ),
    ],
)
def test_a_change_of_any_layer_is_seen_afterwards(index: int, change: str) -> None:
    """Guards stand for layers that were not traced as well."""
    model, x, counts = Stack().double(), rows().double(), []

    def backend(gm: fx.GraphModule, examples: Any) -> Any:
        counts.append(region_calls(gm))
        return flat_regions.without_regions(gm).forward

    layer_regions.serve(backend)
    torch.compiler.reset()
    compiled = torch.compile(model, backend=backend)
    torch.testing.assert_close(compiled(x), model(x))
    layer: Any = model.layers[index]
    if change == "tie":
        layer.down.bias = layer.norm.bias
    elif change == "freeze":
        layer.up.requires_grad_(False)
    elif change == "widen":
        layer.up, layer.down = nn.Linear(WIDTH, 24).double(), nn.Linear(24, 8).double()
    else:
        setattr(layer, change, 0.999999 if change == "drop" else 3.0)
    torch.manual_seed(5)
    got = compiled(x)
    torch.manual_seed(5)
    torch.testing.assert_close(got, model(x))
    got.backward()
    assert (layer.up.weight.grad is None) == (change == "freeze")
    assert counts[0] == [4]
    assert len(counts) == (1 if change == "tie" else 2)  # which operands are, is open
