"""Parts of ``one_gpu.py`` that check kernels in one process: epilogues, collectives
inside kernels with streams that play ranks.

Every kernel is compared with its program in a higher precision on fresh random inputs;
what it writes begins as NaN. Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gpu_programs as programs
import torch
from gpu_here import (
    Here,
    apart,
    fork,
    load,
    meet,
    on,
    poisoned,
    same,
    streams,
)
from gpu_programs import BF16, CASES, F32, ONLY_F32, PIECES, TINY, Case, Job, Sizes

from fxpar.fusion.kernels import region_op, run_kernels
from fxpar.fusion.kernels.symmetric_memory import Provider
from fxpar.fusion.kernels.templates import Template, template_of
from tests.helpers.kernels.shared_memory import virtual

# Relative to the largest number: of float32 (exp, division and rsqrt are within
# two units), and of bfloat16, where a value on the way may round to its neighbour.
# What is shown of a check is the worst error as a share of these.
NEAR, NEAR_BF16 = 1e-5, 1e-2
TURNS, REPEATS = 3, 100
REPEATED = ("reduce_norm", "reduce_norm 2", "scatter_update")
SHAPES = ((64, 4096), (37, 1000))


# Epilogues.


def epilogues(here: Here) -> None:
    """Kernels without collectives, beside their programs in float64 or float32."""
    run_kernels.empty = poisoned
    for dtype in (F32, BF16):
        errors, wrong, masks = [], [], []
        for name in PIECES:
            if dtype is BF16 and name in ONLY_F32:
                continue
            for shape in here.pick(SHAPES if dtype is F32 else SHAPES[:1], ((6, 24),)):
                error, masked = epilogue(here, name, shape, dtype)
                limit = NEAR if dtype is F32 else NEAR_BF16
                errors.append(error / limit)
                masks += masked
                if not error <= limit:
                    wrong.append(f"{name} {shape}: {error:.1e}")
        word = str(dtype).removeprefix("torch.")
        good = not wrong and masks and all(masks)
        note = f"{len(errors)} kernels, {sum(masks)} masks equal"
        here.check(f"epilogues {word}", good, max(errors), wrong=wrong, note=note)


def epilogue(
    here: Here, name: str, shape: tuple[int, int], dtype: torch.dtype
) -> tuple[float, list[bool]]:
    """How far a kernel's results are apart, relative to the largest; and whether masks
    are equal."""
    fn, names = PIECES[name]
    seeds = range(10, 10 + len(names))
    given = [
        programs.made_of(here, word, *shape, dtype, seed)
        for word, seed in zip(names, seeds, strict=True)
    ]
    job = programs.job_of([fn], given)
    values = job.values(given)
    kernel = run_kernels.compiled(job.program, here.device.type)
    assert kernel is not None, f"{name} has no kernel"
    made = run_kernels.run(job.program, list(values.values()), job.numbers[0])
    wide, to = programs.widened(job.program, dtype)
    raised = [programs.up(x, to) for x in values.values()]
    want = run_kernels.interpret(wide, raised, job.numbers[0])
    worst, masks = 0.0, []
    for t, got, x in zip(job.program.outputs, made, want, strict=True):
        if t.dtype == "bool":
            masks.append(same(here, got, x))
        worst = max(worst, apart(here, got, x))
    return worst, masks


# Streams that play ranks.


def virtual_ranks(here: Here) -> None:
    """Every template on 2, 4 and 8 virtual ranks, and repeated."""
    run_kernels.empty = poisoned
    for ranks in here.pick((2, 4, 8), (1,)):
        playing = virtual(ranks, here.device, programs=max(1, here.programs // ranks))
        ours = streams(here, ranks)
        errors, wrong, differ = [], [], []
        for name, case in CASES.items():
            sizes = here.pick(Sizes(), TINY)
            error, alike = one_case(here, case, sizes, playing, ours)
            limit = NEAR if case.dtype is F32 else NEAR_BF16
            errors.append(error / limit)
            if not error <= limit:
                wrong.append(f"{name}: {error:.1e}")
            if not alike:
                differ.append(name)
        bad = {}
        for name in REPEATED:
            bad[name] = repeated(here, CASES[name], playing, ours)
        note = f"{len(errors)} templates, {len(bad)} repeated {REPEATS} times"
        good = not wrong and not differ and not any(bad.values())
        more = {"wrong": wrong, "replicas_differ": differ, "rounds_bad": bad}
        here.check(f"{ranks} virtual ranks", good, max(errors), note=note, **more)


def template(here: Here, case: Case, job: Job, programs: int) -> Template:
    random = run_kernels.random_of(here.device.type)
    return template_of(job.program, shots=case.shots, programs=programs, random=random)


def one_case(
    here: Here, case: Case, sizes: Sizes, playing: Sequence[Provider], ours: Any
) -> tuple[float, bool]:
    """How far results of all ranks are apart from the oracle's, at most, in some
    rounds; and whether what ranks hold alike is equal to the bit."""
    ranks = len(playing)
    job = programs.case_job(here, case, ranks, sizes)
    made = template(here, case, job, playing[0].programs)
    for provider in playing:
        provider.reserve(made.nbytes)
    worst, alike = 0.0, True
    for turn in range(TURNS):
        given = [
            programs.inputs_of(here, case, ranks, rank, turn, sizes)
            for rank in range(ranks)
        ]
        ready = prepare(here, made, job, given, playing)
        play(here, made, [arguments for arguments, _ in ready], ours)
        here.sync()
        got = [run_kernels.by_name(made.kernel, writes) for _, writes in ready]
        want = programs.oracle(here, job, case, given)
        outputs = [t.name for t in job.program.outputs]
        for mine, his in zip(got, want, strict=True):
            for name, x in zip(outputs, his, strict=True):
                worst = max(worst, apart(here, mine[name], x))
        both = programs.alike(here, want)
        alike &= bool(both) or case.unlike
        for i in both:
            first = got[0][outputs[i]]
            alike &= all(same(here, mine[outputs[i]], first) for mine in got)
    return worst, alike


Ready = list[tuple[tuple[Any, ...], list[torch.Tensor]]]


def prepare(
    here: Here, made: Template, job: Job, given: Any, playing: Sequence[Provider]
) -> Ready:
    """Arguments and results of all ranks' kernels, which are compiled and loaded."""
    ready: Ready = []
    for rank, provider in enumerate(playing):
        values = job.values(given[rank])
        numbers = job.numbers[rank]
        ready.append(region_op.prepared(made, values, numbers, provider))
        kernel = made.kernel
        load(
            here,
            run_kernels.function_of(kernel),
            ready[-1][0],
            kernel.programs,
            PROGRAMS=kernel.programs,
            num_warps=kernel.warps,
        )
    here.sync()
    return ready


