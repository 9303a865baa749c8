"""How the values of a graph grow with the batch: a power of its size for each.

Definition: a value ``f`` of the batch ``x`` grows with power ``p`` if the batch fed
twice makes it ``f(x, x) = 2**p * f(x)``; along dims that hold the batch it is
then repeated besides. A sum over the batch has power 1, a mean, a ratio of two sums and
whatever holds for each sample by itself power 0.

In: one program as two ATen graphs, traced with a batch and with one twice as large.
Sizes and numbers that differ say what carries the batch; the rules of ops say which
factors they sum over, and in which operands they are linear. Nothing is computed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxpar.errors import RuleError
from fxpar.sharding.factors import MOVEMENT, Rule
from fxpar.sharding.program import tensor_nodes
from fxpar.sharding.rules import row_of
from fxpar.sharding.rules.table import evaluate, tensors_of

# The power of a constant zero, which is a sum as well as a mean.
NOTHING = -math.inf

# Added to a denominator, a number up to this keeps it from being zero and no more.
_GUARD = 1e-3


@dataclass(frozen=True)
class Growth:
    """``power``: of the batch's size, the largest of its summands'; None if it is not
    known, and ``why``. ``mixed``: it has summands of other powers besides."""

    power: float | None = 0.0
    mixed: bool = False
    why: str = ""

    @property
    def is_fixed(self) -> bool:
        """Whether the value does not grow."""
        return self.power in (0.0, NOTHING)

    def times(self, power: float) -> Growth:
        """Of the value to a power."""
        if self.power is None or self.power == NOTHING:
            return self
        return replace(self, power=self.power * power)

    def plus(self, power: float) -> Growth:
        """Of the value times another that grows with ``power``."""
        if self.power is None or self.power == NOTHING:
            return self
        return replace(self, power=self.power + power)


FIXED = Growth()


def unknown(why: str) -> Growth:
    return Growth(None, why=why)


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
    outputs = once.output_node().args[0]
    if not alike:
        return [unknown("the program depends on the size of the batch")] * len(outputs)
    known: dict[fx.Node, tuple[Growth, ...]] = {}
    given = iter(inputs)
    for a, b in pairs:
        if a.op == "call_function":
            known[a] = _of_call(a, b, known)
        elif a.op == "placeholder":
            known[a] = (next(given, FIXED),)
        else:
            known[a] = (FIXED,)
    return [known[x][0] if isinstance(x, fx.Node) else FIXED for x in outputs]


def _of_call(
    a: fx.Node, b: fx.Node, known: dict[fx.Node, tuple[Growth, ...]]
) -> tuple[Growth, ...]:
    """Of each result of a call that is ``a`` once and ``b`` with twice the batch."""
    if a.target is operator.getitem:
        source, key = a.args
        found = known[source]  # type: ignore[index]
        return (found[key] if len(found) > 1 else found[0],)  # type: ignore[index]
    made = a.meta.get("val")
    results = made if isinstance(made, (list, tuple)) else [made]
    tensors = [x for x in results if isinstance(x, torch.Tensor)]
    if not tensors:
        return (_number(made, b.meta.get("val")),) * max(len(results), 1)
    call = _Call(a, b, [known[n][0] for n in tensor_nodes(a)], known)
    found = call.growths(len(tensors))
    each = iter(found)
    return tuple(
        FIXED
        if not isinstance(x, torch.Tensor)
        else _bounded(next(each), x.dtype)
        for x in results
    )


def _bounded(found: Growth, dtype: torch.dtype) -> Growth:
    """Truth values do not grow."""
    return FIXED if dtype == torch.bool else found


def _number(x: Any, y: Any) -> Growth:
    """Of a number that is ``x``, and ``y`` with twice the batch."""
    if not isinstance(x, (int, float)) or not isinstance(y, (int, float)) or x == y:
        return Growth(NOTHING) if x == 0 and not isinstance(x, bool) else FIXED
    if x == 0 or y == 0 or not math.isfinite(x) or (x < 0) != (y < 0):
        return unknown("a number depends on the size of the batch")
    return _ratio(y / x)


def _ratio(ratio: float) -> Growth:
    power = math.log2(ratio)
    half = round(2 * power) / 2
    return Growth(half if abs(power - half) < 1e-9 else float(round(power)))


def total(terms: Sequence[Growth]) -> Growth:
    """Of a sum of values."""
    for term in terms:
        if term.power is None:
            return term
    powers = {term.power for term in terms} - {NOTHING}
    if not powers:
        return Growth(NOTHING)
    return Growth(max(powers), len(powers) > 1 or any(t.mixed for t in terms))


def product(factors: Sequence[Growth]) -> Growth:
    """Of a product of values."""
    out = FIXED
    for x in factors:
        if x.power is None or x.power == NOTHING:
            return x
        out = replace(out.plus(x.power), mixed=out.mixed or x.mixed)
    return out


@dataclass
class _Call:
    """A call of an ATen op. ``operands``: growths of its tensors, in order."""

    a: fx.Node
    b: fx.Node
    operands: list[Growth]
    known: dict[fx.Node, tuple[Growth, ...]]

    @property
    def name(self) -> str:
        """``add`` for ``aten.add.Tensor``."""
        return _name(self.a.target)

    def growths(self, results: int) -> list[Growth]:
        name = self.name
        if name in POINTWISE:
            return [POINTWISE[name](self)] * results
        if name in SOURCES:
            return [self._source(SOURCES[name])] * results
        return self._by_rule(results)

    def given(self, place: int, key: str = "") -> Growth:
        """Of an argument, a tensor or a number."""
        args = [self._argument(node, place, key) for node in (self.a, self.b)]
        if isinstance(args[0], fx.Node):
            return self.known[args[0]][0]
        return FIXED if args[0] is None else _number(*args)

    @staticmethod
    def _argument(node: fx.Node, place: int, key: str) -> Any:
        return node.args[place] if place < len(node.args) else node.kwargs.get(key)

    def number(self, place: int, key: str = "") -> Any:
        """An argument that is the same number in both graphs, or None."""
        x = self._argument(self.a, place, key)
        same = x == self._argument(self.b, place, key)
        return x if isinstance(x, (int, float)) and same else None

    def _source(self, value: int | None) -> Growth:
        """Of a new tensor filled with argument ``value``, or None: counted."""
        if value is None:
            if self._shapes(self.a) == self._shapes(self.b):
                return FIXED
            return unknown("positions in the batch are counted")
        return self.given(value) if value >= 0 else FIXED

    @staticmethod
    def _shapes(node: fx.Node) -> list[tuple[int, ...]]:
        nodes = [n.meta["val"] for n in tensor_nodes(node)]
        return [tuple(t.shape) for t in (*nodes, *tensors_of(node.meta["val"]))]

    def _by_rule(self, results: int) -> list[Growth]:
        """As the op's rule has it."""
        whole = [x.dtype.is_floating_point for x in tensors_of(self.a.meta["val"])]
        operands = [self._as_operand(i, any(whole)) for i in range(len(self.operands))]
        same = self._shapes(self.a) == self._shapes(self.b)
        if same and all(x.is_fixed for x in operands):
            return [FIXED] * results
        for x in operands:
            if x.power is None:
                return [x] * results
        rules = _rule(self.a), _rule(self.b)
        if rules[0] is None or rules[1] is None:
            return [unknown(f"{self.a.target} has no rule")] * results
        if str(rules[0]) != str(rules[1]):
            if not _moves(rules[0]) or not _moves(rules[1]):
                return [self._unclear()] * results
            return [total(operands)] * results
        return _Ruled(self.name, *rules, operands).growths(results, self._unclear())

    def _as_operand(self, i: int, floating: bool) -> Growth:
        """Indices say where, not how much."""
        node = tensor_nodes(self.a)[i]
        index = not node.meta["val"].dtype.is_floating_point and floating
        return FIXED if index and self.operands[i].power is None else self.operands[i]

    def _unclear(self) -> Growth:
        return unknown(f"{self.name} takes it neither by sum nor by mean")


