"""Sizes that Dynamo leaves open: one plan and one program for a range of them, with the
numbers of one device; what cannot be left open is fixed, and says so."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import fxpar
from fxpar import _torch, compilation
from fxpar.errors import FxparError
from fxpar.graph import size_nodes
from fxpar.graph.builder import Builder
from fxpar.passes.order.delay_work import from_inputs
from fxpar.passes.simulate.launches import crossings
from fxpar.runtime.caches.program_identity import (
    lean_graph,
    name_inputs,
    placeholders,
)
from fxpar.runtime.calls.open_sizes import (
    Fed,
    open_program,
    open_sizes,
    shortened,
    size_range,
)
from fxpar.sharding import decide
from fxpar.sharding.program import Input, Output, Signature
from fxpar.sharding.read_program import read
from tests.helpers.spawn import ranks_of, shared_pool

LENGTHS = (64, 48, 80)


class Block(nn.Module):
    """Embedding, MLP, loss; ``split``: the sequence is split over tp."""

    def __init__(self, split: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head, self.split = nn.Linear(16, 50), split

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        if self.split:
            h = fxpar.constrain(h, None, "tp", None)
        h = h + self.down(F.gelu(self.up(self.norm(h))))
        h = h + h[:, 1:-1].mean(1, keepdim=True)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def llama(layers: int = 1) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config)


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=x, labels=y).loss


class Decoder(nn.Module):
    """Causal attention, a loss on the next token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix = nn.Embedding(50, 16), nn.Linear(16, 48)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        qkv = self.mix(h).chunk(3, -1)
        heads = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in qkv)
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        h = h + seen.transpose(1, 2).flatten(2)
        later = F.pad(y, (0, 1), value=-100)[..., 1:].contiguous()
        return F.cross_entropy((h @ self.embed.weight.T).flatten(0, 1), later.flatten())


class Checkpointed(Block):
    """Its region reads a number of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.5

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def region(h: torch.Tensor) -> torch.Tensor:
            return h + self.scale * torch.tanh(self.norm(h))

        h = checkpoint(region, self.embed(x), use_reentrant=False)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Masked(nn.Module):
    """A sum over tokens, divided by how many count: two sums of one size over ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        counts = (y > 20).to(self.head.weight.dtype)
        scores = self.head(self.embed(x)).logsumexp(-1).square()
        return (scores * counts).sum() / counts.sum()


MODELS: dict[str, Any] = {
    "block": Block,
    "checkpointed": Checkpointed,
    "decoder": Decoder,
    "split": lambda: Block(split=True),
    "llama": WithLoss,
    "masked": Masked,
}


