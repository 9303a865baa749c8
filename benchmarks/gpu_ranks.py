"""The part of ``one_gpu.py`` in which processes of one GPU read each other's memory,
and what parts of several processes share.

Processes of one GPU take turns by time slices: what they compute counts, never how long
it takes. In a try-out they are processes on the CPU that share files, with gloo.
"""

from __future__ import annotations

import ctypes
import datetime
import hashlib
from collections.abc import Callable
from typing import Any

import gpu_programs as programs
import torch
import torch.distributed as dist
from gpu_correct import NEAR, NEAR_BF16, template
from gpu_here import Here, apart, fill, poisoned, same
from gpu_programs import BF16, CASES, F32, TINY, Case, Job, Sizes

from fxpar import _torch
from fxpar.fusion.kernels import region_op, run_kernels, symmetric_memory
from tests.helpers.kernels.shared_memory import install, shared_files, virtual

c10d = torch.ops._c10d_functional
PATIENCE = datetime.timedelta(seconds=60)
TURNS, REPEATS = 2, 10
# Cases that go through the ladder, as whole regions of a graph do.
AS_REGIONS = ("reduce_norm", "reduce_norm bf16", "gather_norm", "scatter_update")
ALONE = ("reduce_norm", "reduce_norm 2 bf16", "reduce_update", "gather_norm")


def start(here: Here, backend: str) -> str:
    """Join the group of all processes of this part; its name."""
    if here.is_gpu:
        torch.cuda.set_device(0)
    dist.init_process_group(
        backend if here.is_gpu else "gloo",
        init_method=f"tcp://127.0.0.1:{here.port}",
        rank=here.rank,
        world_size=here.ranks,
        timeout=PATIENCE,
    )
    group = dist.group.WORLD
    assert group is not None
    if not here.is_gpu and here.ranks > 1:
        share_files(here, group.group_name)
    return str(group.group_name)


def share_files(here: Here, group: str) -> None:
    """A try-out's shared memory; who waits there leaves the core to the others."""
    import time

    from triton.runtime.interpreter import interpreter_builder

    store, rank, ranks = _torch.distributed.group_store(group)
    made = shared_files(store, rank, ranks, name="try", programs=4)
    install(group, "cpu", made)
    swap = interpreter_builder.create_atomic_cas

    def patient(*args: Any) -> Any:
        time.sleep(1e-4)
        return swap(*args)

    interpreter_builder.create_atomic_cas = patient


def told(here: Here, group: str, key: str, mine: str) -> list[str]:
    """What all ranks say, in order."""
    store, rank, ranks = _torch.distributed.group_store(group)
    store.set(f"one_gpu/{key}/{rank}", mine)
    return [store.get(f"one_gpu/{key}/{r}").decode() for r in range(ranks)]


def all_say(here: Here, group: str, key: str, mine: Any) -> bool:
    """Whether all ranks say yes; all of them ask."""
    return all(word == "1" for word in told(here, group, key, str(int(bool(mine)))))


def leave(here: Here, group: str) -> None:
    """The last one to go is who holds the store."""
    store, rank, ranks = _torch.distributed.group_store(group)
    if rank:
        store.set(f"one_gpu/left/{rank}", "1")
        return
    store.wait([f"one_gpu/left/{r}" for r in range(1, ranks)])


def digest(x: torch.Tensor) -> str:
    """Of a tensor's bits."""
    flat = x.detach().contiguous().view(-1).view(torch.uint8).cpu()
    data = ctypes.string_at(flat.data_ptr(), flat.numel())
    return hashlib.sha256(data).hexdigest()[:16]


# Symmetric memory.


def symmetric(here: Here) -> None:
    """Kernels that read other processes' memory, by templates and by the op."""
    run_kernels.empty = poisoned
    group = start(here, "gloo")
    provider = region_op.provider_of(group, here.device)
    note = "torch's symmetric memory" if here.is_gpu else "shared files"
    here.check("symmetric: memory", provider is not None, note=note)
    assert provider is not None, "no symmetric memory"
    errors, wrong, differ = [], [], []
    for name, case in CASES.items():
        job = programs.case_job(here, case, here.ranks, here.pick(Sizes(), TINY))
        made = template(here, case, job, provider.programs)

        def by_template(values: Any, job: Job = job, made: Any = made) -> Any:
            numbers = job.numbers[here.rank]
            return region_op.launched(made, values, numbers, provider)

        error, alike = compared(here, name, case, job, group, by_template)
        limit = NEAR if case.dtype is F32 else NEAR_BF16
        errors.append(error / limit)
        wrong += [] if error <= limit else [f"{name}: {error:.1e}"]
        differ += [] if alike else [name]
    note = f"{len(errors)} templates, {here.ranks} processes"
    good = all_say(here, group, "templates", not wrong and not differ)
    here.check(
        "symmetric: templates", good, max(errors), wrong=wrong, replicas_differ=differ,
        note=note,
    )  # fmt: skip
    region_ops(here, group)
    leave(here, group)


