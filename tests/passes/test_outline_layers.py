"""Layers that repeat as calls of one body: which are, which are not, and what Inductor
makes of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import fxpar
from fxpar import _torch
from fxpar.features.stages import sums_of_parts
from fxpar.passes.order import outline_layers as outlining
from fxpar.passes.order.outline_layers import INVOKE, LEAST_CALLS, outline_layers
from fxpar.passes.simulate.launches import crossings
from fxpar.runtime.ranks import mean_gradients as _mean_gradients  # noqa: F401
from fxpar.runtime.steps import lowering_steps
from tests.helpers.spawn import shared_pool
from tests.helpers.wrapper import code_of, fake_group, hazards, launches

aten, c10d = torch.ops.aten, torch.ops._c10d_functional

Tensor = torch.Tensor

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
MEGATRON = {
    **{f"*{name}.weight": ("tp", None) for name in COLUMNS},
    **{f"*{name}.weight": (None, "tp") for name in ("o_proj", "down_proj")},
}


def layer(x: Tensor, w: Tensor, *, scale: float = 0.5) -> Tensor:
    """Ops of which the last is a view."""
    x = x * scale
    h = x.view(8, 8)
    h = (h - h.mean(1, keepdim=True)) / (h.var(1, keepdim=True) + 1e-5).sqrt()
    return (x.view(8, 8) + torch.sigmoid(h @ w.t()) * h.exp()).view(4, 16)


def traced(fn: Callable[..., Any], *args: Tensor) -> fx.GraphModule:
    table = _torch.inductor.decompositions()
    module = make_fx(fn, tracing_mode="fake", decomposition_table=table)(*args)
    module.graph.eliminate_dead_code()
    return module


def of_layers(count: int, run: Callable[..., Tensor] = layer) -> Callable[..., Any]:
    def stack(x: Tensor, *ws: Tensor) -> Any:
        for i in range(count):
            x = run(x, ws[i])
        return (x.sum(),)

    return stack


def feeds(count: int) -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 16, dtype=torch.float64)
    return [x, *(torch.randn(8, 8, dtype=torch.float64) for _ in range(count))]


def calls(module: fx.GraphModule) -> list[str]:
    nodes = module.graph.find_nodes(op="call_function", target=INVOKE)
    return [str(node.args[1]) for node in nodes]


def outlined(fn: Callable[..., Any], *args: Tensor) -> fx.GraphModule:
    """The graph of ``fn`` with calls, which gives what it gave."""
    module = traced(fn, *args)
    expected = module(*args)
    assert outline_layers(module.graph) == len(calls(module))
    module.recompile()
    for one, other in zip(module(*args), expected, strict=True):
        assert torch.equal(one, other)
    return module


def test_layers_call_one_body() -> None:
    module = outlined(of_layers(5), *feeds(5))
    assert calls(module) == ["layer0"] * 5
    # What is outside: calls, the views that they are given, what they give, the sum.
    count = sum(node.op == "call_function" for node in module.graph.nodes)
    assert count <= 5 * 3 + 1


def attending(x: Tensor, w: Tensor, *, dropout: float = 0.0) -> Tensor:
    """A layer with an attention in its middle."""
    q, k = ((x * scale).view(1, 2, 4, 8) for scale in (0.5, 2.0))
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    out = flash(q, k, q, dropout)[0].transpose(1, 2).reshape(8, 8)
    return (torch.sigmoid(out @ w) * out.exp()).view(4, 16)


def outside(module: fx.GraphModule, target: Any) -> int:
    """How many calls of an op stand in no body."""
    return len(module.graph.find_nodes(op="call_function", target=target))


def test_attention_that_draws_nothing_is_in_bodies() -> None:
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    module = outlined(of_layers(5, attending), *feeds(5))
    assert calls(module) == ["layer0"] * 5
    assert outside(module, flash) == 0
    draws = traced(of_layers(5, partial(attending, dropout=0.1)), *feeds(5))
    outline_layers(draws.graph)
    assert outside(draws, flash) == 5


def test_values_that_a_pass_changed_are_made_again() -> None:
    """In a body, and so in its calls."""
    from torch._inductor.fx_utils import FakeTensorUpdater
    from torch._inductor.virtualized import V

    module = outlined(of_layers(5), *feeds(5))
    nodes = [n for n in module.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    mode = _torch.fake.fake_mode_of([n.meta["val"] for n in nodes])
    body = module.layer0.graph
    with V.set_fake_mode(mode):
        updater = FakeTensorUpdater(module)
        *_, output = body.nodes
        (result,) = output.args[0]
        with body.inserting_before(output):
            double = body.call_function(torch.ops.aten.add.Tensor, (result, result))
        output.args = ((double,),)
        assert updater.incremental_update() > 5


def test_too_few_layers_are_left_alone() -> None:
    few = LEAST_CALLS - 1
    module = traced(of_layers(few), *feeds(few))
    before = str(module.graph)
    assert outline_layers(module.graph) == 0
    assert str(module.graph) == before


def test_a_layer_with_another_constant_is_not_joined() -> None:
    def odd(x: Tensor, *ws: Tensor) -> Any:
        for i, w in enumerate(ws):
            x = layer(x, w, scale=0.25 if i == 3 else 0.5)
        return (x.sum(),)

    module = outlined(odd, *feeds(8))
    assert calls(module) == ["layer0"] * 7
    for node in module.layer0.graph.nodes:
        assert 0.25 not in node.args


def test_what_is_wired_in_another_way_is_not_joined() -> None:
    def crossed(x: Tensor, *ws: Tensor) -> Any:
        for i, w in enumerate(ws):
            h = x * 0.5
            a, b = h.sin() + 1, h.cos() + 1
            for _ in range(4):
                a, b = a * b + 1, b * a + 2
            x = (a - b if i % 2 else b - a) @ w
        return (x.sum(),)

    x, *ws = feeds(8)
    module = outlined(crossed, x.view(8, 8), *ws)
    assert set(calls(module)) <= {"layer0", "layer1"}
    assert calls(module)[:2] != ["layer0", "layer0"]


def test_writes_stay_between_calls() -> None:
    def fn(x: Tensor, *ws: Tensor) -> Any:
        for w in ws:
            x = layer(x, w)
            w.mul_(2)
        return (x.sum(),)

    def fed() -> list[Tensor]:
        return [t.clone() for t in feeds(5)]

    module = traced(fn, *fed())
    assert outline_layers(module.graph) == 5
    module.recompile()
    one, other = fed(), fed()
    assert torch.equal(module(*one)[0], fn(*other)[0])
    assert all(map(torch.equal, one, other))
    for node in module.layer0.graph.nodes:
        assert "mul_" not in str(node.target)


@pytest.mark.parametrize("is_counted", [False, True], ids=["alone", "counted"])
def test_updates_are_in_place_outside_of_bodies(is_counted: bool) -> None:
    """So they are if little besides is read, as a step's number."""

    def fn(*ws: Tensor) -> Any:
        total = ws[0].sum()
        for w in ws:
            new = layer(w.view(4, 16), w)
            total = total + new.mean() if is_counted else total
            w.copy_(new.view(8, 8))
        return (total,)

    module = traced(fn, *feeds(8)[1:])
    assert outline_layers(module.graph) == 0


