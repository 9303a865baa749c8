"""Manual regions compute what one device does, and refuse what they cannot."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives

import fxpar
from fxpar import Spec, shard_map
from fxpar.errors import MeshError, RegionError
from tests.helpers.regions import CASES, RegionModel, parts
from tests.helpers.spawn import shared_pool

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

TP = ("tp",)
QUICK = [
    ("mlp", "tp=2", "propagate"),
    ("heads", "dp=2,tp=2", "propagate"),
    ("ring", "tp=4", "propagate"),
    ("two", "dp=2,tp=2", "search"),
]
MESHES = ("tp=1", "tp=2", "tp=4", "dp=2,tp=2", "tp=2,dp=2")


def every_case() -> list[Any]:
    modes = ("propagate", "search", "replicate")
    return [
        pytest.param(*case, marks=() if case in QUICK else (pytest.mark.slow,))
        for case in itertools.product(CASES, MESHES, modes)
    ]


@pytest.mark.parametrize("name, mesh, mode", every_case())
def test_every_rank_together_is_one_device(
    name: str, mesh: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXPAR_HARDWARE", "h100")
    case, ranks = CASES[name], fxpar.Mesh.parse(mesh).sizes["tp"]
    args = case.arguments()
    plan = fxpar.plan(case.model, *args, mesh=mesh, mode=mode, grad=True)
    result, gradients = plan.simulate(*args)
    want = case.expected(ranks, *args)
    torch.testing.assert_close(result, want)
    outs = want if isinstance(want, tuple) else (want,)
    total = sum(out.sum() for out in outs)
    for got, x in zip(
        gradients.values(), torch.autograd.grad(total, args), strict=True
    ):
        torch.testing.assert_close(got, x)
    reference, gradients_too = plan.reference(*args)
    torch.testing.assert_close(reference, result)
    torch.testing.assert_close(gradients_too, gradients)


def kinds(plan: Any) -> list[tuple[str, tuple[str, ...]]]:
    return [(c.kind, c.axes) for c in plan.collectives]


def test_gradients_send_no_more_than_megatron() -> None:
    """The sum of the forward has no sum in the backward; the whole input has one."""
    args = CASES["mlp"].arguments()
    case = CASES["mlp"]
    specs = [None, (None, "tp"), ("tp", None)]
    plan = fxpar.plan(
        case.one_rank, *args, mesh="tp=2", in_specs=specs, mode="propagate", grad=True
    )
    assert kinds(plan) == [("all_reduce", TP)] * 2
    lines = [c.source for c in plan.collectives]
    assert all("regions.py" in line or "test_shard_map.py" in line for line in lines)


def test_other_axes_stay_automatic() -> None:
    """Along dp the region is planned: its batch is split, and so are its bytes."""
    args = CASES["gather_dim_1"].arguments()
    found = {
        mesh: fxpar.plan(
            CASES["gather_dim_1"].model, *args, mesh=mesh, mode="propagate", grad=True
        )
        for mesh in ("tp=2", "dp=2,tp=2")
    }
    one, two = (plan.collectives for plan in found.values())
    assert [c.kind for c in one] == [c.kind for c in two]
    assert [c.bytes for c in one] == [2 * c.bytes for c in two]


def test_without_a_mesh_the_function_is_itself() -> None:
    def fn(x: torch.Tensor, factor: float, more: dict[str, Any]) -> Any:
        assert (fxpar.axis_size("tp"), int(fxpar.axis_index("tp"))) == (1, 0)
        x = collectives.all_reduce(x, "sum", "tp") * factor
        x = collectives.all_gather_tensor(x, 1, "dp")
        x = collectives.reduce_scatter_tensor(x, "sum", 0, "anything")
        x = collectives.all_to_all_single(x, None, None, "tp").view(2, 8).view(4, 4)
        return {"y": fxpar.permute(x, [0], "tp") + more["y"]}

    x, y = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    mapped = shard_map(fn, (TP, None), (TP,))
    out = mapped(x, 3.0, {"y": y})["y"]
    torch.testing.assert_close(out, 3 * x + y)
    assert type(out) is torch.Tensor
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient, torch.full_like(x, 3.0))
    with pytest.raises(RuntimeError):  # the name stands for no group elsewhere
        collectives.all_gather_tensor(x, 0, "tp")


def test_on_one_rank_regions_are_taken_out() -> None:
    torch.manual_seed(0)
    model = RegionModel()
    x = torch.randn(4, 8)
    options = {"mesh": "tp=1", "codegen": "eager"}
    compiled = torch.compile(model, backend="fxpar", options=options)
    torch.testing.assert_close(compiled(x), model(x))


def test_nested_regions() -> None:
    """A region inside a region takes the axes that are left."""

    def inner(x: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce(x.square(), "sum", "tp")

    def outer(x: torch.Tensor) -> torch.Tensor:
        assert fxpar.axis_size("dp") == 2
        y = shard_map(inner, ((None, "tp"),), (None,))(x.sin())
        return collectives.all_reduce(y, "sum", "dp").cos()

    def model(x: torch.Tensor) -> torch.Tensor:
        return shard_map(outer, (("dp",),), (None,), axes="dp")(x)

    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    plan = fxpar.plan(model, x, mesh="dp=2,tp=2", mode="propagate", grad=True)
    result, gradients = plan.simulate(x)
    cut = [a for part in parts(x, 2) for a in parts(part.sin(), 2, 1)]
    want = sum(part.square() for part in cut).cos()
    torch.testing.assert_close(result, want)
    (gradient,) = torch.autograd.grad(want.sum(), x)
    torch.testing.assert_close(gradients["x"], gradient)


@torch.library.custom_op("fxpar_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.filterwarnings("error::fxpar.FxparWarning")
def test_custom_ops_run_on_what_a_rank_holds() -> None:
    """An op without a rule is not warned of where nothing of it is repeated."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return shard_map(lambda x: doubled(x.sin()), (TP,), (TP,))(x)

    x = torch.randn(8, 4)
    plan = fxpar.plan(model, x, mesh="tp=4", mode="propagate")
    torch.testing.assert_close(plan.simulate(x), 2 * x.sin())
    assert plan.collectives == ()


