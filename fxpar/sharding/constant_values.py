"""Lets every rank compute the part that it reads of values made of constants alone.

Such values are positions that count up, masks of them: a rank computes its part, or the
whole.
In: a Program, strategies and settled specs. Out: both lists, changed for such values.
Never: leaves such a value to be gathered.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Op, Program
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import Strategy, fits, operand_spec, project, result_spec

# The most elements of a value that is computed while planning.
MOST = 1 << 20


def constants_of(program: Program) -> set[int]:
    """Return the values that depend on no input. Random values are left out: drawing
    the whole on each rank is expensive."""
    constants = {v.index for v in program.values} - set(program.producers)
    constants -= {v for v in program.inputs if v is not None}
    for op in program.ops:
        is_aten = getattr(op.target, "namespace", "") in ("aten", "prims")
        if is_aten and op.has_rule and constants.issuperset(op.operands):
            constants.update(op.results)
    return constants


def make_as_read(
    program: Program,
    strategies: MutableSequence[Strategy],
    settled: MutableSequence[Spec],
    mesh: Mesh,
) -> None:
    """Give each constant value the spec in which it is read: split where all readers
    agree, else whole, of which any part is a slice. Changes both lists."""
    constants = constants_of(program)
    outputs = set(program.outputs)
    for op in reversed(program.ops):
        if len(op.results) != 1 or not constants.issuperset(op.results):
            continue
        (v,) = op.results
        reads = {
            operand_spec(program.ops[reader].rule, strategies[reader], i)
            for reader, i in program.uses[v]
        }
        reads = {spec.without_partial() for spec in reads}
        if v in outputs:
            reads.add(settled[v])
        whole = Spec.whole(len(program.values[v].shape))
        need = reads.pop() if len(reads) == 1 else whole
        strategy = _strategy_for(op, need, mesh)
        if strategy is None:
            need, strategy = whole, Strategy(op.rule.pinned)
        strategies[op.index], settled[v] = strategy, need


def _strategy_for(op: Op, spec: Spec, mesh: Mesh) -> Strategy | None:
    """Return the strategy by which an op makes its result in a spec; None if there is
    none."""
    rule = op.rule
    axes_of = project(rule.results[0], spec, rule.size, mesh, even=rule.even_factors)
    strategy = Strategy((*rule.pinned, *axes_of.items()))
    if result_spec(rule, strategy, 0) != spec or rule.whole.intersection(axes_of):
        return None
    return strategy if fits(rule, axes_of, mesh) else None


def computed(node: Any, values: dict[fx.Node, Any]) -> Any:
    """Return the value of a node that is made of constants alone; None for any other.
    ``values``: the nodes computed so far, to which it adds."""
    if node in values:
        return values[node]
    values[node] = None
    if not _is_arithmetic(node):
        return None
    if any(computed(x, values) is None for x in node.all_input_nodes):
        return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    values[node] = node.target(*args, **kwargs)
    return values[node]


def _is_arithmetic(node: fx.Node) -> bool:
    """Return whether a call's result follows from its arguments, and has at most
    ``MOST`` elements."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor):
        return False
    target: Any = node.target
    return (
        getattr(target, "namespace", "") in ("aten", "prims")
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not _torch.objects.is_mutable(target)
        and value.numel() <= MOST
        and not value.dtype.is_complex
        and not target.name().startswith("aten::empty")
    )
