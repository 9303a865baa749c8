"""Selects the nodes that belong into one kernel with a collective.

From a collective a region grows down, through its wait, over all pointwise ops, views
and reductions of rows, to the next contraction, collective or op that a kernel cannot
have; and up, over nodes that are computed for the region alone. A reduce-scatter's
region may go on through the all-gather of a value made of its result, as in an
optimizer's step. A region is convex, and never makes the collective wait for work that
could overlap with it: nodes that depend on a later contraction are left out. Where a
schedule's line ``fuse`` made a region, that one grows, and nothing else; then it may
wait.

In: a graph after ``order_collectives``. Out: members, and near misses: nodes that ended
a region although they might have been in it, with the reason. Never changes the graph.
Shapes, dtypes and the order of nodes decide, equally on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpar._torch.objects import tensors_in
from fxpar.fusion.kernels.emit import emit_body
from fxpar.fusion.kernels.expressions import BY_COLUMN, CAST, SUMS, kind_of
from fxpar.fusion.kernels.placement import (
    KNOWN,
    LONGEST,
    SAME_ORDER,
    reduction_of,
)
from fxpar.fusion.kernels.region_program import (
    MOVES,
    REDUCE_SCATTER,
    WAIT,
    CannotEmit,
    Outline,
    RegionProgram,
    op_name,
    outline,
    stages_of,
)
from fxpar.graph.builder import region_of
from fxpar.sharding.cost.op import is_contraction, is_light, is_view
from fxpar.sharding.op_facts import op_facts_of

REGION = "fxpar.region.default"
_OF_MOVES = MOVES | {WAIT}

# Attempts to leave out nodes that the emitter refuses.
_ATTEMPTS = 40


@dataclass(frozen=True)
class Miss:
    """Is a node that is not in a region, with the reason."""

    collective: fx.Node  # the collective of the region
    node: fx.Node
    why: str


@dataclass(frozen=True)
class SelectedRegion:
    """Holds the nodes of a graph that become one op."""

    collective: fx.Node  # the collective around which it grew
    members: tuple[fx.Node, ...]  # in graph order
    outputs: tuple[fx.Node, ...]  # members that others read, in graph order
    outline: Outline


def collectives(graph: fx.Graph) -> list[fx.Node]:
    """Return the collectives at which regions may begin, in graph order."""
    return [n for n in graph.nodes if op_name(n) in MOVES]


def grow(
    collective: fx.Node, ranks_of: Any
) -> tuple[SelectedRegion | None, list[Miss]]:
    """Return the region around a collective, None if nothing can join it, and the nodes
    that were left out."""
    banned: dict[fx.Node, str] = {}
    for _ in range(_ATTEMPTS):
        growth = _Growth(collective, banned)
        growth.misses = [Miss(collective, n, why) for n, why in banned.items()]
        if not growth.run():
            return None, growth.misses
        members = growth.trimmed()
        if not any(op_name(n) not in _OF_MOVES for n in members):
            return None, growth.misses
        outputs = results_of(members)
        outlined = outline(members, outputs, ranks_of)
        wrong = _refused(outlined)
        if wrong is None:
            region = SelectedRegion(
                collective, tuple(members), tuple(outputs), outlined
            )
            return region, growth.misses
        node = outlined.names.get(wrong.line)
        if node is None or node in banned or op_name(node) in _OF_MOVES:
            return None, [*growth.misses, Miss(collective, collective, wrong.why)]
        banned[node] = wrong.why
    return None, growth.misses


def _refused(outlined: Outline) -> CannotEmit | None:
    """Return why kernels cannot have a program; None if they can."""
    for step in stages_of(outlined.program):
        if isinstance(step, RegionProgram):
            try:
                emit_body(step)
            except CannotEmit as error:
                return error
    return None


def under_way(region: SelectedRegion) -> fx.Node | None:
    """Return a collective that has begun, and is not waited for yet, when a region
    runs, that is after the last of its operands; None if there is none. If the region's
    kernel waits inside, the two can keep each other's programs out on different GPUs,
    for ever."""
    inside, first = set(region.members), region.members[0]
    at = max([first.prev, *region.outline.inputs])
    for node in before(at):
        waits = [u for u in _waits(node) if u.args[0] is node]  # not what it sends
        is_launched = not waits or min(waits) > at
        has_begun = bool(waits) or op_name(node) in MOVES  # also an exchange, a message
        if has_begun and node not in inside and is_launched:
            return node
    return None


def _waits(node: fx.Node) -> list[fx.Node]:
    return [u for u in node.users if op_name(u) == WAIT]


def before(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a node and those before it, from the last on."""
    while node.op != "root":
        yield node
        node = node.prev


