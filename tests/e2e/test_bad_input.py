"""What users get wrong: an error that says what, where and what to do, on every rank,
or a warning and right numbers. Never a hang."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxpar
from fxpar import pipeline
from fxpar.errors import (
    FxparError,
    FxparWarning,
    HintError,
    InputMismatchError,
    MeshError,
    OptionError,
    PlanError,
    RankMismatchError,
    UnknownOpError,
)
from fxpar.runtime.ranks import meeting
from fxpar.sharding import ops as rules
from tests.helpers.dying_rank import (
    check_that_ranks_end,
    check_that_the_rank_is_named,
)
from tests.helpers.spawn import shared_pool

WIDTH = 16


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def made(seed: int = 0) -> tuple[MLP, torch.Tensor]:
    torch.manual_seed(seed)
    return MLP(), torch.randn(8, WIDTH)


def compiled(fn: Any, **options: Any) -> Any:
    return torch.compile(fn, backend="fxpar", options={"codegen": "eager"} | options)


def rank() -> int:
    return dist.get_rank()


def call(options: dict[str, Any] | None = None) -> torch.Tensor:
    """The ordinary program, with whatever is wrong around it."""
    model, x = made()
    return compiled(model, **(options or {}))(x).detach()


def raised(fn: Any, *args: Any, kind: type = FxparError, **how: Any) -> list[str]:
    """The texts of what every rank must raise."""
    errors = shared_pool(2).errors(fn, *args, **how)
    assert [type(error) for error in errors] == [kind] * 2, errors
    return [str(error) for error in errors]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    torch._dynamo.reset()


# Meshes


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ("dp=2;tp=2", "dp=2;tp=2"),
        ("dp", "'dp'"),
        ("dp=2,tp=two", "two"),
        ("dp=2,dp=2", "dp"),
        ("dp=4,tp=0", "0"),
    ],
)
def test_malformed_mesh(mesh: str, said: str) -> None:
    for text in raised(call, kind=MeshError, env={"FXPAR_MESH": mesh}):
        assert said in text and "fix:" in text


@pytest.mark.multiprocess
def test_mesh_of_another_size_than_the_world() -> None:
    for text in raised(call, kind=MeshError, env={"FXPAR_MESH": "dp=2,tp=4"}):
        assert "mesh dp=2,tp=4 has 8 ranks, but 2 processes run" in text
        assert "--nproc-per-node 8" in text


def test_mesh_without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPAR_MESH", "dp=4")
    with pytest.raises(MeshError, match="4 ranks, but 1 process runs"):
        call()


# Options


def test_an_error_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made()
    program = compiled(model)
    monkeypatch.setenv("FXPAR_MESH", "dp=4")
    with pytest.raises(MeshError):
        program(x)
    monkeypatch.setenv("FXPAR_MESH", "dp=1")
    torch.testing.assert_close(program(x), model(x))


def test_unknown_option() -> None:
    with pytest.raises(OptionError, match="unknown option 'messh'\n.*'mesh'"):
        call({"messh": "dp=1"})


def test_value_an_option_cannot_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPAR_PLAN", "propogate")
    with pytest.raises(OptionError, match="FXPAR_PLAN .*\n.*'propagate'"):
        call()


def test_unknown_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPAR_MESHES", "dp=1")
    with pytest.raises(OptionError, match="FXPAR_MESHES(.|\n)*'FXPAR_MESH'"):
        call()


# Ranks that are not alike


def other_parameters() -> tuple[list[str], torch.Tensor, list[torch.Tensor]]:
    """One training step of models that were built from the rank as seed."""
    model, _ = made(rank())
    _, x = made()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = compiled(model, mesh="dp=2,tp=2")(x)
        out.square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    texts = [str(w.message) for w in caught if w.category is FxparWarning]
    return texts, out.detach(), [p.detach() for p in model.parameters()]


@pytest.mark.multiprocess
def test_parameters_that_differ_are_those_of_rank_0() -> None:
    model, x = made()
    want = model(x)
    want.square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for me, (texts, out, parameters) in enumerate(shared_pool(4).run(other_parameters)):
        torch.testing.assert_close(out, want.detach())
        for p, q in zip(parameters, model.parameters(), strict=True):
            torch.testing.assert_close(p, q.detach())
        warned = [text for text in texts if "parameters differ between ranks" in text]
        assert len(warned) == (me == 0)
        if me == 0:
            assert "up.weight, up.bias, down.weight, down.bias" in warned[0]
            assert "manual_seed" in warned[0]


def other_inputs(by_name: bool) -> None:
    model, _ = made()
    x = torch.full((8, WIDTH), float(rank() == 1))
    program = compiled(model)
    program(x=x) if by_name else program(x)


@pytest.mark.multiprocess
@pytest.mark.parametrize("by_name", [False, True])
def test_inputs_that_differ(by_name: bool) -> None:
    for text in raised(other_inputs, by_name, kind=InputMismatchError):
        assert "input x differs between ranks: rank 1 does not feed what rank 0" in text
        assert "feed the same batch on every rank" in text
        assert "FXPAR_INPUTS=local" in text


def other_shapes() -> None:
    model, _ = made()
    compiled(model)(torch.ones(8 if rank() else 4, WIDTH))


def other_code() -> None:
    model, x = made()
    act = torch.sigmoid if rank() == 1 else torch.relu

    def program(x: torch.Tensor) -> torch.Tensor:
        return act(model(x))

    compiled(program)(x)


@pytest.mark.multiprocess
def test_programs_that_differ() -> None:
    for text in raised(other_code, kind=RankMismatchError):
        assert "ranks disagree about the program they call: rank" in text
        assert "--- rank 0\n+++ rank 1" in text
        assert "fix:" in text
        assert re.search(r"\n-.*relu", text) and re.search(r"\n\+.*sigmoid", text)


@pytest.mark.multiprocess
def test_shapes_that_differ() -> None:
    for text in raised(other_shapes, kind=InputMismatchError):
        assert "input x has other sizes" in text and "FXPAR_INPUTS=local" in text
        assert "[4, 16] on rank 0, [8, 16] on rank 1" in text


def counted(x: torch.Tensor) -> torch.Tensor:
    return x * (x > 0).sum().item()


def chosen(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0] * 2


def captured(fn: Any, option: str) -> None:
    with torch._dynamo.config.patch({option: True}):
        compiled(fn)(made()[1])


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("fn", "option"),
    [(counted, "capture_scalar_outputs"), (chosen, "capture_dynamic_output_shape_ops")],
)
def test_data_read_inside_a_graph(fn: Any, option: str) -> None:
    for text in raised(captured, fn, option, kind=PlanError):
        assert "inside one graph" in text and "test_bad_input.py" in text
        assert f"leave torch._dynamo.config.{option} off" in text


def inverted(x: torch.Tensor) -> torch.Tensor:
    window = torch.hann_window(8, dtype=x.dtype)
    bands = torch.stft(x, 8, window=window, return_complex=True)
    return torch.istft(bands, 8, window=window).square()


def histogram(x: torch.Tensor) -> torch.Tensor:
    return x.square() * torch.bincount((x > 0).long().flatten(), minlength=2).sum()


def in_a_step(fn: Any) -> None:
    model, x = made()

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        return fn(model(x)).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"codegen": "eager"}
    fxpar.train_step(model, loss_fn, optimizer, options=options)(x)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("fn", "line"),
    [
        (inverted, "return torch.istft(bands, 8, window=window).square()"),
        (histogram, "torch.bincount("),
        (chosen, "return x[x > 0] * 2"),
    ],
)
def test_data_read_inside_a_step(fn: Any, line: str) -> None:
    for text in raised(in_a_step, fn, kind=PlanError):
        assert "inside one graph" in text and line in text
        assert "outside of what is one graph (fxpar.train_step, fullgraph" in text


def fails_while_compiling() -> None:
    def decided(*args: Any, **kwargs: Any) -> Any:
        raise PlanError("nothing fits here")

    with contextlib.ExitStack() as stack:
        if rank() == 1:
            patched = mock.patch.object(pipeline, "decided", decided)
            stack.enter_context(patched)
        call()


@pytest.mark.multiprocess
def test_a_rank_that_fails_while_compiling() -> None:
    first, second = shared_pool(2).errors(fails_while_compiling)
    assert isinstance(second, PlanError) and "nothing fits here" in str(second)
    assert isinstance(first, RankMismatchError)
    assert "rank 1 failed:\nPlanError: nothing fits here" in str(first)
    for out in shared_pool(2).run(call):  # the ranks go on
        torch.testing.assert_close(out, call())


@pytest.mark.multiprocess
def test_a_rank_that_dies_within_a_step() -> None:
    check_that_ranks_end("dp=2", "rank 1 has ended without an error")


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("end", "codegen"),
    [
        ("raises", "eager"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("dies", "eager"), ("hangs", "eager"), ("raises", "inductor"))
        ),
    ],
)
def test_a_rank_that_leaves_between_forward_and_backward(
    end: str, codegen: str
) -> None:
    check_that_the_rank_is_named(end, codegen)


def test_other_errors_of_a_step_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are asked of collectives alone."""
    monkeypatch.setattr(meeting, "all_ranks", lambda: pytest.fail("asked"))
    meeting.name_lost_ranks(RuntimeError("mat1 and mat2 shapes"))
    meeting.name_lost_ranks(PlanError("a message by gloo"))