def play(here: Here, made: Template, arguments: Any, ours: Sequence[Any]) -> None:
    """All ranks' kernels, each on its stream; this stream waits for them."""
    fork(here, ours)
    for stream, mine in zip(ours, arguments, strict=True):
        with on(here, stream):
            run_kernels.call(made.kernel, mine, None)
    meet(here, ours)


def repeated(here: Here, case: Case, playing: Sequence[Provider], ours: Any) -> int:
    """Rounds, in a row and without a pause, whose results are not the first's. Three
    inputs and two halves of the workspace: what is left of another round is seen."""
    ranks, sizes = len(playing), here.pick(Sizes(), TINY)
    job = programs.case_job(here, case, ranks, sizes)
    made = template(here, case, job, playing[0].programs)
    for provider in playing:
        provider.reserve(made.nbytes)
    rounds = []
    for k in range(6):  # in the order of the halves
        given = [
            programs.inputs_of(here, case, ranks, rank, k % 3, sizes)
            for rank in range(ranks)
        ]
        rounds.append(prepare(here, made, job, given, playing))
    first = []
    for ready in rounds[:3]:
        play(here, made, [arguments for arguments, _ in ready], ours)
        here.sync()
        first.append([[x.clone() for x in writes] for _, writes in ready])
    play(here, made, [arguments for arguments, _ in rounds[3]], ours)  # ends a pair
    here.sync()
    for ready in rounds:
        for _, writes in ready:
            for x in writes:
                x.fill_(float("nan") if x.is_floating_point() else 1)
    here.sync()
    for i in range(here.pick(REPEATS, 6)):
        for rank, stream in enumerate(ours):
            with on(here, stream):
                run_kernels.call(made.kernel, rounds[(i + 4) % 6][rank][0], None)
    here.sync()
    bad = 0
    for k, ready in enumerate(rounds):
        for rank, (_, writes) in enumerate(ready):
            want = first[k % 3][rank]
            bad += not all(map(lambda a, b: same(here, a, b), writes, want))
    return bad
