"""Makes single ops of regions of a graph, in place.

In: the graph of a forward or a backward after ``order_collectives``. Out: the graph in
which each region that pays is one ``fxpar::region``; and a ``Fused``, which reports the
regions and near misses. A region pays if it moves fewer bytes through memory than the
kernels that Inductor would make of it. Kernels compute in float32 with the graph's
casts: they round where the graph rounds, and other values have fewer bits only in
memory. Never decides which nodes are in a region (``select_region``).
"""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import fx

from fxpar.config import write_dump
from fxpar.errors import compose
from fxpar.fusion.kernels import region_op as _op
from fxpar.fusion.kernels import run_kernels
from fxpar.fusion.kernels.implementations import GroupFacts, Rung, choose
from fxpar.fusion.kernels.kernel_text import kernel_of
from fxpar.fusion.kernels.kernel_worth import bytes_of, writes_of
from fxpar.fusion.kernels.region_program import RegionProgram
from fxpar.fusion.kernels.select_region import (
    WAITS,
    Miss,
    SelectedRegion,
    collectives,
    grow,
    results_of,
    under_way,
)
from fxpar.fusion.kernels.split_at_collectives import ComputeStep, stages_of
from fxpar.fusion.kernels.trace_region import op_name
from fxpar.fusion.verbs.fuse_nodes import arrange
from fxpar.graph.builder import region_of
from fxpar.sharding.cost.op import is_view
from fxpar.sharding.program import user_line

log = logging.getLogger("fxpar")

OP, OP_ = torch.ops.fxpar.region.default, torch.ops.fxpar.region_.default


@dataclass(frozen=True)
class Fused:
    """Reports regions of a graph that became ops, and those that did not."""

    programs: tuple[RegionProgram, ...] = ()  # one for each region, in order
    before: int = 0  # bytes that the ops of regions move in several kernels
    after: int = 0  # bytes that they move in one kernel for each region
    near_misses: tuple[str, ...] = ()  # near misses as text
    unfused: tuple[str, ...] = ()  # nodes that a schedule wants in a region in vain
    rungs: tuple[Rung, ...] = ()  # how each region runs

    def __str__(self) -> str:
        kind_count = len({p.hash for p in self.programs})
        return (
            f"{len(self.programs)} regions ({kind_count} different), "
            f"{self.before} -> {self.after} bytes in memory"
        )

    @property
    def lines(self) -> tuple[str, ...]:
        """Return a line for each different region: how many there are, its title, its
        rung and why."""
        counts = Counter(
            f"{program.title}: {rung.name}: {rung.why}"
            for program, rung in zip(self.programs, self.rungs, strict=True)
        )
        return tuple(f"{count} x {text}" for text, count in counts.items())


@dataclass
class _Log:
    # Nodes that a schedule wants in a region and that are in none so far, and why.
    unfused: dict[fx.Node, str]
    programs: list[RegionProgram] = field(default_factory=list)  # one for each region
    before: int = 0  # as ``Fused.before``, so far
    after: int = 0  # as ``Fused.after``, so far
    # Near misses as text, each once, in order.
    near_misses: dict[str, None] = field(default_factory=dict)
    rungs: list[Rung] = field(default_factory=list)  # how each region runs


def fuse_graph(
    graph: fx.Graph,
    *,
    facts_of: Callable[[str], GroupFacts],
    dump: str | Path | None = None,
    beyond_schedule: bool = True,
    tune: bool = False,
) -> Fused:
    """Make regions of a graph.

    facts_of: facts of a process group, by its name, by which each region gets a rung of
    the ladder. dump: a directory for programs and their kernels as text.
    beyond_schedule: whether there are other regions than those of the schedule. tune:
    whether rungs are measured, when regions first run.
    """
    log = _Log(
        dict.fromkeys(asked_for(graph), "no kernel has it together with its collective")
    )
    if not beyond_schedule and not log.unfused:
        return Fused()
    drop_double_permutes(graph)
    started: set[str] = set()
    while True:
        # The graph changes with every region.
        start = next((n for n in collectives(graph) if n.name not in started), None)
        if start is None:
            break
        started.add(start.name)
        region = (
            _region(start, facts_of, log)
            if beyond_schedule or region_of(start)
            else None
        )
        if region is not None:
            log.programs.append(region.outline.program)
            rung = log.rungs[-1]
            replace(graph, region, "measured" if tune and rung.is_fused else rung.name)
    unfused = tuple(_miss_text(Miss(n, n, why)) for n, why in log.unfused.items())
    fused = Fused(
        tuple(log.programs),
        log.before,
        log.after,
        tuple(log.near_misses),
        unfused,
        tuple(log.rungs),
    )
    if dump is not None:
        _write(fused, Path(dump))
    return fused


