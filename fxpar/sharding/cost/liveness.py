"""When each value is in memory, whatever plan is chosen: what lives from when to when.

In: a Program with its fused regions. Out: ``Lifetimes``. Time counts ops. Says which
values are written to memory at all, which of them the backward is given (the others it
needs it computes again, as ``recompute`` says), and when an op reads: a light op of
which nothing is written runs where its results are read. What is a kernel follows
``passes.inductor_launches``, which knows the local graph. Never looks at specs.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from dataclasses import dataclass

from torch import fx

from fxpar.sharding.cost.fused_work import Regions
from fxpar.sharding.cost.recompute import computed_again
from fxpar.sharding.program import (
    Program,
    depending_on_tangents,
    is_view,
    values_by_node,
)

# Time of what does not happen.
NEVER = -1


@dataclass(frozen=True)
class Lifetimes:
    """When the values of a program are in memory."""

    # Bases of values that are in memory at all.
    written: frozenset[int]
    # Values of the forward that the backward computes anew.
    again: frozenset[int]
    # For each op when it last reads its operands, in the forward and in the backward.
    reads: tuple[tuple[int, int], ...]


def lifetimes(
    program: Program,
    regions: Regions,
    backward: Collection[int],
    gathered: Collection[int] = (),
) -> Lifetimes:
    """``gathered``: values the backward makes anew in any case, those computed from
    resting parameters alone."""
    again, kept = _recomputed(program, regions, backward, gathered)
    written = set(regions.written) | _read_apart(program, regions, backward) | kept
    reads = _reads(program, regions, backward, written, again)
    return Lifetimes(frozenset(written), frozenset(again), tuple(reads))


def _read_apart(
    program: Program, regions: Regions, backward: Collection[int]
) -> set[int]:
    """Results of light ops that kernels read which cannot be one: a heavy op lies
    between them. A light op runs as late as its first reader lets it."""
    base, producers = regions.base, program.producers
    depth = [0] * len(program.ops)  # heavy ops before it, in the longest row of them
    for op in program.ops:
        for v in op.operands:
            if base[v] in producers:
                maker = producers[base[v]][0]
                depth[op.index] = max(
                    depth[op.index], depth[maker] + regions.heavy(maker)
                )
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for op in reversed(program.ops):
        if is_view(op):
            continue
        late = op.index in backward
        if not regions.heavy(op.index):
            depth[op.index] = min(
                (first[v] for v in op.results if v in first), default=depth[op.index]
            )
        for v in op.operands:
            b = base[v]
            maker = producers.get(b, (NEVER, 0))[0]
            if maker != NEVER and (maker in backward) == late:
                first[b] = min(first.get(b, depth[op.index]), depth[op.index])
                last[b] = max(last.get(b, depth[op.index]), depth[op.index])
    apart = {b for b in first if first[b] < last[b]}
    return {b for b in apart if program.ops[producers[b][0]].operands}


def _recomputed(
    program: Program,
    regions: Regions,
    backward: Collection[int],
    gathered: Collection[int],
) -> tuple[set[int], set[int]]:
    """Bases that the backward reads of the forward: (computed again, kept)."""
    if not backward:
        return set(), set()
    value_of = values_by_node(program)
    nodes = program.ops[0].node.graph.nodes
    calls = [node for node in nodes if node.op not in ("placeholder", "output")]
    late = depending_on_tangents(program.ops[0].node.graph)
    anew = {node for node, v in value_of.items() if v in gathered}
    calls.sort(key=late.__contains__)  # the backward runs behind the forward
    again = computed_again(calls, late, anew)
    read = {source for node in late | again for source in node.all_input_nodes}

    def bases(among: Set[fx.Node]) -> set[int]:
        values = {value_of[node] for node in among if node in value_of}
        return {v for v in values if regions.base[v] == v and v in program.producers}

    return bases(again), bases(read - again - late)


def _reads(
    program: Program,
    regions: Regions,
    backward: Collection[int],
    written: Set[int],
    again: Set[int],
) -> list[tuple[int, int]]:
    """For each op when it last reads: (in the forward, in the backward)."""
    base = regions.base
    out = [(NEVER, NEVER)] * len(program.ops)
    used: dict[int, tuple[int, int]] = {}  # when a base is last used in each phase
    for op in reversed(program.ops):
        if is_view(op):
            continue
        uses = [used.get(v, (NEVER, NEVER)) for v in op.results]
        early, late = (max(times) for times in zip(*uses, strict=True))
        lives = regions.heavy(op.index) or not written.isdisjoint(op.results)
        if op.index in backward:
            when = NEVER, op.index if lives else max(late, op.index)
        else:
            recomputed = not again.isdisjoint(op.results)
            early = op.index if lives else max(early, op.index)
            when = early, late if recomputed else NEVER
        out[op.index] = when
        for v in op.operands:
            one = used.get(base[v], (NEVER, NEVER))
            used[base[v]] = max(one[0], when[0]), max(one[1], when[1])
    return out
