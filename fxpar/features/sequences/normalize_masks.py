"""traced -> normalized: turns masks that are causal into the ``is_causal`` of
attention.

In: a functional ATen graph with global fake values. Out: the same graph, changed in
place, computing the same values. A mask made of positions that count up, compared and
combined, is read as a function of places (``PlaceFunction``), by the rule of each op:
integers as affine functions of an element's place, booleans as the inequalities that
hold. Where ``query >= key`` is all that is left of a mask (a window as long as the
sequence and a single document hide nothing more), the kernel gets ``is_causal``; where
nothing is left, there is no mask. Never: follows values that depend on inputs: padding
and packed documents stay masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import fx

from fxpar._torch.objects import argument, arguments_of, calls_where, schema_of
from fxpar._torch.symbols import expression, expressions
from fxpar.features.sequences.local_attention import in_order
from fxpar.graph.builder import shape_of
from fxpar.runtime.steps.pipeline_state import JointState
from fxpar.sharding.op_facts import BIASES

aten = torch.ops.aten
prims = torch.ops.prims

Number: TypeAlias = int | float | bool


@dataclass(frozen=True)
class Affine:
    """Is ``constant + sum(step * place)`` over the dims of a tensor."""

    # One for each dim; 0 for a dim of one element.
    steps: tuple[int, ...]
    # The value at place 0 of all dims.
    constant: Number


@dataclass(frozen=True)
class TwoValued:
    """Is one value where all of some affine functions are at least 0, else another."""

    # The affine functions.
    bounds: frozenset[Affine]
    # The value where all bounds are at least 0.
    yes: Number
    # The value elsewhere.
    no: Number


PlaceFunction: TypeAlias = Affine | TwoValued
PlaceFunctions: TypeAlias = dict[fx.Node, PlaceFunction | None]
# Operand -> its function.
Ask: TypeAlias = Callable[[Any], PlaceFunction | None]
PlaceRule: TypeAlias = Callable[[fx.Node, Ask], PlaceFunction | None]

# dtypes of positions: sums in others may wrap around, or lose digits.
_EXACT = (torch.int64, torch.int32)


def causal_masks(graph: fx.Graph, _: JointState) -> None:
    """Give attention under a causal mask ``is_causal`` instead, and drop masks that
    hide nothing."""
    functions: PlaceFunctions = {}
    for node in calls_where(graph, _is_attention):
        arguments = arguments_of(node.target, node.args, node.kwargs)
        name = next((n for n in BIASES if isinstance(arguments.get(n), fx.Node)), None)
        if name is None or arguments.get("is_causal", True):
            continue
        # A gradient of the mask is read.
        if any(arguments.get("grad_input_mask", ())[3:]):
            continue
        causal = _is_causal(arguments, arguments[name], functions)
        if causal is not None:
            changed = arguments | {name: None, "is_causal": causal}
            node.args, node.kwargs = in_order(node.target, changed)


def _is_attention(target: Any) -> bool:
    """Return whether an op is an attention with arguments by name."""
    return "attention" in str(target) and schema_of(target) is not None


def _is_causal(
    arguments: dict[str, Any], mask: fx.Node, functions: PlaceFunctions
) -> bool | None:
    """Return whether a mask is causal (True) or hides nothing (False); None for another
    mask."""
    function, dtype = function_of(mask, functions), mask.meta["val"].dtype
    sees = dtype is torch.bool
    if is_constant(function):
        return False if function.constant == sees else None
    if isinstance(function, TwoValued) and len(function.bounds) == 1:
        function = function if function.yes == sees else with_opposite_bound(function)
    if not isinstance(function, TwoValued) or function.yes != sees:
        return None
    least = 0 if sees else torch.finfo(dtype).min
    sides = (shape_of(arguments[name]) for name in ("query", "key"))
    rows, keys = (expression(shape[-2]) for shape in sides)
    if function.no > least or rows != keys:
        return None
    rank = len(shape_of(mask))
    visible = Affine((*(0,) * (rank - 2), 1, -1), 0) if rank > 1 else None
    return True if function.bounds == {visible} else None


# Functions of places


def normal(
    function: PlaceFunction | None, sizes: Sequence[Any]
) -> PlaceFunction | None:
    """Return the same function without steps along dims of one element and without
    bounds that all elements keep."""
    if isinstance(function, Affine):
        return on_sizes(function, sizes)
    if function is None:
        return None
    bounds = set[Affine]()
    for bound in function.bounds:
        bound = on_sizes(bound, sizes)
        least, most = range_of(bound, sizes)
        if most is not None and most < 0:
            return Affine((0,) * len(sizes), function.no)
        if least is None or least < 0:
            bounds.add(bound)
    if not bounds or function.yes == function.no:
        return Affine((0,) * len(sizes), function.yes)
    return replace(function, bounds=frozenset(bounds))


def on_sizes(function: Affine, sizes: Sequence[Any]) -> Affine:
    """Return a function of the last dims as a function of all dims."""
    steps = (0,) * (len(sizes) - len(function.steps)) + function.steps
    is_one = (isinstance(n, int) and n == 1 for n in sizes)
    return replace(
        function, steps=tuple(0 if o else s for s, o in zip(steps, is_one, strict=True))
    )


def range_of(
    function: Affine, sizes: Sequence[Any]
) -> tuple[Number | None, Number | None]:
    """Return the least and the largest value; None for both if a size that matters is
    open."""
    least = most = function.constant
    for step, n in zip(function.steps, sizes, strict=True):
        if step and not isinstance(n, int):
            return None, None
        far = step * max(n - 1, 0) if step else 0
        least, most = least + min(far, 0), most + max(far, 0)
    return least, most


def with_opposite_bound(choice: TwoValued) -> TwoValued:
    """Return the same choice by the inequality that holds where its bound does not."""
    (bound,) = choice.bounds  # integers: not at least 0 means at most -1
    opposite = combined(Affine((), -1), bound, -1)
    return TwoValued(frozenset([opposite]), choice.no, choice.yes)


def combined(one: Affine, other: Affine, times: Number = 1) -> Affine:
    """Return ``one + times * other``."""
    rank = max(len(one.steps), len(other.steps))
    a, b = ((0,) * (rank - len(f.steps)) + f.steps for f in (one, other))
    steps = tuple(x + int(times) * y for x, y in zip(a, b, strict=True))
    return Affine(steps, one.constant + times * other.constant)


def is_constant(function: PlaceFunction | None) -> TypeGuard[Affine]:
    """Return whether a function is affine without steps, so the same everywhere."""
    return isinstance(function, Affine) and not any(function.steps)


def shifted(function: Affine, dim: int, by: int, step: int = 1) -> Affine:
    """Return the function of a slice of ``dim`` from element ``by``, with ``step``."""
    steps = list(function.steps)
    constant = function.constant + steps[dim] * by
    steps[dim] *= step
    return Affine(tuple(steps), constant)


def map_bounds(
    x: PlaceFunction | None, mapping: Callable[[Affine], Affine | None]
) -> PlaceFunction | None:
    """Return ``mapping`` of a function, or a choice with all its bounds mapped; None if
    one of these is None."""
    if not isinstance(x, TwoValued):
        return None if x is None else mapping(x)
    bounds = [mapping(bound) for bound in x.bounds]
    bounds_mapped = frozenset(bound for bound in bounds if bound is not None)
    return None if None in bounds else replace(x, bounds=bounds_mapped)


# Functions of nodes


def function_of(node: Any, functions: PlaceFunctions) -> PlaceFunction | None:
    """Return the function of a node or a number, or None; cached in ``functions``."""
    if isinstance(node, bool | int | float):
        return Affine((), node)
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    if node not in functions:
        rule, value = RULES.get(node.target), node.meta.get("val")
        functions[node] = None
        if rule is not None and isinstance(value, torch.Tensor):
            function = rule(node, lambda x: function_of(x, functions))
            functions[node] = normal(function, shape_of(node))
    return functions[node]


def _dtype(node: fx.Node) -> torch.dtype:
    return node.meta["val"].dtype


# Without operands


def _iota(node: fx.Node, ask: Ask) -> PlaceFunction | None:
    start, step = node.kwargs.get("start", 0), node.kwargs.get("step", 1)
    constant = isinstance(start, int) and isinstance(step, int)
    return Affine((step,), start) if constant and _dtype(node) in _EXACT else None


def _filled(at: int) -> PlaceRule:
    """Return the rule of an op filled with the number in this argument position."""

    def rule(node: fx.Node, ask: Ask) -> PlaceFunction | None:
        value = node.args[at] if len(node.args) > at else None
        return None if isinstance(value, fx.Node) else ask(value)

    return rule


# Arithmetic


def _sum(sign: int) -> PlaceRule:
    def rule(node: fx.Node, ask: Ask) -> PlaceFunction | None:
        one, other = ask(node.args[0]), ask(node.args[1])
        times = argument(node, "alpha")
        if not isinstance(times, int) or _dtype(node) not in _EXACT:
            return None
        if not (isinstance(one, Affine) and isinstance(other, Affine)):
            return None
        return combined(one, other, sign * times)

    return rule


def _product(node: fx.Node, ask: Ask) -> PlaceFunction | None:
    """Return the product with a constant, or of two choices by the same bounds."""
    one, other = ask(node.args[0]), ask(node.args[1])
    for a, b in ((one, other), (other, one)):
        if isinstance(a, Affine) and is_constant(b) and _dtype(node) in _EXACT:
            return combined(Affine((), 0), a, b.constant)
        if not isinstance(a, TwoValued):
            continue
        if is_constant(b):
            b = TwoValued(a.bounds, b.constant, b.constant)
        if isinstance(b, TwoValued) and a.bounds == b.bounds:
            yes, no = a.yes * b.yes, a.no * b.no
            return None if math.isnan(yes + no) else TwoValued(a.bounds, yes, no)
    return None


def _running_sum(node: fx.Node, ask: Ask) -> PlaceFunction | None:
    x, dim = ask(node.args[0]), node.args[1]
    if not is_constant(x) or _dtype(node) not in _EXACT:
        return None
    steps = [0] * len(shape_of(node))
    steps[dim] = int(x.constant)
    return Affine(tuple(steps), int(x.constant))


# Conditions


def _compared(sign: int, less: int) -> PlaceRule:
    """Return the rule for ``sign * (one - other) - less >= 0``."""

    def rule(node: fx.Node, ask: Ask) -> PlaceFunction | None:
        one, other = ask(node.args[0]), ask(node.args[1])
        if not (isinstance(one, Affine) and isinstance(other, Affine)):
            return None
        a, b = (one, other) if sign > 0 else (other, one)
        bound = combined(combined(a, b, -1), Affine((), less), -1)
        exact = isinstance(bound.constant, int)
        return TwoValued(frozenset([bound]), True, False) if exact else None

    return rule


def _equal(same: bool) -> PlaceRule:
    """Return the rule for ``==`` (``same``) or ``!=``, if it is constant."""

    def rule(node: fx.Node, ask: Ask) -> PlaceFunction | None:
        one, other = ask(node.args[0]), ask(node.args[1])
        if not (isinstance(one, Affine) and isinstance(other, Affine)):
            return None
        sizes = shape_of(node)
        least, most = range_of(on_sizes(combined(one, other, -1), sizes), sizes)
        if least is None or most is None:
            return None
        if least == most == 0:
            return Affine((), same)
        return Affine((), not same) if least > 0 or most < 0 else None

    return rule


def _junction(neutral: bool) -> PlaceRule:
    """Return the rule of ``and`` (``neutral`` is True), or of ``or`` if one operand is
    constant."""

    def rule(node: fx.Node, ask: Ask) -> PlaceFunction | None:
        one, other = ask(node.args[0]), ask(node.args[1])
        for x in (one, other):
            # A number that differs from place to place is no truth.
            if not (is_constant(x) or isinstance(x, TwoValued | None)):
                return None
        if _dtype(node) is not torch.bool:
            return None
        for a, b in ((one, other), (other, one)):
            if is_constant(a):
                return b if bool(a.constant) is neutral else a
        if not (isinstance(one, TwoValued) and isinstance(other, TwoValued)):
            return None
        holds = neutral and one.yes and other.yes and not (one.no or other.no)
        return TwoValued(one.bounds | other.bounds, True, False) if holds else None

    return rule


def _not(node: fx.Node, ask: Ask) -> PlaceFunction | None:
    x = ask(node.args[0])
    if _dtype(node) is not torch.bool:
        return None
    if isinstance(x, TwoValued):
        opposite = replace(x, yes=not x.yes, no=not x.no)
        return with_opposite_bound(opposite) if len(x.bounds) == 1 else opposite
    return Affine((), not x.constant) if is_constant(x) else None


def _where(node: fx.Node, ask: Ask) -> PlaceFunction | None:
    condition, yes, no = (ask(x) for x in node.args)
    if is_constant(condition):
        return yes if condition.constant else no
    if isinstance(condition, TwoValued) and is_constant(yes) and is_constant(no):
        values = [(yes if c else no).constant for c in (condition.yes, condition.no)]
        return TwoValued(condition.bounds, *values)
    return None


def _cast(node: fx.Node, ask: Ask) -> PlaceFunction | None:
    x, dtype = ask(node.args[0]), _dtype(node)
    if isinstance(x, Affine) and not is_constant(x):
        return x if dtype in _EXACT else None

    def cast(number: Number) -> Number:
        value = torch.tensor(number, dtype=torch.float64).to(dtype).item()
        return bool(value) if dtype is torch.bool else value

    if x is None:
        return None
    numbers = (x.yes, x.no) if isinstance(x, TwoValued) else (x.constant,)
    if dtype in _EXACT and not all(map(math.isfinite, numbers)):
        return None
    results = [cast(number) for number in numbers]
    return (
        TwoValued(x.bounds, *results)
        if isinstance(x, TwoValued)
        else Affine(x.steps, *results)
    )


# Elements that move


def _moves_elements(
    steps_of: Callable[[fx.Node, tuple[int, ...]], Sequence[int] | None],
) -> PlaceRule:
    """Return the rule of an op that moves elements; ``steps_of`` (node, its operand's
    steps) gives the steps of its dims."""

    def rule(node: fx.Node, ask: Ask) -> PlaceFunction | None:
        def of(function: Affine) -> Affine | None:
            steps = steps_of(node, function.steps)
            return None if steps is None else replace(function, steps=tuple(steps))

        return map_bounds(ask(node.args[0]), of)

    return rule


def _unsqueeze(node: fx.Node, steps: tuple[int, ...]) -> Sequence[int]:
    dim = node.args[1] % (len(steps) + 1)
    return [*steps[:dim], 0, *steps[dim:]]


def _view(node: fx.Node, steps: tuple[int, ...]) -> Sequence[int] | None:
    """Return the steps after a view that adds or removes dims of one element; any view
    of a constant has no steps."""
    before, after = (expressions(shape_of(x)) for x in (node.args[0], node))
    if not any(steps):
        return [0] * len(after)
    before_dims, after_dims = (
        {i: n for i, n in enumerate(shape) if n != 1} for shape in (before, after)
    )
    if [*before_dims.values()] != [*after_dims.values()]:
        return None
    source_of = dict(zip(after_dims, before_dims, strict=True))
    return [steps[source_of[j]] if j in source_of else 0 for j in range(len(after))]


def _slice(node: fx.Node, ask: Ask) -> PlaceFunction | None:
    source, dim = node.args[0], argument(node, "dim")
    start, step = argument(node, "start") or 0, argument(node, "step")
    if not isinstance(start, int) or not isinstance(step, int) or start < 0:
        return None
    if source.target is aten.constant_pad_nd.default and not start:
        unpadded, amounts = source.args[:2]
        sizes = [expressions(shape_of(x)) for x in (node, unpadded)]
        if not any(amounts[::2]) and sizes[0] == sizes[1]:
            return ask(unpadded)
    return map_bounds(ask(source), lambda f: shifted(f, dim, start, step))


def _cat(node: fx.Node, ask: Ask) -> PlaceFunction | None:
    """Return the function of a join in which each part goes on where the one before
    ends."""
    parts, dim = node.args[0], argument(node, "dim") % len(shape_of(node))
    functions = [f for f in map(ask, parts) if isinstance(f, Affine)]
    if len(functions) < len(parts):
        return None
    sizes = [expression(shape_of(x)[dim]) for x in parts]
    along = {f.steps[dim] for f, n in zip(functions, sizes, strict=True) if n != 1}
    step = along.pop() if along else 0
    across = {f.steps[:dim] + f.steps[dim + 1 :] for f in functions}
    if along or len(across) > 1:
        return None
    goes_on = functions[0].constant
    for i, (function, n) in enumerate(zip(functions, sizes, strict=True)):
        if function.constant != goes_on:
            return None
        if step and not isinstance(n, int) and i < len(parts) - 1:
            return None
        goes_on += step * n if isinstance(n, int) else 0
    steps = (*functions[0].steps[:dim], step, *functions[0].steps[dim + 1 :])
    return Affine(steps, functions[0].constant)


def _index(node: fx.Node, ask: Ask) -> PlaceFunction | None:
    """Return the function of a lookup at positions that are functions."""
    x, indices = ask(node.args[0]), node.args[1]
    if is_constant(x):
        return Affine((), x.constant)
    # With a dim that is not indexed, the indexed dims may be in another position.
    if not isinstance(x, Affine) or len(indices) != len(x.steps) or None in indices:
        return None
    function = Affine((), x.constant)
    for step, index in zip(x.steps, indices, strict=True):
        at = ask(index) if step else Affine((), 0)
        # A negative place counts from the end.
        if not isinstance(at, Affine) or min(at.constant, *at.steps, 0) < 0:
            return None
        function = combined(function, at, step)
    return function


_SAME = _moves_elements(lambda node, steps: steps)

_RULES_BY_NAME: dict[str, PlaceRule] = {
    "full": _filled(1),
    "full_like": _filled(1),
    "scalar_tensor": _filled(0),
    "add": _sum(1),
    "sub": _sum(-1),
    "mul": _product,
    "cumsum": _running_sum,
    "ge": _compared(1, 0),
    "gt": _compared(1, 1),
    "le": _compared(-1, 0),
    "lt": _compared(-1, 1),
    "eq": _equal(True),
    "ne": _equal(False),
    "bitwise_and": _junction(True),
    "logical_and": _junction(True),
    "bitwise_or": _junction(False),
    "logical_or": _junction(False),
    "bitwise_not": _not,
    "logical_not": _not,
    "where": _where,
    "_to_copy": _cast,
    "expand": _SAME,
    "alias": _SAME,
    "clone": _SAME,
    "unsqueeze": _moves_elements(_unsqueeze),
    "permute": _moves_elements(lambda node, steps: [steps[d] for d in node.args[1]]),
    "view": _moves_elements(_view),
    "reshape": _moves_elements(_view),
    "slice": _slice,
    "cat": _cat,
    "index": _index,
}

RULES: dict[Any, PlaceRule] = {
    prims.iota.default: _iota,
    prims.convert_element_type.default: _cast,
} | {
    getattr(getattr(aten, name), overload): rule
    for name, rule in _RULES_BY_NAME.items()
    for overload in getattr(aten, name).overloads()
}
