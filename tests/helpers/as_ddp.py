"""Training loops run twice on the same ranks, under DistributedDataParallel and under
fxpar with ``inputs="local"``, and what each rank saw, compared value by value.

A loop is a function of a ``Side``, which stands for the few lines in which the two
scripts differ: it makes the model, wraps it, draws this rank's data and notes what is
compared. ``compare(loop, cell)`` runs on every rank and returns the lines of what
differs there; it gathers nothing, so that each rank is compared with itself under DDP.

Ranks of one place, those that differ along tp, cp or pp only, draw the same data, and
DDP spans all ranks: the mean over ranks is then the mean over places.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

import fxpar
from tests.helpers.spawn import ranks_of
from tests.helpers.training import place_of, whole

STEPS = 3
RELATIVE = 1e-9  # of the largest value of a tensor, in float64
# Of what rounding leaves where a value is 0 in exact arithmetic, as the gradient of a
# bias before BatchNorm is: smaller values are compared with this one.
FLOOR = 1e-6
TIMEOUT = 100.0  # seconds for one loop on one cell
# So that a rank that waits for another one says so before the time above is over.
VARIABLES = {"FXPAR_TIMEOUT": "15", "FXPAR_LATE_TIMEOUT": "30"}

DDP = "ddp"  # the eager model in DistributedDataParallel: what is right
FXPAR = "fxpar"
# Stand-ins for fxpar that show what the comparison itself sees.
INDUCED = "aot_eager in ddp"  # equal
UNREDUCED = "aot_eager"  # nothing is averaged


@dataclass(frozen=True)
class Cell:
    """Where and how fxpar runs a loop."""

    mesh: str = "dp=2"
    codegen: str = "eager"
    plan: str = "search"
    sharded: bool = False
    # What is compared with DDP.
    side: str = FXPAR

    def __str__(self) -> str:
        """Of letters that pytest's -k takes."""
        rest = "sharded" if self.sharded else "whole"
        mesh = self.mesh.replace("=", "").replace(",", "")
        return f"{mesh}-{self.codegen}-{rest}-{self.plan}"


@dataclass(frozen=True)
class Loop:
    """A training loop, and where it can not be compared."""

    run: Callable[[Side], None]
    # Why its parameters can not be sharded; "" if they can.
    whole: str = ""
    # Why torch.compile in DDP gives something else than DDP; "" if it does not.
    eager: str = ""
    # Why nothing is lost where fxpar averages nothing; "" if something is.
    alone: str = ""
    # Of what is compared; larger where a model itself computes in float32.
    relative: float = RELATIVE


class Side:
    """One of the two scripts, on one rank."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.place, self.places = place_of(cell.mesh)
        self.generator = torch.Generator().manual_seed(100 + self.place)
        # Names and values, in the order they were noted.
        self.log: list[tuple[str, Any]] = []

    # Data, of this place

    def rows(self, *shape: int) -> torch.Tensor:
        """Normal numbers that no other place draws, larger on later places."""
        x = torch.randn(*shape, dtype=torch.float64, generator=self.generator)
        return x * (1 + self.place)

    def ints(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=self.generator)

    def own(self, *values: Any) -> Any:
        """One of several values, by the place."""
        return values[self.place % len(values)]

    # The lines in which the scripts differ

    def model(self, module: nn.Module) -> nn.Module:
        """The module in float64, sharded where the cell says so."""
        module = module.double()
        if self.cell.side == FXPAR and self.cell.sharded:
            return fxpar.shard(module, mesh=self.cell.mesh)
        return module

    def compile(self, fn: Any, **how: Any) -> Any:
        """A function or module compiled, under DDP as it is."""
        match self.cell.side:
            case "ddp":
                return fn
            case "fxpar":
                options = {
                    "mesh": self.cell.mesh,
                    "inputs": "local",
                    "codegen": self.cell.codegen,
                    "plan": self.cell.plan,
                    "cache_plans": False,
                }
                return torch.compile(fn, backend="fxpar", options=options, **how)
            case _:
                return torch.compile(fn, backend="aot_eager", **how)

    def parallel(self, module: nn.Module, **how: Any) -> nn.Module:
        """The module in DDP; as it is where fxpar averages gradients."""
        if self.cell.side in (DDP, INDUCED):
            return DistributedDataParallel(module, **how)
        return module

    def wrap(self, module: nn.Module, **how: Any) -> nn.Module:
        """The module compiled, or in DDP."""
        return self.parallel(self.compile(module), **how)

    def no_sync(self, run: nn.Module, model: nn.Module) -> Any:
        """Where gradients need not be averaged, since more are added to them."""
        if isinstance(run, DistributedDataParallel):
            return run.no_sync()
        is_ours = self.cell.side == FXPAR
        return fxpar.no_sync(model) if is_ours else contextlib.nullcontext()

    # What is compared

    def note(self, **values: Any) -> None:
        """Values of any kind, by name."""
        for name, value in values.items():
            self.log += [
                (name + pytree.keystr(path), whole(x) if is_tensor(x) else x)
                for path, x in pytree.tree_flatten_with_path(value)[0]
            ]

    def gradients(self, *modules: nn.Module) -> None:
        """All gradients, None for those that there are not."""
        for i, module in enumerate(modules):
            named = named_parameters(module)
            self.note(**{f"gradients {i}": {n: p.grad for n, p in named}})

    def steps(
        self,
        *modules: nn.Module,
        count: int = STEPS,
        before: Callable[[], Any] = lambda: None,
        update: Callable[[torch.optim.Optimizer], Any] | None = None,
    ) -> Iterator[int]:
        """Numbers of training steps. What follows a loop's body is the same in all
        scripts: gradients are noted, ``before()`` is called, parameters are updated
        (by ``update(optimizer)`` if that is given) and gradients set to None. After the
        last step, parameters and buffers are noted.
        """
        parameters = [p for m in modules for _, p in named_parameters(m)]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        for step in range(count):
            yield step
            self.gradients(*modules)
            before()
            update(optimizer) if update else optimizer.step()
            optimizer.zero_grad()
        for i, module in enumerate(modules):
            self.note(**{f"parameters {i}": dict(named_parameters(module))})
            self.note(**{f"buffers {i}": dict(module.named_buffers())})


def is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def named_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters by the names they have without a wrapper."""
    return [
        (name.replace("_orig_mod.", "").replace("module.", ""), p)
        for name, p in module.named_parameters()
    ]


