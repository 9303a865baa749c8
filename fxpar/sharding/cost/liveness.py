"""When each value is in memory, whatever plan is chosen: what lives from when to when.

In: a Program with its fused regions. Out: ``Lifetimes``. Time counts ops. Says which
values are written to memory at all, which of them the backward is given (the others it
needs it computes again), and when an op reads: a light op of which nothing is written
runs where its results are read. Follows ``passes.kernels`` and ``passes.phases``, which
know the local graph and say the same of it in more detail. Never looks at specs.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from dataclasses import dataclass

from torch.utils.checkpoint import CheckpointPolicy

from fxpar.sharding.cost.fused_work import Regions
from fxpar.sharding.program import Op, Program, is_view
from fxpar.sharding.rules.op_facts import op_facts_of

# Time of what does not happen.
NEVER = -1

# So many light ops in a row are computed again, as AOTAutograd bans long chains.
_CHAIN = 16

# What the tags of checkpoints say: whether the backward computes a value again.
_TAGGED = {
    CheckpointPolicy.MUST_RECOMPUTE: True,
    CheckpointPolicy.PREFER_RECOMPUTE: True,
    CheckpointPolicy.MUST_SAVE: False,
}


@dataclass(frozen=True)
class Lifetimes:
    """``written``: bases of values that are in memory. ``again``: values of the forward
    that the backward computes anew. ``reads``: for each op when it last reads its
    operands, in the forward and in the backward."""

    written: frozenset[int]
    again: frozenset[int]
    reads: tuple[tuple[int, int], ...]


def lifetimes(
    program: Program,
    regions: Regions,
    backward: Collection[int],
    gathered: Collection[int] = (),
) -> Lifetimes:
    """``gathered``: values the backward makes anew in any case, those computed from
    resting parameters alone."""
    again, kept = _Backward(program, regions, backward, gathered).split()
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


def _tag(op: Op) -> bool | None:
    """Whether an op is tagged to be computed again; None if it is not tagged."""
    return _TAGGED.get(op.node.meta.get("recompute"))


class _Backward:
    """What the backward is given and what it computes again; one value decided after
    the other, as ``passes.phases`` does on the local graph."""

    def __init__(
        self,
        program: Program,
        regions: Regions,
        backward: Collection[int],
        gathered: Collection[int],
    ) -> None:
        self.program, self.regions, self.gathered = program, regions, gathered
        self.base = regions.base
        ops = [op for op in program.ops if not is_view(op)]
        self.late = [op for op in ops if op.index in backward]
        self.early = [op for op in ops if op.index not in backward]
        self.needed: set[int] = set()
        # Be kept: a heavy op reads it, or a tag says so.
        self.must = {v for op in self.early if _tag(op) is False for v in op.results}

    def split(self) -> tuple[set[int], set[int]]:
        """(computed again, kept), bases."""
        for op in self.late:
            read = self._made(op)
            self.needed |= read
            if self.regions.heavy(op.index):
                self.must |= read
        again: set[int] = set()
        for op in reversed(self.early):
            mine = self.needed.intersection(op.results)
            if mine and self._is_lighter(op, mine):
                again |= mine
                self.needed |= self._made(op)
        kept = {v for op in self.early for v in op.results if v in self.needed} - again
        free = self._free(kept, kept | again)
        again, kept = again | free, kept - free
        for op in reversed(self.early):
            if again.intersection(op.results):
                again |= self._made(op) - kept
        return again, kept

    def _made(self, op: Op) -> set[int]:
        """The operands that ops make."""
        return {self.base[v] for v in op.operands} & self.program.producers.keys()

    def _is_lighter(self, op: Op, mine: Collection[int]) -> bool:
        """Whether what a value is made of weighs less, what is needed being there."""
        if _tag(op) or self.gathered and not set(mine).difference(self.gathered):
            return True
        if self.must.intersection(mine) or not self._is_pointwise(op):
            return False
        values, read = self.program.values, self._made(op)
        size = sum(values[v].nbytes for v in mine)
        more = sum(values[v].nbytes for v in read - self.needed)
        return more < size or (more == size and len(read) == 1)

    def _is_pointwise(self, op: Op) -> bool:
        """Whether a light op makes each element by itself."""
        if self.regions.heavy(op.index):
            return False
        values = self.program.values
        size = min(values[v].numel for v in op.results)
        if any(values[v].numel > size for v in op.operands):
            return False
        facts = op_facts_of(op.target)
        return facts.pointwise or (not op.operands and not facts.draws)

    def _free(self, kept: set[int], there: set[int]) -> set[int]:
        """Of those kept, what a few light ops give of others that are there."""
        row: dict[int, int] = {}  # so many ops after what is there
        out: set[int] = set()
        for op in self.early:
            made = set(op.results)
            count = 1 + max((row.get(b, _CHAIN) for b in self._made(op)), default=0)
            may = (made & kept) - self.must
            if (
                count <= _CHAIN
                and self._is_pointwise(op)
                and (may or not made.intersection(there))
            ):
                row.update(dict.fromkeys(made, count))
                out |= may
            else:
                row.update(dict.fromkeys(made.intersection(there), 0))
        return out


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