def test_bodies_give_memory_of_their_own() -> None:
    def fn(x: Tensor, *ws: Tensor) -> Any:
        saved = []
        for w in ws:
            saved += [w.t(), x.view(8, 8)]
            x = layer(x, w)
        return (x.sum(), *saved)

    module = outlined(fn, *feeds(5))
    assert calls(module) == ["layer0"] * 4  # the first shows what is given
    *_, output = module.layer0.graph.nodes
    assert len(output.args[0]) == 1 and "view" not in str(output.args[0][0].target)


def test_a_reshape_that_copies_is_in_the_body() -> None:
    """A weight is the columns of a bucket that all ranks sent."""

    def stack(x: Tensor, *ws: Tensor) -> Any:
        for w in ws:
            x = layer(x, w[:, 4:36].clone().view(8, 8))
        return (x.sum(),)

    args = [torch.randn(4, 16), *(torch.randn(2, 40) for _ in range(4))]
    module = traced(stack, *args)
    for node in module.graph.find_nodes(op="call_function", target=aten.clone.default):
        columns, (view, *_) = node.args[0], node.users
        with module.graph.inserting_before(view):
            reshape = module.graph.call_function(
                aten.reshape.default, (columns, [8, 8])
            )
        reshape.meta = dict(view.meta)
        view.replace_all_uses_with(reshape)
    module.graph.eliminate_dead_code()
    expected = module(*args)
    assert outline_layers(module.graph) == 4
    assert not outside(module, aten.reshape.default)
    module.recompile()
    assert torch.equal(module(*args)[0], expected[0])