def _name(target: Any) -> str:
    name = getattr(target, "_schema", None)
    return str(name.name).rsplit("::", 1)[-1] if name is not None else str(target)


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

    name: str
    rule: Rule
    doubled: Rule
    operands: list[Growth]

    def growths(self, results: int, unclear: Growth) -> list[Growth]:
        if self.name in TOGETHER:
            return [total(self.operands).times(TOGETHER[self.name])] * results
        base = self._scaled()
        if base is None:
            return [unclear] * results
        if self._coupled and not _moves(self.rule) and self.name not in _WRITES:
            return [unclear] * results
        out = []
        for i in range(results):
            found = base
            for f in sorted(self.rule.contracted_by[i]):
                found = self._reduced(found, f, unclear)
            out.append(found)
        return out

    @property
    def _coupled(self) -> bool:
        """Whether samples of the batch meet other than in a sum."""
        return any(self._size(f).power != 0.0 for f in self.rule.whole)

    def _size(self, factor: str) -> Growth:
        once, twice = self.rule.size.get(factor), self.doubled.size.get(factor)
        return _ratio(twice / once) if once and twice else FIXED

    def _reduced(self, found: Growth, factor: str, unclear: Growth) -> Growth:
        size = self._size(factor)
        reduction = self.rule.reduction.get(factor, "sum")
        if size.power == 0.0 or reduction in ("avg", "max", "min"):
            return found
        if reduction != "sum":
            return unclear
        # What is looked up lies in one place: it is moved, not summed.
        return found if _moves(self.rule) else found.plus(size.power or 0.0)

    def _scaled(self) -> Growth | None:
        """Of a result before its reductions; None if the op is not linear in what
        grows."""
        operands = [self._without_sum(i) for i in range(len(self.operands))]
        mixed = any(x.mixed for x in operands)
        left = {i: x.power or 0.0 for i, x in enumerate(operands) if not x.is_fixed}
        linear = [
            set(p.operands) for p in self.rule.passages if "sum" in p.reductions
        ]
        nothing = {i for i, x in enumerate(operands) if x.power == NOTHING}
        if any(p <= nothing for p in linear):
            return Growth(NOTHING)
        power = 0.0
        for group in linear:
            alone = group - nothing
            for other in linear:
                if other is not group:
                    alone -= other
            powers = {left.get(i, 0.0) for i in alone}
            if len(powers) > 1:
                return self._mixed(operands, linear)
            step = powers.pop() if powers else 0.0
            power += step
            for i in group - nothing:
                left[i] = left.get(i, 0.0) - step
        if any(left.values()):
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
        have = {f for dim in self.rule.operands[i] for f in dim}
        for f in sorted(self.rule.contracted - have):
            x = x.plus(-(self._size(f).power or 0.0))
        return x