def train(
    name: str,
    sizes: Sequence[tuple[int, int]],
    options: dict[str, Any] | None,
    dynamic: bool | None = None,
) -> dict[str, Any]:
    """A step of AdamW for each batch; ``options``: None on one device."""
    torch._dynamo.reset()
    before = len(fxpar.plans())
    model = run = MODELS[name]().double()
    local = options is not None and options.get("inputs") == "local"
    if options is not None:
        given = {"codegen": "eager"} | options
        run = torch.compile(model, backend="fxpar", options=given, dynamic=dynamic)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for rows, length in sizes:
        generator = torch.Generator().manual_seed(rows * length)
        x, y = torch.randint(0, 50, (2, rows, length), generator=generator)
        if local:
            x, y = (each.chunk(2)[dist.get_rank()].clone() for each in (x, y))
        loss = run(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if local:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        losses.append(loss.item())
    plans = fxpar.plans()[before:]
    return {
        "losses": losses,
        "weights": [p.detach().clone() for p in model.parameters()],
        "notes": [plan.notes for plan in plans],
    }


def check(
    name: str,
    mesh: str,
    sizes: Sequence[tuple[int, int]],
    most: int,
    dynamic: bool | None = None,
    **options: Any,
) -> list[tuple[str, ...]]:
    """Two ranks train as one device does, by at most so many plans; their notes."""
    want = train(name, sizes, None)
    asked = {"mesh": mesh} | options
    got = ranks_of(mesh).run(train, name, sizes, asked, dynamic, timeout=400.0)
    close = 1e-5 if name == "llama" else 1e-10  # its norms are in float32
    for each in got:
        assert each["losses"] == pytest.approx(want["losses"], rel=close)
        torch.testing.assert_close(each["weights"], want["weights"], rtol=0, atol=close)
        assert len(each["notes"]) <= most, each["notes"]
    return got[0]["notes"]


def said(notes: Sequence[tuple[str, ...]], text: str) -> list[int]:
    """Which plans say so."""
    return [i for i, each in enumerate(notes) if any(text in note for note in each)]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("block", "dp=2", {}),
        pytest.param("llama", "dp=2", {}, marks=pytest.mark.slow),
        pytest.param("llama", "tp=2", {}, marks=pytest.mark.slow),
        pytest.param("llama", "tp=2", {"plan": "propagate"}, marks=pytest.mark.slow),
        pytest.param("llama", "dp=2", {"codegen": "inductor"}, marks=pytest.mark.slow),
        pytest.param(
            "llama",
            "tp=2",
            {"codegen": "inductor", "plan": "propagate"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_range_of_lengths_is_planned_once(
    name: str, mesh: str, options: dict[str, Any]
) -> None:
    """The first length is a program of its own, since Dynamo takes it for fixed."""
    sizes = [(4, length) for length in (*LENGTHS, 7)]
    notes = check(name, mesh, sizes, 2, **options)
    assert said(notes, "valid for ") == [1]


def train_again(
    folder: str, name: str, sizes: Sequence[tuple[int, int]], options: dict[str, Any]
) -> tuple[dict[str, Any], int]:
    """``train`` as a start with plans in a folder has it; how often it searches."""
    searches: list[Any] = []
    counted = _counted(searches, decide.search)
    with (
        mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder),
        mock.patch.object(decide, "search", counted),
    ):
        return train(name, sizes, options, dynamic=True), len(searches)


def _counted(calls: list[Any], function: Any) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return function(*args, **kwargs)

    return counted


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_second_start_finds_the_plan_of_open_sizes(tmp_path: Path) -> None:
    """For the sizes that it begins with; for others one is searched, and all have the
    numbers of one device."""
    options = {"mesh": "dp=2", "plan": "search"}
    starts = [((4, 64), (4, 48)), ((4, 64), (6, 40)), ((4, 32), (4, 64))]
    searched, found = [], []
    for sizes in starts:
        want = train("block", sizes, None)
        ranks = shared_pool(2).run(train_again, str(tmp_path), "block", sizes, options)
        for got, _ in ranks:
            assert got["losses"] == pytest.approx(want["losses"], rel=1e-10)
            assert len(got["notes"]) == 1, "valid for both"
        searched.append(sum(count for _, count in ranks))
        found.append(said(ranks[0][0]["notes"], "stored plan: ") == [0])
    assert found == [False, True, False]
    assert searched[1] == 0 < searched[0] == searched[2]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "name", ["checkpointed", pytest.param("block", marks=pytest.mark.slow)]
)
def test_dynamic_from_the_first_call(name: str) -> None:
    """A batch that changes, too; numbers of Python are tensors to Dynamo then."""
    sizes = [(4, 64), (4, 48), (8, 40), (6, 7)]
    notes = check(name, "dp=2", sizes, 1, dynamic=True)
    assert "x.shape[0]/2" in notes[0][-1]


@pytest.mark.multiprocess
def test_ranks_start_collectives_in_one_order() -> None:
    """Each finds where its shard begins by other arithmetic, which decides nothing."""
    sizes = [(8, 6), (6, 5)]
    check("masked", "dp=2", sizes, 1, dynamic=True, plan="propagate")


def with_windows(mesh: str) -> torch.Tensor:
    """Tokens of a model whose cache keeps the last rows alone in some layers."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch._dynamo.reset()
    torch.manual_seed(0)
    config = Gemma2Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=16,
        vocab_size=96,
        eos_token_id=None,
    )
    model = Gemma2ForCausalLM(config).eval().double()
    if mesh:
        options = {"mesh": mesh, "codegen": "eager", "plan": "search"}
        model.forward = torch.compile(model.forward, backend="fxpar", options=options)
    ids = torch.arange(14).view(2, 7) + 3
    mask = torch.ones_like(ids)
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=12)
    return tokens


@pytest.mark.slow
@pytest.mark.multiprocess
def test_sizes_that_tracing_fixes() -> None:
    """One rank plans: all ranks fix the sizes, where it would find none open."""
    want = with_windows("")
    for got in ranks_of("tp=2").run(with_windows, "tp=2"):
        assert torch.equal(got, want)


@pytest.mark.parametrize("elsewhere", ["", "outside", "inside"])
def test_numbers_that_regions_read(elsewhere: str) -> None:
    """A tensor that is read for its number alone is that number; one that stays a
    tensor is computed with as it is, in a checkpointed region too, unless it is read
    otherwise."""
    graphs: list[tuple[fx.GraphModule, Sequence[Any]]] = []

    def keep(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        graphs.append((gm, examples))
        return gm

    torch._dynamo.reset()
    model = Checkpointed()
    torch.compile(model, backend=keep, dynamic=True)(*torch.ones(2, 4, 6).long())
    [(gm, examples)] = graphs
    region = next(m for m in gm.children() if isinstance(m, fx.GraphModule))
    names = [node.name for node in placeholders(gm)]
    if elsewhere:
        bodies = [region, gm] if elsewhere == "inside" else [gm]  # 2.15 reads it in gm
        each = ((body, x) for body in bodies for x in placeholders(body))
        read, scale = next((body, x) for body, x in each if x.name == "l_self_scale")
        with read.graph.inserting_before(read.graph.output_node()):
            read.graph.call_function(torch.neg, (scale,))
    before = str(gm.graph), str(region.graph)
    lean, positions, numbers = lean_graph(gm, examples)
    assert (str(gm.graph), str(region.graph)) == before
    expected = {"l_self_modules_embed_norm_type", "l_self_modules_norm_eps"}
    assert {names[i] for i in numbers} == expected
    bodies = [m for m in lean.modules() if isinstance(m, fx.GraphModule)]
    reads = any(
        body.graph.find_nodes(op="call_method", target="item") for body in bodies
    )
    assert reads == bool(elsewhere)
    for i, node in zip(positions, placeholders(lean), strict=True):
        assert isinstance(_torch.dynamo.example_of(node), torch.SymFloat) == (
            i in numbers
        )


@pytest.mark.multiprocess
@pytest.mark.slow
def test_parts_of_a_batch() -> None:
    """The rows stay open for Dynamo from the first call; fxpar fixes them until they
    change."""
    sizes = [(4, 64), (4, 48), (4, 7), (8, 48), (6, 24), (12, 31)]
    notes = check("llama", "dp=2", sizes, 3, inputs="local")
    assert said(notes, "valid for") == [1, 2]


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_a_size_that_is_split_divides(codegen: str) -> None:
    """Lengths that do not are other programs."""
    sizes = [(4, 64), (4, 48), (4, 10), (4, 9), (4, 80)]
    options = {"codegen": codegen, "plan": "propagate"}
    notes = check("split", "tp=2", sizes, 3, **options)
    assert any("x.shape[1]/2" in note for note in notes[1])


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "name, mesh, codegen",
    [
        pytest.param("decoder", "cp=2", "eager", marks=pytest.mark.slow),
        pytest.param("llama", "cp=2", "eager", marks=pytest.mark.slow),
        pytest.param("llama", "sp=2", "inductor", marks=pytest.mark.slow),
        pytest.param("llama", "dp=2,cp=2", "eager", marks=pytest.mark.slow),
    ],
)
def test_sequences_of_any_length_are_split(name: str, mesh: str, codegen: str) -> None:
    """Those that do not divide, and the shortest, are other programs."""
    sizes = [(4, 16), (4, 24), (8, 32), (4, 15), (8, 40), (4, 4)]
    options = {"codegen": codegen, "plan": "propagate"}
    notes = check(name, mesh, sizes, 3, dynamic=True, **options)
    assert any("x.shape[1]/2" in note for note in notes[0])
    assert len(notes) == 3 and said(notes, "sizes are fixed")


@pytest.mark.multiprocess
def test_rows_that_do_not_divide_are_few_programs() -> None:
    """Those of unequal shards have fixed sizes; the last one leaves all rows whole."""
    sizes = [(rows, 6) for rows in (17, 19, 21, 23, 25, 27, 29)]
    notes = check("masked", "dp=2", sizes, 5, dynamic=True, plan="propagate")
    assert said(notes, "sizes are fixed: ") == [0, 1, 2, 3]
    assert said(notes, "valid for ") == [4]


@pytest.mark.multiprocess
@pytest.mark.slow
def test_what_cannot_stay_open_is_fixed_and_says_so() -> None:
    sizes = [(4, 24), (4, 16), (4, 32)]
    notes = check("block", "dp=2", sizes, 3, microbatches=2)
    assert said(notes, "sizes are fixed: ") == [1, 2]
    assert not said(notes, "valid for")


def planned_again(replan: float | None, rows: Sequence[int]) -> list[tuple[int, str]]:
    """The number of plans, and the last one's hash, after a call of each size."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))
    options = {"mesh": "tp=2", "codegen": "eager", "plan": "search", "replan": replan}
    options |= {"search_seconds": 2, "cache_plans": False}
    with mock.patch.dict(os.environ, {"FXPAR_HARDWARE": "h100"}):
        run = torch.compile(model, backend="fxpar", options=options, dynamic=True)
        before, plans = len(fxpar.plans()), []
        for count in rows:
            x = torch.randn(count, 512)
            torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-6)
            made = fxpar.plans()[before:]
            plans.append((len(made), made[-1].hash))
            assert any("valid for" in note for note in made[-1].notes)
    return plans


