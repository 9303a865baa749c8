"""Parts of ``one_gpu.py`` about the machine and the host: what it is and what it
reaches, what a call of a region costs the host (B7), and compiling one (B8)."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any

import gpu_programs as programs
import torch
from gpu_correct import prepare, template
from gpu_here import BLOCKS, Here, compiled, copy_rate, matmul_rate
from gpu_memory import reduce_rms
from gpu_programs import BF16, CASES, TINY, Case, Sizes
from gpu_ranks import start

from fxpar.fusion.kernels import region_op, run_kernels
from tests.helpers.kernels.shared_memory import install, virtual

ASKED = (
    "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu"
)


def facts(here: Here) -> None:
    """The machine, before and after it was busy, and its ceilings."""
    import platform

    import triton

    found: dict[str, Any] = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()} {platform.release()}",
        "clocks_idle": asked(),
    }
    if here.is_gpu:
        about = torch.cuda.get_device_properties(here.device)
        found |= {
            "gpu": about.name,
            "capability": [about.major, about.minor],
            "multiprocessors": about.multi_processor_count,
            "memory": about.total_memory,
            "cuda": torch.version.cuda,
            "nccl": list(torch.cuda.nccl.version()),
        }
    here.tell(facts=found)
    copies, flops = copy_rate(here), matmul_rate(here)
    here.value("copy", copies * 1e-12, "1 GiB")
    here.value("matmul", flops * 1e-12, "8192 cubed")
    here.tell(facts={"clocks_busy": asked()})


def asked() -> dict[str, str]:
    """What nvidia-smi says; nothing where it is not. It changes nothing."""
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={ASKED}", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    words = [word.strip() for word in done.stdout.splitlines()[0].split(",")]
    return dict(zip(ASKED.split(","), words, strict=False))


# B7.

CALLS = 200


def calls(here: Here) -> None:
    """A small region at one rank, where nothing is moved and the host is what counts:
    one kernel with its collective, beside NCCL's all-reduce and Inductor's epilogue."""
    group = start(here, "cpu:gloo,cuda:nccl")
    sizes = here.pick(Sizes(8, 4096), TINY)
    case = Case(reduce_rms, 1, BF16)
    job = programs.case_job(here, case, 1, sizes)
    given = programs.inputs_of(here, case, 1, 0, 0, sizes)
    (provider,) = virtual(1, here.device, programs=here.programs)
    install(group, here.device.type, provider)
    word = region_op.remember(job.program)
    values, numbers = list(job.values(given).values()), list(job.numbers[0])

    def region() -> Any:
        return torch.ops.fxpar.region(values, numbers, word, group, "triton")

    def plain(x: Any, bias: Any, rest: Any, weight: Any, seed: Any) -> Any:
        y = programs.all_reduce(x, group)
        kept = programs.dropout(y + bias, seed)[0]
        return programs.rms(kept + rest, weight)

    from fxpar.passes.normalize import random

    random.register_lowering()
    made = compiled(here, plain)
    sides = {"region": region, "parts": lambda: made(*given)}
    with torch.no_grad():
        host = {name: seconds_of(here, run) for name, run in sides.items()}
        here.value(
            "b7 host",
            host["region"] / host["parts"],
            "8 rows",
            microseconds=scaled(host),
        )
        # In a graph the region's collective stands between kernels: load them before.
        run_kernels.run(job.program, values, numbers, group)
        device = {name: replayed(here, run) for name, run in sides.items()}
    here.value(
        "b7 graph", device["region"] / device["parts"], "8 rows",
        microseconds=scaled(device),
    )  # fmt: skip


def scaled(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: x * 1e6 for name, x in seconds.items()}


def seconds_of(here: Here, run: Callable[[], Any]) -> float:
    """Until the host is done with a call, of many in a row."""
    count = CALLS if here.is_gpu else 3
    found = []
    for _ in range(BLOCKS + 1):
        here.sync()
        begun = time.perf_counter()
        for _ in range(count):
            run()
        found.append((time.perf_counter() - begun) / count)
    here.sync()
    return statistics.median(found[1:])


def replayed(here: Here, run: Callable[[], Any]) -> float:
    """Of a call in a captured graph of many, on the device."""
    if not here.is_gpu:
        return seconds_of(here, run)
    aside = torch.cuda.Stream(here.device)
    aside.wait_stream(torch.cuda.current_stream(here.device))
    with torch.cuda.stream(aside):
        for _ in range(3):
            run()
    here.sync()
    graph = torch.cuda.CUDAGraph()
    # What NCCL's threads do meanwhile is no reason to give up.
    with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
        for _ in range(20):
            run()
    here.sync()
    found = []
    for _ in range(20):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        here.sync()
        found.append(first.elapsed_time(last) * 1e-3 / 20)
    return statistics.median(found[5:])


# B8.


def compiling(here: Here) -> None:
    """Text, first compilation, and the same from the cache on disk, of the kernel of a
    region; of shapes that no other part has."""
    names = ("reduce_norm", "reduce_norm 2 bf16", "scatter_update")
    for name in here.pick(names, names[:1]):
        case, ranks = CASES[name], here.pick(4, 1)
        sizes = here.pick(Sizes(40, 2048, 500_000, 1 << 16), TINY)
        job = programs.case_job(here, case, ranks, sizes)
        begun = time.perf_counter()
        made = template(here, case, job, 17)
        here.value("b8 text", time.perf_counter() - begun, name)
        playing = virtual(ranks, here.device, programs=17)[:1]
        given = [programs.inputs_of(here, case, ranks, 0, 0, sizes)]
        for what in ("b8 cold", "b8 cached"):
            run_kernels.function_of(made.kernel).__dict__.get(
                "device_caches", {}
            ).clear()
            playing[0].reserve(made.nbytes)
            begun = time.perf_counter()
            prepare(here, made, job, given, playing)
            here.value(what, time.perf_counter() - begun, name)
