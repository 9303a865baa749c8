"""Parts of ``one_gpu.py`` that measure kernels bound by memory: epilogues (B1),
all-reduces of virtual ranks with their epilogue (B2), sums with AdamW (B5).

The model of all of them: each input is read once, each output written once, at the
rate of a copy in the same process. Baselines are made by Inductor of the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gpu_programs as programs
import torch
import torch.nn.functional as F
from gpu_correct import play, prepare, template
from gpu_here import (
    Here,
    Side,
    apart,
    compiled,
    copy_rate,
    figures_of,
    fill,
    fork,
    measure,
    meet,
    on,
    over,
    rate,
    sets_of,
    streams,
)
from gpu_programs import BF16, F32, RATE, Case, Job

from fxpar.fusion.kernels import run_kernels
from fxpar.fusion.kernels.symmetric_memory import Provider
from fxpar.fusion.kernels.templates import Template
from fxpar.passes.normalize import random
from tests.helpers.kernels.shared_memory import virtual

WIDTH = 4096
MIB = 1 << 20


def rows_of(here: Here, mib: int) -> int:
    """Rows of so many MiB of bfloat16."""
    return here.pick(mib * MIB // (2 * WIDTH), 8)


def width(here: Here) -> int:
    return here.pick(WIDTH, 64)


def launcher(
    here: Here, job: Job, given: Sequence[torch.Tensor]
) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    """A program's kernel, to be called again and again, and what it writes."""
    kernel = run_kernels.compiled(job.program, here.device.type)
    assert kernel is not None, "no kernel"
    values = job.values(given)
    reads = [run_kernels.as_read(values[t.name], t, here.device) for t in kernel.reads]
    writes = [run_kernels.place(kernel, t, here.device) for t in kernel.writes]
    more = [job.numbers[0][i] for i in kernel.numbers]
    function = run_kernels.function_of(kernel)

    def call() -> Any:
        return function[(kernel.programs,)](
            *reads, *writes, *more, PROGRAMS=kernel.programs, num_warps=kernel.warps
        )

    return call, writes


def nbytes_of(job: Job) -> int:
    """Read and written once."""
    tensors = (*job.program.inputs, *job.program.outputs)
    return sum(t.nbytes for t in tensors)


# B1.


def eager_drop(x: Any, bias: Any, rest: Any, seed: Any) -> Any:
    return F.dropout(x + bias, RATE) + rest


def eager_norm(x: Any, bias: Any, rest: Any, weight: Any, seed: Any) -> Any:
    y = F.dropout(x + bias, RATE) + rest
    return programs.rms(y, weight), y


# The piece, its inputs, what eager runs, and how often its bytes the fused ones: of S
# bytes a sum 2 (the bias is small), dropout 2.5 with its mask, a sum 3; of the norm in
# float32 3 + 4 + 2 + 4 + 3 + 2.
B1: dict[str, tuple[Any, tuple[str, ...], Any, float]] = {
    "dropout": (programs.drop_only, ("x", "b", "y", "seed"), eager_drop, 7.5 / 3),
    "norm": (programs.drop_norm, ("x", "b", "y", "w", "seed"), eager_norm, 25.5 / 4),
}


def epilogues(here: Here) -> None:
    random.register_lowering()
    ceiling = copy_rate(here)
    for name, (fn, names, eager, more) in B1.items():
        for mib in (64, 512):
            epilogue(here, f"{name} {mib} MiB", fn, names, eager, more, mib, ceiling)
            if here.mode == "try":
                break


def epilogue(
    here: Here,
    case: str,
    fn: Any,
    names: Sequence[str],
    eager: Any,
    more: float,
    mib: int,
    ceiling: float,
) -> None:
    rows, columns = rows_of(here, mib), width(here)
    given = [
        [
            programs.made_of(here, word, rows, columns, BF16, 100 * k + i)
            for i, word in enumerate(names)
        ]
        for k in range(sets_of(here, 3 * 2 * rows * columns))
    ]
    job = programs.job_of([fn], given[0])
    calls, writes = zip(*(launcher(here, job, one) for one in given), strict=True)
    inductor = compiled(here, fn)
    sides = {
        "ours": Side(lambda i: calls[i % len(calls)]()),
        "inductor": Side(lambda i: inductor(*given[i % len(given)])),
        "eager": Side(lambda i: eager(*given[i % len(given)])),
    }
    with torch.no_grad():
        times = measure(here, sides)
        theirs = inductor(*given[0])
    theirs = theirs if isinstance(theirs, tuple) else (theirs,)
    calls[0]()
    here.sync()
    far = max(min(apart(here, x, y) for y in theirs) for x in writes[0])
    nbytes, ours = nbytes_of(job), times["ours"]
    here.value(
        "b1 ceiling", rate(nbytes, ours) / ceiling, case, predicted=1.0,
        spread=ours.spread, nbytes=nbytes, ceiling=ceiling, times=figures_of(times),
    )  # fmt: skip
    here.value(
        "b1 inductor", over(ours, times["inductor"]), case, predicted=1.0, far=far
    )
    here.value("b1 eager", over(times["eager"], ours), case, predicted=more)


