"""Trace small functions as regions, run their kernels, and compare numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from fxpar import _torch
from fxpar.fusion.kernels import run_kernels
from fxpar.fusion.kernels.expressions import CAST
from fxpar.fusion.kernels.region_program import (
    Outline,
    Ref,
    RegionProgram,
    Statement,
    dtype_of,
    outline,
    stages_of,
)
from fxpar.sharding.cost.op import is_view
from tests.helpers.kernels import samples

c10d = torch.ops._c10d_functional
ROWS, WIDTH = 6, 24
NARROW = {f"torch.{name}" for name in samples.NARROW}


def poisoned(
    shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: Any
) -> torch.Tensor:
    """Memory that shows what was not written."""
    x = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return x.fill_(float("nan") if dtype.is_floating_point else 1)


def traced(fn: Callable[..., Any], args: Sequence[torch.Tensor]) -> fx.Graph:
    """A function as an ATen graph with fake values."""
    table = _torch.inductor.decompositions()
    made = make_fx(functionalize(fn), decomposition_table=table, tracing_mode="fake")
    graph = made(*args).graph
    graph.eliminate_dead_code()
    return graph


def outlined(graph: fx.Graph) -> tuple[Outline, list[int]]:
    """A whole graph as a program, and which inputs of the graph it takes. Results that
    are views of sums are given as those."""
    inputs = graph.find_nodes(op="placeholder")
    results = graph.output_node().args[0]
    results = list(results) if isinstance(results, (list, tuple)) else [results]
    calls = [n for n in graph.nodes if n.op == "call_function"]
    for i, node in enumerate(results):
        while is_view(node) and "sum" in str(node.args[0].target):
            node = node.args[0]
        results[i] = node
    alive: set[fx.Node] = set(results)
    for node in reversed(calls):
        if node in alive:
            alive.update(node.all_input_nodes)
    found = outline([n for n in calls if n in alive], set(results), lambda _: 1)
    return found, [inputs.index(n) for n in found.inputs]


def single(op: str, args: Any, kwargs: Any) -> tuple[Callable[..., Any], list[str]]:
    """A call of one op as a function of the tensors it is given, and their names. An
    integer of few bits is widened again."""
    names: list[str] = []

    def collect(x: Any) -> None:
        if isinstance(x, list):
            for part in x:
                collect(part)
        elif isinstance(x, str) and x in samples.NAMES:
            names.append(x)

    for x in args:
        collect(x)

    def fn(*given: torch.Tensor) -> Any:
        rest = list(given)

        def put(x: Any) -> Any:
            if isinstance(x, list):
                return [put(part) for part in x]
            named = isinstance(x, str) and x in names
            return rest.pop(0) if named else x

        made = run_kernels.op_of(op)(*map(put, args), **kwargs)
        if str(getattr(made, "dtype", "")) in NARROW:  # as the next op reads it
            return torch.ops.prims.convert_element_type(made, torch.int64)
        return made

    return fn, names


def one_op_graph(op: str, args: Any, kwargs: Any) -> tuple[fx.Graph, list[Any]]:
    """A graph of one call, whose operands are its inputs; an op with several results
    has them taken apart."""
    fn, names = single(op, args, kwargs)
    given = [samples.make(name) for name in names]
    return make_fx(fn, tracing_mode="fake")(*given).graph, given


@dataclass(frozen=True)
class Comparison:
    """A program's kernels beside the program."""

    kernels: bool  # whether all of it became kernels
    own: bool  # whether each result of the program is memory of its own
    error: float  # as ``apart``
    ulps: float
    strides: bool  # whether results lie as the program says
    same: list[bool]  # results that are equal to the bit


def compared(
    found: Outline,
    inputs: Sequence[torch.Tensor],
    want: Sequence[torch.Tensor] | None = None,
) -> Comparison:
    """A program's kernels beside ``want``, or beside the program itself."""
    program = found.program
    made = run_kernels.interpret(program, inputs, found.numbers)
    places = [x.untyped_storage().data_ptr() for x in (*inputs, *made)]
    if want is None:
        want = made
    got = run_kernels.run(program, inputs, found.numbers)
    parts = [s for s in stages_of(program) if isinstance(s, RegionProgram)]
    kernels = [run_kernels.compiled(part, "cpu") for part in parts]
    return Comparison(
        kernels=None not in kernels and bool(parts),
        own=len(set(places[len(inputs) :]) - set(places[: len(inputs)])) == len(made),
        error=max(map(apart, got, want), default=0.0),
        ulps=max(map(ulps, got, want), default=0.0),
        strides=all(
            x.stride() == t.stride for x, t in zip(got, program.outputs, strict=True)
        ),
        same=[torch.equal(a, b) for a, b in zip(got, want, strict=True)],
    )


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference relative to the largest number; infinite where NaNs and
    infinities are not in the same places."""
    if got.dtype != want.dtype and not want.is_floating_point():
        return float("inf")
    if not got.is_floating_point():
        return 0.0 if torch.equal(got, want) else float("inf")
    a, b = got.double(), want.double()
    if got.shape != want.shape or not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    endless = a.isinf() | b.isinf()
    if not torch.equal(a[endless], b[endless]):
        return float("inf")
    a, b = a.nan_to_num(0.0, 0.0, 0.0), b.nan_to_num(0.0, 0.0, 0.0)
    largest = b.abs().max().clamp_min(1e-30)
    return ((a - b).abs().max() / largest).item() if b.numel() else 0.0


def ulps(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference in units of the last place of ``got``'s dtype, beyond a
    millionth of the largest number."""
    if not got.is_floating_point():
        return 0.0
    a, b = got.double(), want.double()
    place = torch.finfo(got.dtype).eps * 2.0 ** b.abs().clamp_min(1e-30).log2().floor()
    beyond = (a - b).abs() - 1e-6 * b.abs().max()
    return (beyond / place).max().item()


def in_dtype(program: RegionProgram, old: str, new: str) -> RegionProgram:
    """A program with one dtype for another."""
    return RegionProgram.parse(program.text.replace(f'"{old}"', f'"{new}"'))


def widened(program: RegionProgram, dtype: str) -> RegionProgram:
    """A program in another dtype than float32 and bfloat16, whose casts to bfloat16
    still round."""
    wide = in_dtype(in_dtype(program, "bfloat16", dtype), "float32", dtype)
    lines: list[Statement] = []
    for old, line in zip(program.lines, wide.lines, strict=True):
        if old.op != CAST or old.dtype != "bfloat16":
            lines.append(line)
            continue
        rounded = f"{line.name}_rounded"
        lines.append(dataclasses.replace(old, name=rounded))
        args = Ref(rounded), dtype_of(dtype)
        more = {"op": CAST, "args": args, "kwargs": ()}
        lines.append(dataclasses.replace(line, **more))
    return dataclasses.replace(wide, lines=tuple(lines))


def round_as_devices() -> None:
    """Let Triton's interpreter round to bfloat16, as devices do; it cuts off."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def rounding(self: Any, src: Any, to: Any) -> Any:
        if (src.dtype.scalar.name, to.scalar.name) != ("fp32", "bf16"):
            return cast(self, src, to)
        wide = torch.from_numpy(numpy.array(src.data, dtype=numpy.float32))
        bits = wide.bfloat16().view(torch.int16).numpy().view(numpy.uint16)
        return TensorHandle(bits, to.scalar)

    InterpreterBuilder.cast_impl = rounding
