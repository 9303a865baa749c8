"""Makes single ops of regions of a graph, in place.

In: the graph of a forward or a backward after ``order_collectives``. Out: the graph in
which each region that pays is one ``fxpar::region``; and a ``Fused``, which reports the
regions and near misses. Kernels compute in float32 with the graph's casts: they round
where the graph rounds, and other values have fewer bits only in memory. Never decides
which nodes are in a region (``select_region``).

A region pays if it moves fewer bytes through memory than the kernels that Inductor
would make of it (``passes.simulate.launches``). One kernel for all reads its inputs and
writes its outputs. Bytes that a collective moves through buffers of its own are left
out on both sides. A value that others could have computed in the same kernel as the
region must now be written for them and read again. A training step leaves
``copy_(input, new)`` for each parameter and state. Where a region makes ``new`` for
nothing else, it may write it there. Kernels write in place where that is safe
(``run_kernels``), elsewhere a copy is made when they are done: a number never depends
on it.
"""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import fx

from fxpar.config import write_dump
from fxpar.errors import compose
from fxpar.fusion.kernels import region_op as _op
from fxpar.fusion.kernels import run_kernels
from fxpar.fusion.kernels.emit import kernel_of
from fxpar.fusion.kernels.implementations import GroupFacts, Rung, choose
from fxpar.fusion.kernels.region_program import (
    WAIT,
    RegionProgram,
    op_name,
    stages_of,
)
from fxpar.fusion.kernels.select_region import (
    Miss,
    SelectedRegion,
    after,
    collectives,
    grow,
    is_heavy,
    results_of,
    under_way,
)
from fxpar.fusion.node_legality import arrange
from fxpar.graph.builder import region_of
from fxpar.passes.simulate.launches import launches_among
from fxpar.sharding.cost.op import is_light, is_view, nbytes_of
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.program import ancestors, user_line

log = logging.getLogger("fxpar")

OP, OP_ = torch.ops.fxpar.region.default, torch.ops.fxpar.region_.default


@dataclass
class Fused:
    """Reports regions of a graph that became ops, and those that did not."""

    programs: list[RegionProgram] = field(default_factory=list)  # of regions, in order
    before: int = 0  # bytes that the ops of regions move in several kernels
    after: int = 0  # bytes that they move in one kernel for each region
    # Near misses as text, each once.
    near_misses: list[str] = field(default_factory=list)
    # Nodes that a schedule wants in a region in vain, as text.
    unfused: list[str] = field(default_factory=list)
    rungs: list[Rung] = field(default_factory=list)  # how each region runs

    def add_miss(self, miss: Miss) -> None:
        text = _miss_text(miss)
        if text not in self.near_misses:
            self.near_misses.append(text)

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
    fused, lacking = Fused(), "no kernel has it together with its collective"
    unplaced = dict.fromkeys(asked_for(graph), lacking)
    if not beyond_schedule and not unplaced:
        return fused
    drop_double_permutes(graph)
    started: set[str] = set()
    while True:
        # The graph changes with every region.
        start = next((n for n in collectives(graph) if n.name not in started), None)
        if start is None:
            break
        started.add(start.name)
        region = None
        if beyond_schedule or region_of(start):
            region = _region(start, facts_of, fused, unplaced)
        if region is not None:
            rung = fused.rungs[-1]
            replace(graph, region, "measured" if tune and rung.is_fused else rung.name)
    fused.unfused = [_miss_text(Miss(n, n, why)) for n, why in unplaced.items()]
    if dump is not None:
        _write(fused, Path(dump))
    return fused


def _region(
    start: fx.Node,
    facts_of: Callable[[str], GroupFacts],
    fused: Fused,
    unplaced: dict[fx.Node, str],
) -> SelectedRegion | None:
    """Return the region of a collective, if it pays or a schedule wants it, and report
    it. ``unplaced``: nodes that a schedule wants in a region and that are in none so
    far, and why."""
    region, misses = grow(start, lambda group: facts_of(group).ranks)
    for miss in misses:
        fused.add_miss(miss)
        if miss.node in unplaced:
            unplaced[miss.node] = miss.why
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
        fused.add_miss(Miss(start, start, why))
        return None
    fused.programs.append(outline.program)
    fused.rungs.append(rung)
    fused.before += before
    fused.after += after
    for node in region.members:
        unplaced.pop(node, None)
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
        and op_name(node) != WAIT
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
            if isinstance(step, RegionProgram):
                kernel = kernel_of(step)
                path = folder / f"region_{program.hash}_{kernel.name}.py"
                write_dump(path, kernel.text)


