"""Results of one graph that share memory: a write to one is seen in the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxpar
from tests.helpers.spawn import shared_pool

pytestmark = pytest.mark.usefixtures("propagated")

Results = tuple[torch.Tensor, ...]


def with_rows(x: torch.Tensor, w: torch.Tensor) -> Results:
    z = torch.relu(x @ w)
    return z, z[0], z.t(), z.view(-1)[3:9:2], z * 1, z.detach()[1:]


def the_largest_in_between(x: torch.Tensor, w: torch.Tensor) -> Results:
    z = (x @ w).t()
    return z[1], z, z[2:4, ::2], z.sum(0), z[3:, 1:]


def thirds(x: torch.Tensor, w: torch.Tensor) -> Results:
    z = (x @ w).relu()
    return *z.chunk(3, -1), z


def with_a_gradient(x: torch.Tensor, w: torch.Tensor) -> Results:
    z = x @ w
    return z.relu().sum(), z, z.detach(), z.detach()[0]


def equal(x: torch.Tensor, w: torch.Tensor) -> Results:
    """Computed once where gradients are recorded, but two tensors."""
    return (x @ w).square().sum(), x @ w, x @ w


def apart(x: torch.Tensor, w: torch.Tensor) -> Results:
    """The negative twin: nothing here shares memory."""
    z = torch.relu(x @ w)
    return z, z.clone(), z + 0


# With the collectives: one for each memory, and one for a gradient.
PROGRAMS = {
    with_rows: 2,
    the_largest_in_between: 2,
    thirds: 1,
    with_a_gradient: 3,
    equal: 4,
    apart: 3,
}


def write_to_each(fn: Callable[..., Results], x: Any, w: Any) -> list[torch.Tensor]:
    """Results before and after each of them is written to."""
    results = fn(x, w)
    if results[0].requires_grad:
        results[0].backward()
    before = [result.detach().clone() for result in results]
    for i, result in enumerate(results):
        result.detach().add_(i + 1)
    layout = [torch.tensor(result.stride()) for result in results]
    return [*before, *(result.detach().clone() for result in results), *layout]


def compare(dynamic: bool, codegen: str) -> list[int]:
    """With one device, twice; how many collectives each program has."""
    counts = []
    for fn in PROGRAMS:
        torch._dynamo.reset()
        how = {"mesh": "dp=2", "codegen": codegen, "hints": {"x": ("dp", None)}}
        compiled: Any = torch.compile(fn, backend="fxpar", dynamic=dynamic, options=how)
        for rows in (8, 6):
            torch.manual_seed(rows)
            x, w = torch.randn(rows, 8), torch.randn(8, 6)
            w.requires_grad_(fn in (with_a_gradient, equal))
            got, want = write_to_each(compiled, x, w), write_to_each(fn, x, w)
            torch.testing.assert_close(got, want)
        counts.append(len(fxpar.plans()[-1].collectives))
    return counts


@pytest.mark.multiprocess
@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_one_device(dynamic: bool) -> None:
    """What covers the others is gathered, and they are views of it."""
    for counts in shared_pool(2).run(compare, dynamic, "eager"):
        assert counts == list(PROGRAMS.values())


Rows = Callable[[torch.Tensor], Results]

# Views of rows u.
VIEWS: dict[str, Rows] = {
    "other dims": lambda u: (u, u.t(), u[None]),
    "cut": lambda u: (u, u[0], u[: len(u) // 2]),
    "in parts": lambda u: u.chunk(2),
    "by rows": lambda u: (u, u[:, :3], u.view(-1, 2), u[:, None].expand(-1, 3, -1)),
}


def of_parts(
    name: str, rank: int | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results and gradients in local mode; of a ``rank``, what eager code gives of its
    part of the batch."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(8, 6).double(), torch.randn(8, 8).double()

    def fn(x: torch.Tensor) -> Results:
        return VIEWS[name](layer(x))

    call: Any = fn
    if rank is None:
        rank = torch.distributed.get_rank()
        how = {"mesh": "dp=2", "codegen": "eager", "inputs": "local"}
        call = torch.compile(fn, backend="fxpar", options=how)
    results = call(x.chunk(2)[rank].clone())
    sum(y.square().mean() for y in results).backward()
    return [y.detach() for y in results], [p.grad for p in layer.parameters()]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x == "by rows" else pytest.mark.slow) for x in VIEWS],
)
def test_views_of_a_part_of_the_batch(name: str) -> None:
    """Results are the rank's own, gradients means."""
    each = [of_parts(name, rank) for rank in range(2)]
    pairs = zip(*(gradients for _, gradients in each), strict=True)
    means = [(a + b) / 2 for a, b in pairs]
    for rank, (results, gradients) in enumerate(shared_pool(2).run(of_parts, name)):
        torch.testing.assert_close(results, each[rank][0])
        torch.testing.assert_close(gradients, means)