@pytest.mark.parametrize(
    ("replan", "count"),
    [
        (1.2, 2),
        pytest.param(None, 1, marks=pytest.mark.slow),
        pytest.param(1e6, 1, marks=pytest.mark.slow),
    ],
)
def test_sizes_far_from_those_planned_for_are_planned_again(
    replan: float | None, count: int
) -> None:
    """A few rows are computed by all ranks, many are split: if asked, both plans are
    there, one is not if it has to be a million times as fast."""
    rows = [16, 24, 4096, 3072, 20]
    for plans in shared_pool(2).run(planned_again, replan, rows, timeout=300.0):
        assert [number for number, _ in plans] == [1, 1, count, count, count]
        assert len({name for _, name in plans}) == count


def scheduled(schedule: str) -> tuple[list[int], str, float]:
    """Collectives of forward and backward, the plan's schedule, and how far gradients
    are from one device's, for batches of three sizes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    widths = range(256, 288, 8)  # buckets of layers that repeat are cut otherwise
    model = nn.Sequential(*(nn.Linear(n, n + 8) for n in widths)).double()
    options = {"mesh": "dp=2", "plan": "propagate", "schedule": schedule}
    options |= {"codegen": "eager", "cache_plans": False, "hardware": "h100"}
    run, lists = (
        torch.compile(model, backend="fxpar", options=options, dynamic=True),
        [],
    )
    apart, before = 0.0, len(fxpar.plans())

    def noted(graph: fx.Graph, **how: Any) -> list[str]:
        lists.append(crossings(graph, **how))
        return lists[-1]

    with mock.patch.object(compilation, "crossings", noted):
        for rows in (8, 12, 16):
            x = torch.randn(rows, 256).double()
            gradients = []
            for each in (run, model):
                model.zero_grad()
                each(x).square().mean().backward()
                gradients.append([p.grad.clone() for p in model.parameters()])
            far = (float((a - b).abs().max()) for a, b in zip(*gradients, strict=True))
            apart = max(apart, *far)
    (plan,) = fxpar.plans()[before:]
    assert any("valid for" in note for note in plan.notes)
    return [len(each) for each in lists], plan.schedule, apart


@pytest.mark.multiprocess
def test_buckets_are_of_the_schedule_that_is_asked_for() -> None:
    """One by name that says settings alone, and what is chosen, keeps sizes open."""
    backward = {}
    for schedule in ("auto", "none", "buckets(bytes=0)"):
        for counts, text, apart in shared_pool(2).run(scheduled, schedule):
            backward[schedule] = counts[1]
            assert len(counts) == 2 and apart < 1e-12
            if schedule == "auto":
                assert text.startswith("buckets(bytes=")
            else:
                assert text == schedule.replace("none", "")
    assert backward["auto"] < backward["none"] < backward["buckets(bytes=0)"] == 8


def refused(schedule: str) -> str:
    torch._dynamo.reset()
    options = {"mesh": "dp=2", "codegen": "eager", "schedule": schedule}
    run = torch.compile(nn.Linear(4, 4), backend="fxpar", options=options, dynamic=True)
    with pytest.raises(FxparError) as caught:  # on others: what rank 0 says
        run(torch.ones(8, 4))
    return str(caught.value)


@pytest.mark.multiprocess
def test_a_schedule_with_verbs_is_for_sizes_that_are_fixed() -> None:
    """Where it names a node that is not there, as for any program."""
    for text in shared_pool(2).run(refused, "split(nothing)"):
        assert "no node named 'nothing'" in text and "sizes" not in text


def add_in_place() -> list[torch.Tensor]:
    """What is written to inputs of open sizes; the last is a part of another tensor,
    which lies in memory as none before."""
    torch._dynamo.reset()

    def add(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        x.add_(1.0)
        return y

    run = torch.compile(
        add, backend="fxpar", options={"mesh": "dp=2", "codegen": "eager"}, dynamic=True
    )
    inputs = [torch.zeros(8, 4), torch.zeros(12, 4), torch.zeros(16, 8)[:, ::2]]
    for x in inputs:
        run(x, torch.ones(4, 4))
    return inputs


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_part_of_a_tensor_is_written_to() -> None:
    for inputs in shared_pool(2).run(add_in_place):
        assert all(bool((x == 1).all()) for x in inputs)


def generated(options: dict[str, Any] | None, tokens: int, cache: str) -> Any:
    """(tokens, plans) of greedy generation."""
    torch._dynamo.reset()
    before = len(fxpar.plans())
    model = llama().double().eval()
    model.generation_config.disable_compile = True
    if options is not None:
        given = {"codegen": "eager"} | options
        model.forward = torch.compile(model.forward, backend="fxpar", options=given)
    x = torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(0))
    how = {"cache_implementation": cache} if cache != "dynamic" else {}
    asked = {"max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0}
    out = model.generate(x, do_sample=False, **asked, **how)
    return out, len(fxpar.plans()) - before


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2"])
def test_generation_takes_three_programs(mesh: str, cache: str, codegen: str) -> None:
    want, _ = generated(None, 64, cache)
    options = {"mesh": mesh, "codegen": codegen}
    for got, plans in shared_pool(2).run(generated, options, 64, cache, timeout=600.0):
        assert torch.equal(got, want)
        assert plans <= 3


# Without ranks


def traced(fn: Any, *args: Any) -> tuple[fx.GraphModule, Any, Any]:
    """The Dynamo graph of a function with all sizes open, what it is called with, and
    the names of that."""
    torch._dynamo.reset()
    found: list[Any] = []

    def keep(gm: fx.GraphModule, examples: Any) -> Any:
        found[:] = gm, examples, name_inputs(gm.graph, examples)
        return gm.forward

    torch.compile(fn, backend=keep, dynamic=True)(*args)
    return found[0], found[1], found[2]


def sizes_of(fed: Fed, *tensors: torch.Tensor) -> Any:
    """Sizes of a call with these tensors, in the order of the inputs."""
    given: dict[int, Any] = dict(zip(fed.tensors, tensors, strict=True))
    for i, (source, dim) in fed.sources.items():
        given[i] = given[source].shape[dim]
    return fed.sizes(given)


def test_a_range_is_of_sizes_that_keep_its_guards() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ y

    gm, examples, named = traced(fn, torch.randn(12, 5), torch.randn(5, 3))
    fed = Fed(gm, named, None)
    sizes = open_sizes(gm, named)
    texts = [size.text for size in sizes]
    assert [text[-10:] for text in texts] == ["x.shape[0]", "x.shape[1]", "y.shape[1]"]
    units = {sizes[0].name: 2}
    program = open_program(gm, examples, named, fed, sizes, units)
    rows, inner = program.examples[len(program.symbols)].shape
    assert rows % 2 == 0
    assert program.divisors_asked() == {}  # it is known
    assert rows % 3 == 0
    assert program.divisors_asked() == {sizes[0].name: 3}
    assert inner != 7
    known = size_range(program)
    assert known.fixed == ()
    assert "x.shape[0]/2" in known.text

    def holds(rows: int, inner: int, columns: int, again: int | None = None) -> bool:
        x, y = torch.empty(rows, inner), torch.empty(again or inner, columns)
        found = sizes_of(fed, x, y)
        return known.contains(found.shapes, found.numbers)

    assert holds(12, 5, 3) and holds(18, 4, 9)
    assert not holds(14, 5, 3)  # no multiple of 3
    assert not holds(9, 5, 3)  # nor of 2
    assert not holds(12, 7, 3)
    assert not holds(12, 5, 1)  # of one, programs differ
    assert not holds(12, 5, 3, again=6)


def test_a_size_that_is_fixed_is_told() -> None:
    gm, examples, named = traced(lambda x: x * x.shape[0], torch.randn(6, 5))
    fed = Fed(gm, named, None)
    sizes = open_sizes(gm, named)
    program = open_program(gm, examples, named, fed, sizes, {})
    assert int(program.symbols[0]) == 6
    known = size_range(program)
    assert [size.text[-10:] for size in known.fixed] == ["x.shape[0]"]
    assert known.contains(((6, 9),), sizes_of(fed, torch.empty(6, 9)).numbers)
    assert not known.contains(((4, 9),), sizes_of(fed, torch.empty(4, 9)).numbers)


def test_sizes_are_written_as_nodes() -> None:
    mode = _torch.fake.new_fake_mode(symbols=True)
    s, t = (_torch.symbols.new_symbol(mode, n, h) for n, h in (("s", 6), ("t", 5)))
    graph = fx.Graph()
    for name, value in (("s", s), ("t", t)):
        graph.placeholder(name).meta["val"] = value
    build = Builder(graph, mode)
    made = build.call(torch.ops.aten.full.default, [2 * s, s * t + 3], 1.0)
    graph.output(made)
    graph.lint()
    assert not _torch.symbols.fixed([s, t])
    module = fx.GraphModule({}, graph)
    assert module(6, 5).shape == (12, 33)
    assert module(7, 2).shape == (14, 17)
    plain = size_nodes.at_hints(graph, mode)
    assert fx.GraphModule({}, plain)(0, 0).shape == (12, 33)
    names = {node.op for node in plain.nodes}
    assert names == {"placeholder", "call_function", "output"}
    assert [n.target for n in plain.nodes if n.op == "call_function"] == [
        torch.ops.aten.full.default
    ]


def test_a_size_that_no_input_tells_is_refused() -> None:
    mode = _torch.fake.new_fake_mode(symbols=True)
    s = _torch.symbols.new_symbol(mode, "s", 6)
    graph = fx.Graph()
    graph.placeholder("x").meta["val"] = torch.empty(2)
    with pytest.raises(_torch.symbols.Inexpressible):
        size_nodes.as_nodes(graph, [s])


def test_sizes_that_a_collective_reads_are_not_held() -> None:
    mode = _torch.fake.new_fake_mode(symbols=True)
    rows, graph = _torch.symbols.new_symbol(mode, "s", 6), fx.Graph()
    s = graph.placeholder("s")
    s.meta["val"] = rows
    build = Builder(graph, mode)
    x = build.call(torch.ops.aten.full.default, [2 * rows, 3], 1.0)
    functional = torch.ops._c10d_functional
    launch = graph.call_function(
        functional.all_to_all_single.default, (x, [s, s], [s, s], "group")
    )
    graph.output(graph.call_function(functional.wait_tensor.default, (launch,)))
    module = fx.GraphModule({}, graph)
    _torch.inductor._hold_operands(module)
    holds = [n for n in module.graph.nodes if "hold" in str(n.target)]
    assert [n.all_input_nodes[0].name for n in holds] == [x.name]


def test_all_ranks_cut_their_shards_from_inputs() -> None:
    """The first begins at 0, others where arithmetic of sizes says."""
    mode = _torch.fake.new_fake_mode(symbols=True)
    rows, graph = _torch.symbols.new_symbol(mode, "s", 6), fx.Graph()
    graph.placeholder("s").meta["val"] = rows
    x = graph.placeholder("x")
    with mode:
        x.meta["val"] = torch.empty(2 * rows)
    build = Builder(graph, mode)
    ends = (0, rows), (rows, 2 * rows)
    shards = [build.call(torch.ops.aten.slice.Tensor, x, 0, *each) for each in ends]
    graph.output(shards)
    assert {*shards} <= from_inputs(graph)


def test_many_conditions_are_counted() -> None:
    few = " and ".join(["2 <= s"] * 6)
    assert shortened(few) == few
    assert shortened(f"s % 7 == 0 and {few}") == (f"{few} and 1 more")


@pytest.mark.parametrize("is_open", [True, False])
def test_rows_of_an_open_size_do_not_move(is_open: bool) -> None:
    """Who sends which rows is known for one size alone."""
    mode = _torch.fake.new_fake_mode(symbols=True)
    rows = _torch.symbols.new_symbol(mode, "s", 16) if is_open else 16
    graph = fx.Graph()
    graph.placeholder("s").meta["val"] = rows
    build = Builder(graph, mode)
    x = build.call(torch.ops.aten.full.default, [rows, 4], 1.0)
    graph.output(build.call(torch.ops.aten.slice.Tensor, x, 0, 1, -1))
    signature = Signature((Input("s"),), (Output("y"),))
    program = read(size_nodes.at_hints(graph, mode), signature)
    rule = program.ops[-1].rule
    (word,) = rule.operands[0][0]
    assert bool(rule.moves) is not is_open
    assert (word in rule.whole) is is_open
