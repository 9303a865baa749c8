"""Programs whose kernels ``one_gpu.py`` checks and measures, and what they must give.

In: a piece of a model, sizes, ranks. Out: a ``Job``: the program, numbers of each rank,
which inputs it takes; its inputs of a rank and a round; and, by ``oracle``, what all
ranks must get. Pieces are functions as they stand around collectives of real models.
No kernel is launched here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from gpu_here import Here, fill, same
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from fxpar import _torch
from fxpar.fusion.kernels import run_kernels
from fxpar.fusion.kernels.region_program import (
    CollectiveStep,
    Ref,
    RegionProgram,
    outline,
    stages_of,
)
from fxpar.sharding.cost.op import is_view

c10d = torch.ops._c10d_functional
F32, BF16 = torch.float32, torch.bfloat16
GROUP = "group"
RATE = 0.1  # of dropout


@dataclass(frozen=True)
class Sizes:
    """``rows`` by ``width`` of activations, ``flat`` numbers of an all-reduced
    gradient, ``shard`` of a rank's part of a scattered one."""

    rows: int = 96
    width: int = 4096
    flat: int = 1_000_003
    shard: int = 1 << 17


TINY = Sizes(6, 48, 1100, 384)


def all_reduce(x: torch.Tensor, group: str = GROUP) -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", group))


def reduce_scatter(x: torch.Tensor, ranks: int, group: str = GROUP) -> torch.Tensor:
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "sum", ranks, group))


def all_gather(x: torch.Tensor, ranks: int, group: str = GROUP) -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, ranks, group))


# Pieces.


def dropout(x: Any, seed: Any, rows: int | None = None, first: int = 0) -> Any:
    """And the mask: this rank has ``rows`` of the whole from ``first`` on."""
    whole = [rows or x.shape[0], *x.shape[1:]]
    start = [first, *(0 for _ in x.shape[1:])]
    drawn = torch.ops.fxpar.random(list(x.shape), seed, "rand", whole, start)
    return torch.where(drawn > RATE, x / (1 - RATE), 0.0), drawn > RATE


def rms(x: Any, weight: Any) -> Any:
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * (wide * scale).to(x.dtype)


def layer(x: Any, weight: Any, bias: Any) -> Any:
    return F.layer_norm(x, [x.shape[-1]], weight, bias)


def adamw(p: Any, g: Any, m: Any, v: Any) -> Any:
    """The first step of torch.optim.AdamW(lr=1e-3), by its own formula."""
    p = p * (1 - 1e-3 * 0.01)
    m = m.lerp(g, 0.1)
    v = (v * 0.999).addcmul(g, g, value=0.001)
    bottom = v.sqrt() / (0.001**0.5) + 1e-8
    return p - (1e-3 / 0.1) * m / bottom, m, v


def gradient(fn: Callable[..., Any], *given: Any) -> Any:
    """Gradients of ``fn`` of all but the last argument, its result's gradient."""
    *args, grad = given
    return torch.func.vjp(fn, *args)[1](grad)


def drop(x: Any, bias: Any, rest: Any, seed: Any) -> Any:
    """The epilogue of a product."""
    kept, mask = dropout(x + bias, seed)
    return kept + rest, mask


def drop_only(x: Any, bias: Any, rest: Any, seed: Any) -> Any:
    return dropout(x + bias, seed)[0] + rest


def drop_norm(x: Any, bias: Any, rest: Any, weight: Any, seed: Any) -> Any:
    y = dropout(x + bias, seed)[0] + rest
    return rms(y, weight), y


def rotary(x: Any, cos: Any, sin: Any) -> Any:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


