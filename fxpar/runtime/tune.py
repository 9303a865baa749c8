"""``options={"tune": True}``: the schedules that come near, measured on the mesh.

In: what planning gave, which knows the schedule that is predicted to be the fastest and
others that were thought of. Out: the result with the one whose steps were the fastest.
Each is run as it would be compiled, forward and backward in one graph, on random inputs
of the right shapes, in turns, so that drift of the machine meets all alike. A step
takes as long as its slowest rank; all ranks see the same figures and choose alike.
Nothing that the user owns is read or changed.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from fxpar import _compat
from fxpar.fusion.later import settings_of
from fxpar.passes import Result
from fxpar.passes.phases import as_run
from fxpar.runtime import agree
from fxpar.runtime.binding import bind
from fxpar.runtime.groups import Ranks

# So many schedules are measured, the predicted best among them.
MOST = 4

# Rounds of one step each, after those that are not counted.
ROUNDS, WARMUP = 7, 2

# The predicted best stands unless another is faster by this share.
LEAST = 0.01

# Seconds that making the code of one may take a rank longer than another.
COMPILING = 300.0

Step = Callable[[], Any]


def tuned(
    result: Result,
    again: Callable[[str], Result],
    ranks: Ranks,
    root: torch.nn.Module,
    *,
    name: str,
    codegen: str,
    disable: frozenset[str],
    fake_mode: Any,
) -> Result:
    """The result with the fastest schedule. ``again``: the result with another, given
    as text; ``root`` holds the graph's constants; ``name``: of the graph, for errors.

    Raises RankMismatchError if a rank fails meanwhile.
    """
    mine = json.dumps([result.plan.schedule, *result.others][:MOST])
    schedules = json.loads(agree.gather(f"the schedules of {name}", mine)[0])
    if len(schedules) < 2 or ranks.mesh.size == 1:
        return result
    candidates = [again(text) for text in schedules]
    inputs = made_up(result.local)

    def prepared(candidate: Result) -> Step:
        settings = settings_of(candidate.plan.schedule)
        graph = as_run(candidate.local, disable=disable, settings=settings)
        inductor = codegen == "inductor"
        bound = bind(
            graph, ranks.mesh, ranks.rank, ranks.group, fake_mode, inductor=inductor
        )
        bound.set_codegen(fx.graph.CodeGen())
        module = fx.GraphModule(root, bound)
        return runnable(module, inputs, inductor=inductor)

    steps = [prepared(candidate) for candidate in candidates]
    # A rank that fails to make its code is not waited for in a collective.
    agree.gather(f"code of the schedules of {name}", "", work=COMPILING * len(steps))
    seconds = measure(steps, name)
    best = min(range(len(seconds)), key=seconds.__getitem__)
    if seconds[best] > (1 - LEAST) * seconds[0]:
        best = 0
    chosen = candidates[best]
    times = ", ".join(f"{each * 1e3:.4g}" for each in seconds)
    note = (
        f"schedule: of {len(seconds)} measured, in the order predicted, number "
        f"{best + 1} is taken; they took {times} ms a step"
    )
    plan = replace(chosen.plan, near=result.plan.near)
    plan = replace(plan, notes=(*plan.notes, note))
    return replace(chosen, plan=plan)


def runnable(module: fx.GraphModule, inputs: Sequence[Any], *, inductor: bool) -> Step:
    """A step of a bound graph."""
    if not inductor:
        return lambda: module(*inputs)
    values = [n.meta.get("val") for n in module.graph.find_nodes(op="placeholder")]
    compiled = _compat.compile_inner(module, values)
    return lambda: compiled(list(inputs))


def made_up(graph: fx.Graph) -> list[Any]:
    """Values of the shapes and kinds of a graph's inputs."""
    with _compat.as_compiled():
        return [_made(n.meta.get("val")) for n in graph.find_nodes(op="placeholder")]


def _made(value: Any) -> Any:
    """Indices are 0, which is always one."""
    if not isinstance(value, torch.Tensor):
        return value
    shape, dtype, device = tuple(value.shape), value.dtype, value.device
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    made = torch.empty_strided(shape, value.stride(), dtype=dtype, device=device)
    return made.uniform_(-1, 1, generator=torch.Generator(device).manual_seed(0))


def measure(steps: Sequence[Step], name: str) -> list[float]:
    """Seconds of each step: the median over rounds of the slowest rank's."""
    times: list[list[float]] = [[] for _ in steps]
    with _compat.as_compiled(), torch.no_grad(), torch.random.fork_rng():
        for turn in range(WARMUP + ROUNDS):
            for mine, step in zip(times, steps, strict=True):
                took = _seconds(step)
                if turn >= WARMUP:
                    mine.append(took)
    every = [json.loads(x) for x in agree.gather(f"times of {name}", json.dumps(times))]
    slowest = [
        [max(rank) for rank in zip(*ranks, strict=True)]
        for ranks in zip(*every, strict=True)
    ]
    return [statistics.median(rounds) for rounds in slowest]


def _seconds(step: Step) -> float:
    dist.barrier()
    _synchronize()
    begun = time.perf_counter()
    step()
    _synchronize()
    return time.perf_counter() - begun


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
