"""Measure the schedules predicted to be fastest: ``options={"tune": True}``.

In: graphs of a step, one with the schedule that is predicted to be the fastest, others
with those predicted to be next. Out: the number of the one whose steps were the
fastest. Each runs as it would be compiled, forward and backward in one graph, on random
inputs of the right shapes, in turns, so that drift of the machine affects all equally.
A step takes as long as its slowest rank; all ranks see the same times and choose the
same schedule. One that fails on a rank, out of memory or otherwise, is left out on all
of them. Never: a read of, or change to, what the user owns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from textwrap import shorten
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.errors import PlanError
from fxpar.graph.graph_bodies import hold, module_of
from fxpar.runtime.ranks import meeting, worlds
from fxpar.runtime.ranks.groups import Ranks
from fxpar.runtime.steps.binding import bind

# How many schedules are measured, the predicted best among them.
MOST = 4

# Rounds of one step each, after warm-up rounds that are not counted.
ROUNDS, WARMUP = 7, 2

# The predicted best is kept unless another is faster by this share.
LEAST = 0.01

Step = Callable[[], Any]

# By the number of a schedule: which rank failed with it, and why.
Dropped = dict[int, str]


def candidates(schedules: Sequence[str], name: str) -> list[str]:
    """Return the schedules to measure, as rank 0 has them, the predicted best first.
    Raises RankMismatchError if a rank does not come."""
    tag = f"the schedules of {name}"
    first: list[str] = meeting.gather_data(tag, list(schedules)[:MOST])[0]
    return first


def fastest(
    schedules: Sequence[str],
    graphs: Mapping[int, fx.Graph],
    failed: Mapping[int, str],
    ranks: Ranks,
    root: torch.nn.Module,
    fake_mode: Any,
    *,
    name: str,
    inductor: bool,
) -> tuple[int, list[str]]:
    """Return the number of the fastest schedule, and notes on all of them.

    graphs: by the number of each schedule that did not fail here, the graph that runs
    it. failed: why others did. root: holds the graph's constants. name: of the graph,
    for errors.

    A schedule that a rank cannot compile or run is left out on all ranks, and a note
    says so. Raises PlanError on all ranks if none is left, RankMismatchError if a rank
    does not come.
    """
    inputs = random_inputs(next(iter(graphs.values()))) if graphs else []

    def prepare(graph: fx.Graph) -> Step:
        bound = bind(
            graph, ranks.mesh, ranks.rank, ranks.group, fake_mode, inductor=inductor
        )
        bound.set_codegen(fx.graph.CodeGen())
        module = module_of(root, bound)
        hold(module, bound)
        return runnable(module, inputs, inductor=inductor)

    steps, dropped = _prepared(graphs, failed, prepare, name)
    seconds, failures = measure(steps, name)
    dropped |= failures
    if not seconds:
        raise PlanError(
            f"no schedule of {name} could be measured: {dropped[min(dropped)]}",
            fix="leave out tune, and see that rank's error",
        )
    best, predicted = min(seconds, key=seconds.__getitem__), min(seconds)
    if seconds[best] > (1 - LEAST) * seconds[predicted]:
        best = predicted
    notes = [
        f"tune: schedule {i + 1} of {len(schedules)}, {shorten(schedules[i], 160)!r}, "
        f"is left out: {why}"
        for i, why in dropped.items()
    ]
    return best, [*notes, _table(seconds, best)]


NOTHING = (
    "tune: nothing is measured, since there is only one schedule: it is given or "
    "saved, or no other is predicted to be as fast, or the hardware is unknown"
)


def _table(seconds: Mapping[int, float], best: int) -> str:
    """Return the note on all times, in milliseconds."""
    times = ", ".join(f"{each * 1e3:.4g}" for each in seconds.values())
    return (
        f"schedule: of {len(seconds)} measured, in the order predicted, number "
        f"{list(seconds).index(best) + 1} is taken; they took {times} ms a step"
    )


def _prepared(
    graphs: Mapping[int, fx.Graph],
    failures: Mapping[int, str],
    prepare: Callable[[fx.Graph], Step],
    name: str,
) -> tuple[dict[int, Step], Dropped]:
    """Return the result of ``prepare`` for each schedule for which no rank fails, and
    those that are dropped."""
    steps, failed = dict[int, Step](), dict(failures)
    for i, graph in graphs.items():
        try:
            steps[i] = prepare(graph)
        except Exception as error:
            failed[i] = text_of(error)
    dropped = _dropped_on_any_rank(f"code of the schedules of {name}", failed)
    return {i: step for i, step in steps.items() if i not in dropped}, dropped


def _dropped_on_any_rank(tag: str, failed: Mapping[int, str]) -> Dropped:
    """Return the schedules that failed on any rank. Every rank learns of them before it
    waits for others in a collective."""
    dropped = Dropped()
    for rank, failures in enumerate(meeting.gather_data(tag, failed)):
        for i, why in failures.items():
            dropped.setdefault(int(i), f"{meeting.named([rank])} failed: {why}")
    return dropped


def text_of(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {error}"


def runnable(module: fx.GraphModule, inputs: Sequence[Any], *, inductor: bool) -> Step:
    """Return a function that runs one step of a bound graph."""
    if not inductor:
        return lambda: module(*inputs)
    values = [n.meta.get("val") for n in module.graph.find_nodes(op="placeholder")]
    compiled = _torch.inductor.compile_inner(module, values)
    return lambda: compiled(list(inputs))


def random_inputs(graph: fx.Graph) -> list[Any]:
    """Return random values with the shapes and dtypes of a graph's inputs."""
    with _torch.aot.as_compiled():
        return [
            _random_like(n.meta.get("val")) for n in graph.find_nodes(op="placeholder")
        ]