Piece = tuple[Callable[..., Any], tuple[str, ...]]
# Inputs: x, y, z: rows by columns; w, b: columns; row: rows by one; v: x, positive.
PIECES: dict[str, Piece] = {
    "drop": (drop, ("x", "b", "y", "seed")),
    "drop_norm": (drop_norm, ("x", "b", "y", "w", "seed")),
    "rms": (lambda x, y, w: (rms(x + y, w), x + y), ("x", "y", "w")),
    "rms_back": (lambda *a: gradient(rms, *a), ("x", "w", "y")),
    "layer": (layer, ("x", "w", "b")),
    "layer_back": (lambda *a: gradient(layer, *a), ("x", "w", "b", "y")),
    "softmax": (lambda x: x.softmax(-1), ("x",)),
    "tanh": (torch.tanh, ("x",)),
    "gelu": (F.gelu, ("x",)),
    "gelu_back": (
        lambda *a: gradient(lambda x: F.gelu(x, approximate="tanh"), *a),
        ("x", "y"),
    ),
    "silu_gate": (lambda x, y: F.silu(x) * y, ("x", "y")),
    "rotary": (rotary, ("x", "w", "b")),
    "columns": (lambda x: (x.sigmoid().sum(0), x.exp()), ("x",)),
    "turned": (lambda x, row: x.t() * row.t() + 1, ("x", "row")),
    "adamw": (adamw, ("x", "y", "z", "v")),
}
ONLY_F32 = ("adamw", "columns")  # sums in bfloat16 round what they end in


def made_of(
    here: Here, name: str, rows: int, width: int, dtype: torch.dtype, seed: int
) -> torch.Tensor:
    """What a name of a piece's input stands for."""
    if name == "seed":
        return torch.tensor(seed - (1 << 40), device=here.device)
    shapes = {"w": (width,), "b": (width,), "row": (rows, 1)}
    x = fill(here, shapes.get(name, (rows, width)), dtype, seed)
    return x.abs() + 0.1 if name == "v" else x


# Programs.


