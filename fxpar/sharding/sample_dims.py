"""Dims that hold samples of the batch, told from dims of parameters by rules of ops.

In: a Program in local mode, and the specs its values are made in. Out: the dims of
values that one factor or another ties to a dim along which ranks feed parts of the
batch. Parameters may be sharded over the same axes; their dims are not among them.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxpar.sharding.program import Program
from fxpar.sharding.spec import Spec

Dim = tuple[int, int]  # (index of a value, one of its dims)


def sample_dims(program: Program, made: Sequence[Spec]) -> frozenset[Dim]:
    """Find the dims that hold samples. ``made``: spec of each value as it is made."""
    batch = program.signature.batch
    if not batch:
        return frozenset()
    ties = _tied(program)
    seeds = [
        (v, 0)
        for declared, v in zip(program.signature.inputs, program.inputs, strict=True)
        if v is not None
        and declared.kind in ("input", "tangent")
        and made[v].dims[:1] == (batch,)
    ]
    seen, rest = set(seeds), list(seeds)
    while rest:
        for other in ties.get(rest.pop(), ()):
            if other not in seen:
                seen.add(other)
                rest.append(other)
    return frozenset(seen)


def _tied(program: Program) -> dict[Dim, list[Dim]]:
    """The dims of an op that lead with the same factor, and so are split together."""
    ties: dict[Dim, list[Dim]] = {}
    for op in program.ops:
        led: dict[str, list[Dim]] = {}
        for v, dims in zip(op.tensors, op.rule.tensors, strict=False):
            for d, factors in enumerate(dims):
                if factors:
                    led.setdefault(factors[0], []).append((v, d))
        for dims_of_factor in led.values():
            first = dims_of_factor[0]
            for other in dims_of_factor[1:]:
                ties.setdefault(first, []).append(other)
                ties.setdefault(other, []).append(first)
    return ties
