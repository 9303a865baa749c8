"""Powers of the batch's size that values grow with: how ops join and change them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fxpar import _torch
from fxpar.sharding.program import tensor_nodes
from fxpar.sharding.rules.table import tensors_of

# The power of a constant zero, which is a sum as well as a mean.
NOTHING = -math.inf

# Added to a denominator, a number up to this keeps it from being zero and no more.
_GUARD = 1e-3


@dataclass(frozen=True)
class Growth:
    """The power of the batch's size that a value grows with."""

    # The largest of its summands'; None if it is not known.
    power: float | None = 0.0
    # It has summands of other powers besides.
    mixed: bool = False
    # Why it is not known; "" if it is.
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


def of_number(x: Any, y: Any) -> Growth:
    """Of a number that is ``x``, and ``y`` with twice the batch."""
    if not isinstance(x, (int, float)) or not isinstance(y, (int, float)) or x == y:
        return Growth(NOTHING) if x == 0 and not isinstance(x, bool) else FIXED
    if x == 0 or y == 0 or not math.isfinite(x) or (x < 0) != (y < 0):
        return unknown("a number depends on the size of the batch")
    return ratio(y / x)


def ratio(ratio: float) -> Growth:
    power = math.log2(ratio)
    half = round(2 * power) / 2
    return Growth(half if abs(power - half) < 1e-9 else float(round(power)))


def total(terms: Sequence[Growth]) -> Growth:
    """Of a sum of values."""
    for term in terms:
        if term.power is None:
            return term
    powers = {term.power for term in terms if term.power is not None} - {NOTHING}
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
class DoubledCall:
    """A call of an ATen op, once and with twice the batch."""

    # In the graph with the batch as it is.
    a: fx.Node
    # The same call in the graph with twice the batch.
    b: fx.Node
    # Growths of the results of each node before it.
    growth_of: Mapping[fx.Node, Sequence[Growth]]

    @property
    def name(self) -> str:
        """``add`` for ``aten.add.Tensor``."""
        return name_of(self.a.target)

    def growth_at(self, place: int, key: str = "") -> Growth:
        """Of an argument, a tensor or a number."""
        args = [self._argument(node, place, key) for node in (self.a, self.b)]
        if isinstance(args[0], fx.Node):
            return self.growth_of[args[0]][0]
        return FIXED if args[0] is None else of_number(*args)

    @staticmethod
    def _argument(node: fx.Node, place: int, key: str) -> Any:
        return node.args[place] if place < len(node.args) else node.kwargs.get(key)

    def number(self, place: int, key: str = "") -> Any:
        """An argument that is the same number in both graphs, or None."""
        x = self._argument(self.a, place, key)
        same = x == self._argument(self.b, place, key)
        return x if isinstance(x, (int, float)) and same else None

    def source(self, value: int | None) -> Growth:
        """Of a new tensor filled with argument ``value``, or None: counted."""
        if value is None:
            if self.shapes(self.a) == self.shapes(self.b):
                return FIXED
            return unknown("positions in the batch are counted")
        return self.growth_at(value) if value >= 0 else FIXED

    @staticmethod
    def shapes(node: fx.Node) -> list[tuple[int, ...]]:
        nodes = [n.meta["val"] for n in tensor_nodes(node)]
        return [tuple(t.shape) for t in (*nodes, *tensors_of(node.meta["val"]))]


def name_of(target: Any) -> str:
    schema = _torch.objects.schema_of(target)
    return str(target) if schema is None else str(schema.name).rsplit("::", 1)[-1]


# Pointwise ops by what they do to a power. Numbers count as operands.


def _sum(call: DoubledCall) -> Growth:
    """Sums; a small number next to what grows keeps it from being zero."""
    terms = [
        call.growth_at(0),
        product([call.growth_at(1, "other"), call.growth_at(2, "alpha")]),
    ]
    for i, guard in enumerate((call.number(0), call.number(1, "other"))):
        if guard is not None and abs(guard) <= _GUARD and (terms[1 - i].power or 0) > 0:
            return terms[1 - i]
    return total(terms)


def _product(call: DoubledCall) -> Growth:
    return product([call.growth_at(0), call.growth_at(1, "other")])


def _quotient(call: DoubledCall) -> Growth:
    return product([call.growth_at(0), call.growth_at(1, "other").times(-1.0)])


def _same(call: DoubledCall) -> Growth:
    return call.growth_at(0)


def _power(exponent: float) -> Callable[[DoubledCall], Growth]:
    return lambda call: call.growth_at(0).times(exponent)


