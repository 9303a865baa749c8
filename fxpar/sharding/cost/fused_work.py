"""What an op computes on one rank: a roofline per fused region.

In: a Program and Hardware. Out: ``Work`` per op, and its seconds under a strategy.
Inductor fuses chains of light ops (pointwise, reductions) into one kernel, so a value
that only light ops of one region read is never written: it costs nothing. A region is
launched once, by its first op, however its ops are split; so work that is not split is
never free for want of a floor (where the floor is per op, replicated work is).

A light op is any that multiplies no matrices. Views cost nothing. ``cost.op`` says what
is what, here and for the launches of a lowered graph, where the order of ops and
the sizes of their loops are known and part regions further (``passes.simulate_step``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fxpar.sharding import shard_sizes, shift_messages
from fxpar.sharding.cost.hardware import Hardware
from fxpar.sharding.cost.op import family_of, flops_of, is_light, least_of_factors
from fxpar.sharding.factors import Axes, Strategy
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Op, Program, Value, contracts, is_view


@dataclass(frozen=True)
class Work:
    """One op's work, of all ranks together."""

    # Of its contraction; 0 for a light op.
    flops: float
    # (position among ``op.tensors``, bytes) that it reads or writes in memory; of what
    # its region shares, its share.
    moved: tuple[tuple[int, float], ...]
    # Elements of each tensor; none for a view.
    points: tuple[int, ...]
    # Whether its kernel starts with it.
    launches: bool
    dtype: torch.dtype
    # Which peak a contraction has, as ``Hardware.peak`` knows it.
    family: str = ""


def seconds(op: Op, work: Work, strategy: Strategy, mesh: Mesh, on: Hardware) -> float:
    """Seconds of this op on one rank, and of what it sends, without its launch."""
    shards = {f: _shards(op.rule.size[f], mesh, axes) for f, axes in strategy.factors}

    def share(position: int) -> float:
        dims = op.rule.tensors[position]
        return 1 / math.prod(shards.get(f, 1) for dim in dims for f in dim)

    moved = sum(size * share(position) for position, size in work.moved)
    messages = shift_messages.seconds(op, strategy, mesh)
    if not work.flops:
        # Registers are not free either: else what is between would be left whole.
        points = max((n * share(i) for i, n in enumerate(work.points)), default=0.0)
        streamed = moved / on.bandwidth + points / on.peak("float32").flops
        return streamed + messages
    pinned = dict(op.rule.pinned)  # what is inside a region counts its own part
    flops = work.flops / math.prod(n for f, n in shards.items() if f not in pinned)
    arithmetic = on.arithmetic(
        flops, _least(op, shards), work.dtype, family=work.family
    )
    return max(arithmetic, moved / on.bandwidth) + messages


def _shards(rows: int, mesh: Mesh, axes: Axes) -> float:
    """By how much less the rank has to do that takes longest, than the slowest takes
    for all."""
    if shard_sizes.has_shares(mesh, axes):
        return rows / (_slowest_rows(rows, mesh, axes) or 1)
    if shard_sizes.is_even(rows, mesh, axes):
        return mesh.count(axes)
    return rows / shard_sizes.largest(rows, mesh, axes)


def _slowest_rows(rows: int, mesh: Mesh, axes: Axes) -> float:
    """So many rows the slowest rank would do in the time of the one that takes longest
    for its own."""
    if not axes:
        return rows
    speeds = mesh.speeds_of(axes[0])
    return max(
        _slowest_rows(shard_sizes.piece(rows, mesh, axes[0], i)[1], mesh, axes[1:])
        * min(speeds)
        / speed
        for i, speed in enumerate(speeds)
    )


def work_alone(op: Op, values: Sequence[Value]) -> Work:
    """The work of an op that is fused with nothing: it moves each of its tensors."""
    tensors = [values[v] for v in op.tensors]
    floating = [x.dtype for x in tensors if x.dtype.is_floating_point]
    dtype = floating[0] if floating else tensors[-1].dtype
    if is_view(op):
        return Work(0.0, (), (), False, dtype)
    moved = tuple((i, float(x.nbytes)) for i, x in enumerate(tensors))
    points = tuple(x.numel for x in tensors)
    return Work(flops_of_op(op), moved, points, True, dtype, family_of(op.target))


def _least(op: Op, shards: Mapping[str, float]) -> float:
    """The smallest of m, n, k of a contraction of two operands, on one rank."""
    rule = op.rule
    if len(rule.operands) != 2 or len(rule.results) != 1:
        return math.inf
    left, right, result = ({f for dim in t for f in dim} for t in rule.tensors)
    size = {f: n / shards.get(f, 1) for f, n in rule.size.items()}
    return least_of_factors(left, right, result, size)


def flops_of_op(op: Op) -> float:
    """Flops as a whole; of an op that torch has no formula for, and whose rule is a
    contraction, those of its factors. 0 for light ops."""
    flops = flops_of(op.node)
    if not flops and contracts(op):
        flops = 2.0 * math.prod(op.rule.size[f] for f in op.rule.factors)
    return flops


