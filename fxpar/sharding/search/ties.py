"""Ties choices of layers that repeat, forward and backward each by itself.

In: a Program. Out: for each op the op of the first layer that it corresponds to
(itself, if none). Ops are compared by target, rule, shapes and dtypes. Never:
constrains the answer of a search; ties only guide it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from fxpar.layers import numbered, rows_of_layers
from fxpar.sharding.program import Program
from fxpar.sharding.search.formulate import Formulation

# Kinds of nodes of which a value may have several.
_SEVERAL = ("copy", "exchange")


def repeated(program: Program, backward: Collection[int]) -> list[int]:
    """Return for each op its counterpart in the first of the layers that it is in."""
    shapes = [(value.shape, value.dtype) for value in program.values]
    labels = numbered(
        (op.target, op.rule, *map(shapes.__getitem__, op.tensors), op.index in backward)
        for op in program.ops
    )
    tied = list(range(len(labels)))
    for begin, end, distance in rows_of_layers(labels):
        for i in range(begin, end):
            tied[i] = begin + (i - begin) % distance
    return tied


def ties(formulation: Formulation, tied: Sequence[int]) -> tuple[int, ...]:
    """Return for each node of a problem the node it is tied to, given the ties of
    ops."""
    program = formulation.program
    value = _values(program, tied)
    index: dict[tuple[str, int, int], int] = {}
    nth: dict[int, int] = {}  # node -> which of its kind it is of its value
    count: Counter[tuple[str, int]] = Counter()
    for i, node in enumerate(formulation.nodes):
        if node.kind in _SEVERAL:
            nth[i] = count[node.kind, node.of]
            count[node.kind, node.of] += 1
            index[node.kind, node.of, nth[i]] = i
        elif node.kind != "value":
            index[node.kind, node.of, 0] = i
    for v, (forward, backward) in formulation.settling.items():
        index["value", v, forward] = index["settled", v, 0] = forward
        index["settled", v, 1] = backward
    inputs = {v: k for k, v in enumerate(program.inputs) if v is not None}
    outputs = {v: k for k, v in enumerate(program.outputs) if v is not None}
    out = list(range(len(formulation.nodes)))
    for i, node in enumerate(formulation.nodes):
        to: int | None = None
        if node.kind == "op":
            to = index["op", tied[node.of], 0]
        elif node.kind == "value":
            phase = int(formulation.settling[node.of][0] != i)
            to = index.get(("settled", value.get(node.of, node.of), phase))
        elif node.kind in _SEVERAL:
            to = index.get((node.kind, value.get(node.of, node.of), nth[i]))
        elif node.kind == "input":
            k = inputs.get(value.get(program.inputs[node.of], -1), node.of)
            to = index.get(("input", k, 0))
        elif node.kind == "output":
            k = outputs.get(value.get(program.outputs[node.of], -1), node.of)
            to = index.get(("output", k, 0))
        if to is not None and np.array_equal(formulation.nodes[to].specs, node.specs):
            out[i] = to
    return _heads(out)


def _heads(to: Sequence[int]) -> tuple[int, ...]:
    """Return for each node the least one it is tied to through others. A parameter of
    the first layer and one of the last, where the backward begins, name each other."""
    heads = list(range(len(to)))

    def find(i: int) -> int:
        while heads[i] != i:
            heads[i] = heads[heads[i]]
            i = heads[i]
        return i

    for i, t in enumerate(to):
        a, b = find(i), find(t)
        heads[max(a, b)] = min(a, b)
    return tuple(find(i) for i in range(len(heads)))


def _values(program: Program, tied: Sequence[int]) -> dict[int | None, int]:
    """Return for each value its counterpart: for results by their op, for inputs by the
    op that first reads them."""
    out: dict[int | None, int] = {}
    for op in program.ops:
        other = program.ops[tied[op.index]]
        if other is op:
            continue
        out.update(zip(op.results, other.results, strict=True))
        for mine, theirs in zip(op.operands, other.operands, strict=True):
            inputs = mine not in program.producers and theirs not in program.producers
            if inputs and mine != theirs:
                out.setdefault(mine, theirs)
    return out