# B5.


def updates(here: Here) -> None:
    """The sum of all ranks' gradients for a shard, and AdamW of it."""
    ceiling = copy_rate(here)
    ranks, count = 8, here.pick(1 << 26, 1 << 10)
    grads = [fill(here, (count,), F32, r) for r in range(ranks)]
    p = fill(here, (count,), F32, 50)
    m, v = torch.zeros_like(p), torch.zeros_like(p)

    def whole(*given: Any) -> Any:
        *parts, p, m, v = given
        return programs.adamw(p, total(*parts), m, v)

    given = [*grads, p, m, v]
    job = programs.job_of([whole], given)
    call, writes = launcher(here, job, given)
    summed, parameter = compiled(here, total), torch.nn.Parameter(p.clone())
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.01, fused=True)

    def theirs(_: int) -> None:
        parameter.grad = summed(*grads)
        optimizer.step()

    far = None
    if here.mode != "ahead":
        call()
        theirs(0)
        far = min(apart(here, x, parameter.detach()) for x in writes)
    sides = {"ours": Side(lambda i: call())}
    if here.mode != "ahead":
        sides["torch"] = Side(theirs)
    times = measure(here, sides)
    ours, peer = times["ours"], times.get("torch", times["ours"])
    nbytes, case = nbytes_of(job), f"{ranks} gradients of {count >> 20}M"
    here.value(
        "b5 ceiling", rate(nbytes, ours) / ceiling, case, predicted=1.0,
        spread=ours.spread, nbytes=nbytes, ceiling=ceiling, far=far,
        times=figures_of(times),
    )  # fmt: skip
    # Theirs writes the sum and reads it again.
    each = 4 * ranks + 24
    here.value("b5 torch", over(ours, peer), case, predicted=each / (each + 8))


def total(*parts: torch.Tensor) -> torch.Tensor:
    out = parts[0]
    for part in parts[1:]:
        out = out + part
    return out


# B2.


def reduce_rms(rank: int, ranks: int, rows: int) -> Callable[..., Any]:
    def fn(x: Any, bias: Any, rest: Any, weight: Any, seed: Any) -> Any:
        return behind(programs.all_reduce(x), bias, rest, weight, seed)

    return fn


def behind(y: Any, bias: Any, rest: Any, weight: Any, seed: Any) -> Any:
    return programs.rms(programs.dropout(y + bias, seed)[0] + rest, weight)


B2 = Case(reduce_rms, 1, BF16)
# Cycles in which the host launches a call of all ranks: 2.5 ms.
LONG_GATE = 5_000_000


def all_reduces(here: Here) -> None:
    """Kernels with an all-reduce inside on streams that play ranks, beside a copy, a
    sum and an epilogue on the same streams."""
    random.register_lowering()
    ceiling = copy_rate(here)
    for ranks in here.pick((2, 4, 8), (1,)):
        more_programs(here, ranks, 64)
    cases = [(ranks, mib) for mib in (64, 256) for ranks in (2, 4, 8)]
    for ranks, mib in here.pick([*cases, (8, 16)], [(1, 16)]):
        all_reduce(here, ranks, mib, ceiling)


def inputs_of(here: Here, ranks: int, mib: int) -> list[list[list[torch.Tensor]]]:
    """Two sets, of each rank."""
    sizes = programs.Sizes(rows_of(here, mib), width(here))
    return [
        [
            programs.inputs_of(here, B2, ranks, rank, turn, sizes)
            for rank in range(ranks)
        ]
        for turn in (0, 1)
    ]