# Pointwise ops by what they do to a power. Numbers count as operands.


def _sum(call: _Call) -> Growth:
    """Sums; a small number next to what grows keeps it from being zero."""
    terms = [call.given(0), call.given(1, "other")]
    for i, guard in enumerate((call.number(0), call.number(1, "other"))):
        if guard is not None and abs(guard) <= _GUARD and (terms[1 - i].power or 0) > 0:
            return terms[1 - i]
    return total(terms)


def _product(call: _Call) -> Growth:
    return product([call.given(0), call.given(1, "other")])


def _quotient(call: _Call) -> Growth:
    return product([call.given(0), call.given(1, "other").times(-1.0)])


def _same(call: _Call) -> Growth:
    return call.given(0)


def _power(exponent: float) -> Callable[[_Call], Growth]:
    return lambda call: call.given(0).times(exponent)


def _pow(call: _Call) -> Growth:
    base, exponent = call.given(0), call.number(1, "exponent")
    if base.is_fixed and call.given(1, "exponent").is_fixed:
        return FIXED
    if exponent is None or base.power is None:
        return unknown("a power of what grows") if base.power is not None else base
    return base.times(float(exponent))


def _logarithm(call: _Call) -> Growth:
    x = call.given(0)
    if x.power is None:
        return x
    return FIXED


