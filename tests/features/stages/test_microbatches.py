"""The batch in microbatches, simulated: numbers are those of one device, sums are
communicated once, one part is done with before the next begins."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpar
from fxpar.errors import OptionError, PlanError
from fxpar.graph.builder import OURS
from fxpar.passes.simulate.launches import is_collective
from tests.helpers.wrapper import code_of

ROWS, WIDTH = 8, 16


def double(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model.double()


def mlp() -> nn.Module:
    return double(nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)))


def normed() -> nn.Module:
    return double(nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU()))


def dropped() -> nn.Module:
    return double(
        nn.Sequential(nn.Linear(WIDTH, 32), nn.Dropout(0.4), nn.Linear(32, 8))
    )


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.scale = nn.Linear(WIDTH, WIDTH, False), nn.Linear(1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x) * self.scale.bias


class Words(nn.Module):
    """A loss whose mean counts the words that are not left out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + F.scaled_dot_product_attention(*[self.mix(self.norm(x))] * 3)
        return F.cross_entropy(
            self.head(x).flatten(0, 1), ids.flatten(), ignore_index=3
        )


def words() -> nn.Module:
    return double(Words())


def rows() -> torch.Tensor:
    made = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, generator=made, dtype=torch.double)


def ids() -> torch.Tensor:
    return torch.randint(20, (ROWS, 6), generator=torch.Generator().manual_seed(1))


Feed = Callable[[], torch.Tensor]
MODELS: list[tuple[Callable[[], nn.Module], Feed]] = [
    (mlp, rows),
    (normed, rows),
    (dropped, rows),
    (words, ids),
]


def planned(
    monkeypatch: pytest.MonkeyPatch,
    model: nn.Module,
    x: torch.Tensor,
    mesh: str,
    parts: int,
    mode: str = "propagate",
) -> Any:
    monkeypatch.setenv("FXPAR_MICROBATCHES", str(parts))
    return fxpar.plan(model, x, mesh=mesh, grad=True, mode=mode)


