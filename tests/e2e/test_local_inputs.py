"""``inputs="local"``: every rank feeds its part of the batch, as with a
DistributedSampler; losses and gradients are those of the global batch mean."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxpar
from fxpar import FxparError
from fxpar._torch import dynamo
from tests.helpers.models import build, build_loss
from tests.helpers.spawn import shared_pool
from tests.helpers.training import MESHES, part

pytestmark = pytest.mark.multiprocess


def options(mesh: str) -> dict[str, str]:
    return {"mesh": mesh, "codegen": "eager", "inputs": "local"}


def loss_inside(name: str, mesh: str | None) -> tuple[float, dict]:
    model, batch = build_loss(name)
    run = model
    if mesh is not None:
        torch._dynamo.reset()
        batch = part(batch, MESHES[mesh])
        run = torch.compile(model, backend="fxpar", options=options(mesh))
    loss = run(**batch)
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}


def loss_outside(name: str, mesh: str | None) -> tuple[float, dict]:
    """The loss is taken by each rank of its own part, outside the compiled graph."""
    model, batch = build(name)
    run = model
    if mesh is not None:
        torch._dynamo.reset()
        batch = part(batch, MESHES[mesh])
        run = torch.compile(model, backend="fxpar", options=options(mesh))
    labels = batch.pop("labels")
    logits = run(**batch).logits
    assert logits.shape[0] == labels.shape[0]
    loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}


def close(got: dict, want: dict) -> None:
    largest = max(x.abs().max() for x in want.values())
    for name, x in want.items():
        error = (got[name] - x).abs().max()
        assert error <= max(1e-4 * x.abs().max(), 1e-6 * largest), name


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=4", "dp=2,tp=2"])
def test_loss_in_the_graph_is_the_global_mean(mesh) -> None:
    loss, gradients = loss_inside("llama", None)
    for got, grads in shared_pool(4).run(loss_inside, "llama", mesh, timeout=200.0):
        assert got == pytest.approx(loss, rel=1e-5)
        close(grads, gradients)


@pytest.mark.slow
def test_loss_outside_the_graph_gives_the_gradients_of_the_mean() -> None:
    loss, gradients = loss_outside("llama/1", None)
    runs = shared_pool(2).run(loss_outside, "llama/1", "dp=2", timeout=200.0)
    assert sum(got for got, _ in runs) / 2 == pytest.approx(loss, rel=1e-5)
    assert runs[0][0] != runs[1][0]
    for _, grads in runs:
        close(grads, gradients)


class Shifted(nn.Module):
    """Reads a tensor deep in what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(8))

    def forward(self, fed):
        return fed["x"][0] + self.shift


def traced_again() -> tuple[int, list[torch.Tensor]]:
    """How often Dynamo was asked to trace again, and results for two sizes."""
    torch._dynamo.reset()
    plain, asked = dynamo.trace_again, []

    def counted(reason: str) -> None:
        asked.append(reason)
        plain(reason)

    results = []
    with mock.patch.object(dynamo, "trace_again", counted):
        for rows in (4, 6):
            x = torch.arange(rows * 8.0).view(rows, 8) + torch.distributed.get_rank()
            model = Shifted()
            run = torch.compile(model, backend="fxpar", options=options("dp=2"))
            results.append(run({"x": [x]}) - model({"x": [x]}))
    return len(asked), results


def test_what_is_fed_is_traced_once() -> None:
    for asked, results in shared_pool(2).run(traced_again, timeout=100.0):
        assert asked == 0
        assert not any(x.any() for x in results)


def hidden_again() -> int:
    torch._dynamo.reset()
    x, asked = torch.ones(4, 8), []
    plain = dynamo.trace_again

    def counted(reason: str) -> None:
        asked.append(reason)
        plain(reason)

    run = torch.compile(
        lambda y: y + hidden.x, backend="fxpar", options=options("dp=2")
    )
    hidden = SimpleNamespace(x=x)
    with mock.patch.object(dynamo, "trace_again", counted):
        assert torch.equal(run(torch.ones(4, 8)), x + 1)
    return len(asked)


def test_what_no_argument_holds_is_traced_again() -> None:
    assert shared_pool(2).run(hidden_again, timeout=100.0) == [1, 1]


