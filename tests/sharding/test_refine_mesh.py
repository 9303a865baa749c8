"""Plans on parts of an axis: asked for by hints and code, or found for heads that an
axis does not divide. What the ranks compute is what one device does."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxpar
from fxpar.errors import HintError
from fxpar.planning import TracedPlan
from fxpar.sharding.plan import Plan
from fxpar.sharding.spec import Spec
from tests.helpers.grouped_heads import HEADS, WIDTH, batch, layer
from tests.helpers.models import DoubleLoss, double


def planned(model: nn.Module, mesh: str, **how: Any) -> TracedPlan:
    return fxpar.plan(model, batch(), mesh=mesh, grad=True, **how)


@functools.cache
def on_four() -> TracedPlan:
    return planned(layer(2), "tp=4", mode="propagate")


def check(plan: TracedPlan) -> None:
    """The ranks compute what one device computes, forward and backward."""
    x = batch()
    got, want = plan.simulate(x), plan.reference(x)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


# Heads that the axis does not divide


@pytest.mark.parametrize(
    ("mesh", "refined", "how", "mode"),
    [
        ("tp=4", "tp=2*2", "gqa", "propagate"),
        pytest.param(
            "dp=2,tp=4", "dp=2,tp=2*2", "expand", "propagate", marks=pytest.mark.slow
        ),
        pytest.param("tp=4", "tp=2*2", "expand", "search", marks=pytest.mark.slow),
        pytest.param("tp=8", "tp=2*4", "gqa", "propagate", marks=pytest.mark.slow),
        pytest.param("tp=8", "tp=2*4", "gqa", "search", marks=pytest.mark.slow),
        pytest.param("tp=4", "tp=2*2", "repeat", "propagate", marks=pytest.mark.slow),
        pytest.param(
            "dp=2,tp=4", "dp=2,tp=2*2", "gqa", "search", marks=pytest.mark.slow
        ),
    ],
)
def test_two_key_heads_lie_on_parts(
    mesh: str, refined: str, how: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each key head lies on the ranks of a part, as Megatron copies it: no heads are
    gathered, gradients of its projection are reduced over the rest of the axis."""
    monkeypatch.setenv("FXPAR_HARDWARE", "a100")
    # By itself a search leaves so small a layer whole.
    hints = {"*.q.weight": ("tp", None)} if mode == "search" else None
    plan = planned(layer(2, how=how), mesh, mode=mode, hints=hints)
    assert str(plan.mesh) == refined
    check(plan)
    moved = {c.kind for c in plan.collectives if any("tp" in a for a in c.axes)}
    assert moved <= {"all_reduce", "reduce_scatter", "all_gather"}
    if mode == "propagate":
        assert plan.spec("attention.k.weight") == Spec("tp:(1)2", None)
        assert plan.spec("attention.q.weight") == Spec("tp", None)
        assert moved == {"all_reduce"}
    assert sum(c.bytes for c in plan.collectives) <= megatron(plan)


def megatron(plan: TracedPlan) -> int:
    """Bytes that Megatron's layout all-reduces in a step: the results of both blocks
    and of both their gradients, the projections of keys and values over the copies of
    a head, all parameters over the batch axis."""
    sizes = plan.mesh.unrefined.sizes
    rows = batch().numel() * 8 // sizes.get("dp", 1)
    heads = 2 * (2 * WIDTH // HEADS) * WIDTH * 8 // 2
    total = 4 * rows + heads
    if "dp" in sizes:
        shapes = {name: p.shape for name, p in layer(2).named_parameters()}
        for name, spec in plan.parameters:
            local = spec.local_shape(plan.mesh, shapes[name])
            total += math.prod(local) * 8
    return total


@pytest.mark.slow
def test_six_heads_lie_on_parts() -> None:
    plan = planned(layer(6, heads=6), "tp=4", mode="propagate")
    assert str(plan.mesh) == "tp=2*2"
    check(plan)
    assert plan.spec("attention.q.weight") == Spec("tp:(1)2", None)
    assert plan.spec("up.weight") == Spec("tp", None)
    assert {c.kind for c in plan.collectives} == {"all_reduce"}


@pytest.mark.parametrize(
    ("kv", "mesh"),
    [
        (4, "tp=4"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, "tp=4"), (2, "tp=2"), (3, "tp=2"), (2, "dp=4"))
        ),
    ],
)
def test_nothing_changes_where_no_head_needs_parts(kv: int, mesh: str) -> None:
    heads = 6 if kv == 3 else HEADS
    plan = planned(layer(kv, heads=heads), mesh, mode="propagate")
    assert str(plan.mesh) == mesh