def error_of(plan: Any, x: torch.Tensor) -> float:
    """The largest difference from one device, of the result and all gradients."""
    torch.manual_seed(3)
    got, grads = plan.simulate(x)
    torch.manual_seed(3)
    want, expected = plan.reference(x)
    errors = [(grads[name] - y).abs().max().item() for name, y in expected.items()]
    return max((got - want).abs().max().item(), *errors)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param("dp=1", marks=pytest.mark.slow),
        pytest.param("dp=2", marks=pytest.mark.slow),
        pytest.param("tp=2", marks=pytest.mark.slow),
        "dp=2,tp=2",
    ],
)
@pytest.mark.parametrize(("make", "feed"), MODELS)
def test_numbers_are_those_of_one_device(
    make: Callable[[], nn.Module],
    feed: Feed,
    mesh: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = planned(monkeypatch, make(), feed(), mesh, 4)
    assert any("in 4 microbatches" in note for note in plan.notes)
    assert error_of(plan, feed()) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize("mesh", ["dp=4", "dp=2,tp=4", "fsdp=2,tp=2"])
@pytest.mark.parametrize(("make", "feed"), MODELS)
def test_numbers_on_more_meshes(
    make: Callable[[], nn.Module],
    feed: Feed,
    mesh: str,
    parts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for mode in ("propagate", "search"):
        plan = planned(monkeypatch, make(), feed(), mesh, parts, mode)
        assert error_of(plan, feed()) < 1e-12


class Indexed(nn.Module):
    """Reads rows of the batch by indices, as masks and caches do."""

    def __init__(self, read: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.read, self.embed = read, nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, rows = self.embed(ids), torch.arange(ids.shape[0])
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.read(x, rows, ids % ids.shape[1])


READS: dict[str, Callable[..., torch.Tensor]] = {
    "tokens of each row": lambda x, rows, at: x[rows[:, None], at],
    "the last token": lambda x, rows, at: x[rows, at[:, 0]],
    "written": lambda x, rows, at: torch.index_put(
        torch.zeros_like(x), (rows[:, None], at), x, accumulate=True
    ),
    "other rows": lambda x, rows, at: x[rows.flip(0)] + x.roll(1, 0),
    "a mask": lambda x, rows, at: (
        x * (at > 2)[rows[:, None], rows[None, :6]][..., None]
    ),
}


@pytest.mark.parametrize(
    ("mesh", "parts"),
    [
        ("pp=2,tp=2", ROWS),
        pytest.param("pp=2,tp=2", 2, marks=pytest.mark.slow),
        pytest.param("tp=2", ROWS, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("how", READS)
def test_rows_that_indices_read(
    how: str, mesh: str, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index of a row is that in its part, of one row too."""
    model = double(Indexed(READS[how]))
    plan = planned(monkeypatch, model, ids(), mesh, parts)
    assert any("microbatches" in note for note in plan.notes)
    result, gradients = plan.simulate(ids())
    want = model(ids())
    want.sum().backward()
    torch.testing.assert_close(result, want.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("positions", "grad"),
    [(True, False), (True, True), (False, True)],
)
def test_masks_of_gemma_at_parts_of_one_row(
    positions: bool, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask of a sliding window is read by row and place; with positions given, the
    ranks also exchange rows of the mask."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes: dict[str, int] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    config = Gemma2Config(
        vocab_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
        use_cache=False,
        **sizes,
    )
    model = double(Gemma2ForCausalLM(config))
    tokens = torch.randint(96, (4, 16), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    if positions:
        batch["position_ids"] = torch.arange(16) + torch.arange(4)[:, None]

    def loss(**batch: torch.Tensor) -> torch.Tensor:
        return model(**batch).loss

    monkeypatch.setenv("FXPAR_MICROBATCHES", "4")
    plan = fxpar.plan(loss, mesh="pp=2,tp=2", mode="propagate", grad=grad, **batch)
    got, want = plan.simulate(**batch), loss(**batch)
    result, gradients = got if grad else (got, {})
    torch.testing.assert_close(result, want.detach())  # the loss is of float32
    if not grad:
        return
    want.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            gradients[f"model.{name}"], parameter.grad, rtol=1e-4, atol=1e-6
        )


def kinds(plan: Any) -> Counter[tuple[str, tuple[str, ...]]]:
    return Counter((each.kind, each.axes) for each in plan.collectives)


def test_gradients_are_communicated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = planned(monkeypatch, mlp(), rows(), "dp=2", 1)
    cut = planned(monkeypatch, mlp(), rows(), "dp=2", 4)
    assert kinds(whole) == kinds(cut) and kinds(cut)
    # What follows the batch is communicated once for each part.
    whole = planned(monkeypatch, mlp(), rows(), "tp=2", 1)
    cut = planned(monkeypatch, mlp(), rows(), "tp=2", 4)
    assert kinds(cut)["all_reduce", ("tp",)] == 4 * kinds(whole)["all_reduce", ("tp",)]


def parts_in_order(plan: Any) -> list[int]:
    """The part of each product with the batch, in the order of the graph."""
    products = [
        node
        for node in plan.result.local.nodes
        if node.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    ]
    count = Counter(node.meta["fxpar_origin"] for node in products)
    seen: Counter[str] = Counter()
    out = []
    for node in products:
        origin = node.meta["fxpar_origin"]
        if count[origin] > 1:
            out.append(seen[origin])
            seen[origin] += 1
    return out


def test_parts_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    order = parts_in_order(planned(monkeypatch, words(), ids(), "dp=1", 4))
    assert order == sorted(order) and set(order) == {0, 1, 2, 3}
    # Statistics of the batch need all parts of the first product.
    order = parts_in_order(planned(monkeypatch, normed(), rows(), "dp=1", 4))
    assert order[:4] == [0, 1, 2, 3]


def test_narrow_sums_are_accumulated_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = mlp().bfloat16()
    plan = planned(monkeypatch, model, rows().bfloat16(), "dp=1", 4)
    sums = [
        node.meta["val"].dtype
        for node in plan.result.local.nodes
        if node.target is torch.ops.fxpar.accumulate.default
    ]
    assert sums and set(sums) == {torch.float32}
    _, grads = plan.simulate(rows().bfloat16())
    assert all(x.dtype == torch.bfloat16 for x in grads.values())


@pytest.mark.parametrize("mesh", ["dp=1", "pp=2"])
def test_rows_that_do_not_divide_take_fewer_parts(
    mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = rows()[:6]
    plan = planned(monkeypatch, mlp(), x, mesh, 4)
    assert any("6 rows on a rank do not divide" in note for note in plan.notes)
    assert error_of(plan, x) < 1e-12


@pytest.mark.parametrize("mesh", ["dp=1", "pp=2"])
@pytest.mark.parametrize("count", [0, 1])
def test_the_last_batch_may_have_one_row_or_none(
    monkeypatch: pytest.MonkeyPatch, count: int, mesh: str
) -> None:
    """As the last one of a loader that does not drop it."""
    x = rows()[:count]
    plan = planned(monkeypatch, mlp(), x, mesh, 4)
    if count:
        assert error_of(plan, x) < 1e-12
    else:
        assert plan.simulate(x)[0].shape == (0, WIDTH)


def test_a_batch_of_one_row_is_not_said_to_be_none() -> None:
    plan = fxpar.plan(mlp(), rows()[:1], mesh="pp=2", mode="propagate", grad=True)
    assert any("a batch of one row" in note for note in plan.notes)


def test_a_batch_that_stays_whole_has_its_reshards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By which the backward knows what to gather again, and a plan says why."""

    def notes(parts: int) -> list[set[str]]:
        plan = planned(monkeypatch, mlp(), rows()[:2], "dp=2", parts)
        nodes = filter(is_collective, plan.result.local.nodes)
        return [{*OURS} & node.meta.keys() for node in nodes]

    assert notes(4) == notes(1) != []
    assert all(notes(4))


def test_no_kernel_computes_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though those of two parts read one weight: the second part's may have to arrive
    from another stage yet."""
    model = double(nn.Sequential(*[Scaled() for _ in range(3)]))
    monkeypatch.setenv("FXPAR_MICROBATCHES", "2")
    plan = fxpar.plan(model, rows(), mesh="dp=1", mode="propagate")
    code = code_of(plan.result.local, monkeypatch)
    calls = re.findall(r"^ +(extern_kernels.mm|cpp_fused)", code, re.MULTILINE)
    layer = ["extern_kernels.mm", "cpp_fused"]
    # The last kernel joins both.
    assert calls == [*layer * 2, layer[0], *layer * 3]


def test_shards_that_are_not_alike_stay_in_one_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = double(nn.Sequential(nn.Linear(WIDTH, 31), nn.ReLU(), nn.Linear(31, 8)))
    plan = planned(monkeypatch, model, rows(), "tp=2", 4)
    assert any("are unequal" in note for note in plan.notes)
    assert error_of(plan, rows()) < 1e-12


def test_what_cannot_be_cut_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="MICROBATCHES cannot be '0'"):
        planned(monkeypatch, mlp(), rows(), "dp=1", 0)
    monkeypatch.setenv("FXPAR_MICROBATCHES", "2")
    with pytest.raises(PlanError, match="no input holds a batch"):
        fxpar.plan(lambda: torch.ones(4) * 2, mesh="dp=2")
