"""Dims that hold samples of the batch, in a program that is fed parts of it.

In: a Program and the specs of its inputs. Out: which dims of which values hold samples,
and the strategies that do not keep the samples of one rank apart from another's where
each differentiates a loss of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from fxpar.sharding.factors import Rule
from fxpar.sharding.program import Op, Program
from fxpar.sharding.spec import Spec

# (index of a value, one of its dims)
Dim = tuple[int, int]


def sample_dims(program: Program, specs: Mapping[int, Spec]) -> frozenset[Dim]:
    """Dims that hold samples of the batch, as rules tie them to a dim along which
    ranks feed parts of it; not those of parameters, which may be sharded over the same
    axes. ``specs``: of each input, by value."""
    batch = program.signature.batch
    if not batch:
        return frozenset()
    ties = _tied(program)
    seeds = [
        (v, 0)
        for declared, v in zip(program.signature.inputs, program.inputs, strict=True)
        if v is not None
        and declared.kind in ("input", "tangent")
        and specs[v].dims[:1] == (batch,)
    ]
    seen, stack = set(seeds), list(seeds)
    while stack:
        for tied in ties.get(stack.pop(), ()):
            if tied not in seen:
                seen.add(tied)
                stack.append(tied)
    return frozenset(seen)


def _tied(program: Program) -> dict[Dim, list[Dim]]:
    """The dims of an op that lead with the same factor, and so are split together."""
    ties: dict[Dim, list[Dim]] = {}
    for op in program.ops:
        tensors = op.tensors
        for (i, d), others in _led(op.rule):
            if i >= len(tensors):
                continue
            first = tensors[i], d
            for j, e in others:
                if j < len(tensors):
                    other = tensors[j], e
                    ties.setdefault(first, []).append(other)
                    ties.setdefault(other, []).append(first)
    return ties


@lru_cache(maxsize=1 << 14)
def _led(rule: Rule) -> tuple[tuple[Dim, tuple[Dim, ...]], ...]:
    """Of each factor the first dim that it leads, and the others: (tensor, dim)."""
    led: dict[str, list[Dim]] = {}
    for i, dims in enumerate(rule.tensors):
        for d, factors in enumerate(dims):
            if factors:
                led.setdefault(factors[0], []).append((i, d))
    return tuple((first, tuple(others)) for first, *others in led.values() if others)


def resting_inputs(program: Program) -> dict[int, Spec]:
    """The specs of the inputs that are known before a plan is: a tangent lies as its
    result does."""
    signature = program.signature
    tangents = dict(signature.tangents)
    specs: dict[int, Spec] = {}
    for k, (declared, v) in enumerate(
        zip(signature.inputs, program.inputs, strict=True)
    ):
        if v is None:
            continue
        of_result = signature.outputs[tangents[k]].rest if k in tangents else None
        whole = Spec.whole(len(program.values[v].shape))
        specs[v] = of_result or declared.rest or whole
    return specs


def where_samples_begin(program: Program) -> dict[int, tuple[Dim, ...]]:
    """Ops, by index, that make samples out of the gradient of a result that all ranks
    have alike, of which each may make a loss of its own; and the dims of their results
    that hold these."""
    specs = resting_inputs(program)
    dims = dict(sorted(sample_dims(program, specs), reverse=True))  # the first of each
    batch = program.signature.batch
    alike = {
        v
        for i, _ in program.signature.tangents
        if (v := program.inputs[i]) is not None
        and v not in dims
        and specs[v].dims[:1] != (batch,)
    }
    begins: dict[int, tuple[Dim, ...]] = {}
    for op in program.ops if batch else ():
        if alike.isdisjoint(op.operands):
            continue
        of_samples = tuple((v, dims[v]) for v in op.results if v in dims)
        if of_samples:
            begins[op.index] = of_samples
        else:
            alike.update(op.results)
    return begins


def keeps_apart(
    program: Program, op: Op, of_samples: tuple[Dim, ...], results: Mapping[int, Spec]
) -> bool:
    """Whether each rank's own samples can be told among what an op makes so: results
    ``of_samples`` are no summands, and of several values each rank has its own alone.
    """
    batch = set(program.signature.batch)
    return all(
        batch <= set(results[v].dims[d])
        if len(op.results) > 1
        else batch.isdisjoint(results[v].partial_axes)
        for v, d in of_samples
    )
