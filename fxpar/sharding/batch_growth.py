"""How the values of a graph grow with the batch: a power of its size for each.

Definition: a value ``f`` of the batch ``x`` grows with power ``p`` if the batch fed
twice makes it ``f(x, x) = 2**p * f(x)``; along dims that hold the batch it is
then repeated besides. A sum over the batch has power 1, a mean, a ratio of two sums and
whatever holds for each sample by itself power 0.

In: one program as two ATen graphs, traced with a batch and with one twice as large.
Sizes and numbers that differ say what carries the batch; the rules of ops say which
factors they sum over, and in which operands they are linear; ``powers`` knows pointwise
ops. Nothing is computed.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar.errors import RuleError
from fxpar.sharding.body_ties import Ties, ties_of
from fxpar.sharding.factors import MOVEMENT, Rule
from fxpar.sharding.growth_powers import (
    FIXED,
    NOTHING,
    POINTWISE,
    SOURCES,
    TOGETHER,
    WRITES,
    DoubledCall,
    Growth,
    of_number,
    ratio,
    total,
    unknown,
)
from fxpar.sharding.program import tensor_nodes
from fxpar.sharding.rules import row_of
from fxpar.sharding.rules.table import evaluate, tensors_of


def growths(
    once: fx.Graph, twice: fx.Graph, inputs: Sequence[Growth] = ()
) -> list[Growth]:
    """Of each output of a graph, in order. ``twice``: the same program traced with
    twice the batch. ``inputs``: of each placeholder; without, they are the batch
    itself, or do not depend on it."""
    pairs = list(zip(once.nodes, twice.nodes, strict=False))
    alike = len(once.nodes) == len(twice.nodes) and all(
        a.op == b.op and (a.op == "placeholder" or a.target == b.target)
        for a, b in pairs
    )
    outputs: Any = once.output_node().args[0]
    if isinstance(outputs, fx.Node):  # the test of a loop gives one
        outputs = (outputs,)
    if not alike:
        return [unknown("the program depends on the size of the batch")] * len(outputs)
    growth_of: dict[fx.Node, tuple[Growth, ...]] = {}
    input_growths = iter(inputs)
    for a, b in pairs:
        if a.op == "call_function":
            growth_of[a] = _of_call(a, b, growth_of)
        elif a.op == "placeholder":
            growth_of[a] = (next(input_growths, FIXED),)
        else:
            growth_of[a] = (FIXED,)
    return [growth_of[x][0] if isinstance(x, fx.Node) else FIXED for x in outputs]


def _of_call(
    a: fx.Node, b: fx.Node, growth_of: dict[fx.Node, tuple[Growth, ...]]
) -> tuple[Growth, ...]:
    """Of each result of a call that is ``a`` once and ``b`` with twice the batch."""
    if a.target is operator.getitem:
        source: Any = a.args[0]
        key: Any = a.args[1]
        source_growths = growth_of[source]
        return (source_growths[key] if len(source_growths) > 1 else source_growths[0],)
    value = a.meta.get("val")
    results = value if isinstance(value, (list, tuple)) else [value]
    tensors = [x for x in results if isinstance(x, torch.Tensor)]
    if not tensors:
        return (of_number(value, b.meta.get("val")),) * max(len(results), 1)
    call = DoubledCall(a, b, growth_of)
    ties = [_ties(node) for node in (a, b)]
    if ties[0] is None or ties[1] is None:
        result_growths = iter(_of_op(call, len(tensors)))
    else:
        result_growths = iter(_of_bodies(call, ties[0], ties[1], len(tensors)))
    return tuple(
        FIXED
        if not isinstance(x, torch.Tensor)
        else _bounded(next(result_growths), x.dtype)
        for x in results
    )


def _ties(node: fx.Node) -> Ties | None:
    """How the tensors of a call become those of graphs that it runs."""
    args = fx.node.map_arg(node.args, lambda n: n.meta.get("val"))
    return ties_of(node.target, args, node.meta["val"])


def _of_bodies(
    call: DoubledCall, once: Ties, twice: Ties, results: int
) -> list[Growth]:
    """Of the results of an op that runs graphs of its own. What a loop carries grows
    alike in every step, or it is not known how."""
    operands = [call.growth_of[n][0] for n in tensor_nodes(call.a)]
    input_growths = [FIXED if i is None else operands[i] for i, _ in once.inputs]
    bodies = list(zip(once.bodies, twice.bodies, strict=True))
    for _ in range(_STEPS):
        over_bodies: list[Growth | None] = [None] * results
        for (a, b), outputs in zip(bodies, once.outputs, strict=True):
            output_growths = growths(a.graph, b.graph, input_growths)
            for grown, (i, _) in zip(output_growths, outputs, strict=True):
                if i is not None:
                    over_bodies[i] = _either(over_bodies[i], grown)
        out = [FIXED if grown is None else grown for grown in over_bodies]
        carried = [_either(input_growths[i], out[i]) for i in range(once.carried)]
        if carried == input_growths[: once.carried]:
            return out
        input_growths[: once.carried] = carried
    return [unknown("what a loop carries grows otherwise in each step")] * results


# A loop's carry begins as a constant zero, say, and is what steps add from then on.
_STEPS = 3


def _either(one: Growth | None, other: Growth) -> Growth:
    """Of a value that is one of two."""
    if one is None or one.power == NOTHING:
        return other
    if other.power == NOTHING or one == other:
        return one
    return unknown("branches or steps grow unlike")


def _bounded(growth: Growth, dtype: torch.dtype) -> Growth:
    """Truth values do not grow."""
    return FIXED if dtype == torch.bool else growth


def _of_op(call: DoubledCall, results: int) -> list[Growth]:
    """Of the results of an ATen op."""
    name = call.name
    if name in POINTWISE:
        return [POINTWISE[name](call)] * results
    if name in SOURCES:
        return [call.source(SOURCES[name])] * results
    floating = any(x.dtype.is_floating_point for x in tensors_of(call.a.meta["val"]))
    operands = [_as_operand(call, n, floating) for n in tensor_nodes(call.a)]
    same = call.shapes(call.a) == call.shapes(call.b)
    if same and all(x.is_fixed for x in operands):
        return [Growth(mixed=any(x.mixed for x in operands))] * results
    for x in operands:
        if x.power is None:
            return [x] * results
    once, twice = _rule(call.a), _rule(call.b)
    if once is None or twice is None:
        return [unknown(f"{call.a.target} has no rule")] * results
    unclear = unknown(f"{name} takes it neither by sum nor by mean")
    if str(once) != str(twice):
        moves = _moves(once) and _moves(twice)
        return [total(operands) if moves else unclear] * results
    return _Ruled(name, once, twice, operands).growths(results, unclear)


def _as_operand(call: DoubledCall, node: fx.Node, floating: bool) -> Growth:
    """Indices say where, not how much."""
    index = not node.meta["val"].dtype.is_floating_point and floating
    growth = call.growth_of[node][0]
    return FIXED if index and growth.power is None else growth


def _rule(node: fx.Node) -> Rule | None:
    row = row_of(node.target)
    if row is None:
        return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    try:
        return evaluate(row, args, dict(kwargs), node.meta["val"])
    except RuleError:
        return None


def _moves(rule: Rule) -> bool:
    """Whether elements only change their places."""
    return any(set(MOVEMENT) <= set(p.reductions) for p in rule.passages)


@dataclass
class _Ruled:
    """An op by its rule, once and with twice the batch."""

    # Of the op.
    name: str
    # For the batch.
    rule: Rule
    # For twice the batch.
    doubled: Rule
    # How each grows.
    operands: list[Growth]

    def growths(self, results: int, unclear: Growth) -> list[Growth]:
        if self.name in TOGETHER:
            return [total(self.operands).times(TOGETHER[self.name])] * results
        base = self._scaled()
        if base is None:
            return [unclear] * results
        if self._coupled and not _moves(self.rule) and self.name not in WRITES:
            return [unclear] * results
        out = []
        for i in range(results):
            growth = base
            for f in sorted(self.rule.contracted_by[i]):
                growth = self._reduced(growth, f, unclear)
            out.append(growth)
        return out

    @property
    def _coupled(self) -> bool:
        """Whether samples of the batch meet other than in a sum."""
        among = self.rule.whole | self.rule.exchanged
        return any(self._size(f).power != 0.0 for f in among)

    def _size(self, factor: str) -> Growth:
        once, twice = self.rule.size.get(factor), self.doubled.size.get(factor)
        return ratio(twice / once) if once and twice else FIXED

    def _reduced(self, growth: Growth, factor: str, unclear: Growth) -> Growth:
        size = self._size(factor)
        reduction = self.rule.reduction.get(factor, "sum")
        if size.power == 0.0 or reduction in ("avg", "max", "min"):
            return growth
        if reduction != "sum":
            return unclear
        # What is looked up lies in one place: it is moved, not summed.
        return growth if _moves(self.rule) else growth.plus(self._summed(factor))

    def _summed(self, factor: str) -> float:
        """The power that a sum over a factor adds: none where values are put at places
        of which there are as many more (rows in an order, at their tokens)."""
        have = set(self._factors(*self.rule.accumulates))
        others = set(range(len(self.operands))) - set(self.rule.accumulates)
        places = have - set(self._factors(*others))
        power = self._size(factor).power or 0.0
        more = sum(self._size(f).power or 0.0 for f in places)
        return power - more if power else 0.0

    def _factors(self, *operands: int) -> list[str]:
        return [f for i in operands for dim in self.rule.operands[i] for f in dim]

    def _scaled(self) -> Growth | None:
        """Of a result before its reductions; None if the op is not linear in what
        grows."""
        operands = [self._without_sum(i) for i in range(len(self.operands))]
        mixed = any(x.mixed for x in operands)
        operand_powers = {
            i: x.power or 0.0 for i, x in enumerate(operands) if not x.is_fixed
        }
        linear = [set(p.operands) for p in self.rule.passages if "sum" in p.reductions]
        nothing = {i for i, x in enumerate(operands) if x.power == NOTHING}
        if any(p <= nothing for p in linear):
            return Growth(NOTHING)
        power = 0.0
        for group in linear:
            alone = group - nothing
            for other in linear:
                if other is not group:
                    alone -= other
            powers = {operand_powers.get(i, 0.0) for i in alone}
            if len(powers) > 1:
                return self._mixed(operands, linear)
            step = powers.pop() if powers else 0.0
            power += step
            for i in group - nothing:
                operand_powers[i] = operand_powers.get(i, 0.0) - step
        if any(operand_powers.values()):
            return self._mixed(operands, linear)
        return Growth(power, mixed)

    def _mixed(
        self, operands: Sequence[Growth], linear: Sequence[set[int]]
    ) -> Growth | None:
        """Summands that grow unlike each other."""
        together = set(range(len(operands)))
        return total(operands) if together in linear and len(operands) > 1 else None

    def _without_sum(self, i: int) -> Growth:
        """An operand that is added into a result, next to what is summed there."""
        x = self.operands[i]
        if i not in self.rule.accumulates:
            return x
        for f in sorted(self.rule.contracted - set(self._factors(i))):
            x = x.plus(-self._summed(f))
        return x