def _pow(call: DoubledCall) -> Growth:
    base, exponent = call.growth_at(0), call.number(1, "exponent")
    if base.is_fixed and call.growth_at(1, "exponent").is_fixed:
        return Growth(mixed=base.mixed or call.growth_at(1, "exponent").mixed)
    if exponent is None or base.power is None:
        return unknown("a power of what grows") if base.power is not None else base
    return base.times(float(exponent))


def _logarithm(call: DoubledCall) -> Growth:
    x = call.growth_at(0)
    if x.power is None:
        return x
    return Growth(mixed=x.mixed)


def _at_least(call: DoubledCall) -> Growth:
    """A bound from below that is a number keeps counts from being zero."""
    x = call.growth_at(0)
    upper = call.number(2, "max") if call.name == "clamp" else None
    lower = call.growth_at(1, "min" if call.name == "clamp" else "other")
    if x.power is None or x.power <= 0.0 or (upper is None and lower.is_fixed):
        return x if upper is None or x.is_fixed else _unbounded(call)
    if lower.power == x.power:
        return x
    return _unbounded(call)


def _at_most(call: DoubledCall) -> Growth:
    """Of values of one power; zero has any."""
    terms = [call.growth_at(0), call.growth_at(1, "other")]
    powers = {term.power for term in terms} - {NOTHING, None}
    return total(terms) if len(powers) <= 1 else _unbounded(call)


def _greatest(call: DoubledCall) -> Growth:
    terms = [call.growth_at(0), call.growth_at(1, "other")]
    return total(terms)


def _unbounded(call: DoubledCall) -> Growth:
    x = call.growth_at(0)
    return x if x.power is None else unknown(f"{call.name} of what grows")


def _chosen(call: DoubledCall) -> Growth:
    """One of two values, by a condition."""
    return total([call.growth_at(1), call.growth_at(2)])


def _filled(call: DoubledCall) -> Growth:
    return total([call.growth_at(0), call.growth_at(2)])


def _fused(call: DoubledCall) -> Growth:
    """``x + a * b``, or divided by ``b``."""
    sign = -1.0 if call.name == "addcdiv" else 1.0
    return total(
        [call.growth_at(0), product([call.growth_at(1), call.growth_at(2).times(sign)])]
    )


def _sign(call: DoubledCall) -> Growth:
    x = call.growth_at(0)
    return x if x.power is None else FIXED


def _each(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


POINTWISE: dict[str, Callable[[DoubledCall], Growth]] = {
    **_each("add sub rsub", _sum),
    **_each("mul", _product),
    **_each("div true_divide floor_divide", _quotient),
    **_each("neg abs relu clone alias detach _to_copy convert_element_type", _same),
    **_each("leaky_relu real nan_to_num constrain contiguous", _same),
    **_each("round floor ceil trunc", _same),
    **_each("sqrt", _power(0.5)),
    **_each("rsqrt", _power(-0.5)),
    **_each("reciprocal", _power(-1.0)),
    **_each("square", _power(2.0)),
    **_each("pow", _pow),
    **_each("log log2 log10 log1p", _logarithm),
    **_each("clamp clamp_min", _at_least),
    **_each("clamp_max minimum", _at_most),
    **_each("maximum", _greatest),
    **_each("where", _chosen),
    **_each("masked_fill", _filled),
    **_each("addcmul addcdiv", _fused),
    **_each("sign sgn", _sign),
}

# New tensors: the argument they are filled with, -1 if it does not grow, None if they
# count positions.
SOURCES: dict[str, int | None] = {
    "full": 1,
    "full_like": 1,
    "new_full": 2,
    "fill": 1,
    "scalar_tensor": 0,
    **_each("ones ones_like new_ones rand randn randint", -1),
    **_each("rand_like randn_like randint_like bernoulli", -1),
    **_each("random seeds inductor_random inductor_seeds", -1),
    **_each("inductor_lookup_seed inductor_randint", -1),
    **_each("empty empty_like new_empty empty_strided", -1),
    **_each("arange iota linspace logspace eye randperm", None),
    **_each("tril_indices triu_indices fft_fftfreq fft_rfftfreq", None),
}

# Ops that take the samples together, though they add up nothing: their power in the
# values they take.
TOGETHER: dict[str, float] = {
    **_each("sort topk median nanmedian kthvalue mode max min", 1.0),
    **_each("aminmax cummax cummin amax amin std std_mean var_mean", 1.0),
    **_each("argsort argmax argmin searchsorted bucketize", 0.0),
    **_each("_softmax _log_softmax _safe_softmax logsumexp", 0.0),
    "var": 2.0,
}

# Ops that put values in places of others.
WRITES = frozenset(
    {
        "index_put",
        "_unsafe_index_put",
        "scatter",
        "index_copy",
        "slice_scatter",
        "select_scatter",
        "diagonal_scatter",
    }
)