def gathered(group: str) -> Callable[..., Any]:
    """Weights are gathered a layer ahead, what layers give is reduced, beside them."""

    def start(w: Tensor) -> Tensor:
        return c10d.all_gather_into_tensor(w * 2, 4, group)

    def fn(x: Tensor, *ws: Tensor) -> Any:
        ahead, late = start(ws[0]), None
        for i in range(len(ws)):
            w = c10d.wait_tensor(ahead)
            if i + 1 < len(ws):
                ahead = start(ws[i + 1])
            before, x = late, layer(x, w)
            late = c10d.all_reduce(x * 3, "sum", group)
            if before is not None:
                x = x + c10d.wait_tensor(before)
        return (x, c10d.wait_tensor(late))

    return fn


def test_nothing_touches_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_group(4) as group:
        args = [torch.randn(4, 16), *(torch.randn(2, 8) for _ in range(6))]
        module = traced(gathered(group), *args)
        assert outline_layers(module.graph) >= 4
        for body in (m for n, m in module.named_children() if n.startswith("layer")):
            assert "c10d" not in str(body.graph)
        code = code_of(module.graph, monkeypatch, module)
    assert launches(code) == 12
    assert hazards(code) == []
    early = re.sub(r"((buf\d+) = .*\.all_gather.*)", r"\1\nlayer0_args = [\2]", code)
    assert "is read before its wait" in hazards(early)[0]
    assert code.count("def layer0(args)") == 1


def reduced(group: str) -> Callable[..., Any]:
    """Layers in which a product is reduced beside another op, and waited for there."""

    def fn(x: Tensor, *ws: Tensor) -> Any:
        for w in ws:
            product = c10d.all_reduce(x.view(8, 8) @ w, "sum", group)
            beside = x.view(8, 8).sin().cos()
            x = layer((c10d.wait_tensor(product) * beside).view(4, 16), w)
        return (x.sum(),)

    return fn


def test_a_collective_that_ends_in_its_layer_is_in_the_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_group(2) as group:
        module = traced(reduced(group), *feeds(5))
        before = crossings(module.graph)
        assert outline_layers(module.graph) == 4  # the first shows what is given
        assert crossings(module.graph) == before and len(before) == 5
        assert outside(module, c10d.all_reduce.default) == 1
        code = code_of(module.graph, monkeypatch, module)
        uneven = traced(reduced(group), *feeds(5))
        assert outline_layers(uneven.graph, even=False) >= 4
        assert outside(uneven, c10d.all_reduce.default) == 5
        assert crossings(uneven.graph) == before
    signatures, _, body = code.partition("def layer0(args):")
    body = body.partition("\nasync_compile")[0]
    assert launches(body) == 1
    assert hazards(f"{signatures}def call(self, args):{body}") == []
    late = re.sub(r".*\.wait_tensor.*", "", body)
    assert (
        "is read before its wait"
        in hazards(f"{signatures}def call(self, args):{late}")[0]
    )