@dataclass(frozen=True)
class Job:
    """``order``: which of the inputs a program takes; ``numbers``: of each rank."""

    program: RegionProgram
    order: tuple[int, ...]
    numbers: tuple[tuple[int, ...], ...]

    def values(self, given: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Inputs by the program's names."""
        names = [t.name for t in self.program.inputs]
        taken = [given[i] for i in self.order]
        return dict(zip(names, taken, strict=True))


def job_of(
    makers: Sequence[Callable[..., Any]], like: Sequence[torch.Tensor], ranks: int = 1
) -> Job:
    """The program that functions, one for each rank, of inputs like these have in
    common."""
    with unset_fake_temporarily():
        # Memory that nothing is written to is not taken.
        given = [torch.empty(x.shape, dtype=x.dtype) for x in like]
        found = [_outlined(_traced(fn, given)) for fn in makers]
    programs = {program for program, *_ in found}
    assert len(programs) == 1, "ranks have different programs"
    program = dataclasses.replace(programs.pop(), ranks=ranks)
    return Job(program, found[0][1], tuple(numbers for *_, numbers in found))


def _traced(fn: Callable[..., Any], args: Sequence[torch.Tensor]) -> fx.Graph:
    table = _torch.inductor.decompositions()
    made = make_fx(functionalize(fn), decomposition_table=table, tracing_mode="fake")
    graph = made(*args).graph
    graph.eliminate_dead_code()
    return graph


def _outlined(
    graph: fx.Graph,
) -> tuple[RegionProgram, tuple[int, ...], tuple[int, ...]]:
    """A whole graph: the program, which inputs it takes, and its numbers."""
    inputs = graph.find_nodes(op="placeholder")
    results = graph.output_node().args[0]
    results = list(results) if isinstance(results, (list, tuple)) else [results]
    for i, node in enumerate(results):
        while is_view(node) and "sum" in str(node.args[0].target):
            node = node.args[0]  # views of sums are given as those
        results[i] = node
    calls = [n for n in graph.nodes if n.op == "call_function"]
    alive: set[fx.Node] = set(results)
    for node in reversed(calls):
        if node in alive:
            alive.update(node.all_input_nodes)
    found = outline([n for n in calls if n in alive], set(results), lambda _: 1)
    order = tuple(inputs.index(n) for n in found.inputs)
    return found.program, order, tuple(found.numbers)


def in_dtype(program: RegionProgram, old: str, new: str) -> RegionProgram:
    """A program with one dtype for another."""
    return RegionProgram.parse(program.text.replace(f'"{old}"', f'"{new}"'))


_CASTS = ("prims.convert_element_type.default", "aten._to_copy.default")


def widened(
    program: RegionProgram, dtype: torch.dtype
) -> tuple[RegionProgram, torch.dtype]:
    """A program in the precision of its oracle, and that: float64, of bfloat16 float32.
    Casts to bfloat16 still round."""
    wide = torch.float64 if dtype is F32 else F32
    word = str(wide).removeprefix("torch.")
    raised = in_dtype(in_dtype(program, "bfloat16", word), "float32", word)
    lines = []
    for old, line in zip(program.lines, raised.lines, strict=True):
        if old.op in _CASTS and old.dtype == "bfloat16":
            name = f"{line.name}_narrow"
            lines.append(dataclasses.replace(old, name=name))
            args = Ref(name), wide
            line = dataclasses.replace(line, op=_CASTS[0], args=args, kwargs=())
        lines.append(line)
    return dataclasses.replace(raised, lines=tuple(lines)), wide


def up(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if x.is_floating_point() else x


# Cases with collectives.


def reduce_norm(rank: int, ranks: int, rows: int) -> Callable[..., Any]:
    def fn(x: Any, bias: Any, rest: Any, weight: Any, seed: Any) -> Any:
        kept, mask = dropout(all_reduce(x) + bias, seed)
        return rms(kept + rest, weight), kept + rest, mask

    return fn


def reduce_computed(rank: int, ranks: int, rows: int) -> Callable[..., Any]:
    """Computed before; sums along rows and columns, and the sum itself, are given."""

    def fn(x: Any, bias: Any, rest: Any, weight: Any, seed: Any) -> Any:
        mine = torch.tanh(x) * weight
        y = all_reduce(mine)
        return layer(y + rest, weight, bias), y, mine * y, (y * rest).sum(0), y.amax(-1)

    return fn


def reduce_update(rank: int, ranks: int, rows: int) -> Callable[..., Any]:
    return lambda g, p, m, v: adamw(p, all_reduce(g), m, v)


def scatter_norm(rank: int, ranks: int, rows: int) -> Callable[..., Any]:
    """Each rank has rows of the mask, which is no result."""

    def fn(x: Any, bias: Any, rest: Any, weight: Any, seed: Any) -> Any:
        y = reduce_scatter(F.silu(x), ranks)
        kept, _ = dropout(y + bias, seed, ranks * rows, rank * rows)
        return layer(kept + rest, weight, bias), (y * 2).sum(0)

    return fn


def gather_norm(rank: int, ranks: int, rows: int) -> Callable[..., Any]:
    def fn(x: Any, bias: Any, rest: Any, weight: Any, seed: Any) -> Any:
        mine = rest * 2 + bias
        whole = all_gather(mine, ranks)
        return rms(whole + x, weight), whole, mine

    return fn


def scatter_update(rank: int, ranks: int, rows: int) -> Callable[..., Any]:
    """An optimizer's step between both collectives."""

    def fn(g: Any, p: Any, m: Any, v: Any) -> Any:
        p, m, v = adamw(p, reduce_scatter(g, ranks), m, v)
        return all_gather(p, ranks), m, v

    return fn


@dataclass(frozen=True)
class Case:
    """``parts``: a rank has a part of the collective's result or operand. ``unlike``:
    no result is one on all ranks."""

    make: Callable[[int, int, int], Callable[..., Any]]
    shots: int = 1
    dtype: torch.dtype = F32
    flat: bool = False
    parts: bool = False
    unlike: bool = False


CASES: dict[str, Case] = {
    "reduce_norm": Case(reduce_norm),
    "reduce_norm 2": Case(reduce_norm, 2),
    "reduce_norm bf16": Case(reduce_norm, 1, BF16),
    "reduce_norm 2 bf16": Case(reduce_norm, 2, BF16),
    "reduce_computed": Case(reduce_computed),
    "reduce_computed 2": Case(reduce_computed, 2),
    "reduce_update": Case(reduce_update, flat=True),
    "reduce_update 2": Case(reduce_update, 2, flat=True),
    "scatter_norm": Case(scatter_norm, parts=True, unlike=True),
    "scatter_norm bf16": Case(scatter_norm, 1, BF16, parts=True, unlike=True),
    "gather_norm": Case(gather_norm, parts=True),
    "gather_norm bf16": Case(gather_norm, 1, BF16, parts=True),
    "scatter_update": Case(scatter_update, flat=True, parts=True),
}


def shapes_of(case: Case, ranks: int, sizes: Sizes) -> list[tuple[str, Any, bool]]:
    """Of each input its name, its shape, and whether it is one on all ranks."""
    if case.flat:
        count = sizes.shard if case.parts else sizes.flat
        whole = count * ranks if case.parts else count
        rest = [(name, (count,), not case.parts) for name in ("p", "m", "v")]
        return [("g", (whole,), False), *rest]
    height = sizes.rows * (ranks if case.parts else 1)
    return [
        ("x", (height, sizes.width), False),
        ("bias", (sizes.width,), True),
        ("rest", (sizes.rows, sizes.width), not case.parts),
        ("weight", (sizes.width,), True),
        ("seed", (), True),
    ]


def inputs_of(
    here: Here, case: Case, ranks: int, rank: int, turn: int, sizes: Sizes
) -> list[torch.Tensor]:
    """Of one rank in one round: known to every rank."""
    out = []
    for i, (name, shape, alike) in enumerate(shapes_of(case, ranks, sizes)):
        seed = 1000 * turn + 10 * i + (0 if alike else 1 + rank)
        if name == "seed":
            out.append(torch.tensor(seed - (1 << 40), device=here.device))
            continue
        x = fill(here, shape, case.dtype, seed)
        out.append(x.abs() + 0.1 if name == "v" else x)
    return out


def case_job(here: Here, case: Case, ranks: int, sizes: Sizes) -> Job:
    """A case's program, which is one on all ranks."""
    makers = [case.make(rank, ranks, sizes.rows) for rank in range(ranks)]
    return job_of(makers, inputs_of(here, case, ranks, 0, 0, sizes), ranks)


def oracle(
    here: Here, job: Job, case: Case, all_inputs: Sequence[Sequence[torch.Tensor]]
) -> list[list[torch.Tensor]]:
    """Results of all ranks, by one process; of bfloat16 rounded where a collective
    carries it."""
    (program, wide), ranks = widened(job.program, case.dtype), len(all_inputs)
    values: list[dict[str, torch.Tensor]] = []
    for given in all_inputs:
        values.append({k: up(x, wide) for k, x in job.values(given).items()})
    for step in stages_of(program):
        if isinstance(step, CollectiveStep):
            narrow = job.program.values[step.operand].dtype == "bfloat16"
            carried = _rounded if narrow else lambda x: x
            got = _moved(step, [carried(v[step.operand]) for v in values])
            # Two shots round sums, as a gather does what it is given.
            got = [carried(x) for x in got] if case.shots == 2 else got
            for v, x in zip(values, got, strict=True):
                v[step.result] = x
            continue
        for rank, v in enumerate(values):
            part = step
            args = [v[t.name] for t in part.inputs]
            made = run_kernels.interpret(part, args, job.numbers[rank % ranks])
            v |= dict(zip((t.name for t in part.outputs), made, strict=True))
    return [[v[t.name] for t in program.outputs] for v in values]


def alike(here: Here, want: Sequence[Sequence[torch.Tensor]]) -> list[int]:
    """Which of an oracle's results are one on all ranks."""
    each = range(len(want[0]))
    return [i for i in each if all(same(here, x[i], want[0][i]) for x in want)]


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """To bfloat16 and back."""
    return x.to(BF16).to(x.dtype)


def _moved(move: CollectiveStep, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A collective's results on all ranks."""
    if move.kind == "all_gather_into_tensor":
        return [torch.cat(list(given))] * len(given)
    total = functools.reduce(torch.add, given)
    if move.kind == "all_reduce":
        return [total] * len(given)
    return list(total.chunk(len(given)))
