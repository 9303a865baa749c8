"""Parameters that ``fxpar.shard`` split by default rest where the first program uses
them: they are moved once, with all that goes with them, and numbers stay those of one
device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import fxpar
from fxpar.features.at_rest.dynamo_graphs import spec_of
from tests.helpers.processes import RankError
from tests.helpers.spawn import shared_pool
from tests.helpers.training import place_of, whole

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("propagated")]

MESHES = {"tp=2": 2, "dp=2,tp=2": 4}
WORDS, WIDTH, INNER = 16, 8, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Small(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.roll(1, 1).flatten())


def built(mesh: str | None, *, blocks: int = 2, tied: bool = False, **how: Any) -> Any:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Small(blocks).double()
    if tied:
        model.head.weight = model.words.weight
    return fxpar.shard(model, mesh=mesh, **how) if mesh else model


def run_of(model: Any, mesh: str | None, **options: Any) -> Any:
    if mesh is None:
        return model
    how = {"codegen": "eager", "mesh": mesh, **options}
    return torch.compile(model, backend="fxpar", options=how)


def adam_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01)


def batches() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, WORDS, (4, 4), generator=draw) for _ in range(3)]


def steps(run: Any, model: nn.Module, optimizer: Any, after: Any = lambda: None) -> Any:
    """Losses, norms of gradients, and the parameters after the last step."""
    out: list[Any] = []
    for ids in batches():
        loss = run(ids)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        after()
        out += [loss.item(), whole(norm)]
    return out + [whole(p) for p in model.parameters()]


def check(case: Callable[..., Any], mesh: str = "tp=2", *args: Any, **how: Any) -> None:
    want = case(None, *args)
    for got in shared_pool(4).run(case, mesh, *args, ranks=MESHES[mesh], **how):
        torch.testing.assert_close(got, want)


def splits(x: Any) -> list[int | None]:
    """The dim that each axis splits."""
    return [p.dim if p.is_shard() else None for p in x.placements]


def has_moved(model: Any) -> bool:
    """Whether row-parallel weights rest as they are used."""
    return all(splits(block.down.weight)[-1] == 1 for block in model.blocks)


def with_state(mesh: str | None) -> list[Any]:
    """A gradient, an optimizer with its state, a state dict and copies are there before
    the first call; a penalty's gradient is on its way."""
    model = built(mesh, blocks=1)
    mine = {name: (p, id(p)) for name, p in model.named_parameters()}
    optimizer = adam_of(model)
    for p in model.parameters():
        p.grad = p.detach() * 0.3 + 0.1
    optimizer.step()
    for p in model.parameters():
        optimizer.state[p]["master"] = p.detach()  # shares its memory
    state, shadow = model.state_dict(), copy.deepcopy(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    by_hand = {name: p.detach().clone() for name, p in model.named_parameters()}

    def follow() -> None:
        average.update_parameters(model)
        with torch.no_grad():
            for name, p in model.named_parameters():
                by_hand[name].lerp_(p, 0.1)
            for p, q in zip(shadow.parameters(), model.parameters(), strict=True):
                p.mul_(0.9).add_(q, alpha=0.1)

    run, early = run_of(model, mesh), model.blocks[0].down.weight.square().sum()
    (run(batches()[0]) + early).backward()
    out = steps(run, model, optimizer, follow)
    for name, p in model.named_parameters():
        assert mine[name] == (p, id(p))
        out += [whole(state[name]), whole(by_hand[name])]
        out += [whole(x) for x in optimizer.state[p].values() if x.dim()]
        torch.testing.assert_close(whole(state[name]), whole(p), rtol=0, atol=0)
    out += [whole(p) for p in [*shadow.parameters(), *average.module.parameters()]]
    out += [shadow(batches()[0]).item(), run_of(average, mesh)(batches()[0]).item()]
    if mesh is not None:
        assert has_moved(model) and has_moved(shadow) and has_moved(average.module)
        for p in model.parameters():
            lies = [optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]]
            assert all(x.placements == p.placements for x in lies)
    return out