def test_columns_that_are_no_heads_need_no_parts() -> None:
    """Two classes, and a gate beside its values, are not shared by a product."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.out = nn.Linear(8, 2 * 16), nn.Linear(16, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate, value = self.both(x).unflatten(-1, (2, 16)).unbind(-2)
            return self.out(torch.sigmoid(gate) * value)

    plan = fxpar.plan(Gated(), torch.randn(4, 3, 8), mesh="tp=4", mode="propagate")
    assert str(plan.mesh) == "tp=4"


# What names parts


def chain(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w) @ v


def operands() -> list[torch.Tensor]:
    torch.manual_seed(2)
    shapes = (8, 16), (16, 32), (32, 16)
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("part", ["tp:2", "tp:(2)2", ("tp:(2)2", "tp:(1)2")])
def test_hints_name_parts(part: Any) -> None:
    hints = {"w": (None, part)}
    plan = fxpar.plan(chain, *operands(), mesh="tp=4", hints=hints, mode="propagate")
    check_chain(plan)
    spec = Spec(None, part)
    assert plan.spec("w") == spec
    assert plan.spec("v") == Spec(*reversed(spec.dims))
    axes = {axis for c in plan.collectives for axis in c.axes}
    assert axes == ({"tp"} if isinstance(part, tuple) else set(spec.axes))


def check_chain(plan: TracedPlan) -> None:
    got, want = plan.simulate(*operands()), plan.reference(*operands())
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_specs_and_files_name_parts(tmp_path: Path) -> None:
    (tmp_path / "hints.toml").write_text('w = ["_", "tp:2"]')
    plan = fxpar.plan(
        chain,
        *operands(),
        mesh="tp=4",
        in_specs=[("tp:(2)2", None), None, None],
        out_specs=[("tp", None)],
        hints=str(tmp_path / "hints.toml"),
        mode="propagate",
    )
    check_chain(plan)
    assert plan.inputs[0] == Spec("tp:(2)2", None)
    assert plan.spec("w") == Spec(None, "tp:(1)2")
    assert plan.outputs[0] == Spec("tp", None)


def test_a_part_as_large_as_its_axis_is_the_axis() -> None:
    plan = fxpar.plan(
        chain, *operands(), mesh="tp=4", in_specs=[("tp:4", None), None, None]
    )
    check_chain(plan)
    assert plan.inputs[0] == Spec("tp", None)


def test_code_names_parts() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return fxpar.constrain(x @ w, "tp:2", None)

    plan = fxpar.plan(f, *operands()[:2], mesh="dp=2,tp=4", mode="propagate")
    assert Spec("tp:(1)2", None) in dict(plan.values).values()
    got = plan.simulate(*operands()[:2])
    torch.testing.assert_close(got, plan.reference(*operands()[:2]))


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (("tp:(1)3", None), "axis 'tp' of 4 ranks has no part 'tp:(1)3'"),
        (("sp:(2)2", None), "has no axis 'sp:(2)2'"),
        (("tp:2", "tp"), "axes 'tp:(1)2' and 'tp' overlap"),
        (("tp:(1)2", "tp:(1)2"), "axis 'tp:(1)2' is used twice"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    entries: tuple[str | None, ...], words: str
) -> None:
    """In hints and in code, there with the user's line."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return fxpar.constrain(x * 2, *entries)

    with pytest.raises(HintError) as error:
        fxpar.plan(f, operands()[0], mesh="tp=4", mode="propagate")
    assert words in str(error.value) and error.value.fix
    assert "fxpar.constrain(x * 2" in str(error.value)
    with pytest.raises(HintError) as error:
        hints = {"x": entries}
        fxpar.plan(chain, *operands(), mesh="tp=4", hints=hints, mode="propagate")
    assert words in str(error.value) and error.value.fix


