"""Generated kernels do what their programs do, in Triton's interpreter.

Outputs begin as NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from fxpar.fusion.kernels import run_kernels
from fxpar.fusion.kernels.emit import (
    Sink,
    Source,
    emit_body,
    function,
    kernel_of,
    masked,
    phase,
)
from fxpar.fusion.kernels.expressions import OPS
from fxpar.fusion.kernels.placement import KNOWN, space_of
from fxpar.fusion.kernels.region_program import stages_of
from fxpar.passes.normalize import random
from tests.helpers.kernels import samples
from tests.helpers.kernels.compare_kernels import (
    Comparison,
    apart,
    compared,
    in_dtype,
    one_op_graph,
    outlined,
    single,
    traced,
    widened,
)
from tests.helpers.kernels.fused_graphs import (
    GRAPHS,
    OF_TWO,
    ROWS,
    WIDTH,
    all_reduce,
    fused,
    on_one_rank,
    on_two_ranks,
)
from tests.helpers.kernels.random_regions import region

pytestmark = pytest.mark.interpreted

HALF = 0.51  # units of the last place: what rounding costs
F32 = 1e-6  # relative to the largest number of a result
QUICK, ALL = 15, 200


CALLS = [(op, i) for op, calls in samples.OPS.items() for i in range(len(calls))]


def test_every_op_has_a_sample() -> None:
    assert set(samples.OPS) == KNOWN


def test_no_row_is_for_an_op_that_is_always_decomposed() -> None:
    """Programs are traced with Inductor's decompositions."""
    gone = set()
    for op in OPS:
        for args, kwargs in samples.OPS[op]:
            fn, names = single(op, args, kwargs)
            graph = traced(fn, [samples.make(name) for name in names])
            if any(str(node.target) == op for node in graph.nodes):
                break
        else:
            gone.add(op)
    assert not gone


@pytest.mark.parametrize(("op", "call"), CALLS)
def test_op(op: str, call: int) -> None:
    graph, given = one_op_graph(op, *samples.OPS[op][call])
    found, order = outlined(graph)
    kernels = compared(found, [given[k] for k in order])
    assert kernels.kernels and kernels.strides
    assert kernels.error <= F32
    assert kernels.own, "a result is memory of another's"


def piece(name: str) -> Comparison:
    fn, names = samples.PIECES[name]
    given = [samples.make(x) for x in names]
    found, order = outlined(traced(fn, given))
    return compared(found, [given[k] for k in order])


@pytest.mark.parametrize("name", samples.PIECES)
def test_piece(name: str) -> None:
    kernels = piece(name)
    assert kernels.kernels and kernels.error <= F32


@pytest.mark.parametrize("name", samples.IN_BF16)
def test_piece_in_bf16(name: str) -> None:
    """What float32 gives, with the graph's casts, rounded once."""
    fn, names = samples.PIECES[name]
    given = [samples.make(x, torch.bfloat16) for x in names]
    found, order = outlined(traced(fn, given))
    inputs = [given[k] for k in order]
    wide = widened(found.program, "float32")
    up = [x.float() if x.dtype is torch.bfloat16 else x for x in inputs]
    want = run_kernels.interpret(wide, up, found.numbers)
    kernels = compared(found, inputs, want)
    assert kernels.kernels and kernels.ulps <= HALF


def test_numbers_on_the_cpu_are_arguments() -> None:
    """Numbers on the CPU beside tensors elsewhere: kernels are given floats."""
    fn, names = samples.PIECES["adamw"]
    given = [samples.make(name) for name in names]
    found, order = outlined(traced(fn, given))
    numbers = frozenset(t.name for t in found.program.inputs if not t.shape)
    with mock.patch.object(run_kernels, "alone_of", lambda *_: numbers):
        kernels = compared(found, [given[k] for k in order])
    assert kernels.kernels and kernels.error <= F32
    (part,) = stages_of(found.program)
    kernel = run_kernels.compiled(part, "cpu", numbers)
    assert len(numbers) == 2 == len(kernel.alone)
    assert not numbers & {t.name for t in kernel.reads}


def test_masks_are_equal_to_the_bit() -> None:
    assert piece("bias_dropout_residual").same[1]


