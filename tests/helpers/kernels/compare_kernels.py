"""Generated kernels in Triton's interpreter, beside the programs they were made of.

A script, since Triton is either interpreter or compiler in one process:
``python -m tests.helpers.kernels.interpreted OUT WHAT...`` writes what it found to OUT
as JSON: for each case whether a kernel was made, and how far results are apart.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy
import torch
from torch import fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from fxpar import _torch
from fxpar.fusion.kernels import interpret, run_kernels
from fxpar.fusion.kernels.expressions import CASTS
from fxpar.fusion.kernels.reductions import CAST, space_of
from fxpar.fusion.kernels.region_program import Line, Program, Ref, dtype_of
from fxpar.fusion.kernels.split_at_collectives import Part, stages_of
from fxpar.fusion.kernels.trace_region import Outline, outline
from fxpar.passes import random
from fxpar.sharding.cost.op import is_view
from tests.helpers.kernels import samples
from tests.helpers.kernels.random_regions import region

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

        made = interpret.op_of(op)(*map(put, args), **kwargs)
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


def compared(
    found: Outline, inputs: Sequence[torch.Tensor], want: Sequence[torch.Tensor] | None
) -> dict[str, Any]:
    """A program's kernels beside ``want``, or beside the program itself."""
    program = found.program
    made = interpret.run(program, inputs, found.numbers)
    places = [x.untyped_storage().data_ptr() for x in (*inputs, *made)]
    if want is None:
        want = made
    try:
        got = run_kernels.run(program, inputs, found.numbers)
    except Exception as error:  # of Triton, in many forms
        return {"kernel": False, "raised": repr(error)[-300:]}
    parts = [s for s in stages_of(program) if isinstance(s, Part)]
    kernels = [run_kernels.compiled(part.program, "cpu") for part in parts]
    strides = [
        x.stride() == t.stride for x, t in zip(got, program.outputs, strict=True)
    ]
    return {
        "kernel": None not in kernels and bool(parts),
        "own": len(set(places[len(inputs) :]) - set(places[: len(inputs)]))
        == len(made),
        "error": max(map(apart, got, want), default=0.0),
        "ulps": max(map(ulps, got, want), default=0.0),
        "strides": all(strides),
        "same": [torch.equal(a, b) for a, b in zip(got, want, strict=True)],
    }


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


def in_dtype(program: Program, old: str, new: str) -> Program:
    """A program with one dtype for another."""
    return Program.parse(program.text.replace(f'"{old}"', f'"{new}"'))


def widened(program: Program, dtype: str) -> Program:
    """A program in another dtype than float32 and bfloat16, whose casts to bfloat16
    still round."""
    wide = in_dtype(in_dtype(program, "bfloat16", dtype), "float32", dtype)
    lines: list[Line] = []
    for old, line in zip(program.lines, wide.lines, strict=True):
        if old.op not in CASTS or old.dtype != "bfloat16":
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


def run_ops() -> dict[str, Any]:
    out = {}
    for op, calls in samples.OPS.items():
        for i, (args, kwargs) in enumerate(calls):
            graph, given = one_op_graph(op, args, kwargs)
            found, order = outlined(graph)
            out[f"{op} {i}"] = compared(found, [given[k] for k in order], None)
    return out


def run_pieces() -> dict[str, Any]:
    out = {}
    for name, (fn, names) in samples.PIECES.items():
        for dtype in (torch.float32, torch.bfloat16):
            if dtype is torch.bfloat16 and name not in samples.IN_BF16:
                continue
            given = [samples.make(x, dtype) for x in names]
            found, order = outlined(traced(fn, given))
            inputs = [given[k] for k in order]
            want = None
            if dtype is torch.bfloat16:
                wide = widened(found.program, "float32")
                up = [x.float() if x.dtype is dtype else x for x in inputs]
                want = interpret.run(wide, up, found.numbers)
            case = f"{name} {str(dtype).removeprefix('torch.')}"
            out[case] = compared(found, inputs, want)
    return out


def run_fuzz(first: int, count: int) -> dict[str, Any]:
    """Random regions, beside float64."""
    out = {}
    for seed in range(first, first + count):
        fn, given = region(seed)
        found, order = outlined(traced(fn, given))
        inputs = [given[k] for k in order]
        wide = in_dtype(found.program, "float32", "float64")
        up = [x.double() if x.dtype is torch.float32 else x for x in inputs]
        want = interpret.run(wide, up, found.numbers)
        plain = interpret.run(found.program, inputs, found.numbers)
        case = compared(found, inputs, want)
        case["plain"] = max(map(apart, plain, want), default=0.0)
        out[str(seed)] = case
    return out