def templates(here: Here) -> None:
    """The kernels of ``symmetric``, launched as there, by one process ahead of time."""
    most = max(1, here.programs - symmetric_memory.FREE)
    playing = virtual(2, here.device, programs=most)
    for case in CASES.values():
        sizes = here.pick(Sizes(), TINY)
        job = programs.case_job(here, case, 2, sizes)
        made = template(here, case, job, most)
        for rank, provider in enumerate(playing):
            provider.cooperative = True
            given = programs.inputs_of(here, case, 2, rank, 0, sizes)
            region_op.launched(made, job.values(given), job.numbers[rank], provider)


def region_ops(here: Here, group: str) -> None:
    """``fxpar::region``, which asks the ladder, and then again and again."""
    kept, calls = region_op.launched, [0]

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return kept(*args, **kwargs)

    region_op.launched = counting
    worst, rounds = 0.0, 0
    for name in AS_REGIONS:
        case = CASES[name]
        job = programs.case_job(here, case, here.ranks, here.pick(Sizes(), TINY))
        word = region_op.remember(job.program)

        def by_op(values: Any, job: Job = job, word: str = word) -> Any:
            given, numbers = list(values.values()), list(job.numbers[here.rank])
            args = given, numbers, word, group, "triton"
            made = torch.ops.fxpar.region(*args)
            names = [t.name for t in job.program.outputs]
            return dict(zip(names, made, strict=True))

        for i in range(here.pick(REPEATS, 2)):
            key = f"region {name} {i}"
            error, _ = compared(here, key, case, job, group, by_op, turns=1)
            limit = NEAR if case.dtype is F32 else NEAR_BF16
            worst, rounds = max(worst, error / limit), rounds + 1
    region_op.launched = kept
    good = all_say(here, group, "regions", worst <= 1.0)
    note = f"{calls[0]} of {rounds} by one kernel"
    here.check("region op", good and calls[0] == rounds, worst, note=note)


def compared(
    here: Here,
    key: str,
    case: Case,
    job: Job,
    group: str,
    run: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    turns: int = TURNS,
) -> tuple[float, bool]:
    """How far this rank's results are from the oracle's; and whether what is one on all
    ranks is so to the bit."""
    sizes = here.pick(Sizes(), TINY)
    worst, alike = 0.0, True
    for turn in range(turns):
        given = [
            programs.inputs_of(here, case, here.ranks, rank, turn, sizes)
            for rank in range(here.ranks)
        ]
        made = run(job.values(given[here.rank]))
        here.sync()
        want = programs.oracle(here, job, case, given)
        names = [t.name for t in job.program.outputs]
        for name, x in zip(names, want[here.rank], strict=True):
            worst = max(worst, apart(here, made[name], x))
        both = programs.alike(here, want)
        alike &= bool(both) or case.unlike
        for i in both:
            words = told(here, group, f"{key}/{turn}/{i}", digest(made[names[i]]))
            alike &= len(set(words)) == 1
    return worst, alike


# Of any number of ranks.


def collectives(here: Here, group: str) -> bool:
    """Functional collectives give what they should."""
    each = [
        fill(here, (8 * here.ranks, 16), F32, 40 + rank) for rank in range(here.ranks)
    ]
    x, total = each[here.rank], torch.stack(each).sum(0)
    parts = total.chunk(here.ranks)
    found = [
        (c10d.all_reduce(x, "sum", group), total),
        (
            c10d.reduce_scatter_tensor(x, "sum", here.ranks, group),
            parts[here.rank],
        ),
        (c10d.all_gather_into_tensor(x, here.ranks, group), torch.cat(each)),
    ]
    waited = [(c10d.wait_tensor(got), want) for got, want in found]
    here.sync()
    return all(apart(here, got, want) <= 1e-6 for got, want in waited)


def decomposed(here: Here, group: str = programs.GROUP) -> tuple[float, str]:
    """Of some cases how far the kernel with the collective inside is from kernels with
    the collective between them, as a share of what is allowed; and how many are equal
    to the bit."""
    errors, bits = [], []
    for name in ALONE:
        case = CASES[name]
        error, equal = whole_beside_parts(here, case, group)
        errors.append(error / (NEAR_BF16 if case.dtype is BF16 else NEAR))
        bits.append(equal)
    return max(errors), f"{sum(bits)} of {len(bits)} equal to the bit"


def whole_beside_parts(here: Here, case: Case, group: str) -> tuple[float, bool]:
    """The kernel with the collective inside, beside the collective between kernels."""
    sizes = here.pick(Sizes(), TINY)
    job = programs.case_job(here, case, 1, sizes)
    (provider,) = virtual(1, here.device, programs=here.programs)
    made = template(here, case, job, provider.programs)
    values = job.values(programs.inputs_of(here, case, 1, 0, 7, sizes))
    numbers = job.numbers[0]
    got = region_op.launched(made, values, numbers, provider)
    want = run_kernels.run(job.program, list(values.values()), numbers, group)
    here.sync()
    pairs = [(got[t.name], x) for t, x in zip(job.program.outputs, want, strict=True)]
    return (
        max(apart(here, a, b) for a, b in pairs),
        all(same(here, a, b) for a, b in pairs),
    )
