"""What is wrong in torch itself: what fxpar does about it, and a test that fails once
it is mended there, so that ours can go."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._decomp import decomposition_table
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.utils.checkpoint import checkpoint

import fxpar
from fxpar._torch import aot, decompositions
from tests.helpers.spawn import shared_pool
from tests.helpers.training import whole


class Counted(nn.Module):
    """Reads a copy of a buffer, then updates the buffer in place."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("buf", torch.eye(4) * 2)
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        copies = {
            "clone": lambda b: b.clone().detach(),
            "view": lambda b: b.view(16).clone().view(4, 4),
            "repeat": lambda b: b.repeat(1, 1),
        }
        y = self.linear(x) @ copies[self.how](self.buf)
        self.buf.mul_(3.0)
        return y


def gradients(how: str, **compiler: Any) -> tuple[torch.Tensor, ...]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Counted(how), torch.randn(4, 4, requires_grad=True)
    call = torch.compile(model, **compiler) if compiler else model
    call(x).square().sum().backward()
    return x.grad, model.linear.weight.grad, model.buf.clone()


def ours(how: str) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    options = {"codegen": "eager"}
    return gradients(how), gradients(how, backend="fxpar", options=options)


@pytest.mark.parametrize("how", ["clone", "view", "repeat"])
def test_a_copy_of_a_buffer_that_is_updated_stays_a_copy(how: str) -> None:
    for want, got in shared_pool(2).run(ours, how, env={"FXPAR_MESH": "dp=2"}):
        torch.testing.assert_close(got, want)


def normed(**compiler: Any) -> list[torch.Tensor]:
    """Gradients behind the spectral norm of a hook, which writes to its vectors."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    last = nn.utils.spectral_norm(nn.Linear(16, 4))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), last).double()
    call = torch.compile(model, **compiler) if compiler else model
    call(torch.randn(8, 8).double()).square().mean().backward()
    return [p.grad for p in model.parameters()]


def normed_here() -> list[torch.Tensor]:
    return normed(backend="fxpar", options={"codegen": "eager"})


def test_what_is_computed_of_a_buffer_that_is_updated_is_saved() -> None:
    want = normed()
    for got in shared_pool(2).run(normed_here, env={"FXPAR_MESH": "dp=2"}):
        torch.testing.assert_close(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("of", [lambda **how: gradients("clone", **how), normed])
def test_inductor_reads_the_buffer_again(of: Any) -> None:
    """If this fails, torch is mended: ``keep_read``, or a half of it, ``fxpar::kept``
    and the sentence in docs/limits.md can go."""
    want, got = of(), of(backend="inductor")
    assert any(not torch.allclose(x, y) for x, y in zip(got, want, strict=True))
    torch.testing.assert_close(of(backend="aot_eager"), want)


class Checkpointed(nn.Module):
    """Attention, which draws random numbers for all that torch knows, made again in the
    backward."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(8, 24)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.rows(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.attend, x, use_reentrant=False).square().sum()


def attended(mesh: str) -> dict[str, torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Checkpointed().double(), torch.randn(4, 2, 6, 8, dtype=torch.float64)
    call = model
    if mesh:
        model = fxpar.shard(model, mesh=mesh)
        options = {"mesh": mesh, "codegen": "eager"}
        call = torch.compile(model, backend="fxpar", options=options)
    call(x).backward()
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def test_random_states_are_saved_beside_the_mesh_of_parameters_at_rest() -> None:
    for got in shared_pool(2).run(attended, "dp=2"):
        torch.testing.assert_close(got, attended(""), rtol=1e-9, atol=1e-11)


def unordered() -> str:
    with mock.patch.object(aot, "_objects_behind_generators", contextlib.nullcontext):
        try:
            attended("dp=2")
        except AssertionError as error:
            return str(error)
    return ""


@pytest.mark.slow
def test_torch_puts_random_states_behind_the_mesh() -> None:
    """If this fails, torch is mended: ``_objects_behind_generators`` can go."""
    for error in shared_pool(2).run(unordered):
        assert "expected all tensors_saved_with_vc_check" in error


def summand() -> float:
    """``item()`` of a sum whose summands are 1 on each of two ranks, by torch alone."""
    mesh = init_device_mesh("cpu", (2,))
    x = DTensor.from_local(torch.ones(()), mesh, [Partial()])
    handlers = DTensor._op_dispatcher._custom_op_handlers
    with mock.patch.dict(handlers):
        handlers.pop(torch.ops.aten._local_scalar_dense.default, None)
        return x.item()


@pytest.mark.multiprocess
def test_torch_gives_a_summand_as_the_item() -> None:
    """If this fails, torch is mended (its issue 166638): ``reduce_before_item`` can
    go."""
    assert shared_pool(2).run(summand) == [1.0, 1.0]


@pytest.mark.skipif(torch.__version__ >= "2.15", reason="torch 2.15 is mended")
def test_torch_takes_padding_for_class_0() -> None:
    """Ours of ``multilabel_margin_loss`` can go with the last torch before 2.15."""
    op = torch.ops.aten.multilabel_margin_loss_forward.default
    x, target = torch.tensor([0.1, 0.9, 0.3, 0.4]), torch.tensor([3, -1, 0, 0])
    want = sum((1 - 0.4 + value) / 4 for value in (0.1, 0.9, 0.3))
    ours, theirs = (
        float(table[op](x, target, 1)[0])
        for table in (decompositions.TABLE, decomposition_table)
    )
    assert ours == pytest.approx(want) and theirs > want + 0.1


def dropped_in_a_body(backend: str) -> bool:
    """Whether gradients of a body that draws have the numbers of its forward."""
    torch._dynamo.reset()
    torch.manual_seed(0)

    def branches(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: F.dropout(x * 2.0), torch.sin, (x,))

    x = torch.ones(8, 8, requires_grad=True)
    with fresh_cache():
        y = torch.compile(branches, backend=backend, fullgraph=True)(x)
        y.sum().backward()
    return torch.equal(y != 0, x.grad != 0)


@pytest.mark.slow
def test_one_rank_drops_in_a_backward_what_its_forward_dropped() -> None:
    assert dropped_in_a_body("fxpar")


@pytest.mark.slow
def test_torch_drops_otherwise_in_the_backward_of_a_body() -> None:
    """If this fails, torch is mended: one rank needs no ``calls_rewritten``."""
    assert not dropped_in_a_body("inductor")