def of_buckets(
    group: str, sizes: Sequence[int], *, early: bool = False, hops: int = 1
) -> Callable[..., Any]:
    """Layers, each with two values that are summed over ranks, in buckets of so many
    values, which start where the last of them is made; ``early``: and are read there;
    ``hops``: over so many axes, one after the other.
    """

    def stack(x: Tensor, *ws: Tensor) -> Any:
        bucket: list[Tensor] = []
        started: list[Tensor] = []

        def push(value: Tensor, h: Tensor) -> Tensor:
            bucket.append(value)
            if len(bucket) < sizes[len(started) % len(sizes)]:
                return h
            flat = torch.cat([each.view(1, 8) for each in bucket])
            started.append(c10d.all_reduce.default(flat, "sum", group))
            for _ in range(hops - 1):
                result = c10d.wait_tensor.default(started.pop())
                started.append(c10d.all_reduce.default(result, "sum", group))
            bucket.clear()
            return h * c10d.wait_tensor.default(started[-1]).sum() if early else h

        for w in ws:
            x = x * 0.5
            h = x.view(8, 8)
            h = push((h.sin() * w).sum(0) + h.exp().sum(1), h)
            h = (h - h.mean(1, keepdim=True)) / (h.var(1, keepdim=True) + 1e-5).sqrt()
            h = push((h.cos() * w).sum(1) + h.exp().sum(0), h)
            x = (x.view(8, 8) + torch.sigmoid(h @ w.t()) * h.exp()).view(4, 16)
        ends = [c10d.wait_tensor.default(each).sum() for each in started]
        return (x.sum(), sum(ends))

    return stack


SIZES = (3, 2, 3, 4)  # of values: buckets start in either half of a layer, or in none