def loop_of(module: str, name: str) -> Loop:
    """A loop by name; ``module``: where ``LOOPS`` or ``loop(name)`` is."""
    home = importlib.import_module(f"tests.helpers.{module}")
    return home.LOOPS[name] if hasattr(home, "LOOPS") else home.loop(name)


def logged(module: str, name: str, cell: Cell) -> list[tuple[str, Any]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    side = Side(cell)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop_of(module, name).run(side)
    return side.log


def compare(module: str, name: str, cell: Cell) -> list[str]:
    """On each rank: what differs under DDP and in the cell, a line for each value."""
    want = logged(module, name, replace(cell, side=DDP))
    # Buckets of DDP must not cut what torch.compile traces.
    with torch._dynamo.config.patch(optimize_ddp=False):
        got = logged(module, name, cell)
    return differences(got, want, loop_of(module, name).relative)


def differences(
    got: list[tuple[str, Any]], want: list[tuple[str, Any]], relative: float
) -> list[str]:
    names = [[name for name, _ in log] for log in (got, want)]
    if names[0] != names[1]:
        return [f"noted {names[0]}, under DDP {names[1]}"]
    return [
        f"{i}: {name}: {text}"
        for i, ((name, a), (_, b)) in enumerate(zip(got, want, strict=True))
        if (text := difference(a, b, relative))
    ]


def difference(a: Any, b: Any, relative: float) -> str:
    """How a value differs from the one under DDP, "" if it does not."""
    if isinstance(b, float) and isinstance(a, float):
        a, b = torch.tensor(a).double(), torch.tensor(b).double()
    if not is_tensor(a) or not is_tensor(b):
        return "" if same(a, b) else f"{short(a)}, under DDP {short(b)}"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype}{[*a.shape]}, under DDP {b.dtype}{[*b.shape]}"
    if not b.numel():
        return ""
    x, y = a.double(), b.double()
    finite = y.isfinite()
    if not torch.allclose(x[~finite], y[~finite], equal_nan=True):
        return f"{short(a)}, under DDP {short(b)}"
    x, y = (torch.where(finite, t, 0.0) for t in (x, y))
    error = (x - y).abs().max().item() / max(y.abs().max().item(), FLOOR)
    if error <= relative:  # not of a NaN
        return ""
    return f"{short(a)}, under DDP {short(b)}: off by {error:.1e}"


def same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and not is_tensor(a) and a == b


def short(x: Any) -> str:
    if not is_tensor(x):
        return repr(x)
    return repr(x.item()) if x.numel() == 1 else f"{x.flatten()[:3].tolist()}..."


def check(module: str, name: str, cell: Cell) -> None:
    """Raise AssertionError where a rank differs from itself under DDP; RankError where
    one fails or waits for ever."""
    __tracebackhide__ = True
    lines = by_rank(module, name, cell)
    assert not lines, "\n".join(lines)


def by_rank(module: str, name: str, cell: Cell) -> list[str]:
    """What differs on any rank."""
    __tracebackhide__ = True
    pool = ranks_of(cell.mesh)
    ranks = pool.run(compare, module, name, cell, timeout=TIMEOUT, env=VARIABLES)
    return [f"rank {rank}: {x}" for rank, lines in enumerate(ranks) for x in lines]