def ready_of(
    here: Here, job: Job, given: Any, playing: Sequence[Provider]
) -> tuple[Template, list[Any]]:
    """The template, and arguments of all ranks for both sets, in both halves."""
    made = template(here, B2, job, playing[0].programs)
    for provider in playing:
        provider.reserve(made.nbytes)
    # Also in the order of halves: set i in half i.
    return made, [prepare(here, made, job, one, playing) for one in given]


def all_reduce(here: Here, ranks: int, mib: int, ceiling: float) -> None:
    playing = virtual(ranks, here.device, programs=max(1, here.programs // ranks))
    ours = streams(here, ranks)
    given = inputs_of(here, ranks, mib)
    sizes = programs.Sizes(rows_of(here, mib), width(here))
    job = programs.case_job(here, B2, ranks, sizes)
    made, ready = ready_of(here, job, given, playing)
    buffers = [torch.empty_like(one[0]) for one in given[0]]
    summed, epilogue = compiled(here, float_sum), compiled(here, behind)

    def inside(i: int) -> None:
        play(here, made, [args for args, _ in ready[i % 2]], ours)

    def parts(i: int) -> list[Any]:
        fork(here, ours)
        for rank, stream in enumerate(ours):
            with on(here, stream):
                buffers[rank].copy_(given[i % 2][rank][0])
        for stream in ours:
            for other in ours:
                if other is not stream:
                    stream.wait_stream(other)
        out = []
        for rank, stream in enumerate(ours):
            with on(here, stream):
                out.append(epilogue(summed(*buffers), *given[i % 2][rank][1:]))
        meet(here, ours)
        return out

    with torch.no_grad():
        sides = {"ours": Side(inside), "parts": Side(parts)}
        times = measure(here, sides, longest=2500.0, gate=LONG_GATE)
        inside(0)
        here.sync()
        (mine,) = run_kernels.by_name(made.kernel, ready[0][0][1]).values()
        far = apart(here, mine, parts(0)[0])
        here.sync()
    size = given[0][0][0].nbytes
    nbytes, case = (ranks + 4) * size * ranks, f"{ranks} x {mib} MiB"
    mine_times = times["ours"]
    here.value(
        "b2 ceiling", rate(nbytes, mine_times) / ceiling, case, predicted=1.0,
        spread=mine_times.spread, nbytes=nbytes, ceiling=ceiling, far=far,
        programs=made.kernel.programs, times=figures_of(times),
    )  # fmt: skip
    here.value(
        "b2 parts", over(mine_times, times["parts"]), case,
        predicted=(ranks + 4) / (ranks + 6),
    )  # fmt: skip


def float_sum(*parts: torch.Tensor) -> torch.Tensor:
    """In float32 and in the order of ranks, as the kernel does."""
    return total(*(x.float() for x in parts)).to(parts[0].dtype)


def more_programs(here: Here, ranks: int, mib: int) -> None:
    """Twice the programs, where registers certainly hold both of a multiprocessor."""
    given = inputs_of(here, ranks, mib)
    sizes = programs.Sizes(rows_of(here, mib), width(here))
    job = programs.case_job(here, B2, ranks, sizes)
    ours, found = streams(here, ranks), {}
    for each in (1, 2):
        count = max(1, each * here.programs // ranks)
        playing = virtual(ranks, here.device, programs=count)
        made, ready = ready_of(here, job, given, playing)
        if here.is_gpu and each > 1 and not twice(made, ready[0][0][0]):
            return

        def inside(i: int, made: Template = made, ready: Any = ready) -> None:
            play(here, made, [args for args, _ in ready[i % 2]], ours)

        found[str(each)] = Side(inside)
    times = measure(here, found, longest=1000.0, gate=LONG_GATE)
    case = f"{ranks} x {mib} MiB"
    here.value("b2 more", over(times["2"], times["1"]), case, times=figures_of(times))


def twice(made: Template, arguments: Any) -> bool:
    """Whether two programs and some room fit a multiprocessor."""
    kernel = made.kernel
    function = run_kernels.function_of(kernel)
    how = {"PROGRAMS": kernel.programs, "num_warps": kernel.warps}
    binary = function.warmup(*arguments, grid=(kernel.programs,), **how)
    binary._init_handles()
    threads = 32 * kernel.warps
    registers = (binary.n_regs + 8) * threads
    return 2 * registers <= 65536 and 4 * threads <= 2048
