"""Finds the factors and dims that follow the batch, by planning over an axis in time.

In: a Program in global shapes. Out: a ``BatchCut``, by the same factor rules that split
a batch over ranks; None where there is no batch. ``stages.microbatches`` cuts
the local graph in the same way.
Never: changes the program.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fxpar.sharding.decide import decide
from fxpar.sharding.mesh import Link, Mesh
from fxpar.sharding.program import Program, Signature
from fxpar.sharding.propagate.conventions import TIME, batch_inputs
from fxpar.sharding.search.batch_parts import BatchCut
from fxpar.sharding.spec import Spec

# A message between places in time is a read and a write of memory, so that a reduction
# is cheaper the earlier it runs.
MEMORY = Link(bandwidth=1e12, latency=0.0, overhead=0.0)


def cut_in_time(program: Program) -> BatchCut | None:
    """Return the factors and dims that follow the batch; None if the batch cannot be
    cut."""
    program = whole_in_time(program)
    batch = batch_inputs(program)
    if not batch:
        return None
    rows = math.gcd(*(program.values[v].shape[0] for v in batch))
    if rows < 2:
        return None
    least = next(n for n in range(2, rows + 1) if rows % n == 0)
    mesh = Mesh(((TIME, least),), (MEMORY,))
    timed = decide(program, mesh, {}, [(v, (TIME,)) for v in batch], batch=())
    if not timed.is_even:
        return None
    factors = [
        frozenset(f for f, axes in strategy.factors if axes)
        for strategy in timed.strategies
    ]
    dims = list(map(_split, timed.edges.specs))
    inputs = set(program.inputs)
    for reshard in timed.edges.reshards:  # inputs are whole, and read in parts
        if reshard.value in inputs:
            dims[reshard.value] = _split(reshard.target)
    for op, cut in zip(program.ops, factors, strict=True):
        rows = math.gcd(rows, *(op.rule.size[f] for f in cut))
    specs = enumerate(timed.edges.specs)
    sums = frozenset(v for v, spec in specs if spec.partial)
    return BatchCut(tuple(factors), tuple(dims), sums, rows)


def _split(spec: Spec) -> frozenset[int]:
    return frozenset(d for d, axes in enumerate(spec.dims) if axes)


def whole_in_time(program: Program) -> Program:
    """Return the program with each input and output whole."""

    def whole(v: int | None) -> Spec | None:
        return None if v is None else Spec.whole(len(program.values[v].shape))

    signature = program.signature
    inputs = (
        replace(end, at_rest=whole(v), use=None)
        for end, v in zip(signature.inputs, program.inputs, strict=True)
    )
    outputs = (
        replace(end, at_rest=whole(v), layout="whole")
        for end, v in zip(signature.outputs, program.outputs, strict=True)
    )
    signature = Signature(tuple(inputs), tuple(outputs), signature.tangents)
    return replace(program, signature=signature)