# Hints


@pytest.mark.parametrize(
    ("hint", "said"),
    [
        ({"up.weight": ["nowhere", "_"]}, "mesh dp=2,tp=2 has no axis 'nowhere'"),
        ({"up.weight": ["tp", "tp"]}, "axis 'tp' is used twice"),
        ({"up.*": ["_", "tp", "_"]}, "3 entries for a tensor of 2 dims"),
        ({"left.weight": ["tp"]}, "matches no parameter, buffer or input"),
    ],
)
def test_hints_that_do_not_fit(hint: dict[str, Any], said: str) -> None:
    model, x = made()

    def program(x: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
        return model(x).sum() + odd.sum()

    hints = {f"model.{k}" if k != "odd" else k: v for k, v in hint.items()}
    with pytest.raises(HintError, match=re.escape(said)) as caught:
        fxpar.plan(program, x, torch.ones(3), mesh="dp=2,tp=2", hints=hints)
    assert "fix:" in str(caught.value)
    assert next(iter(hints)) in str(caught.value)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (("nowhere",), "no axis 'nowhere'"),
        (("tp", "tp"), "axis 'tp' is used twice"),
        ((None, None, "tp"), "3 entries for a tensor of 2 dims"),
    ],
)
def test_constraints_that_do_not_fit(entries: tuple, said: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return fxpar.constrain(x * 2, *entries)

    with pytest.raises(HintError, match=re.escape(said)):
        fxpar.plan(program, torch.ones(8, 8), mesh="dp=2,tp=2")


def test_specs_for_another_number_of_arguments() -> None:
    with pytest.raises(HintError, match="in_specs has 2 entries for 1 tensor"):
        fxpar.plan(torch.relu, torch.ones(4), mesh="dp=2", in_specs=[None, None])


def test_hints_file_that_cannot_be_read(tmp_path: Any) -> None:
    path = tmp_path / "hints.toml"
    path.write_text("up.weight = tp")
    with pytest.raises(HintError, match="cannot read the hints file"):
        fxpar.plan(torch.relu, torch.ones(4), mesh="dp=2", hints=str(path))


# Ops without a rule


@torch.library.custom_op("fxpar_tests::double", mutates_args=())
def double_it(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double_it.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def uses_own_op(x: torch.Tensor) -> torch.Tensor:
    y = torch.ops.fxpar_tests.double(x + 1)  # first
    return torch.ops.fxpar_tests.double(y) - 1


@pytest.fixture
def own_rule() -> Iterator[None]:
    fxpar.rule("fxpar_tests::double", "b n -> b n", linear="0")
    yield
    del rules._USER["fxpar_tests::double"]


X = torch.arange(64.0).reshape(8, 8)


def plan_own_op() -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = fxpar.plan(uses_own_op, X, mesh="dp=2,tp=2", in_specs=[("dp", "tp")])
    texts = [str(w.message) for w in caught if w.category is FxparWarning]
    torch.testing.assert_close(plan.simulate(X), uses_own_op(X))
    return plan, texts


def test_unknown_op_warns_once() -> None:
    plan, texts = plan_own_op()
    assert len(texts) == 1
    assert "fxpar_tests.double" in texts[0] and "no sharding rule" in texts[0]
    assert f"2 calls, {2 * X.nbytes} bytes" in texts[0]
    line = uses_own_op.__code__.co_firstlineno + 1
    assert f"test_bad_input.py:{line}" in texts[0]
    assert 'fxpar.rule("fxpar_tests::double' in texts[0]
    assert plan.unknown and any(c.kind == "all_gather" for c in plan.collectives)


def test_unknown_op_raises_when_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPAR_STRICT", "1")
    line = uses_own_op.__code__.co_firstlineno + 1
    with pytest.raises(UnknownOpError, match=f"test_bad_input.py:{line}"):
        fxpar.plan(uses_own_op, X, mesh="dp=2,tp=2")


def test_a_rule_shards_the_op(own_rule: None) -> None:
    plan, texts = plan_own_op()
    assert not texts and not plan.unknown
    ops = [node for node in plan.nodes if "double" in node.op]
    assert len(ops) == 2
    assert all(node.results == (fxpar.Spec("dp", "tp"),) for node in ops)
    assert not any(c.kind == "all_gather" for c in plan.collectives[:-1])


def own_op_on_ranks(strict: bool, ruled: bool) -> tuple[list[str], torch.Tensor]:
    if ruled:
        fxpar.rule("fxpar_tests::double", "b n -> b n", linear="0")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            options = {"strict": strict, "mesh": "dp=2", "plan": "propagate"}
            out = compiled(uses_own_op, **options)(X)
    finally:
        rules._USER.pop("fxpar_tests::double", None)
    return [str(w.message) for w in caught if w.category is FxparWarning], out


@pytest.mark.multiprocess
def test_own_op_on_ranks() -> None:
    pool = shared_pool(2)
    for ruled in (False, True):
        for me, (texts, out) in enumerate(pool.run(own_op_on_ranks, False, ruled)):
            torch.testing.assert_close(out, uses_own_op(X))
            said = [text for text in texts if "no sharding rule" in text]
            assert len(said) == (me == 0 and not ruled)
    for text in raised(own_op_on_ranks, True, False, kind=UnknownOpError):
        assert "fxpar_tests.double" in text