class Regions:
    """Which values of a program are written to memory, and what each op moves."""

    def __init__(self, program: Program, backward: set[int]) -> None:
        self.program, self.backward = program, backward
        self.base = list(range(len(program.values)))  # what a view looks at
        self.flops = [flops_of_op(op) for op in program.ops]
        for op in program.ops:
            if is_view(op):
                self.base[op.results[0]] = self.base[op.operands[0]]
        # Of each value, whether it is read, by light ops alone.
        self.read_by_light = self._read_by_light()
        self.written = self._written()
        self.region = self._regions()
        self.works = self._works()

    def heavy(self, index: int) -> bool:
        """Whether the op is a kernel of its own that nothing is fused into."""
        return self.flops[index] > 0

    def light_made(self, v: int) -> bool:
        """Whether Inductor generates the op that makes a value, or what it views."""
        made = self.program.producers.get(self.base[v])
        return made is not None and is_light(self.program.ops[made[0]].target)

    def reads_lightly(self, index: int) -> bool:
        """Whether Inductor generates the op, or all that read the view it is."""
        op = self.program.ops[index]
        return self.read_by_light[op.results[0]] if is_view(op) else is_light(op.target)

    def _read_by_light(self) -> list[bool]:
        program = self.program
        out = [v.index not in program.outputs for v in program.values]
        read = {v for op in program.ops for v in op.operands}
        for op in reversed(program.ops):
            light = is_light(op.target)
            if is_view(op):
                light = op.results[0] in read and out[op.results[0]]
            for v in op.operands:
                out[v] &= light
        return [v in read and light for v, light in enumerate(out)]

    def _written(self) -> set[int]:
        """Bases in memory: inputs, what heavy ops read or make, what crosses from the
        forward to the backward, and outputs."""
        program, base = self.program, self.base
        found = {base[v.index] for v in program.values} - set(program.producers)
        found |= {base[v] for v in program.outputs if v is not None}
        for op in program.ops:
            if is_view(op):
                continue
            if self.heavy(op.index):
                found.update(base[v] for v in op.tensors)
        return found

    def _regions(self) -> list[int]:
        """For each op the first op of its region."""
        leader = list(range(len(self.program.ops)))

        def find(i: int) -> int:
            while leader[i] != i:
                leader[i] = leader[leader[i]]
                i = leader[i]
            return i

        for op in self.program.ops:
            if is_view(op) or self.heavy(op.index):
                continue
            for v in op.operands:
                b = self.base[v]
                if b not in self.written and b in self.program.producers:
                    maker = self.program.producers[b][0]
                    if (maker in self.backward) == (op.index in self.backward):
                        one, other = find(maker), find(op.index)
                        leader[max(one, other)] = min(one, other)
        return [find(i) for i in range(len(leader))]

    def _shares(self) -> dict[tuple[int, int], dict[int, float]]:
        """(value in memory, region) -> op that pays for it -> its part: all of it the
        one that makes it; else those that read it, in proportion to what they read.
        It is read once: a reader that is split saves its part, not the whole."""
        values, sizes = self.program.values, dict[tuple[int, int], dict[int, int]]()
        seen = dict[tuple[int, int], dict[int, int]]()  # the views of it
        made: set[tuple[int, int]] = set()
        for op in self.program.ops:
            if is_view(op):
                continue
            for position, v in enumerate(op.tensors):
                key = self.base[v], self.region[op.index]
                if key[0] not in self.written or key in made:
                    continue
                if position >= len(op.operands):
                    made.add(key)
                read = sizes.setdefault(key, {})
                read[op.index] = max(read.get(op.index, 0), values[v].nbytes)
                seen.setdefault(key, {})[v] = values[v].nbytes
        out = {}
        for key, read in sizes.items():
            once = min(sum(seen[key].values()), values[key[0]].nbytes)
            rate = once / max(sum(read.values()), 1)
            out[key] = {op: size * rate for op, size in read.items()}
        return out

    def _works(self) -> list[Work]:
        program, out = self.program, []
        shares = self._shares()
        started: set[int] = set()
        for op in program.ops:
            dtype = program.values[op.results[0]].dtype
            if is_view(op):
                out.append(Work(0.0, (), (), False, dtype))
                continue
            moved = []
            region = self.region[op.index]
            seen: set[int] = set()
            for position, v in enumerate(op.tensors):
                b = self.base[v]
                share = shares.get((b, region), {}).get(op.index)
                if share is not None and b not in seen:
                    seen.add(b)
                    moved.append((position, share))
            floating = [
                program.values[v].dtype
                for v in op.operands
                if program.values[v].dtype.is_floating_point
            ]
            launches = region not in started
            started.add(region)
            dtype = floating[0] if floating else dtype
            points = tuple(program.values[v].numel for v in op.tensors)
            flops = self.flops[op.index]
            family = family_of(op.target)
            out.append(Work(flops, tuple(moved), points, launches, dtype, family))
        return out