def columns_over_the_batch(local: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model, x = nn.Linear(6, 4).double(), torch.randn(8, 6, dtype=torch.float64)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return fxpar.constrain(model(x), "_", "dp").square().sum() / len(x)

    run = loss
    if local:
        torch._dynamo.reset()
        x = x.tensor_split(2)[dist.get_rank()]
        run = torch.compile(loss, backend="fxpar", options=options("dp=2"))
    run(x).backward()
    return model.weight.grad


def test_an_axis_of_the_batch_may_split_columns() -> None:
    want = columns_over_the_batch(False)
    for got in shared_pool(2).run(columns_over_the_batch, True):
        torch.testing.assert_close(got, want)


class Broken(nn.Module):
    """Two graphs with a break between them, and an input that wants a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        h = self.a(x).tanh()
        torch._dynamo.graph_break()
        return self.b(h).square().mean()


def across_a_break(local: bool) -> tuple[float, torch.Tensor, torch.Tensor]:
    model = Broken()
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    run = model
    if local:
        torch._dynamo.reset()
        x = part({"x": x}, 2)["x"]
        run = torch.compile(model, backend="fxpar", options=options("dp=2"))
    x.requires_grad_()
    loss = run(x)
    loss.backward()
    return loss.item(), model.a.weight.grad.clone(), x.grad.clone()


def test_values_stay_local_across_a_graph_break() -> None:
    loss, weight, x = across_a_break(False)
    for rank, (got, grad, own) in enumerate(
        shared_pool(2).run(across_a_break, True, timeout=100.0)
    ):
        assert got == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(grad, weight)
        # of the rank's own mean, as DistributedDataParallel would show it
        torch.testing.assert_close(own, x.chunk(2)[rank] * 2)


def sizes() -> list[float]:
    """A batch size more than one: the graph is compiled for each."""
    torch._dynamo.reset()
    model = Broken()
    run = torch.compile(model, backend="fxpar", options=options("dp=2"))
    out = []
    for n in (8, 16, 8):
        x = torch.arange(n * 8.0).view(n, 8) / 100
        out.append(run(part({"x": x}, 2)["x"]).item() - model(x).item())
    return out


def test_other_batch_sizes_are_compiled_anew() -> None:
    for errors in shared_pool(2).run(sizes, timeout=100.0):
        assert max(map(abs, errors)) < 1e-6


def one_sample() -> None:
    torch._dynamo.reset()
    run = torch.compile(Broken(), backend="fxpar", options=options("dp=2"))
    run(torch.randn(1, 8))


def test_a_fixed_batch_size_is_an_error_that_says_so() -> None:
    for error in shared_pool(2).errors(one_sample, timeout=100.0):
        assert isinstance(error, FxparError) or "must stay open" in str(error)
        assert "feed at least 2 samples a rank" in str(error)


def handed_through() -> list[bool]:
    """One result is an input, one a part of the batch, one a global value."""
    torch._dynamo.reset()

    def fn(x, scale):
        return x, x * scale, x.sum()

    run = torch.compile(fn, backend="fxpar", options=options("dp=2"))
    x, scale = part({"x": torch.arange(8.0).view(8, 1)}, 2)["x"], torch.tensor(2.0)
    same, scaled, total = run(x, scale)
    return [
        torch.equal(same, x),
        torch.equal(scaled, x * 2),
        torch.equal(total, torch.tensor(28.0 / 2)),  # the mean over ranks
    ]


def test_results_are_told_apart() -> None:
    assert all(map(all, shared_pool(2).run(handed_through, timeout=100.0)))


class Repeated(nn.Module):
    """Computes its first layer again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        h = checkpoint(lambda x: self.a(x).tanh(), x, use_reentrant=False)
        return self.b(h).square().mean()


def repeated(local: bool) -> list[torch.Tensor]:
    model = Repeated()
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    run = model
    if local:
        torch._dynamo.reset()
        x = part({"x": x}, 2)["x"]
        run = torch.compile(model, backend="fxpar", options=options("dp=2"))
    run(x).backward()
    return [p.grad for p in model.parameters()]


def test_checkpointed_code() -> None:
    want = repeated(False)
    for grads in shared_pool(2).run(repeated, True, timeout=100.0):
        for got, grad in zip(grads, want, strict=True):
            torch.testing.assert_close(got, grad)


class AddsInPlace(nn.Module):
    """Writes to its part of the batch, and to a buffer what all of the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1.0)
        self.average.lerp_(x.mean(0), 0.5)
        return (x * self.scale).mean()


def write_in_place() -> tuple[torch.Tensor, torch.Tensor]:
    model = AddsInPlace()
    x = part({"x": torch.arange(32.0).view(8, 4)}, 2)["x"]
    torch._dynamo.reset()
    torch.compile(model, backend="fxpar", options=options("dp=2"))(x).backward()
    return x, model.average


def test_what_is_written_to_a_part_of_the_batch_is_that_part() -> None:
    batch = torch.arange(32.0).view(8, 4) + 1
    results = shared_pool(2).run(write_in_place)
    for (x, average), want in zip(results, batch.chunk(2), strict=True):
        torch.testing.assert_close(x, want)
        torch.testing.assert_close(average, batch.mean(0) / 2)


def masks_of_two_steps(inputs: str) -> torch.Tensor:
    """A loss that is taken outside of the graph, and what the graph gave before it."""
    torch._dynamo.reset()
    x = torch.ones(4, 8)
    x = x.chunk(2)[torch.distributed.get_rank()] if inputs == "local" else x
    how = {"mesh": "dp=2", "codegen": "eager", "plan": "propagate", "inputs": inputs}
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    nn.init.ones_(model[0].weight)
    run = torch.compile(model, backend="fxpar", options=how)
    torch.manual_seed(0)
    masks = []
    for _ in range(2):
        y = run(x)
        y.square().mean().backward()
        masks.append(y.detach() != 0)
    return torch.stack(masks)


def test_masks_are_those_of_global_inputs() -> None:
    """A backward draws nothing: the numbers of a later step are those of one device."""
    pool = shared_pool(2)
    whole = pool.run(masks_of_two_steps, "global")[0]
    parts = pool.run(masks_of_two_steps, "local")
    assert not torch.equal(whole[0], whole[1])
    assert torch.equal(torch.cat(parts, 1), whole)


def encoder_in_eval(padded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's part of what torch's one-op encoder layers give, and what it should."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, padding = torch.randn(4, 6, 16), torch.zeros(4, 6, dtype=torch.bool)
    padding[1:, 4:] = True
    rank = torch.distributed.get_rank()
    how = {"mesh": "dp=2", "codegen": "eager", "plan": "propagate", "inputs": "local"}
    run = torch.compile(model, backend="fxpar", options=how)
    with torch.no_grad():
        masks = {"src_key_padding_mask": padding.chunk(2)[rank]} if padded else {}
        whole = {"src_key_padding_mask": padding} if padded else {}
        got = run(x.chunk(2)[rank], **masks)
        return got, model(x, **whole).chunk(2)[rank]


@pytest.mark.parametrize("padded", [False, True])
def test_encoder_layers_in_eval(padded: bool) -> None:
    for got, want in shared_pool(2).run(encoder_in_eval, padded):
        torch.testing.assert_close(got, want)