def input_views(parts: int) -> list[torch.Tensor]:
    """Views of a batch itself; of this rank's part of it, one device's else."""
    torch._dynamo.reset()
    x = torch.arange(32).view(8, 4)

    def fn(x: torch.Tensor) -> Results:
        return x.flatten(), x.view(-1, 2), x[:, 1:], x[:, None], x.view(-1, 1, 4)

    call: Any = fn
    if parts > 1:
        how = {"mesh": "dp=2", "codegen": "eager", "inputs": "local"}
        call = torch.compile(fn, backend="fxpar", options=how)
        x = x.chunk(parts)[torch.distributed.get_rank()].clone()
    return list(call(x))


@pytest.mark.multiprocess
def test_views_of_what_is_fed_in_parts() -> None:
    for rank, got in enumerate(shared_pool(2).run(input_views, 2)):
        for y, whole in zip(got, input_views(1), strict=True):
            torch.testing.assert_close(y, whole.chunk(2)[rank])


class Branches(torch.nn.Module):
    """Parameters with equal gradients, of one shape and of several."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Linear(8, 6) for _ in range(2))
        self.row, self.twin = (torch.nn.Parameter(torch.ones(1, 6)) for _ in range(2))
        self.w, self.delta = (torch.nn.Parameter(torch.randn(6, 6)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (self.a(x) + self.b(x) + self.row + self.twin).tanh()
        return (y @ (self.w + self.delta)).square().mean()


def updated(
    codegen: str | None = None, sharded: bool = False, inputs: str = "global"
) -> list[torch.Tensor]:
    """Gradients of two backwards that add up, scaled in place."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Branches().double(), torch.randn(8, 8).double()
    if sharded:
        fxpar.shard(model, mesh="dp=2")
    how = {"mesh": "dp=2", "codegen": codegen, "inputs": inputs}
    run: Any = torch.compile(model, backend="fxpar", options=how) if codegen else model
    for _ in range(2):
        run(x).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    gradients: list[Any] = [p.grad for p in model.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "how",
    [
        ("eager",),
        ("inductor",),
        pytest.param(("inductor", True), marks=pytest.mark.slow),
        pytest.param(("inductor", False, "local"), marks=pytest.mark.slow),
    ],
)
def test_equal_gradients_have_memory_of_their_own(how: tuple[Any, ...]) -> None:
    for got in shared_pool(2).run(updated, *how):
        torch.testing.assert_close(got, updated())


@pytest.mark.slow
@pytest.mark.multiprocess
def test_inductor() -> None:
    shared_pool(2).run(compare, False, "inductor", timeout=400.0)


class AtRest(torch.nn.Module):
    """Returns rows of a linear layer, whose result is itself a view, in other forms."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.rows, self.last = (torch.nn.Linear(8, 6), torch.nn.Linear(6, 6))
        self.name = name

    def forward(self, x: torch.Tensor) -> Results:
        z = self.rows(x)
        if self.name == "parameter":
            return z, self.rows.weight, self.rows.weight.t()
        if self.name == "break":
            flat = z.flatten(0, 1)
            torch._dynamo.graph_break()
            return self.last(z), flat * 2
        return FORMS[self.name](x, z)


def written_later(x: torch.Tensor, z: torch.Tensor) -> Results:
    """Views of a value that is written after they were made."""
    a, b = z.view(4, -1), z.transpose(1, 2)
    a.mul_(2)
    return a, b


FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor], Results]] = {
    "flat": lambda x, z: (z, z.flatten(0, 1)),
    "the base last": lambda x, z: (z[1:], z),
    "siblings": lambda x, z: (z[0], z.flatten(0, 1), z[1:]),
    "pieces": lambda x, z: (*z.chunk(2, -1), z[:, :1], z.view(-1, 2)),
    "input": lambda x, z: (x.flatten(), x[0], z),
    "written later": written_later,
}


def at_rest(name: str, codegen: str = "") -> tuple[list[torch.Tensor], list[Any]]:
    """Results and gradients, of a model that is sharded if it is compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = AtRest(name).double(), torch.randn(4, 3, 8).double().requires_grad_()
    run: Any = model
    if codegen:
        model = fxpar.shard(model, mesh="dp=2")
        how = {"mesh": "dp=2", "codegen": codegen}
        run = torch.compile(model, backend="fxpar", options=how)
    results = run(x)
    scales = (torch.arange(1.0, y.numel() + 1).view(y.shape) for y in results)
    pairs = zip(results, scales, strict=True)
    sum((y * scale).sum() for y, scale in pairs if y.requires_grad).backward()
    gradients = [x.grad, *(p.grad for p in model.parameters())]
    gradients = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]
    if name in ("flat", "the base last"):
        results[0].detach().add_(1)
    return [y.detach() for y in results], gradients


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["parameter", "break", *FORMS])
def test_views_with_a_gradient_of_a_sharded_model(name: str) -> None:
    """With a DTensor among inputs AOTAutograd takes no two views of a hidden value."""
    want = at_rest(name)
    for got in shared_pool(2).run(at_rest, name, "eager"):
        torch.testing.assert_close(got, want)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_views_of_a_sharded_model_compiled() -> None:
    want = at_rest("break")
    for got in shared_pool(2).run(at_rest, "break", "inductor"):
        torch.testing.assert_close(got, want)