def test_plan_is_saved_and_applied_again(tmp_path: Any) -> None:
    args = CASES["mlp"].arguments()
    model, mesh = CASES["mlp"].model, "dp=2,tp=2"
    plan = fxpar.plan(model, *args, mesh=mesh, mode="propagate")
    plan.save(tmp_path / "plan.json")
    again = fxpar.plan(model, *args, mesh=mesh, mode=str(tmp_path / "plan.json"))
    assert again.hash == plan.hash
    torch.testing.assert_close(again.simulate(*args), plan.simulate(*args))


closed_over = nn.Linear(6, 6)
_attention = nn.functional.scaled_dot_product_attention
WHOLE = (None,)


def _leaks(x: torch.Tensor) -> torch.Tensor:
    kept = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.sin())
        return x

    return shard_map(fn, (TP,), (TP,))(x).sum() + kept[0].sum()


def _raw(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x


def _region(fn: Callable[..., Any], ins: Any, outs: Any, **how: Any) -> Any:
    return lambda x: shard_map(fn, ins, outs, **how)(x.clone())


def _twice(x: torch.Tensor) -> torch.Tensor:
    return shard_map(lambda x: x, (TP,), (TP,))(x)


def _branches(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, _twice, lambda x: x.cos(), (x,))


# What is done wrong, and words of the error.
WRONG = {
    "varies": (_region(lambda x: x.sin(), (TP,), WHOLE), "said to be whole along 'tp'"),
    "summand": (
        _region(lambda x: x.sum(0), (TP,), WHOLE),
        "said to be whole along 'tp'",
    ),
    "by index": (
        _region(lambda x: x * fxpar.axis_index("tp"), WHOLE, WHOLE),
        "said to be whole along 'tp'",
    ),
    "raw": (_region(_raw, (TP,), (TP,)), "torch.distributed"),
    "other group": (
        _region(lambda x: collectives.all_reduce(x, "sum", "xx"), (TP,), (TP,)),
        "over group 'xx'",
    ),
    "other group, sized": (
        _region(lambda x: collectives.all_gather_tensor(x, 0, "xx"), (TP,), WHOLE),
        "over group 'xx'",
    ),
    "axis of a spec": (_region(torch.sin, (("xx",),), (TP,)), "names axis 'xx'"),
    "axis of the result": (_region(torch.sin, (TP,), (("xx",),)), "names axis 'xx'"),
    "axes": (_region(torch.sin, (TP,), (TP,), axes="yy"), "axis 'yy'"),
    "axis_size": (
        _region(lambda x: x * fxpar.axis_size("xx"), (TP,), (TP,)),
        "axis 'xx' is not one",
    ),
    "axis_index": (
        _region(lambda x: x * fxpar.axis_index("xx"), (TP,), (TP,)),
        "axis 'xx' is not one",
    ),
    "no order": (
        _region(lambda x: fxpar.permute(x, [0, 0], "tp"), (TP,), (TP,)),
        "no order of 2 ranks",
    ),
    "dims": (
        _region(torch.sin, ((None, None, "tp"),), (TP,)),
        re.escape("3 dims, its tensor [8, 6]"),
    ),
    "twice": (_region(torch.sin, (("tp", "tp"),), (TP,)), "'tp' twice"),
    "divides": (
        lambda x: shard_map(torch.sin, (TP,), (TP,))(x[:7]),
        "dim 0 of size 7 does not divide",
    ),
    "arguments": (_region(torch.sin, (TP, None), (TP,)), "2 entries for 1 tensor arg"),
    "results": (
        _region(lambda x: (x, x), (TP,), (TP,)),
        "1 entries for 2 tensor results",
    ),
    "text": (_region(torch.sin, ("tp",), (TP,)), "a spec is a tuple"),
    "partial in": (
        _region(torch.sin, (Spec(None, partial={"tp": "sum"}),), (TP,)),
        "is partial",
    ),
    "random": (
        _region(lambda x: nn.functional.dropout(x, 0.5), (TP,), (TP,)),
        "random inside a manual region",
    ),
    "random attention": (
        _region(lambda x: _attention(x, x, x, dropout_p=0.5), (TP,), (TP,)),
        "random inside a manual region",
    ),
    "leaks": (_leaks, "is read outside of it"),
    "nested": (_region(_twice, (TP,), (TP,)), "over no axis"),
    "nested, named": (
        _region(lambda x: shard_map(torch.sin, (TP,), (TP,), "tp")(x), (TP,), (TP,)),
        "inside a region that does",
    ),
    "branch": (_branches, "inside a branch or a loop"),
    "uneven": (
        _region(
            lambda x: collectives.all_to_all_single(x, [1, 3], [1, 3], "tp"),
            (TP,),
            (TP,),
        ),
        "blocks of one size",
    ),
}


def wrong_input() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(8, 6, requires_grad=True)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_regions_are_refused(name: str) -> None:
    fn, words = WRONG[name]
    with pytest.raises(RegionError, match=words) as raised:
        fxpar.plan(fn, wrong_input(), mesh="tp=2", mode="propagate", grad=True)
    assert __file__ in str(raised.value.where) and raised.value.fix


def test_region_needs_a_named_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPAR_HARDWARE", "h100")
    with pytest.raises(MeshError, match="chosen by the search"):
        fxpar.plan(_twice_dp, wrong_input(), mesh="auto:4")


def _twice_dp(x: torch.Tensor) -> torch.Tensor:
    return shard_map(torch.sin, (("dp",),), (("dp",),))(x)


def compiled_refusals(names: list[str]) -> dict[str, str]:
    out, options = {}, {"mesh": "tp=2", "codegen": "eager", "plan": "propagate"}
    for name in names:
        torch.compiler.reset()
        compiled = torch.compile(COMPILED[name], backend="fxpar", options=options)
        try:
            compiled(wrong_input()).sum().backward()
        except fxpar.FxparError as error:
            out[name] = f"{type(error).__name__} {error}"
    return out


def _reads_closure(x: torch.Tensor) -> torch.Tensor:
    return shard_map(lambda x: closed_over(x), (TP,), (TP,))(x)


def _cut(x: torch.Tensor) -> torch.Tensor:
    def fn(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    return shard_map(fn, (TP,), (TP,))(x)


COMPILED = {name: fn for name, (fn, _) in WRONG.items()}
COMPILED |= {"cut": _cut, "closure": _reads_closure}


def check_refusals(names: list[str]) -> None:
    words = {name: text for name, (_, text) in WRONG.items()}
    words |= {"closure": "is read outside of it", "cut": "a graph break cuts"}
    for said in shared_pool(2).run(compiled_refusals, names):
        assert said.keys() == set(names)
        for name, text in said.items():
            assert re.search(words[name], text), (name, text)
            assert "test_shard_map.py" in text, text


@pytest.mark.multiprocess
def test_all_ranks_refuse() -> None:
    check_refusals(["raw", "arguments", "cut"])


@pytest.mark.slow
@pytest.mark.multiprocess
def test_all_ranks_refuse_everything() -> None:
    check_refusals(list(COMPILED))


def trained(mesh: str | None, codegen: str, at_rest: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    model = RegionModel().double()
    x, run = torch.randn(4, 8).double(), model
    if mesh is not None:
        torch.compiler.reset()
        if at_rest:
            fxpar.shard(model, mesh=mesh)
        options = {"mesh": mesh, "codegen": codegen, "plan": "propagate"}
        run = torch.compile(model, backend="fxpar", options=options)
    with torch.no_grad():
        before = run(x)
    after = run(x)
    after.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    if at_rest and mesh is not None:
        gradients = {name: g.full_tensor() for name, g in gradients.items()}
    return {"before": before, "after": after.detach(), **gradients}


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "mesh, codegen, at_rest",
    [
        ("tp=2", "eager", False),
        pytest.param("tp=2", "eager", True, marks=pytest.mark.slow),
        pytest.param("tp=2", "inductor", False, marks=pytest.mark.slow),
        pytest.param("dp=2,tp=2", "eager", True, marks=pytest.mark.slow),
    ],
)
def test_model_with_regions_trains(mesh: str, codegen: str, at_rest: bool) -> None:
    want = trained(None, "")
    pool = shared_pool(fxpar.Mesh.parse(mesh).size)
    for got in pool.run(trained, mesh, codegen, at_rest, timeout=600):
        torch.testing.assert_close(got, want)


def stepped(mesh: str | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = RegionModel().double()
    x, optimizer = torch.randn(4, 8).double(), torch.optim.Adam(model.parameters())
    if mesh is None:
        model(x).square().sum().backward()
        optimizer.step()
    else:
        options = {"mesh": mesh, "codegen": "eager", "plan": "propagate"}
        step = fxpar.train_step(
            model, lambda m, x: m(x).square().sum(), optimizer, options=options
        )
        step(x)
    return [p.detach() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_train_step_with_regions() -> None:
    want = stepped(None)
    for got in shared_pool(2).run(stepped, "tp=2"):
        torch.testing.assert_close(got, want)