def _at_least(call: _Call) -> Growth:
    """A bound from below that is a number keeps counts from being zero."""
    x = call.given(0)
    upper = call.number(2, "max") if call.name == "clamp" else None
    lower = call.given(1, "min" if call.name == "clamp" else "other")
    if x.power is None or x.power <= 0.0 or (upper is None and lower.is_fixed):
        return x if upper is None or x.is_fixed else _unbounded(call)
    if lower.power == x.power:
        return x
    return _unbounded(call)


def _at_most(call: _Call) -> Growth:
    x, bound = call.given(0), call.given(1, "other")
    return total([x, bound]) if x.power == bound.power else _unbounded(call)


def _greatest(call: _Call) -> Growth:
    terms = [call.given(0), call.given(1, "other")]
    return total(terms)


def _unbounded(call: _Call) -> Growth:
    x = call.given(0)
    return x if x.power is None else unknown(f"{call.name} of what grows")


def _chosen(call: _Call) -> Growth:
    """One of two values, by a condition."""
    return total([call.given(1), call.given(2)])


def _filled(call: _Call) -> Growth:
    return total([call.given(0), call.given(2)])


def _fused(call: _Call) -> Growth:
    """``x + a * b``, or divided by ``b``."""
    sign = -1.0 if call.name == "addcdiv" else 1.0
    return total([call.given(0), product([call.given(1), call.given(2).times(sign)])])


def _sign(call: _Call) -> Growth:
    x = call.given(0)
    return x if x.power is None else FIXED


def _named(names: str, how: Callable[[_Call], Growth]) -> dict[str, Any]:
    return dict.fromkeys(names.split(), how)


POINTWISE: dict[str, Callable[[_Call], Growth]] = {
    **_named("add sub rsub", _sum),
    **_named("mul", _product),
    **_named("div true_divide floor_divide", _quotient),
    **_named("neg abs relu clone alias detach _to_copy convert_element_type", _same),
    **_named("leaky_relu real nan_to_num constrain contiguous", _same),
    **_named("round floor ceil trunc", _same),
    **_named("sqrt", _power(0.5)),
    **_named("rsqrt", _power(-0.5)),
    **_named("reciprocal", _power(-1.0)),
    **_named("square", _power(2.0)),
    **_named("pow", _pow),
    **_named("log log2 log10 log1p", _logarithm),
    **_named("clamp clamp_min", _at_least),
    **_named("clamp_max minimum", _at_most),
    **_named("maximum", _greatest),
    **_named("where", _chosen),
    **_named("masked_fill", _filled),
    **_named("addcmul addcdiv", _fused),
    **_named("sign sgn", _sign),
}

# New tensors: the argument they are filled with, -1 if it does not grow, None if they
# count positions.
SOURCES: dict[str, int | None] = {
    "full": 1,
    "full_like": 1,
    "new_full": 2,
    "fill": 1,
    "scalar_tensor": 0,
    **dict.fromkeys("ones ones_like new_ones rand randn randint".split(), -1),
    **dict.fromkeys("rand_like randn_like randint_like bernoulli".split(), -1),
    **dict.fromkeys("random seeds inductor_random inductor_seeds".split(), -1),
    **dict.fromkeys("inductor_lookup_seed inductor_randint".split(), -1),
    **dict.fromkeys("empty empty_like new_empty empty_strided".split(), -1),
    **dict.fromkeys("arange iota linspace logspace eye randperm".split(), None),
    **dict.fromkeys("tril_indices triu_indices".split(), None),
}

# Ops that take the samples together, though they add up nothing: their power in the
# values they take.
TOGETHER: dict[str, float] = {
    **dict.fromkeys("sort topk median nanmedian kthvalue mode max min".split(), 1.0),
    **dict.fromkeys("aminmax cummax cummin amax amin std std_mean var_mean".split(), 1.0),
    **dict.fromkeys("argsort argmax argmin searchsorted bucketize".split(), 0.0),
    **dict.fromkeys("_softmax _log_softmax _safe_softmax logsumexp".split(), 0.0),
    "var": 2.0,
}

# Ops that put values in places of others.
_WRITES = frozenset(
    """
    index_put _unsafe_index_put scatter index_copy slice_scatter select_scatter
    diagonal_scatter
    """.split()
)

__all__ = ["FIXED", "NOTHING", "Growth", "growths", "unknown"]