_WRITE = torch.ops.aten.copy_.default


def writes_of(
    members: Collection[fx.Node], outputs: Collection[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Return the results that only a write to an input of the graph reads, with that
    write. Other readers of the input come before the region, since it depends on
    them."""
    inside = set(members)
    writes: dict[fx.Node, fx.Node] = {}
    for node in outputs:
        users = [user for user in node.users if user not in inside]
        if len(users) == 1 and _is_write(users[0], node):
            writes[node] = users[0]
    if not writes:
        return {}
    before = _needed_for(inside)
    return {
        node: write
        for node, write in writes.items()
        if _is_free(write.args[0], inside | {write}, before)
    }


def _is_write(user: fx.Node, value: fx.Node) -> bool:
    if user.target is not _WRITE or user.users or user.args[1] is not value:
        return False
    target = user.args[0]
    assert isinstance(target, fx.Node)
    ours, theirs = value.meta["val"], target.meta["val"]
    return target.op == "placeholder" and all(
        getattr(ours, key) == getattr(theirs, key)
        for key in ("shape", "dtype", "device")
    )


def _needed_for(members: Collection[fx.Node]) -> set[fx.Node]:
    """Return the nodes that a region depends on; also those that change a value before
    it is read."""
    ancestors: set[fx.Node] = set()
    pending = list(members)
    while pending:
        node = pending.pop()
        for read in node.all_input_nodes:
            changed = {
                u for u in read.users if op_facts_of(u.target).mutates and u < node
            }
            added = ({read} | changed) - ancestors - set(members)
            ancestors |= added
            pending += added
    return ancestors


def _is_free(
    value: fx.Node, allowed: Collection[fx.Node], before: Collection[fx.Node]
) -> bool:
    """Return whether all readers of an input, or of a view of it, are allowed or come
    before."""
    return all(
        user in allowed
        or (_is_free(user, allowed, before) if is_view(user) else user in before)
        for user in value.users
    )


def bytes_of(region: SelectedRegion) -> tuple[int, int]:
    """Return (bytes of several kernels, bytes of one)."""
    unfused = launches_among(region.members, region.outputs)
    before = sum(launch.moved for launch in unfused.launches)
    after = sum(tensor.nbytes for tensor in region.outline.program.inputs)
    in_memory = {buffer for launch in unfused.launches for buffer in launch.reads}
    in_memory |= {b for launch in unfused.launches if launch.axes for b in launch.makes}
    writes = writes_of(region.members, region.outputs)
    for node, buffers in zip(region.outputs, unfused.outputs, strict=True):
        # Inductor writes in place, too.
        stored, read_again = (True, False) if node in writes else _readers(region, node)
        if not stored:
            before -= sum(b.nbytes for b in buffers if b not in in_memory)
        after += nbytes_of(node.meta["val"]) * (1 + read_again)
    return before, after


def _readers(region: SelectedRegion, node: fx.Node) -> tuple[bool, bool]:
    """Return, for a result, whether it is in memory in any case, and whether it has
    readers that could have been in a kernel with it."""
    inside = set(region.members)
    stored = read_again = False
    pending, seen = [node], set()
    while pending:
        at = pending.pop()
        for user in at.users:
            if user in inside and not is_view(user) or user in seen:
                continue
            seen.add(user)
            if is_view(user):
                pending.append(user)
            elif _can_join(region, user):
                read_again = True
            else:
                stored = True
    return stored, read_again


def _can_join(region: SelectedRegion, user: fx.Node) -> bool:
    """Return whether Inductor could compute a reader in the kernel of its operand: it
    is light, and waits for nothing else that takes time."""
    if op_facts_of(user.target).mutates:
        return True  # written to in place
    if user.op == "output" or is_heavy(user) or not is_light(user.target):
        return False
    outside = set(after(region.members[0])).difference(region.members)
    return not any(map(is_heavy, ancestors([user], outside)))