def _random_like(value: Any) -> Any:
    """Return a random tensor like ``value``; integers are 0, always a valid index."""
    if not isinstance(value, torch.Tensor):
        return value
    shape, stride, device = tuple(value.shape), value.stride(), value.device
    if not value.dtype.is_floating_point:
        return torch.zeros(shape, dtype=value.dtype, device=device)
    steps = zip(shape, stride, strict=True)
    size = 1 + sum((n - 1) * s for n, s in steps) if value.numel() else 0
    draws = torch.Generator(device).manual_seed(0)
    # Not every dtype can be drawn in; not every input has memory of its own for each
    # element.
    numbers = torch.empty(size, dtype=torch.float32, device=device)
    numbers.uniform_(-1, 1, generator=draws)
    return numbers.to(value.dtype).as_strided(shape, stride)


def measure(steps: Mapping[int, Step], name: str) -> tuple[dict[int, float], Dropped]:
    """Return the seconds of each step, the median over rounds of the slowest rank's,
    and the steps that failed on a rank, which are left out from then on.

    If a rank fails while the others wait for it within a step, they learn of it when
    the process group's timeout ends that wait.
    """
    times: dict[int, list[float]] = {i: [] for i in steps}
    dropped = Dropped()
    with _torch.aot.as_compiled(), torch.no_grad(), torch.random.fork_rng():
        for turn in range(WARMUP + ROUNDS):
            for i, step in steps.items():
                if i in dropped:
                    continue
                failed = dict[int, str]()
                try:
                    took = _seconds(step)
                except Exception as error:
                    failed[i] = text_of(error)
                dropped |= _dropped_on_any_rank(f"step {turn} of {name}", failed)
                if turn >= WARMUP and i not in dropped:
                    times[i].append(took)
    times = {i: mine for i, mine in times.items() if i not in dropped}
    every = meeting.gather_data(f"times of {name}", times)
    slowest = {
        i: map(max, zip(*(rank[str(i)] for rank in every), strict=True)) for i in times
    }
    return {i: statistics.median(each) for i, each in slowest.items()}, dropped


def _seconds(step: Step) -> float:
    """Return the seconds of a step on this rank, begun when all ranks are ready."""
    worlds.barrier()
    _synchronize()
    start = time.perf_counter()
    step()
    _synchronize()
    return time.perf_counter() - start


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
