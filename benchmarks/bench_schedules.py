"""What ``auto`` finds for Megatron blocks, against schedules of three kinds of lines.

    python benchmarks/bench_schedules.py [--each] [--json PATH]

Two blocks of width 4096 as Megatron splits them over tp=8, batch 8, 1024 tokens, bf16,
predicted for H100 (nothing runs). Held against it, by the same simulation: the program
as it is; every all-reduce split along one dim, with the compute between on slices, as
experts write it; on top of that one way of ``overlap`` for all gathers and one for all
reduce-scatters, each of rings and chunks tried for both in turn until nothing is
faster. ``--each``: every collective has a way of its own, which takes minutes.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from _common import conditions
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxpar
from fxpar.errors import ScheduleError
from fxpar.fusion.apply_schedule import apply
from fxpar.fusion.choose_schedule import begin, choose
from fxpar.fusion.overlap_candidates import shapes_of
from fxpar.fusion.schedule import Schedule
from fxpar.graph import collective_nodes
from fxpar.passes.order.forward_backward import as_run
from fxpar.passes.simulate.simulate_step import simulate
from fxpar.sharding.cost.hardware_table import lookup
from fxpar.sharding.cost.op import is_contraction, is_view

WIDTH, HEADS, BATCH, LENGTH = 4096, 32, 8, 1024

# How a product may run beside its collective.
WAYS = (
    "ring=2",
    "ring=1",
    *(f"chunks={n}, dim={dim}" for n in (2, 4, 8) for dim in (0, 1, 2)),
)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        heads = (HEADS, WIDTH // HEADS)
        q, k, v = (
            f(y).unflatten(-1, heads).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(z.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


COLUMNS, ROWS = ("tp", None), (None, "tp")
_IN_ATTENTION = {
    **{f"*.{name}.weight": COLUMNS for name in "qkv"},
    "*.out.weight": ROWS,
}
_IN_MLP = {"*.up.weight": COLUMNS, "*.down.weight": ROWS}


@dataclass(frozen=True)
class Case:
    """Blocks of these modules; whether they are trained."""

    name: str
    parts: tuple[type[nn.Module], ...]
    hints: Mapping[str, Any]
    grad: bool = False


CASES = (
    Case("MLP, forward", (MLP,), _IN_MLP),
    Case("attention and MLP, forward", (Attention, MLP), _IN_ATTENTION | _IN_MLP),
    Case("MLP, forward and backward", (MLP,), _IN_MLP, grad=True),
)


class Step:
    """A case's local graph, and seconds of a step after a schedule."""

    def __init__(self, case: Case) -> None:
        with FakeTensorMode():
            blocks = [part() for _ in range(2) for part in case.parts]
            model = nn.Sequential(*blocks)
            x = torch.randn(BATCH, LENGTH, WIDTH)
        how: dict[str, Any] = {"mode": "propagate", "schedule": "none"}
        hints = dict(case.hints)
        plan = fxpar.plan(model, x, mesh="tp=8", hints=hints, grad=case.grad, **how)
        self.hardware = lookup("h100")
        self.mesh = self.hardware.on(plan.mesh)
        self.graph = shapes_of(self.after("", plan.result.local))

    def after(self, text: str, graph: fx.Graph | None = None) -> fx.Graph:
        """The graph after some lines, communication as steps."""
        return apply(text, graph or self.graph, self.mesh, lowered=False)

    def seconds(self, text: str) -> float | None:
        """None if a line is refused."""
        try:
            lowered = apply(text, self.graph, self.mesh, lowered=True)
        except ScheduleError:
            return None
        settings = Schedule.parse(text).settings
        run = as_run(lowered, settings=settings)
        return simulate(run, self.mesh, self.hardware).seconds


def pairs_of(graph: fx.Graph) -> Iterator[tuple[str, str]]:
    """(kind, what ``overlap`` takes) of collectives next to products."""
    for node in graph.nodes:
        if node.target is collective_nodes.all_gather:
            names = ", ".join(n.name for n in _next_products(node, lambda n: n.users))
            if names:
                yield "all_gather", f"{node.name}, [{names}]"
        elif node.target is collective_nodes.reduce_scatter:
            for start in _next_products(node, lambda n: n.all_input_nodes):
                yield "reduce_scatter", f"{start.name}, {node.name}"


def _next_products(
    node: fx.Node, beside: Callable[[fx.Node], Any]
) -> Iterator[fx.Node]:
    """Products on one side of a node, through views alone."""
    for other in beside(node):
        if is_contraction(other.target):
            yield other
        elif other.op == "call_function" and is_view(other):
            yield from _next_products(other, beside)


def by_hand(step: Step, slices: str, each: bool) -> tuple[float, str] | None:
    """(seconds, schedule) of the best ways of ``overlap`` on top of ``slices``."""
    now = step.seconds(slices)
    if now is None:
        return None
    groups: dict[str, list[str]] = {}
    for kind, arguments in pairs_of(step.after(slices)):
        groups.setdefault(arguments if each else kind, []).append(arguments)
    taken: dict[str, str] = {}

    def text(ways: Mapping[str, str]) -> str:
        lines = [f"overlap({x}, {way})" for k, way in ways.items() for x in groups[k]]
        return slices + "".join(f"{line}\n" for line in lines)

    better = True
    while better:
        better = False
        for group in groups:
            for way in WAYS:
                seconds = step.seconds(text(taken | {group: way}))
                if seconds is not None and seconds < now * (1 - 1e-6):
                    now, taken, better = seconds, taken | {group: way}, True
    return now, text(taken)


def rows_of(case: Case, each: bool) -> Iterator[dict[str, Any]]:
    step = Step(case)
    chosen = choose(begin(step.graph, step.mesh, step.hardware))
    before, found = chosen.seconds
    text = str(chosen.schedule)
    slices = "".join(
        f"{x}\n" for x in text.splitlines() if x.startswith(("split", "reorder"))
    )
    results: dict[str, tuple[float, str] | None] = {
        "as it is": (before, ""),
        "auto": (found, text),
    }
    for dim in (0, 1):
        along = slices.replace("dim=0)", f"dim={dim})").replace("dim=1)", f"dim={dim})")
        alone = step.seconds(along)
        results[f"slices of dim {dim}"] = None if alone is None else (alone, along)
        results[f"and rings or chunks, dim {dim}"] = by_hand(step, along, each)
    for name, result in results.items():
        if result is not None:
            seconds, schedule = result
            yield {
                "case": case.name,
                "schedule": name,
                "milliseconds": seconds * 1e3,
                "auto_over_it": found / seconds,
                "lines": schedule,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", action="store_true")
    parser.add_argument("--json")
    asked = parser.parse_args()
    os.environ["FXPAR_HARDWARE"] = "h100"
    torch.set_default_dtype(torch.bfloat16)
    rows = []
    print(f"{'case':28} {'schedule':30}      ms  auto / it")
    for case in CASES:
        for row in rows_of(case, asked.each):
            rows.append(row)
            print(
                f"{row['case']:28} {row['schedule']:30} {row['milliseconds']:7.4f}"
                f"  {row['auto_over_it']:9.4f}",
                flush=True,
            )
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump({"conditions": conditions(), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
