"""What an op computes on one rank: its part of a roofline per kernel.

In: an op and its ``Work``, which ``program_kernels`` says of all ops of a program, and
Hardware. Out: its seconds under a strategy. A value that only its own kernel reads is
never written: it costs nothing. A kernel is launched once, by its first op, however its
ops are split; so work that is not split is never free for want of a floor (where the
floor is per op, replicated work is).

A light op is any that multiplies no matrices. Views cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fxpar.sharding import shard_sizes, shift_messages
from fxpar.sharding.cost.hardware import Hardware
from fxpar.sharding.cost.op import family_of, flops_of, least_of_factors
from fxpar.sharding.factors import Axes
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Op, Value, contracts, is_view
from fxpar.sharding.strategy import Strategy


@dataclass(frozen=True)
class Work:
    """One op's work, of all ranks together."""

    # Of its contraction; 0 for a light op.
    flops: float
    # (position among ``op.tensors``, bytes) that it reads or writes in memory; of what
    # its kernel reads for several ops, its share. In the forward, and, of what the
    # backward computes again, there too.
    moved: tuple[tuple[int, float], ...]
    # Elements of each tensor; none for a view.
    points: tuple[int, ...]
    # Kernels that start with it.
    launches: int
    dtype: torch.dtype
    # Which peak a contraction has, as ``Hardware.peak`` knows it.
    family: str = ""


def seconds(op: Op, work: Work, strategy: Strategy, mesh: Mesh, on: Hardware) -> float:
    """Seconds of this op on one rank, and of what it sends, without its launch."""
    shards = {f: _shards(op.rule.size[f], mesh, axes) for f, axes in strategy.factors}

    def share(position: int) -> float:
        dims = op.rule.tensors[position]
        return 1 / math.prod(shards.get(f, 1) for dim in dims for f in dim)

    nbytes = sum(size * share(position) for position, size in work.moved)
    messages = shift_messages.seconds(op, strategy, mesh)
    if not work.flops:
        # Registers are not free either: else what is between would be left whole.
        points = max((n * share(i) for i, n in enumerate(work.points)), default=0.0)
        streamed = nbytes / on.bandwidth + points / on.peak("float32").flops
        return streamed + messages
    pinned = dict(op.rule.pinned)  # what is inside a region counts its own part
    flops = work.flops / math.prod(n for f, n in shards.items() if f not in pinned)
    arithmetic = on.arithmetic(
        flops, _least(op, shards), work.dtype, family=work.family
    )
    return max(arithmetic, nbytes / on.bandwidth) + messages


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
    if is_view(op):
        return work_of(op, values, (), 0)
    moved = tuple((i, float(values[v].nbytes)) for i, v in enumerate(op.tensors))
    return work_of(op, values, moved, 1)


def work_of(
    op: Op,
    values: Sequence[Value],
    traffic: tuple[tuple[int, float], ...],
    launches: int,
) -> Work:
    """The work of an op that moves so much and starts so many kernels."""
    tensors = [values[v] for v in op.tensors]
    floating = [x.dtype for x in tensors if x.dtype.is_floating_point]
    dtype = floating[0] if floating else tensors[-1].dtype
    if not traffic and not launches and is_view(op):
        return Work(0.0, (), (), 0, dtype)
    points = tuple(x.numel for x in tensors)
    family = family_of(op.target)
    return Work(flops_of_op(op), traffic, points, launches, dtype, family)


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
