"""Kernels with collectives inside do what their programs do: interpreted, on ranks that
wait for each other; and compiled for sm_90a where there is no GPU."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest
import torch

from fxpar.fusion.kernels import region_op, run_kernels
from fxpar.fusion.kernels.region_program import CannotEmit, Tensor
from fxpar.fusion.kernels.run_kernels import function_of
from fxpar.fusion.kernels.templates import Template, template_of
from tests.helpers.kernels import collective_cases as cases
from tests.helpers.kernels.ahead import RANDOM, TYPES, _usage
from tests.helpers.kernels.compare_kernels import apart, outlined, traced
from tests.helpers.kernels.shared_memory import virtual

triton = pytest.importorskip("triton")

F32 = 1e-6  # relative to the largest number of a result

BROKEN = "reduced_norm 2"
# One of each kind of collective and of its implementations.
QUICK = (
    "reduced_norm 2 bf16",
    "computed_norm",
    "reduced_update 2",
    "computed_norm in the switch",
    "scattered_norm",
    "gathered_norm bf16",
)


def jobs_of(names: Iterable[str], ranks: int) -> dict[str, cases.Job]:
    return {name: cases.job(cases.CASES[name], ranks) for name in names}


def check(names: Iterable[str], ranks: int, mode: str = "sound") -> list[cases.RankRun]:
    """Numbers of cases, one after the other in the same workspace; masks are bools, of
    which none may differ."""
    jobs = jobs_of(names, ranks)
    runs = cases.run_cases(jobs, ranks, mode, 1500 if len(jobs) > 10 else 300)
    for name, case in cases.compared(jobs, runs).items():
        if "bf16" in name:
            assert case.ulps <= 1.0, name
        else:
            assert case.error <= F32, name
        assert case.same, f"{name}: ranks differ in what they hold alike"
        assert case.alike or name.startswith("scattered_norm"), name
    assert not any(run.signals for run in runs), "signals are not lowered again"
    return runs


@pytest.mark.interpreted
@pytest.mark.multiprocess
def test_two_ranks_give_what_one_process_computes() -> None:
    check(QUICK, 2)


@pytest.mark.interpreted
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("ranks", "names"), [(1, ["mixed_update"]), (4, ["computed_norm 2", "gathered"])]
)
def test_ranks_give_what_one_process_computes(ranks: int, names: list[str]) -> None:
    check(names, ranks)


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_cases(ranks: int) -> None:
    check(cases.CASES, ranks)


@pytest.mark.interpreted
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "names",
    [[BROKEN], pytest.param(list(cases.CASES), marks=pytest.mark.slow)],
    ids=["one", "all"],
)
def test_late_ranks_are_waited_for(names: list[str]) -> None:
    check(names, 2, "slow")


@pytest.mark.interpreted
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "mode", ["no_barrier", pytest.param("one_half", marks=pytest.mark.slow)]
)
def test_broken_ones_are_caught(mode: str) -> None:
    """A barrier that does not wait; and a workspace that is filled again at once."""
    with pytest.raises(AssertionError):
        check([BROKEN], 2, mode)


@pytest.mark.interpreted
@pytest.mark.multiprocess
def test_implementations_that_are_measured() -> None:
    """All ranks take the same, and write to nothing of the user's while they try."""
    ways = [run.ways for run in check(["gathered"], 2, "measured")]
    assert ways[0] and ways[0] == ways[1]


@pytest.mark.interpreted
@pytest.mark.multiprocess
def test_a_rank_that_never_comes_is_named() -> None:
    """No kernel waits for ever, also not the one after the first that gave up."""
    *others, last = cases.run_cases(jobs_of([BROKEN], 3), 3, "lost")
    assert last.raised == [] and len(others) == 2
    for run in others:
        assert len(run.raised) == 2
        for text in run.raised:
            assert "rank 2 of the group sent no signal inside fxpar::region" in text
            assert "fix: see why that rank failed" in text


# Compiled ahead of time, rows of 4096 on 8 ranks: registers at most, and loads of 128
# bits. Triton 3.7.1; a bound for others would say nothing.
RANKS, GRID = 8, 132
GOLDEN = {
    "reduced_norm": (113, 28),
    "reduced_norm 2": (128, 30),
    "computed_norm": (95, 28),
    "reduced_update": (60, 24),
    "reduced_update 2": (60, 26),
    "scattered_norm": (124, 24),
    "gathered_norm": (48, 10),
    "gathered": (32, 2),
    "scattered_update": (56, 26),
    "mixed_update": (64, 18),
}
QUICK_AHEAD = ("reduced_norm 2", "computed_norm", "reduced_update", "scattered_norm")
QUICK_AHEAD += ("gathered_norm",)


def large(name: str, dtype: torch.dtype) -> Template:
    """The kernel of a case as of a real model."""
    sizes = {"ROWS": 64, "WIDTH": 4096, "FLAT": 1 << 20, "SHARD": 1 << 17}
    small = {getattr(cases, k): n for k, n in sizes.items()}
    case = cases.CASES[name]
    given = []
    for kind, shape, _ in case.inputs:
        size = [small[n] if n > 0 else RANKS * small[-n] for n in shape]
        of = torch.int64 if kind == "seed" else dtype
        given.append(torch.empty(size, dtype=of))
    with mock.patch.multiple(cases, **sizes):
        found, _ = outlined(traced(case.make(0, RANKS), given))
    program = dataclasses.replace(found.program, ranks=RANKS)
    return template_of(program, shots=case.shots, programs=GRID, random=RANDOM)