def _region(
    start: fx.Node, facts_of: Callable[[str], GroupFacts], log: _Log
) -> SelectedRegion | None:
    """Return the region of a collective, if it pays or a schedule wants it."""
    region, misses = grow(start, lambda group: facts_of(group).ranks)
    log.near_misses |= {_miss_text(miss): None for miss in misses}
    log.unfused |= {miss.node: miss.why for miss in misses if miss.node in log.unfused}
    if region is None:
        return None
    outline = region.outline
    before, after = bytes_of(region)
    rung = choose(outline.program, facts_of(outline.group))
    other = under_way(region) if rung.is_fused else None
    if other is not None:
        rung = Rung("nccl", f"{other.name} runs at the same time, and could delay it")
    why = ""
    if after >= before:
        why = f"in one kernel it would move {after} bytes, in several {before}"
    elif rung.name == "nccl":
        why = f"its collective would run between kernels: {rung.why}"
    if why and not region_of(start):
        log.near_misses[_miss_text(Miss(start, start, why))] = None
        return None
    log.rungs.append(rung)
    log.before += before
    log.after += after
    for node in region.members:
        log.unfused.pop(node, None)
    return region


def asked_for(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that a schedule wants in a region with a collective that is in
    this graph, without waits and views. (A backward repeats some of a forward's nodes
    without the collective.)"""
    wanted_regions = {region_of(node) for node in collectives(graph)} - {None}
    return [
        node
        for node in graph.nodes
        if region_of(node) in wanted_regions
        and op_name(node) not in WAITS
        and not is_view(node)
    ]


def say(fused: Fused, name: str, debug: int) -> None:
    """Log the regions, as a warning from ``FXPAR_DEBUG=1`` on; from 2 on also every
    near miss. A schedule's wish that was not met is always a warning."""
    for text in fused.unfused:
        log.warning("%s: %s", name, text)
    level = logging.WARNING if debug else logging.INFO
    if fused.programs or debug:
        log.log(level, "%s: %s", name, fused)
    for text in fused.lines:
        log.log(level, "%s: %s", name, text)
    for text in fused.near_misses:
        log.log(logging.WARNING if debug >= 2 else logging.DEBUG, "%s: %s", name, text)


def replace(graph: fx.Graph, region: SelectedRegion, how: str) -> None:
    """Put one op in place of a region."""
    members = list(region.members)
    _views_outside(graph, members)
    assert tuple(results_of(members)) == region.outputs
    inside = set(members)
    writes = writes_of(members, region.outputs)
    results = [n for n in region.outputs if n not in writes]
    with graph.inserting_before(members[0]):
        call = _call(graph, region, writes, how)
        call.meta = {
            key: value
            for key, value in region.collective.meta.items()
            if key in ("stack_trace", "custom", "partitioner_tag")
        }
        call.meta["val"] = [n.meta["val"] for n in results]
        for i, node in enumerate(results):
            item = graph.call_function(operator.getitem, (call, i))
            item.meta = dict(node.meta)
            node.replace_all_uses_with(
                item, delete_user_cb=lambda user: user not in inside
            )
    for node in (*writes.values(), *reversed(members)):
        graph.erase_node(node)
    arrange(graph)


def _call(
    graph: fx.Graph, region: SelectedRegion, writes: Mapping[fx.Node, fx.Node], how: str
) -> fx.Node:
    """Add the op of a region; the one that changes operands if there is something to
    write."""
    outline = region.outline
    name = _op.remember(outline.program)
    run_kernels.LINES.setdefault(name, user_line(region.collective))
    constants = list(outline.numbers), name, outline.group, how
    if not writes:
        return graph.call_function(OP, (list(outline.inputs), *constants))
    into = [write.args[0] for write in writes.values()]
    which = [region.outputs.index(node) for node in writes]
    return graph.call_function(OP_, (list(outline.inputs), into, which, *constants))


def _views_outside(graph: fx.Graph, members: list[fx.Node]) -> None:
    """Let others read copies of views outside the region, so that no view is a
    result."""
    inside = set(members)
    for node in reversed(members):
        if is_view(node) and any(u not in inside for u in node.users):
            with graph.inserting_after(node):
                copy = graph.node_copy(node)
            copy.meta = dict(node.meta)
            node.replace_all_uses_with(
                copy, delete_user_cb=lambda user: user not in inside
            )


def drop_double_permutes(graph: fx.Graph) -> None:
    """Replace a permute of a permute that restores the tensor by that tensor."""
    permute = torch.ops.aten.permute.default
    for node in graph.find_nodes(op="call_function", target=permute):
        inner = node.args[0]
        if inner.target is permute:
            rank = len(node.args[1])
            dims = [inner.args[1][d % rank] % rank for d in node.args[1]]
            if dims == list(range(rank)):
                node.replace_all_uses_with(inner.args[0])
    graph.eliminate_dead_code(lambda n: n.target is not permute)


def _miss_text(miss: Miss) -> str:
    """Return a near miss as text."""
    what = f"near miss: {miss.node.name} ({op_name(miss.node)})"
    if miss.node is not miss.collective:
        what += f" is not fused with {miss.collective.name}"
    else:
        what += " is not fused"
    return compose(f"{what}: {miss.why}", where=user_line(miss.node))


def _write(fused: Fused, folder: Path) -> None:
    """Write every program, and the kernels of its parts, as text."""
    for program in fused.programs:
        write_dump(folder / f"region_{program.hash}.txt", f"{program}\n")
        for step in stages_of(program):
            if isinstance(step, ComputeStep):
                kernel = kernel_of(step.program)
                path = folder / f"region_{program.hash}_{kernel.name}.py"
                write_dump(path, kernel.text)
