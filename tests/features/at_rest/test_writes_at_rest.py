"""Writes in place to parameters at rest, outside of a graph."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fxpar
from fxpar.errors import ShardError
from fxpar.features.at_rest.dtensor_ops import gathered
from tests.helpers.spawn import ranks_of

pytestmark = pytest.mark.multiprocess

LAYOUTS: list[Any] = [
    ("dp=2", (7, 5), ("dp", None)),
    *(
        pytest.param(*layout, marks=pytest.mark.slow)
        for layout in [
            ("dp=2", (6, 8), (None, None)),
            ("dp=2", (6, 8), (None, "dp")),
            ("dp=2,tp=2", (6, 8), ("dp", "tp")),
            ("dp=2,tp=2", (5, 7), (("dp", "tp"), None)),
            ("tp=4", (8, 6), ("tp:2", None)),
        ]
    ),
]


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float64)


def by_old_views(w: Any) -> None:
    row, w_data = w[1], w.data
    w.add_(1)  # the row is one of the new values
    row.mul_(2)
    w[..., :1].sub_(row.sum())
    w_data[1, 2:3] = 5
    w.detach().view(-1)[-1] = row.max()


def by_operands_that_share(w: Any) -> None:
    w[0].copy_(w[1])
    torch._foreach_mul_([w[0], w[2][:2]], 3.0)
    torch.mul(w[0], w[1], out=w[3])


def by_parts(w: Any) -> None:
    first, second = w.chunk(2)
    second.copy_(first[: second.shape[0]])
    w.split([2, w.shape[0] - 2])[0].neg_()
    w.unbind(0)[1].zero_()


def by_centering(w: Any) -> None:
    w.sub_(w.mean(0))
    w.div_(w.norm(dim=1, keepdim=True))


def by_setting_items(w: Any) -> None:
    w[3] = ones(w.shape[1])
    w[torch.tensor([0, 2, 4])] = torch.arange(w.shape[1]).to(w.dtype)
    w[w > 0] = 0.5
    w[:, torch.tensor([1])] = 7.0


def by_indices(w: Any) -> None:
    rows = torch.tensor([1, 3])
    w.index_fill_(0, rows, 7.0)
    w.index_add_(0, rows, ones(2, w.shape[1]))
    w.index_copy_(0, rows[:1], ones(1, w.shape[1]))
    w.scatter_(0, torch.zeros(1, w.shape[1], dtype=torch.long), 4.0)
    w.put_(torch.tensor([3, 8]), ones(2))


def by_plain_tensors(w: Any) -> None:
    w.lerp_(ones(*w.shape), 0.5)
    w.masked_scatter_(w > 0, torch.arange(w.numel()).to(w.dtype))
    w.addmm_(ones(w.shape[0], 2), ones(2, w.shape[1]))
    w.copy_(w.detach() * 2)


def by_way_of_plain_tensors(w: Any) -> None:
    whole = ones(*w.shape)
    torch.mm(ones(w.shape[0], 2), w[:2] * 1, out=whole)
    torch.add(whole, whole, out=w[:])
    torch._foreach_add_([w, whole], 1.0)
    whole[1:].add_(w[1:]).mul_(2)
    whole[0].copy_(w[1])
    assert type(whole[1].mul_(w[0])) is torch.Tensor
    torch.mm(whole, whole.t() @ ones(*w.shape), out=w)
    whole.copy_(w)
    w.sub_(whole, alpha=0.5)


def by_random_values(w: Any) -> None:
    w[:, 1].uniform_()
    w[2].normal_()
    w[:2].exponential_()
    w[3:].t().normal_()
    w.data[4].bernoulli_(0.5)


def by_initializing(init: Callable[..., Any], *how: Any) -> Callable[[Any], None]:
    def write(w: Any) -> None:
        init(w, *how)

    return write


INITS = {
    "orthogonal_": (),
    "sparse_": (0.3,),
    "eye_": (),
    "trunc_normal_": (),
    "xavier_uniform_": (),
    "kaiming_normal_": (),
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "rows": lambda w: w[:2].zero_(),
    "a row of data": lambda w: w[0].data.fill_(9),
    "data": lambda w: w.data.clamp_(-0.1, 0.1),
    "a diagonal": lambda w: (w.diagonal().fill_(1), w.fill_diagonal_(3.0)),
    "views of views": lambda w: w[2:5][1].unsqueeze(-1)[1:].mul_(3),
    "flat": lambda w: w.view(-1)[5:20].clamp_(-0.1, 0.1),
    "a column": lambda w: w.t()[1].zero_(),
    "norms": lambda w: w.renorm_(2, 0, 0.1),
    "triangles": lambda w: w.tril_().cumsum_(0),
    "old views": by_old_views,
    "operands that share": by_operands_that_share,
    "parts": by_parts,
    "centering": by_centering,
    "items": by_setting_items,
    "indices": by_indices,
    "plain tensors": by_plain_tensors,
    "by way of plain tensors": by_way_of_plain_tensors,
    "random values": by_random_values,
    **{k: by_initializing(getattr(nn.init, k), *how) for k, how in INITS.items()},
}


def lone(shape: Any, mesh: str, lies: Any) -> tuple[torch.Tensor, Any]:
    """A parameter on one device, and its twin at rest."""
    torch.manual_seed(0)
    plain = torch.randn(shape, dtype=torch.float64)
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = nn.Parameter(plain.clone())
    hints = {"weight": lies} if any(lies) else None
    return plain, fxpar.shard(layer, mesh=mesh, hints=hints).weight


@torch.no_grad()
def off(write: Callable[[Any], Any], plain: torch.Tensor, w: Any) -> float:
    """How far a write of a parameter at rest is from that on one device."""
    for x in (plain, w):
        torch.manual_seed(1)
        write(x)
    return float((gathered(w) - plain).abs().max())


def all_writes(mesh: str, shape: Any, lies: Any) -> dict[str, float]:
    return {
        name: off(write, *lone(shape, mesh, lies)) for name, write in WRITES.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "shape", "lies"), LAYOUTS)
def test_writes_reach_the_parts(mesh: str, shape: Any, lies: Any) -> None:
    for offs in ranks_of(mesh).run(all_writes, mesh, shape, lies):
        assert {name: far for name, far in offs.items() if not far < 1e-12} == {}


def a_view(x: Any, r: random.Random) -> Any:
    d = r.randrange(x.dim())
    n, before = x.shape[d], (slice(None),) * d
    start = r.randrange(n + 1)
    views = {
        "narrow": lambda: x.narrow(d, start, r.randrange(n - start + 1)),
        "select": lambda: x.select(d, r.randrange(n)) if n and x.dim() > 1 else x,
        "transpose": lambda: x.transpose(d, r.randrange(x.dim())),
        "flat": lambda: x.view(-1) if x.is_contiguous() else x,
        "unsqueeze": lambda: x.unsqueeze(d),
        "diagonal": lambda: x.diagonal(r.choice((-1, 0, 1))) if x.dim() > 1 else x,
        "split": lambda: r.choice(x.split(r.randrange(1, n + 1), d)) if n else x,
        "unflatten": lambda: x.unflatten(d, (2, n // 2)) if n and n % 2 == 0 else x,
        "step": lambda: x[(*before, slice(None, None, 2))],
        "data": lambda: x.data,
        "detach": lambda: x.detach(),
    }
    return views[r.choice([*views])]()


def a_write(x: Any, r: random.Random) -> None:
    generator = torch.Generator().manual_seed(r.randrange(10**6))
    plain = torch.randn(tuple(x.shape), dtype=torch.float64, generator=generator)
    d = r.randrange(x.dim())
    row = torch.randint(max(x.shape[d], 1), (1,), generator=generator)
    writes = {
        "zero": lambda: x.zero_(),
        "add": lambda: x.add_(plain, alpha=0.5),
        "copy": lambda: x.copy_(plain),
        "self": lambda: x.copy_(x.cos() + x.sum()),
        "row": lambda: x.index_fill_(d, row, 3.0) if x.shape[d] else None,
        "rows": lambda: x.index_add_(d, row, plain.narrow(d, 0, 1)) if x.numel() else 0,
        "mask": lambda: x.masked_fill_(plain > 0, 7.0),
        "put": lambda: x.__setitem__(x > 0, 0.5),
        "out": lambda: torch.mul(x, plain, out=x),
        "foreach": lambda: torch._foreach_add_([x], [plain]),
        "normal": lambda: x.normal_(),
        "random": lambda: x.random_(0, 9),
        "cumsum": lambda: x.cumsum_(d),
    }
    writes[r.choice([*writes])]()


def a_program(seed: int) -> Callable[[Any], None]:
    """A few writes by views, of which some are made before others write."""

    def write(w: Any) -> None:
        r, kept = random.Random(seed), [w]
        for _ in range(r.randrange(1, 4)):
            x = r.choice(kept)
            for _ in range(r.randrange(4)):
                x = a_view(x, r)
            a_write(x, r)
            kept.append(x)
            w[..., :1].add_(r.choice(kept).sum() * 0.1)

    return write


def programs(mesh: str, lies: Any, seeds: range) -> list[tuple[int, float]]:
    offs = []
    for seed in seeds:
        r = random.Random(seed)
        shape = 8 if "tp:2" in lies else r.randrange(2, 9), r.randrange(2, 9)
        offs.append((seed, off(a_program(seed), *lone(shape, mesh, lies))))
    return offs


SEEDS = [range(4), pytest.param(range(4, 100), marks=pytest.mark.slow)]


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize(("mesh", "shape", "lies"), LAYOUTS)
def test_random_writes(mesh: str, shape: Any, lies: Any, seeds: range) -> None:
    for offs in ranks_of(mesh).run(programs, mesh, lies, seeds, timeout=500):
        assert [(seed, far) for seed, far in offs if not far < 1e-9] == []


# What is more than a lone parameter


def words() -> nn.Module:
    """Tied layers, of which one has a row of zeros, and a buffer."""
    model = nn.Sequential(nn.Embedding(16, 8, padding_idx=3), nn.Linear(8, 16))
    model[1].weight = model[0].weight
    model.register_buffer("scale", torch.ones(4))
    return model.double()


def initialized() -> bool:
    plain = words()
    model = fxpar.shard(copy.deepcopy(plain), mesh="dp=2")
    for module in (plain, model):
        torch.manual_seed(1)
        module[0].reset_parameters()
        module.scale[1:].zero_()
        with torch.no_grad():
            module[1].weight[:2] += 1
    for name, p in model.named_parameters():
        torch.testing.assert_close(gathered(p), plain.get_parameter(name).detach())
    assert torch.equal(model.scale, plain.scale)
    return bool((gathered(model[0].weight)[3] == 0).all())


def test_a_row_that_init_functions_zero() -> None:
    assert ranks_of("dp=2").run(initialized) == [True, True]


def trained(w: Any) -> None:
    """Rows of gradients, of optimizer state, and of values that have gradients."""
    optimizer = torch.optim.Adam([w])
    for _ in range(2):
        y = w * 2
        y[0] = 0
        y[1:3].mul_(3)
        (y[2].sum() + y.square().sum()).backward()
        w.grad[:2] = 0
        w.grad[3].mul_(2)
        optimizer.step()
        optimizer.state[w]["exp_avg"][1].fill_(5)
        optimizer.zero_grad()


def trained_off() -> float:
    plain, w = lone((6, 8), "dp=2", (None, None))
    plain = nn.Parameter(plain)
    for x in (plain, w):
        trained(x)
    return float((gathered(w) - plain).abs().max())


@pytest.mark.slow
def test_rows_of_gradients_and_of_optimizer_state() -> None:
    for far in ranks_of("dp=2").run(trained_off):
        assert far < 1e-12


def scale_after_an_overflow() -> float:
    """Rank 0 alone holds it, of a gradient after one that every rank holds whole."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    whole, split = (lone((rows,), "dp=2", (None,))[1] for rows in (3, 4))
    assert whole.to_local().shape == (3,) and split.to_local().shape == (2,)
    whole.grad, split.grad = whole.detach().clone(), split.detach().clone()
    split.grad[0] = torch.inf
    scaler.step(torch.optim.SGD([whole, split]))
    scaler.update()
    return scaler.get_scale()


