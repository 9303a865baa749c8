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
from fxpar.sharding import rules

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


for _op in (norm, shifted, blocks, noise, lengths):
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
    ("columns", "mesh", "marks", "fix"),
    [
        (128, "tp=4", {}, None),
        (96, "tp=2", {}, "whole"),  # one block and a half
        (2048, "tp=3", {}, "even=True"),
        (2048, "tp=3", {"even": True}, None),
    ],
)
def test_shards_of_an_op_that_works_in_blocks(
    columns: int, mesh: str, marks: Any, fix: str | None
) -> None:
    fxpar.rule("user_rules::blocks", "a b -> a b", **marks)
    x, spec = torch.randn(4, columns), (None, "tp")

    def fn(x: torch.Tensor) -> torch.Tensor:
        return blocks(x, 32)

    if fix is None:
        assert planned(fn, x, mesh=mesh, spec=None if marks else spec) == []
    else:
        with pytest.raises(RuleError, match="'b' is split") as error:
            planned(fn, x, mesh=mesh)
        assert fix in error.value.fix


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