@pytest.mark.parametrize("hops", [1, 2])
def test_a_reduction_that_starts_in_a_layer_starts_right_behind_it(
    hops: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_group(2) as group:
        module = outlined(of_buckets(group, SIZES, hops=hops), *feeds(8))
        starts = [n for n in module.graph.nodes if n.target is c10d.all_reduce.default]
        sizes = [node.args[0].meta["val"].shape[0] for node in starts]
        code = code_of(module.graph, monkeypatch, module)
        never = mock.Mock(return_value=False)
        with mock.patch.object(outlining, "_can_start_later", never):
            cut = outlined(of_buckets(group, SIZES, hops=hops), *feeds(8))
    assert calls(module) == ["layer0"] * 7  # each from middle to middle
    assert len(calls(cut)) < 7
    assert sizes[::hops] == sizes[hops - 1 :: hops] == [3, 2, 3, 4, 3]  # in order
    assert launches(code) == len(sizes) and hazards(code) == []


@pytest.mark.parametrize("how", ["is read in the layer", "is a chunk"])
def test_a_reduction_that_must_start_there_cuts_a_layer(how: str) -> None:
    early = how == "is read in the layer"
    with fake_group(2) as group:
        module = traced(of_buckets(group, SIZES, early=early), *feeds(8))
        for node in module.graph.nodes:
            if node.target is c10d.all_reduce.default and not early:
                node.meta["fxpar_chunk"] = True
        before = _computed_before_reductions(module.graph)
        outline_layers(module.graph)
    for body in (m for n, m in module.named_children() if n.startswith("layer")):
        assert "c10d" not in str(body.graph)
    assert _computed_before_reductions(module.graph) == before


def handing_over(*ws: Tensor, each: int, sizes: Sequence[int] = (1,)) -> Any:
    """Layers that each have two gradients of ``each`` elements, handed over by so many
    as ``sizes`` says, in turn."""
    gradients: list[Tensor] = []
    calls, x = 0, ws[0].sum(0).repeat(8).view(4, 16)
    for w in ws:
        for half in (torch.sin, torch.cos):
            h = x.view(8, 8) @ w
            h = (h - h.mean(1, keepdim=True)) / (h.var(1, keepdim=True) + 1e-5).sqrt()
            gradients.append((half(h) * w).sum() + torch.arange(each) * h.exp().sum())
            if len(gradients) >= sizes[calls % len(sizes)]:
                ones = [1] * len(gradients)
                torch.ops.fxpar.hand_over.default(gradients, ones, ones)
                calls, gradients = calls + 1, []
            x = (half(x.view(8, 8)) + torch.sigmoid(h) * h.exp()).view(4, 16)
    return (x.sum(),)


def test_small_gradients_are_handed_over_after_layers() -> None:
    ws = feeds(8)[1:]
    module = outlined(partial(handing_over, each=8, sizes=SIZES), *ws)
    given = [len(node.args[0]) for node in _handed_over(module)]
    never = mock.Mock(return_value=False)
    with mock.patch.object(outlining, "_can_come_later", never):
        cut = outlined(partial(handing_over, each=8, sizes=SIZES), *ws)
    assert len(calls(module)) >= 6 and given == [3, 2, 3, 4, 3]  # in order
    assert len(calls(cut)) < len(calls(module))


def test_large_gradients_are_handed_over_where_they_are_computed() -> None:
    """Their memory is then free in the middle of a layer."""
    module = outlined(partial(handing_over, each=1 << 20), *feeds(8)[1:])
    nodes = list(module.graph.nodes)
    between = [nodes.index(node) for node in _handed_over(module)]
    bodies = [i for i, node in enumerate(nodes) if node.target is INVOKE]
    assert len(between) == 16 and len(bodies) >= 12
    for one, other in itertools.pairwise(between):
        assert sum(one < i < other for i in bodies) <= 1


def _handed_over(module: fx.GraphModule) -> list[fx.Node]:
    target = torch.ops.fxpar.hand_over.default
    return module.graph.find_nodes(op="call_function", target=target)


def of_parts(sums: bool, *, early: bool = False) -> Callable[..., Any]:
    """Two parts of a batch in layers; of each layer the parts' values are summed, if
    ``sums``, where the second makes its own; ``early``: what is summed is read there.
    """
    accumulate = torch.ops.fxpar.accumulate.default

    def stack(x: Tensor, *ws: Tensor) -> Any:
        totals: list[Tensor] = []
        for part in range(2):
            for i, w in enumerate(ws):
                x = x * 0.5
                h = x.view(8, 8)
                value = (h.sin() * w).sum(0) + h.exp().sum(1)
                if part == 0:
                    totals.append(value)
                elif sums:
                    totals[i] = accumulate(totals[i], value)
                else:
                    totals.append(value)
                h = (h - h.mean(1, keepdim=True)) / h.var(1, keepdim=True).sqrt()
                h = h * torch.sigmoid(totals[i]) if early and part else h
                x = (x.view(8, 8) + torch.sigmoid(h @ w.t()) * h.exp()).view(4, 16)
        return (x.sum(), *totals)

    return stack


def test_sums_over_microbatches_are_added_behind_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many calls of as many bodies as without sums, and outside of them the sums
    alone, each written over the last."""
    plain, summed = (outlined(of_parts(sums), *feeds(5)) for sums in (False, True))
    assert calls(summed) == calls(plain) == ["layer0"] * 10
    sums = outside(summed, torch.ops.fxpar.accumulate.default)
    of_both = [
        sum(n.op == "call_function" for n in m.graph.nodes) for m in (plain, summed)
    ]
    assert sums == 5 and of_both == [of_both[0], of_both[0] + sums]
    sums_of_parts.register_lowering()
    code = code_of(summed.graph, monkeypatch, summed)
    assert code.count("torch.ops.aten.add_.Tensor(") == 5
    with mock.patch.object(outlining, "SUMS", set()):
        cut = outlined(of_parts(True), *feeds(5))
    assert len(calls(cut)) > 10


def test_sums_that_are_read_in_a_layer_cut_it() -> None:
    module = outlined(of_parts(True, early=True), *feeds(5))
    made = [n for n in module.graph.nodes if n.target is INVOKE]
    sums = module.graph.find_nodes(
        op="call_function", target=torch.ops.fxpar.accumulate.default
    )
    assert len(sums) == 5 and len(set(calls(module))) > 1
    assert all(any(user in made for user in node.users) for node in sums)


def _computed_before_reductions(graph: fx.Graph) -> list[int]:
    """How many values of layers that go into a reduction are made before each."""
    made, out = 0, []
    for node in graph.nodes:
        if node.target is INVOKE:
            body = getattr(graph.owning_module, node.args[1]).graph
            made += sum(n.target is aten.exp.default for n in body.nodes)
        made += node.target is aten.exp.default
        if node.target is c10d.all_reduce.default:
            out.append(made)
    return out


def trained(layout: str, disable: str) -> tuple[list[list[float]], list[int]]:
    """Losses and sums of gradients of a Llama of six layers, compiled by Inductor, and
    how many calls of bodies its forward and its backward have."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        use_cache=False,
    )
    model: Any = LlamaForCausalLM(config).double()
    rank = dist.get_rank() if layout != "tp" else 0
    options: dict[str, Any] = {"mesh": "tp=2", "hints": MEGATRON}
    if layout != "tp":
        options = {"mesh": "dp=2", "inputs": "local"}
    if layout == "shard":
        model = fxpar.shard(model, mesh="dp=2")
    counts = []

    def counted(graph: fx.Graph, **how: Any) -> int:
        counts.append(outline_layers(graph, **how))
        return counts[-1]

    # Else a rank takes over what another compiled, and an earlier run of this test.
    options |= {"plan": "propagate", "disable": disable, "cache_plans": False}
    step = torch.compile(model, backend="fxpar", dynamic=False, options=options)
    numbers = []
    for _ in range(2):
        ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(rank))
        with mock.patch.object(lowering_steps, "outline_layers", counted):
            loss = step(input_ids=ids, labels=ids).loss
            loss.backward()
        grads = [p.grad for p in model.parameters()]
        sums = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
        numbers.append([loss.item(), *(g.square().sum().item() for g in sums)])
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    return numbers, counts


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("layout", ["dp", "shard", "tp"])
def test_a_llama_computes_the_same(layout: str) -> None:
    pool = shared_pool(2)
    plain = pool.run(trained, layout, "outline_layers", timeout=600)
    calling = pool.run(trained, layout, "", timeout=600)
    assert plain[0][1] == []
    assert all(min(calls) >= LEAST_CALLS for _, calls in calling)
    for (one, _), (other, _) in zip(plain, calling, strict=True):
        # HF norms and losses are float32 whatever the model is.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_layers_that_read_what_was_saved_otherwise_are_not_alike() -> None:
    """Inductor gives saved values other strides than they were traced with, and refuses
    calls of one body with unlike ones."""

    def layers(w: torch.Tensor, *saved: torch.Tensor) -> torch.Tensor:
        x = w
        for each in saved:
            x = (torch.tanh(x.permute(1, 0) + each) @ w).sin().exp().cos()
        return x

    def outlined_with(strides: list[tuple[int, int]]) -> int:
        given = [torch.randn(8, 8) for _ in range(1 + len(strides))]
        gm = make_fx(layers, tracing_mode="fake")(*given)
        inputs = gm.graph.find_nodes(op="placeholder")
        fakes = [node.meta["val"] for node in inputs]
        saved = zip(fakes[1:], strides, strict=True)
        examples = [x.as_strided(x.shape, stride) for x, stride in saved]
        _torch.inductor._take_strides(gm.graph, [fakes[0], *examples])
        strided = [node.meta["val"].stride() for node in inputs[1:]]
        assert strided == strides
        return outline_layers(gm.graph)

    alike = [(8, 1)] * (2 * LEAST_CALLS)
    count = outlined_with(alike)
    assert count >= LEAST_CALLS
    other = [*alike[:3], (1, 8), *alike[4:]]
    assert outlined_with(other) < count
