"""Rules of ``fxpar.rule`` are tried when an op is first planned: a wrong one is an
error that names the factor, one that cannot be tried a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fxpar
from fxpar.errors import FxparWarning, RuleError
from fxpar.passes.simulate import check_user_rules
from fxpar.sharding import ops as rules

custom_op = torch.library.custom_op


@custom_op("user_rules::norm", mutates_args=())
def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w


@custom_op("user_rules::project", mutates_args=())
def project(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


@custom_op("user_rules::shifted", mutates_args=())
def shifted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@custom_op("user_rules::blocks", mutates_args=())
def blocks(x: torch.Tensor, n: int) -> torch.Tensor:
    """Each ``n`` columns over the largest of them."""
    parts = x.unflatten(1, (-1, n))
    return (parts / parts.abs().amax(-1, keepdim=True)).flatten(1)


@custom_op("user_rules::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand_like(x)


@custom_op("user_rules::lengths", mutates_args=())
def lengths(x: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """Raises on what a sample of an index is."""
    if int(of.min()) < 5:
        raise ValueError("too short")
    return x * of


@custom_op("user_rules::pairs", mutates_args=())
def pairs(x: torch.Tensor) -> torch.Tensor:
    """Each row and the next change places; the last of an odd number stays."""
    pairs = x.shape[0] // 2
    swapped = x[: 2 * pairs].unflatten(0, (pairs, 2)).flip(1).flatten(0, 1)
    return torch.cat([swapped, x[2 * pairs :]])


@custom_op("user_rules::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return (x.float() * 2).to(x.dtype) if x.dtype.itemsize == 1 else x * 2


for _op in (norm, shifted, blocks, noise, lengths, pairs, doubled):
    _op.register_fake(lambda x, *_: torch.empty_like(x))
project.register_fake(lambda x, w: x.new_empty(x.shape[0], w.shape[1]))


@pytest.fixture(autouse=True)
def no_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(check_user_rules, "_CHECKED", set())
    yield
    for name in [name for name in rules._USER if name.startswith("user_rules::")]:
        del rules._USER[name]


def planned(
    fn: Callable[..., Any], *args: Any, mesh: str = "tp=2", spec: Any = None
) -> list[str]:
    """Warnings of a plan, the numbers of which are those of one device."""
    torch.manual_seed(0)
    state = torch.get_rng_state()
    specs = [spec, *[None] * (len(args) - 1)]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        plan = fxpar.plan(fn, *args, mesh=mesh, in_specs=specs, mode="propagate")
    assert torch.equal(torch.get_rng_state(), state)
    if fn is not noise:
        torch.testing.assert_close(plan.simulate(*args), fn(*args))
    return [str(w.message) for w in seen if w.category is FxparWarning]


X, W = torch.randn(8, 16), torch.randn(16)
SQUARE = torch.randn(16, 12)


@pytest.mark.parametrize(
    ("args", "rule", "marks", "fact", "fix"),
    [
        ((norm, X, W), "a b, b -> a b", {}, "'b' is split", '"a b!, b! -> a b!"'),
        (
            (norm, X, W),
            "a b!, b! -> a b!",
            {"linear": "0"},
            "operand is partial",
            "linear",
        ),
        (
            (project, X, SQUARE),
            "m k, k n -> m n",
            {"reduce": "max"},
            "'k'",
            '"m k!, k! n',
        ),
        ((shifted, X), "a b -> a b", {"linear": "0"}, "operand is partial", "linear"),
    ],
)
def test_a_wrong_rule_is_an_error(
    args: Any, rule: str, marks: Any, fact: str, fix: str
) -> None:
    fn, *tensors = args
    fxpar.rule(fn._qualname, rule, **marks)
    for _ in range(2):  # it is not forgotten
        with pytest.raises(RuleError, match=fact) as error:
            planned(fn, *tensors)
        assert fix in error.value.fix and error.value.where
        assert "test_user_rules.py" in error.value.where


@pytest.mark.parametrize(
    ("args", "rule", "marks"),
    [
        ((norm, X, W), "a b!, b! -> a b!", {"linear": "1"}),
        ((project, X, SQUARE), "m k, k n -> m n", {"linear": "0|1"}),
        ((shifted, X), "a b -> a b", {"monotone": "0"}),
    ],
)
def test_a_right_rule_is_taken_in_silence(args: Any, rule: str, marks: Any) -> None:
    fn, *tensors = args
    fxpar.rule(fn._qualname, rule, **marks)
    assert planned(fn, *tensors, spec=("tp", None)) == []


@pytest.mark.parametrize(
    ("columns", "mesh", "axes", "marks", "fix"),
    [
        (128, "tp=4", "tp", {}, None),
        (96, "tp=2", "tp", {}, "whole"),  # one block and a half
        (128, "dp=2,tp=4", "tp", {}, None),
        (128, "dp=2,tp=4", ("dp", "tp"), {}, "whole"),  # half a block
        (2048, "tp=3", "tp", {}, "even=True"),
        (2048, "tp=3", None, {"even": True}, None),
    ],
)
def test_shards_of_an_op_that_works_in_blocks(
    columns: int, mesh: str, axes: Any, marks: Any, fix: str | None
) -> None:
    fxpar.rule("user_rules::blocks", "a b -> a b", **marks)
    x, spec = torch.randn(4, columns), (None, axes)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return blocks(x, 32)

    if fix is None:
        assert planned(fn, x, mesh=mesh, spec=spec) == []
    else:
        with pytest.raises(RuleError, match="'b' is split") as error:
            planned(fn, x, mesh=mesh, spec=spec)
        assert fix in error.value.fix


def test_shards_of_an_odd_number_of_rows() -> None:
    fxpar.rule("user_rules::pairs", "a b -> a b")
    x = torch.randn(8, 4)
    assert planned(pairs, x, mesh="dp=2") == []
    with pytest.raises(RuleError, match="'a' is split"):
        planned(pairs, x, mesh="dp=8")


def test_a_rule_is_tried_at_other_sizes() -> None:
    """Of a dim of size 1 nothing can be split, which says nothing of others."""
    fxpar.rule("user_rules::norm", "a b, b -> a b")
    assert planned(norm, X[:, :1], W[:1], mesh="dp=2") == []
    with pytest.raises(RuleError, match="'b' is split"):
        planned(norm, X, W, mesh="dp=2")


@pytest.mark.parametrize(
    "dtype", [torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_every_dtype_of_numbers(dtype: torch.dtype) -> None:
    """Rounding of other sums is no wrong number, eight-bit floats are compared."""
    if dtype.is_complex:
        fxpar.rule("user_rules::project", "m k, k n -> m n", linear="0|1")
        args = [torch.randn(*shape, dtype=dtype) for shape in ((8, 16), (16, 12))]
        assert planned(lambda x, w: project(x, w), *args) == []
        fxpar.rule("user_rules::shifted", "a b -> a b", linear="0")
        with pytest.raises(RuleError, match="operand is partial"):
            planned(lambda x: shifted(x), args[0])
    else:
        fxpar.rule("user_rules::doubled", "a b -> a b")
        x = X.to(dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plan = fxpar.plan(lambda x: doubled(x), x, mesh="tp=2", mode="propagate")
        assert torch.equal(plan.simulate(x).float(), doubled(x).float())


def test_marks_name_arguments() -> None:
    with pytest.raises(RuleError, match="linear=True for .* names no arguments"):
        fxpar.rule("user_rules::shifted", "a b -> a b", linear=True)
    fxpar.rule("user_rules::project", "m k, k n -> m n", linear="0|1", monotone=None)


def test_a_rule_that_cannot_be_tried_is_a_warning() -> None:
    fxpar.rule("user_rules::noise", "a b -> a b")
    (text,) = planned(noise, X)
    assert "not checked: the op gives other numbers at every call" in text
    fxpar.rule("user_rules::lengths", "a b, a b -> a b")
    (text,) = planned(lengths, X, torch.full((8, 16), 7))
    assert "not checked: a sample fails (too short)" in text
    assert planned(noise, X) == []  # it was said


def test_verify_names_rules_of_users(monkeypatch: pytest.MonkeyPatch) -> None:
    from fxpar.errors import PlanError
    from fxpar.runtime.steps.verify import verify

    monkeypatch.setattr(check_user_rules, "_check", lambda *_: None)
    fxpar.rule("user_rules::norm", "a b, b -> a b")
    specs = [(None, "tp"), None]
    plan = fxpar.plan(norm, X, W, mesh="tp=2", in_specs=specs, mode="propagate")
    result = plan.result
    with pytest.raises(PlanError, match="FXPAR_VERIFY") as error:
        verify(result.local, result.normalized, result.decision, plan.module, [X, W])
    assert "fxpar.rule gave to user_rules.norm" in error.value.fix