STREAMS = {
    "cpp": random._Stream(),
    "triton_1": random._Triton(1),
    "triton_4": random._Triton(4),
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("seed", [0, 7, -1234567890123, 2**62 + 5])
def test_random_numbers_are_those_of_the_device(name: str, seed: int) -> None:
    call = samples.OPS["fxpar.random.default"][0]
    program = outlined(one_op_graph("fxpar.random.default", *call)[0])[0].program
    kernel = kernel_of(program, random=name)
    got = torch.full(samples.FULL, float("nan"))
    offset = (3, 0, 24)
    run_kernels.function_of(kernel)[(kernel.programs,)](
        torch.tensor(seed), got, *offset, PROGRAMS=kernel.programs
    )
    linear = random._linear(samples.FULL, (6, 5, 48), offset, got.device)
    want = STREAMS[name].draw(random._Eager, "rand", linear, torch.tensor(seed))
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("how", ["interpret", "triton"])
def test_fused_graphs_give_the_same(name: str, how: str) -> None:
    graph = on_one_rank(name, how)
    assert graph.error <= (0.0 if how == "interpret" else F32)
    assert graph.regions > 0


@cache
def two_ranks() -> list[Any]:
    return on_two_ranks(OF_TWO)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", OF_TWO)
def test_fused_graphs_on_two_ranks(name: str) -> None:
    """From a graph to regions to kernels that wait inside for the other rank."""
    for graphs in two_ranks():
        by_op, kernels = graphs[name, "interpret"], graphs[name, "triton"]
        assert by_op.error == 0.0 and kernels.error <= F32
        assert kernels.inside == kernels.regions > 0


def test_templates_read_and_write_elsewhere() -> None:
    """A template's kernel: what is before a collective writes to a buffer, what is
    behind it reads the sum of two, in one function."""

    def both_sides(x: Any, w: Any, r: Any) -> Any:
        y = all_reduce(torch.tanh(x @ w))
        return torch.nn.functional.layer_norm(y + r, [WIDTH]) @ w

    def put(offset: str, value: str, mask: str) -> Sequence[str]:
        return [f"tl.store(mine_ptr + {offset}, {value}{masked(mask)}"]

    def get(offset: str, mask: str) -> tuple[Sequence[str], str]:
        line = f"other = tl.load(theirs_ptr + {offset}{masked(mask, ', other=0')}"
        mine = f"tl.load(mine_ptr + {offset}{masked(mask, ', other=0')}"
        return [line], f"{mine} * scale + other"

    (program,) = fused(both_sides)[1].programs
    first, move, last = stages_of(program)
    space = space_of(last)
    sinks = {move.operand: Sink(("mine_ptr",), put)}
    before = emit_body(first, space, sinks=sinks)
    source = Source(("mine_ptr", "theirs_ptr"), get, ("scale = 2.0",))
    behind = emit_body(last, space, sources={move.result: source})
    lines = [*phase(before), "tl.debug_barrier()", *phase(behind)]
    names = list(dict.fromkeys((*before.parameters, *behind.parameters)))
    text = function("both", names, lines, "two phases")
    draw = torch.Generator().manual_seed(2)
    given = {n: torch.randn(ROWS, WIDTH, generator=draw) for n in names}
    run_kernels.module_of("both", text).both[(2,)](*given.values(), PROGRAMS=2)
    operand = given[f"{first.inputs[0].name}_ptr"]
    (sent,) = run_kernels.interpret(first, [operand])
    values = {move.result: sent * 2 + given["theirs_ptr"]}
    values |= {n.removesuffix("_ptr"): x for n, x in given.items()}
    want = run_kernels.interpret(last, [values[t.name] for t in last.inputs])
    assert apart(given["mine_ptr"], sent) <= F32
    assert apart(given[f"{last.outputs[0].name}_ptr"], want[0]) <= F32


def check_region(seed: int) -> bool:
    """Kernels beside float64; whether they are of the whole region."""
    fn, given = region(seed)
    found, order = outlined(traced(fn, given))
    inputs = [given[k] for k in order]
    wide = in_dtype(found.program, "float32", "float64")
    up = [x.double() if x.dtype is torch.float32 else x for x in inputs]
    want = run_kernels.interpret(wide, up, found.numbers)
    plain = run_kernels.interpret(found.program, inputs, found.numbers)
    kernels = compared(found, inputs, want)
    rounding = max(map(apart, plain, want), default=0.0)
    assert kernels.error <= F32 + 10 * rounding, seed
    return kernels.kernels


@pytest.mark.parametrize(
    "seeds",
    [range(QUICK), pytest.param(range(QUICK, QUICK + ALL), marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_random_regions(seeds: range) -> None:
    assert sum(map(check_region, seeds)) >= 0.9 * len(seeds)


# What one device computes of numbers of few bits: a constant beside them has their
# bits, as a tensor that is filled with it has.
CONSTANTS: dict[str, Any] = {
    "equal": lambda x: x == 0.1,
    "less": lambda x: x <= 0.2,
    "filled": lambda x: x == torch.full_like(x, 0.1),
    "filled and widened": lambda x: torch.full_like(x, 0.1).float() * x.float(),
    "a number alone": lambda x: x == torch.full((), 0.1),
    "picked": lambda x: torch.where(x > 0, x, 0.1).float() * 3,
    "clamped": lambda x: x.clamp(0.1, 0.2) == 0.2,
    "padded": lambda x: F.pad(x.view(2, 3), (1, 1), value=0.1).float() * 3,
    "cut off": lambda x: F.hardshrink(x, 0.1),
}


def beside_eager(fn: Any, *given: torch.Tensor) -> Comparison:
    """The kernel of a function beside the function as it stands."""
    found, order = outlined(traced(fn, given))
    return compared(found, [given[k] for k in order], [fn(*given)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_of_few_bits(name: str, dtype: torch.dtype) -> None:
    x = torch.tensor([0.1, 0.2, 0.3, -0.1, 0.0, 5.0], dtype=dtype)
    kernels = beside_eager(CONSTANTS[name], x)
    assert kernels.kernels and kernels.same == [True]


MIXED: dict[str, Any] = {
    "a whole number among floats": lambda x, n: torch.where(
        x > 0, x, torch.full((), 2, dtype=torch.int64)
    ),
    "a bool among whole numbers": lambda x, n: n + torch.full((6,), True),
    "a bool compared": lambda x, n: (x > 0) == torch.full((6,), True),
    "places times a large step": lambda x, n: n + torch.arange(0, 6 * 10**9, 10**9),
    "places from a large start": lambda x, n: (
        n + torch.arange(3 * 10**9, 3 * 10**9 + 6)
    ),
    "an expanded row": lambda x, n: x.view(6, 1).expand(6, 5).sum(-1),
    "more degrees of freedom than numbers": lambda x, n: x.view(2, 3).var(
        -1, correction=5
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_constants_of_other_kinds(name: str) -> None:
    x, n = torch.tensor([0.1, 0.2, 0.3, -0.1, 0.0, 5.0]), torch.arange(-3, 3)
    kernels = beside_eager(MIXED[name], x, n)
    assert kernels.kernels and kernels.error <= F32


def test_an_expanded_input() -> None:
    """Its strides are 0: an element of a row is read once."""
    x = torch.tensor([0.1, 0.2, 0.3, -0.1]).view(4, 1).expand(4, 5)
    kernels = beside_eager(lambda x: x.sum(-1) * 2, x)
    assert kernels.kernels and kernels.error <= F32


REFUSED: dict[str, Any] = {
    "a number beyond the range": lambda x, n: n.to(torch.int8) > 300,
    "a factor that is infinite": lambda x, n: torch.sub(x, x, alpha=float("inf")),
    "a sum of what is rounded": lambda x, n: x.view(2, 3).sum(-1, dtype=torch.float16),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_kernel_runs_without(name: str) -> None:
    x, n = torch.tensor([0.1, 0.2, 0.3, -0.1, 0.0, 5.0]), torch.arange(-3, 3)
    found, order = outlined(traced(REFUSED[name], (x, n)))
    given = [(x, n)[k] for k in order]
    kernels = compared(found, given)
    assert not kernels.kernels and kernels.error == 0