def compiled(made: Template) -> tuple[str, str]:
    """(PTX, what cuobjdump says) for sm_90a."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    found = made.kernel

    def pointer(t: Tensor) -> str:
        return "*" + ("fp32" if t.name in found.sums else TYPES[t.dtype])

    types = {"buffers_ptr": "*i64", "signals_ptr": "*i64"}
    types |= {f"{t.name}_ptr": pointer(t) for t in (*found.reads, *found.writes)}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(types))}
    (numbers,) = re.findall(r"do_not_specialize=\[(.*)\]", found.text)
    types |= {n.strip(" '"): "i32" for n in numbers.split(",")}
    types |= {"PROGRAMS": "constexpr"}
    source = ASTSource(function_of(found), types, {"PROGRAMS": found.programs}, aligned)
    options = {"num_warps": found.warps, "launch_cooperative_grid": True}
    target = GPUTarget("cuda", 90, 32)
    done: Any = triton.compile(source, target=target, options=options)
    return done.asm["ptx"], _usage(done.asm["cubin"])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK_AHEAD else pytest.mark.slow)
        for name in GOLDEN
    ],
)
def test_compiled_ahead(name: str) -> None:
    """Signals with the order they need, one instruction for all ranks; peers' memory
    128 bits at a time, no spills but of what is kept over a barrier."""
    made = large(name, torch.float32 if "update" in name else torch.bfloat16)
    ptx, usage = compiled(made)
    assert re.search(r"\.target (\S+)", ptx)[1] == "sm_90a"
    signals = made.kernel.text.count("lib.barrier(")
    for word in ("release", "acquire"):
        found = re.findall(rf"atom\.global\.{word}\.sys\.cas\.b32", ptx)
        assert len(found) == signals > 0
    assert int(re.search(r"STACK:(\d+)", usage)[1]) <= 8
    registers, wide = GOLDEN[name]
    loads = len(re.findall(r"ld\.global\S*\.v4\.b32", ptx))
    assert loads > 0
    if triton.__version__.startswith("3.7."):
        assert loads >= wide
        assert int(re.search(r"REG:(\d+)", usage)[1]) <= registers


def refused(fn: Any, ranks: int, *given: torch.Tensor, shots: int = 1) -> str:
    """Why there is no kernel of a function with collectives."""
    found, _ = outlined(traced(fn, given))
    program = dataclasses.replace(found.program, ranks=ranks)
    with pytest.raises(CannotEmit) as error:
        template_of(program, shots=shots, programs=4)
    return str(error.value)


def test_what_has_no_template() -> None:
    """Where a program would read what others' programs of other numbers wrote."""
    x, row = torch.empty(8, 16), torch.empty(16)
    reduce, gather = cases.all_reduce, cases.all_gather
    why = refused(lambda x: reduce(x).t() + x.view(16, 8), 2, x)
    assert "in another order than it is communicated in" in why
    why = refused(lambda x, row: x * reduce(row), 2, x, row)
    assert "has neither all elements" in why
    why = refused(lambda x: reduce(x.softmax(-1)).view(16, 8).softmax(-1), 2, x)
    assert "rows before and after it differ" in why
    why = refused(lambda x: (gather(x, 2) * 2).sum(0), 2, torch.empty(64, 16))
    assert "summed over the parts of all ranks" in why
    why = refused(lambda x: gather(x * 2, 2) + 1, 2, row)
    assert "no multiple of 128" in why
    why = refused(lambda x: gather(x, 2).view(-1, 32).softmax(-1), 2, x[:3].clone())
    assert "rows are split between ranks" in why

    def rows_of_ranks(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return (gather(y, 2).view(-1, 2) + y.view(-1, 1)).softmax(-1)

    why = refused(rows_of_ranks, 2, torch.empty(128))
    assert "is not made block by block" in why
    why = refused(lambda x: reduce(x.cos() + x.sum(0)) * 2, 2, x)
    assert "is reduced, and needed elsewhere" in why
    why = refused(lambda x: reduce(reduce(x) * 2), 2, x)
    assert "there is no template of these" in why


EXACT = [name for name, case in cases.CASES.items() if case.dtype is torch.float32]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", EXACT)
def test_streams_of_one_gpu_play_ranks(name: str, ranks: int) -> None:
    device = torch.device("cuda", 0)
    count = torch.cuda.get_device_properties(device).multi_processor_count
    playing = virtual(ranks, device, programs=min(8, count // ranks))
    streams = [torch.cuda.Stream(device) for _ in range(ranks)]
    found = cases.job(cases.CASES[name], ranks)
    shots, programs = found.case.shots, playing[0].programs
    made = template_of(found.program, shots=shots, programs=programs)
    for provider in playing:
        provider.reserve(made.nbytes)
    for turn in range(cases.ROUNDS):
        ready = []
        for rank, provider in enumerate(playing):
            all_given = found.case.inputs_of(ranks, rank, turn)
            given = [all_given[i].to(device) for i in found.order]
            values = dict(
                zip((t.name for t in found.program.inputs), given, strict=True)
            )
            numbers = found.numbers[rank]
            ready.append(region_op.prepared(made, values, numbers, provider))
        torch.cuda.synchronize(device)
        for stream, (arguments, _) in zip(streams, ready, strict=True):
            with torch.cuda.stream(stream):
                run_kernels.call(made.kernel, arguments, None)
        torch.cuda.synchronize(device)
        want = cases.oracle(found, turn)
        for rank, (_, writes) in enumerate(ready):
            got = run_kernels.by_name(made.kernel, writes)
            for t, x in zip(found.program.outputs, want[rank], strict=True):
                assert apart(got[t.name].cpu(), x) <= F32, (turn, rank, t.name)