def results_of(members: Collection[fx.Node]) -> list[fx.Node]:
    """Return the members that others read; instead of a view its source, since the view
    can be taken outside."""
    inside = set(members)
    read_outside = set()
    for node in members:
        if all(u in inside for u in node.users):
            continue
        while is_view(node) and node.args[0] in inside:
            node = node.args[0]
        read_outside.add(node)
    return [n for n in members if n in read_outside]


def is_heavy(node: fx.Node) -> bool:
    """Return whether an op is worth overlapping with a collective, or is one itself."""
    op = op_name(node)
    return op in MOVES or op == REGION or is_contraction(node.target)


@dataclass
class _Growth:
    """Is a region while it grows op by op."""

    collective: fx.Node  # the collective around which it grows
    banned: dict[fx.Node, str]  # nodes that may not be in it, and why
    # Member -> the number of collectives done when it runs.
    members: dict[fx.Node, int] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)  # elements, by that number
    # Elements of a row, where rows are reduced, by that number.
    columns: dict[int, int] = field(default_factory=dict)
    # Members that no other may read but a cast: reductions of more than a row.
    ends: set[fx.Node] = field(default_factory=set)
    tainted: set[fx.Node] = field(default_factory=set)  # outside, after the collective
    misses: list[Miss] = field(default_factory=list)  # nodes not in it, and why
    # Nodes outside that are heavy and after the wait, or depend on one that is.
    late: set[fx.Node] = field(default_factory=set)
    schedule_region: str | None = None  # the region of a schedule

    def run(self) -> bool:
        """Grow. Return False if the collective itself cannot be in a region."""
        start = self.collective
        waits = _waits(start)
        value = start.meta.get("val")
        if len(waits) != 1 or not isinstance(value, torch.Tensor):
            return False
        self.schedule_region = region_of(start)
        overlapping = next((n for n in between(start, waits[0]) if is_heavy(n)), None)
        if overlapping is not None and self.schedule_region is None:
            if _is_computed_with(waits[0]):
                self._miss(start, f"it runs at the same time as {overlapping.name}")
            return False
        self.counts[0] = _count(start.all_input_nodes[0])
        self._add_move(start, waits[0], 0)
        for node in after(start):
            if node not in self.members:
                self._down(node)
            if self.schedule_region is None and node not in self.members:
                is_late = not self.late.isdisjoint(node.all_input_nodes)
                self.late.update([node] if is_late or is_heavy(node) else [])
        self._up()
        return True

    def _add_move(self, start: fx.Node, wait: fx.Node, stage: int) -> None:
        self.members[start], self.members[wait] = stage, stage + 1
        self.counts[stage + 1] = _count(start)

    def _miss(self, node: fx.Node, why: str) -> None:
        self.misses.append(Miss(self.collective, node, why))

    def _down(self, node: fx.Node) -> None:
        """Add a node after the collective to the members, or note that it is
        outside."""
        read = node.all_input_nodes
        ends_here = len(read) == 1 and read[0] in self.ends and op_name(node) == CAST
        if ends_here and not _dtypes(node) and node not in self.banned:
            self.members[node] = self.members[read[0]]
            self.ends.add(node)
            return
        if any(n in self.tainted or n in self.ends for n in read):
            self.tainted.add(node)
            return
        inside = [n for n in read if n in self.members]
        if not inside:
            return
        if region_of(node) != self.schedule_region:
            self.tainted.add(node)
            return
        if self._second_move(node):
            return
        stage = max(self.members[n] for n in inside)
        why = self._why_not(node, stage)
        if why is None:
            self.members[node] = stage
            return
        self.tainted.add(node)
        if why:
            self._miss(node, why)

    def _second_move(self, node: fx.Node) -> bool:
        """Add the gather that ends a reduce-scatter's region, with its wait. Return
        whether ``node`` is that gather."""
        if op_name(self.collective) != REDUCE_SCATTER or 2 in self.counts:
            return False
        waits = _waits(node)
        gathers = "all_gather_into_tensor" in op_name(node)
        if not gathers or len(waits) != 1 or node in self.banned:
            return False
        if node.args[2] != self.collective.args[3]:
            return False
        is_overlapping = any(is_heavy(n) for n in between(node, waits[0]))
        if is_overlapping and self.schedule_region is None:
            return False
        self._add_move(node, waits[0], 1)
        return True

    def _why_not(self, node: fx.Node, stage: int) -> str | None:
        """Return why a node after the collective is no member; None if it is one, "" if
        it is none and no near miss."""
        op = op_name(node)
        if node.op == "output" or is_heavy(node) or node in self.banned:
            return ""
        if op_facts_of(node.target).mutates:
            return ""
        if op not in KNOWN:
            return f"{op} has no form in a generated kernel"
        wrong = _dtypes(node)
        if wrong:
            return wrong
        sources = [n for n in node.all_input_nodes if n in self.late]
        if sources:
            return f"the collective would wait for {sources[0].name}"
        if op in SUMS:
            return self._why_not_reduced(node, stage)
        if op == "getitem":
            return None if node.args[0] in self.members else ""
        if is_view(node) and op not in SAME_ORDER and op != "aten.expand.default":
            why = f"{op} shows it in another order"
            return why if _is_computed_with(node) else ""
        count, columns = self.counts[stage], self.columns.get(stage)
        if _count(node) == count or columns and _count(node) * columns == count:
            return None
        return "" if is_view(node) else "it has another number of elements"

    def _why_not_reduced(self, node: fx.Node, stage: int) -> str | None:
        """Return the same for a reduction; note the rows it reduces."""
        source = node.args[0].meta["val"].shape
        try:
            reduction = reduction_of(node.name, node.args, source)
        except CannotEmit as error:
            return error.why
        if math.prod(source) != self.counts[stage]:
            return "it reduces another number of elements"
        if reduction.kind != "row" and op_name(node) not in BY_COLUMN:
            return "it reduces more than rows"
        if reduction.kind != "all":
            columns = self.columns.get(stage, reduction.columns)
            if columns != reduction.columns:
                return f"it reduces rows of {reduction.columns}, others of {columns}"
            if not 1 < columns <= LONGEST:
                return f"a row has {columns} elements"
            self.columns[stage] = columns
        if reduction.kind != "row":
            self.ends.add(node)
        return None

    def _up(self) -> None:
        """Add nodes that are computed for members alone."""
        last = max(self.members)
        node = last.prev
        while node.op != "root" and node.op != "placeholder":
            users = node.users
            if (
                node not in self.members
                and users
                and all(u in self.members for u in users)
            ):
                self._absorb(node)
            node = node.prev

    def _absorb(self, node: fx.Node) -> None:
        # How many collectives are done when a user reads it.
        stages = {0 if u is self.collective else self.members[u] for u in node.users}
        if node in self.banned or len(stages) != 1 or is_heavy(node):
            return
        if region_of(node) != self.schedule_region:
            return
        (stage,) = stages
        op = op_name(node)
        if node.op != "call_function" or node in self.tainted:
            return
        if op not in KNOWN:
            if is_light(node.target) and _count(node) * 2 > self.counts[stage]:
                self._miss(node, f"{op} has no form in a generated kernel")
            return
        if _dtypes(node) or _count(node) > self.counts[stage]:
            return
        if op in SUMS:
            why = self._why_not_reduced(node, stage)
            if why or node in self.ends:
                self.ends.discard(node)
                return
        self.members[node] = stage

    def trimmed(self) -> list[fx.Node]:
        """Return members in order, without views at the border: those cost nothing
        there."""
        members = sorted(self.members)
        inside = set(members)
        for node in members:
            passes_on = is_view(node) or op_name(node) == "getitem"
            if passes_on and not any(n in inside for n in node.all_input_nodes):
                inside.discard(node)
        for node in reversed(members):
            if (
                node in inside
                and is_view(node)
                and not any(u in inside for u in node.users)
            ):
                inside.discard(node)
        return [n for n in members if n in inside]


def after(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes after one."""
    node = node.next
    while node.op != "root":
        yield node
        node = node.next


def between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes between two."""
    for node in after(first):
        if node is last:
            return
        yield node


def _is_computed_with(value: fx.Node) -> bool:
    """Return whether light ops read a value or a view of it."""
    return any(
        _is_computed_with(u) if is_view(u) else is_light(u.target) for u in value.users
    )


def _count(node: fx.Node) -> int:
    return max(
        (math.prod(t.shape) for t in tensors_in(node.meta.get("val"))), default=0
    )


def _dtypes(node: fx.Node) -> str:
    """Return why a kernel cannot have the dtypes that a node makes or reads; "" if it
    can."""
    for value in tensors_in(node.meta.get("val")):
        name = str(value.dtype).removeprefix("torch.")
        if kind_of(name) is None:
            return f"it is of dtype {name}"
    for read in node.all_input_nodes:
        for value in tensors_in(read.meta.get("val")):
            name = str(value.dtype).removeprefix("torch.")
            if kind_of(name) is None and not (name == "float64" and value.numel() == 1):
                return f"it reads {name}"
    return ""