def test_an_axis_of_a_prime_number_of_ranks_has_no_parts() -> None:
    given, hints = operands(), {"x": ("tp:(1)3", None)}
    with pytest.raises(HintError, match="'tp' of 2 ranks has no part") as error:
        fxpar.plan(chain, *given, mesh="tp=2", hints=hints, mode="propagate")
    assert error.value.fix
    plan = fxpar.plan(
        chain, *given, mesh="tp=2", hints={"w": (None, "tp:(1)2")}, mode="propagate"
    )
    assert str(plan.mesh) == "tp=2" and "tp" in plan.spec("w").axes


def test_an_axis_that_uneven_shards_need_whole_is_not_cut() -> None:
    hints, specs = {"w": (None, "tp:2")}, [("tp", None), None, None]
    given = [torch.randn(10, 16), *(x.detach().float() for x in operands()[1:])]
    with pytest.raises(HintError, match="'tp' has no parts here: .*10 rows"):
        fxpar.plan(
            chain, *given, mesh="tp=4", hints=hints, in_specs=specs, mode="propagate"
        )


# Views that split a dim


@pytest.mark.parametrize(
    ("shape", "parts", "lies"),
    [
        ((2, 8), "x=2*2", Spec("x:(1)2", "x:(2)2")),
        ((4, 4), "x=4", Spec("x", None)),
        ((1, 2, 8), "x=2*2", Spec(None, "x:(1)2", "x:(2)2")),
    ],
)
def test_a_view_splits_a_dim_between_parts(
    shape: tuple[int, ...], parts: str, lies: Spec
) -> None:
    x = torch.randn(16, dtype=torch.float64)
    plan = fxpar.plan(
        lambda x: x.view(shape) * 2, x, mesh="x=4", in_specs=[("x",)], mode="propagate"
    )
    assert (str(plan.mesh), plan.outputs) == (parts, (lies,))
    assert not plan.collectives
    torch.testing.assert_close(plan.simulate(x), plan.reference(x))


@pytest.mark.parametrize(("axis", "shape"), [("x", (3, 8)), ("dp", (2, 12))])
def test_what_no_part_divides_and_what_splits_the_batch_is_not_cut(
    axis: str, shape: tuple[int, ...]
) -> None:
    x = torch.randn(24)
    plan = fxpar.plan(
        lambda x: x.view(shape) * 2,
        x,
        mesh=f"{axis}=4",
        in_specs=[(axis,)],
        mode="propagate",
    )
    assert not plan.mesh.is_refined
    torch.testing.assert_close(plan.simulate(x), plan.reference(x))


def test_a_plan_on_parts_is_saved_and_applied_again(tmp_path: Path) -> None:
    plan = on_four()
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.hash == plan.hash and loaded.mesh.axes == plan.mesh.axes
    assert "tp:(1)2" in json.dumps(loaded.to_dict())
    again = planned(layer(2), "tp=4", mode=str(tmp_path / "plan.json"))
    assert again.hash == plan.hash, plan.diff(again)
    assert str(again.result.local) == str(plan.result.local)
    check(again)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp=4", "dp=2,tp=4"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_models_with_two_key_heads(family: str, mesh: str) -> None:
    """As Hugging Face writes them: what is repeated for each query head, rotations,
    norms of heads."""
    import transformers

    config = getattr(transformers, f"{family}Config")(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=WIDTH // HEADS,
        vocab_size=64,
        max_position_embeddings=16,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = DoubleLoss(getattr(transformers, f"{family}ForCausalLM")(config))
    ids = torch.randint(0, 64, (4, 8))
    fed = {"input_ids": ids, "labels": ids}
    with double():
        plan = fxpar.plan(model, mesh=mesh, grad=True, mode="propagate", **fed)
        got, want = plan.simulate(**fed), plan.reference(**fed)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    for name in ("k", "v"):
        weight = f"model.model.layers.1.self_attn.{name}_proj.weight"
        assert plan.spec(weight) == Spec("tp:(1)2", None)
    # The loss gathers maximum and sum of each part of the vocabulary.
    of_layers = (c for c in plan.collectives if not c.source.startswith("amax "))
    assert {c.kind for c in of_layers} == {"all_reduce"}