def test_an_overflow_in_the_part_of_one_rank() -> None:
    assert ranks_of("dp=2").run(scale_after_an_overflow) == [1.0, 1.0]


def in_inference_mode() -> float:
    plain, w = lone((6, 8), "dp=2", (None, None))
    for x in (plain, w):
        with torch.inference_mode():
            x[0].zero_()
            x[1:3] = 4.0
    return float((gathered(w) - plain).abs().max())


def test_in_inference_mode() -> None:
    assert ranks_of("dp=2").run(in_inference_mode) == [0.0, 0.0]


def strangers() -> tuple[Any, list[type]]:
    """What is done to a DTensor on a mesh that is none of fxpar's, after ``shard``."""
    lone((6, 8), "dp=2", (None, None))
    x = distribute_tensor(ones(6, 8), init_device_mesh("cpu", (2,)), [Shard(0)])
    x.data = distribute_tensor(ones(6, 8) * 2, x.device_mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        x.add_(ones(6, 8))
    return x.to_local().sum().item(), [type(y) for y in (x[0], *x.split(2))]


def test_dtensors_of_others_are_left_to_torch() -> None:
    for result in ranks_of("dp=2").run(strangers):
        assert result == (24.0, [DTensor] * 4)


# What is refused


@torch.no_grad()
def refused(name: str) -> None:
    _, w = lone((6, 8), "dp=2", (None, None))
    if name == "alone":
        with fxpar.alone():
            w[0].zero_()
    elif name == "shape":
        w.t_()
    elif name == "memory":
        torch._foreach_mul_([w[0], w.data[1]], 2.0)
    elif name == "strides":
        w[1:].as_strided((2,), (1,)).zero_()
    else:
        options = {"mesh": "dp=2", "codegen": "eager"}
        torch._dynamo.reset()
        torch.compile(torch.neg, backend="fxpar", options=options)(w[0])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("alone", "outside of fxpar.alone"),
        ("shape", r"x.copy_\(whole\)"),
        pytest.param("memory", r"x.copy_\(whole\)", marks=pytest.mark.slow),
        ("strides", "x.full_tensor"),
        ("compiled", "view.clone"),
    ],
)
def test_what_cannot_be_written(name: str, words: str) -> None:
    for error in ranks_of("dp=2").errors(refused, name):
        assert "ShardError" in repr(error) or isinstance(error, ShardError)
        with pytest.raises(RuntimeError, match=words):
            raise error