def run_alone() -> dict[str, Any]:
    """Numbers on the CPU beside tensors elsewhere: kernels are given floats."""
    fn, names = samples.PIECES["adamw"]
    given = [samples.make(name) for name in names]
    found, order = outlined(traced(fn, given))
    inputs = [given[k] for k in order]
    numbers = frozenset(t.name for t in found.program.inputs if not t.shape)
    with mock.patch.object(run_kernels, "alone_of", lambda *_: numbers):
        case = compared(found, inputs, None)
    (part,) = stages_of(found.program)
    kernel = run_kernels.compiled(part.program, "cpu", numbers)
    read = {t.name for t in kernel.reads}
    case["given"] = len(numbers) == 2 == len(kernel.alone) and not numbers & read
    return {"adamw": case}


def run_streams() -> dict[str, Any]:
    """Random numbers of each device's code."""
    from fxpar.fusion.kernels.kernel_text import kernel_of

    program = outlined(one_op_graph("fxpar.random.default", *_DRAW)[0])[0].program
    out = {}
    streams = {"cpp": random._CPP, "triton_1": random._triton(1)}
    streams["triton_4"] = random._triton(4)
    for name, stream in streams.items():
        for seed in (0, 7, -1234567890123, 2**62 + 5):
            kernel = kernel_of(program, random=name)
            got = torch.full(samples.FULL, float("nan"))
            offset = (3, 0, 24)
            run_kernels.function_of(kernel)[(kernel.programs,)](
                torch.tensor(seed), got, *offset, PROGRAMS=kernel.programs
            )
            linear = random._linear(samples.FULL, (6, 5, 48), offset, got.device)
            want = stream.draw(random._Eager, "rand", linear, torch.tensor(seed))
            out[f"{name} {seed}"] = {"same": torch.equal(got, want)}
    return out


_DRAW = samples.OPS["fxpar.random.default"][0]


def run_graphs() -> dict[str, Any]:
    """Graphs with collectives before and after they were fused, on one rank."""
    from tests.helpers.kernels.fused_graphs import run

    return run()


def run_two() -> dict[str, Any]:
    """And on two."""
    from tests.helpers.kernels.fused_graphs import run_two

    return run_two()


def run_seam() -> dict[str, Any]:
    """A template's kernel: what is before a collective writes to a buffer, what is
    behind it reads the sum of two, in one function."""
    from fxpar.fusion.kernels.emit import Sink, Source, emit_body, masked
    from fxpar.fusion.kernels.kernel_text import function, phase
    from tests.helpers.kernels.fused_graphs import fused

    def both_sides(x: Any, w: Any, r: Any) -> Any:
        y = c10d.wait_tensor(c10d.all_reduce(torch.tanh(x @ w), "sum", "0"))
        return torch.nn.functional.layer_norm(y + r, [WIDTH]) @ w

    def put(offset: str, value: str, mask: str) -> Sequence[str]:
        return [f"tl.store(mine_ptr + {offset}, {value}{masked(mask)}"]

    def get(offset: str, mask: str) -> tuple[Sequence[str], str]:
        line = f"other = tl.load(theirs_ptr + {offset}{masked(mask, ', other=0')}"
        mine = f"tl.load(mine_ptr + {offset}{masked(mask, ', other=0')}"
        return [line], f"{mine} * scale + other"

    (program,) = fused(both_sides)[1].programs
    first, move, last = stages_of(program)
    space = space_of(last.program)
    before = emit_body(
        first.program, space, sinks={move.operand: Sink(("mine_ptr",), put)}
    )
    source = Source(("mine_ptr", "theirs_ptr"), get, ("scale = 2.0",))
    behind = emit_body(last.program, space, sources={move.result: source})
    lines = [*phase(before), "tl.debug_barrier()", *phase(behind)]
    names = list(dict.fromkeys((*before.parameters, *behind.parameters)))
    text = function("both", names, lines, "two phases")
    draw = torch.Generator().manual_seed(2)
    given = {n: torch.randn(ROWS, WIDTH, generator=draw) for n in names}
    kernel = run_kernels.module_of("both", text).both
    kernel[(2,)](*given.values(), PROGRAMS=2)
    sent = interpret.run(first.program, [given[f"{first.program.inputs[0].name}_ptr"]])[
        0
    ]
    values = {move.result: sent * 2 + given["theirs_ptr"]}
    values |= {n.removesuffix("_ptr"): x for n, x in given.items()}
    want = interpret.run(last.program, [values[t.name] for t in last.program.inputs])
    got = given[f"{last.program.outputs[0].name}_ptr"]
    return {
        "both": {"error": apart(got, want[0]), "sent": apart(given["mine_ptr"], sent)}
    }


def main(path: str, *what: str) -> None:
    run_kernels.empty = poisoned
    round_as_devices()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for word in what:
        name, *numbers = word.split(":")
        found[name] = globals()[f"run_{name}"](*map(int, numbers))
    with open(path, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