@pytest.mark.parametrize(
    "mesh", ["tp=2", pytest.param("dp=2,tp=2", marks=pytest.mark.slow)]
)
def test_all_goes_where_a_parameter_goes(mesh: str) -> None:
    check(with_state, mesh)


def tied(mesh: str | None, late: bool) -> list[Any]:
    model = built(mesh, tied=not late)
    if late:
        model.head.weight = model.words.weight
    out = steps(run_of(model, mesh), model, adam_of(model))
    assert model.head.weight is model.words.weight
    assert mesh is None or has_moved(model)
    return out + [model(batches()[0]).item()]


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_tied_weights(late: bool) -> None:
    check(tied, "tp=2", late)


def saved(mesh: str | None, folder: str) -> list[Any]:
    """A checkpoint of a model that was not called is loaded into one that was, and one
    of that into one that was not."""
    model = built(mesh)
    before = {"model": model.state_dict()}
    dcp.save(before, checkpoint_id=f"{folder}/before{mesh}")
    optimizer = adam_of(model)
    out = steps(run_of(model, mesh), model, optimizer)
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/after{mesh}")
    into = {"model": model.state_dict()}
    dcp.load(into, checkpoint_id=f"{folder}/before{mesh}")
    model.load_state_dict(into["model"])
    out += [run_of(model, mesh)(batches()[0]).item()]
    fresh = built(mesh)
    into = {"model": fresh.state_dict()}
    dcp.load(into, checkpoint_id=f"{folder}/after{mesh}")
    fresh.load_state_dict(into["model"])
    out += [run_of(fresh, mesh)(batches()[0]).item()]
    # Whole tensors load after the move too.
    torch.manual_seed(0)
    fresh.load_state_dict(Small().double().state_dict())
    return out + [run_of(fresh, mesh)(batches()[0]).item()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_from_before_and_after(tmp_path: Path) -> None:
    check(saved, "tp=2", str(tmp_path))


def looked_into(mesh: str | None) -> list[Any]:
    """Rank 0 holds its part of one weight, all hold rows of another, and of a third
    the optimizer keeps state that is of this rank's part."""
    model = built(mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    first, second = model.blocks
    down, up, head = first.down.weight, second.up.weight, model.head.weight
    by_rank = mesh is not None and torch.distributed.get_rank() == 0
    part = down.to_local() if by_rank else None
    rows = up.detach().view(2, INNER // 2, WIDTH)
    optimizer.state[second.down.weight]["seen"] = torch.ones(3)
    before = splits(head) if mesh else None
    out = steps(run_of(model, mesh), model, optimizer)
    if mesh:
        assert splits(down) == splits(second.down.weight) == before == [0]
        assert splits(first.norm.weight) == [None]
    if part is not None:
        torch.testing.assert_close(part, down.to_local(), rtol=0, atol=0)
    torch.testing.assert_close(whole(rows).view_as(up), whole(up), rtol=0, atol=0)
    return out


@pytest.mark.slow
def test_what_a_user_looks_into_stays() -> None:
    check(looked_into)


class OwnState(torch.optim.Optimizer):
    """Whose momenta are in its own dict, by ids, or of parts, flat, by position."""

    def __init__(self, parameters: Any, *, of_parts: bool) -> None:
        super().__init__(parameters, {})
        self.of_parts, self.momenta = of_parts, dict[int, torch.Tensor]()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for i, p in enumerate(self.param_groups[0]["params"]):
            key, x, gradient = id(p), p, p.grad
            if self.of_parts:
                key, x, gradient = i, local(p).view(-1), local(gradient).view(-1)
            momentum = self.momenta.setdefault(key, torch.zeros_like(x))
            x.sub_(momentum.mul_(0.9).add_(gradient), alpha=0.1)


def local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def own_state(mesh: str | None, of_parts: bool) -> list[Any]:
    model = built(mesh)
    optimizer = OwnState(model.parameters(), of_parts=of_parts)
    model(batches()[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    out = steps(run_of(model, mesh), model, optimizer)
    if mesh is not None:
        assert has_moved(model) != of_parts
    if mesh is not None and not of_parts:
        lies = [(p, optimizer.momenta[id(p)]) for p in model.parameters()]
        assert all(p.placements == x.placements for p, x in lies)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("of_parts", [False, True])
def test_optimizers_that_keep_state_themselves(of_parts: bool) -> None:
    check(own_state, "tp=2", of_parts)


def again(mesh: str | None, folder: str) -> list[Any]:
    """Another start finds the layout on disk, and by a plan that was saved."""
    out: list[Any] = []
    for options in ({"codegen": "inductor"}, {"codegen": "inductor"}, {"plan": folder}):
        model = built(mesh)
        before, run = len(fxpar.plans()), run_of(model, mesh, **options)
        out += steps(run, model, adam_of(model))
        if mesh is not None:
            (plan,) = fxpar.plans()[before:]
            assert has_moved(model) and "all_to_all" not in str(plan.collectives)
            plan.save(folder)
    if mesh is not None:
        assert "stored plan" in str(plan.notes)
    return out


@pytest.mark.slow
def test_another_start(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    check(again, "tp=2", str(tmp_path / "plan"), env=env)


def of_open_sizes(mesh: str | None) -> list[Any]:
    model = built(mesh)
    run = torch.compile(
        *(model,), backend="fxpar", dynamic=True, options={"codegen": "eager"}
    )
    out = []
    for n in (4, 6, 8):
        ids = torch.arange(4 * n).view(n, 4) % WORDS
        loss = (run if mesh else model)(ids)
        loss.backward()
        out.append(loss.item())
    assert mesh is None or has_moved(model)
    return out + [whole(p.grad) for p in model.parameters()]


@pytest.mark.slow
def test_open_sizes() -> None:
    check(of_open_sizes)


def stays(mesh: str, how: dict[str, Any]) -> None:
    if "sample" in how:
        how = {"sample": ((batches()[0],), {})}
    model = built(mesh, blocks=1, **how)
    before = [splits(p) for p in model.parameters()]
    run_of(model, mesh)(batches()[0]).backward()
    assert [splits(p) for p in model.parameters()] == before


@pytest.mark.parametrize(
    "how",
    [
        {"hints": {"*.up.weight": ("tp", None)}},
        pytest.param({"sample": 1}, marks=pytest.mark.slow),
    ],
)
def test_hints_and_samples_stand(how: dict[str, Any]) -> None:
    shared_pool(4).run(stays, "tp=2", how, ranks=2)


@pytest.mark.slow
def test_along_the_batch_all_is_gathered_anyway() -> None:
    shared_pool(4).run(stays, "dp=2", {}, ranks=2)


def by_layer(mesh: str | None) -> list[Any]:
    """Each layer is a graph: the first lays out those that are like it."""
    model = built(mesh)
    if mesh is not None:
        for block in model.blocks:
            block.compile(backend="fxpar", options={"codegen": "eager", "mesh": mesh})
    count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    out = steps(model, model, adam_of(model))
    if mesh is not None:
        assert has_moved(model)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert graphs - count == 1
    return out


@pytest.mark.slow
def test_layers_compiled_one_by_one() -> None:
    check(by_layer)


def of_parts(mesh: str | None) -> list[Any]:
    """Each rank feeds its part of the batch; evaluation comes first."""
    model = built(mesh)
    place, places = place_of(mesh) if mesh else (0, 1)
    run, optimizer = run_of(model, mesh, inputs="local"), adam_of(model)
    with torch.inference_mode():
        run(batches()[0].chunk(places)[place])
    out: list[Any] = []
    for ids in batches():
        run(ids.chunk(places)[place]).backward()
        optimizer.step()
        optimizer.zero_grad()
    if mesh is not None:
        block = model.blocks[0]
        lie = [str(spec_of(x)) for x in (block.up.weight, block.down.weight)]
        assert lie == ["[tp+dp, _]", "[dp, tp]"]
    return out + [whole(p) for p in model.parameters()]


@pytest.mark.slow
def test_ranks_that_feed_parts() -> None:
    check(of_parts, "dp=2,tp=2")


class Broken(Small):
    """Whose forward is two graphs on the first two ranks."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() < 2:
            torch._dynamo.graph_break()
            self.words(ids).sum()
            torch._dynamo.graph_break()
        return super().forward(ids)


def of_unlike_graphs(mesh: str | None) -> list[Any]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model: Any = Broken().double()
    model = fxpar.shard(model, mesh=mesh) if mesh else model
    place, places = place_of(mesh) if mesh else (0, 1)
    run = run_of(model, mesh, inputs="local")
    for ids in batches():
        run(ids.chunk(places)[place]).backward()
    assert mesh is None or not has_moved(model)
    return [whole(p.grad) for p in model.parameters()]


@pytest.mark.slow
def test_ranks_whose_first_graphs_read_others_move_nothing() -> None:
    check(of_unlike_graphs, "dp=2,tp=2")


def in_another_order(mesh: str) -> None:
    models = [built(mesh), built(mesh)]
    model = models[torch.distributed.get_rank()]
    run_of(model, mesh)(batches()[0])


@pytest.mark.slow
def test_ranks_that_call_different_models_are_stopped() -> None:
    with pytest.raises(RankError, match="ranks call different models"):
        shared_pool(4).run(in_another_order, "tp=2", ranks=2)


def whole_steps(mesh: str | None) -> list[Any]:
    model = built(mesh)
    optimizer = adam_of(model)
    options = {"codegen": "eager", "mesh": mesh} if mesh else None
    step = fxpar.train_step(model, lambda m, x: m(x), optimizer, options=options)
    out = [step(ids).item() for ids in batches()] if mesh else []
    for ids in batches() if mesh is None else ():
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.item())
    assert mesh is None or has_moved(model)
    return out + [whole(p) for p in model.parameters()]


@pytest.mark.slow
def test_training_steps() -> None:
    check(whole_steps)


class TwoWays(nn.Module):
    """Whose weight one program reads by its rows, another by its columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, INNER)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x))).square().sum()

    def alone(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.down(x)).square().sum()


def two_ways(mesh: str | None) -> list[Any]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model: Any = TwoWays().double()
    model = fxpar.shard(model, mesh=mesh) if mesh else model
    ways = run_of(model.forward, mesh), run_of(model.alone, mesh)
    fed = [torch.ones(4, n, dtype=torch.float64) for n in (WIDTH, INNER)]
    out = []
    for _ in range(2):
        for way, x in zip(ways, fed, strict=True):
            loss = way(x)
            loss.backward()
            out.append(loss.item())
    if mesh:
        assert splits(model.down.weight) == [1]
        notes = [
            [x for x in p.notes if "resharded at each call" in x]
            for p in fxpar.plans()[-2:]
        ]
        assert not notes[0] and "down.weight" in notes[1][0], notes
    return out + [whole(p.grad) for p in model.parameters()]


@pytest.mark.slow
def test_a_second_program_with_another_wish() -> None:
    check(two_ways)


def sent(sample: bool) -> list[Any]:
    """Collectives of a step of a Llama, and where its parameters rest."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(**sizes, **heads, vocab_size=32, use_cache=False)
    ids = torch.arange(64).view(4, 16) % 32
    batch = {"input_ids": ids, "labels": ids}
    how = {"sample": ((), batch)} if sample else {}
    model = fxpar.shard(LlamaForCausalLM(config), mesh="tp=2", **how)
    run_of(model, "tp=2")(**batch).loss.backward()
    (plan,) = fxpar.plans()[-1:]
    collectives = [(c.kind, c.axes, c.bytes) for c in plan.collectives]
    return [collectives, [splits(p) for p in model.parameters()]]


@pytest.mark.slow
def test_as_much_is_sent_as_with_a_sample() -> None:
    """Nothing of weights: two sums a layer and direction, as an expert has it."""
    pool = shared_pool(4)
    got, *_ = pool.run(sent, False, ranks=2)
    assert got == pool.run(sent, True, ranks=2)[0]
    assert {kind for kind, *_ in got[0]} == {"all_reduce", "all_gather"}
