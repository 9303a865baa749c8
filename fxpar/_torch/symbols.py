"""Handles sizes that stay open while a program is traced: symbols, hints and guards.

A symbol stands for the sizes of a range, and knows one of them, its hint. A question of
tracing about it (are these equal, does it divide) becomes a guard of the ShapeEnv: the
program holds for the sizes that keep all guards. In: symbolic numbers and fake modes.
Out: numbers, code and guards. Never: adds a guard in a function whose docstring rules
it out.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def new_symbol(mode: Any, name: str, hint: int) -> torch.SymInt:
    """Return an open size of at least 2, ``hint`` among them."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    env, source = mode.shape_env, ConstantSource(name)
    symbol = env.create_symbol(hint, source, DimDynamic.DYNAMIC)
    size: torch.SymInt = env.create_symintnode(symbol, hint=hint, source=source)
    return size


def is_open(x: Any) -> bool:
    """Return whether a number is symbolic, or a tensor has a size or stride that is."""
    if isinstance(x, torch.Tensor):
        return any(map(is_open, (*x.shape, *x.stride(), x.storage_offset())))
    return isinstance(x, SYMBOLIC)


def hint_of(x: Any) -> Any:
    """Return a number as it was when it was traced; adds no guard."""
    if isinstance(x, SYMBOLIC):
        return x.node.hint
    return x


def hint_shape(sizes: Iterable[Any]) -> tuple[int, ...]:
    """Return sizes as they were when they were traced; adds no guard."""
    return tuple([x if type(x) is int else hint_of(x) for x in sizes])


def hint_numel(x: torch.Tensor) -> int:
    """Return the number of elements of a tensor, of sizes as they were when traced."""
    count = x.numel()  # far less to ask for than the shape of a fake tensor
    return count if type(count) is int else math.prod(hint_shape(x.shape))


def expression(x: Any) -> Any:
    """Return the expression of a number in its symbols, hashable; a plain number as it
    is."""
    return x.node.expr if isinstance(x, SYMBOLIC) else x


def expressions(sizes: Iterable[Any]) -> tuple[Any, ...]:
    """Return sizes that compare and hash; adds no guard."""
    return tuple(map(expression, sizes))


def is_symbol(x: Any) -> bool:
    """Return whether a number is one symbol alone."""
    return isinstance(x, torch.SymInt) and x.node.expr.is_symbol


def substituted(x: Any, value_of: Mapping[str, Any]) -> Any:
    """Return a symbolic number of Dynamo's in other numbers, by the names of its
    symbols. Raises KeyError for a symbol that is not known."""
    if not isinstance(x, torch.SymInt):
        return x
    values = {s: value_of[str(s)] for s in x.node.expr.free_symbols}
    return _computed(x.node.expr, values.__getitem__, lambda op, *args: op(*args))


def _operators() -> dict[Any, Callable[..., Any]]:
    import sympy
    from torch.utils._sympy import functions

    return {
        sympy.Add: operator.add,
        sympy.Mul: operator.mul,
        functions.FloorDiv: operator.floordiv,
        functions.CleanDiv: operator.floordiv,
        functions.Mod: operator.mod,
        functions.PythonMod: operator.mod,
        functions.Max: torch.sym_max,
        functions.Min: torch.sym_min,
    }


class Inexpressible(Exception):
    """Says that a size is computed by more than integer arithmetic."""


def _computed(
    expr: Any, symbol: Callable[[Any], Any], apply: Callable[..., Any]
) -> Any:
    """Return an expression of sizes, from its symbols by operators of two operands."""
    if expr.is_Integer:
        return int(expr)
    if expr.is_symbol:
        return symbol(expr)
    args = [_computed(arg, symbol, apply) for arg in expr.args]
    op: Callable[..., Any] | None
    if expr.is_Pow and isinstance(args[1], int) and args[1] > 0:
        op, args = operator.mul, args[:1] * args[1]
    else:
        op = _operators().get(expr.func)
    if op is None:
        raise Inexpressible(str(expr))
    first, *rest = args
    for arg in rest:
        first = apply(op, first, arg)
    return first


def computed(
    x: torch.SymInt, value_of: Mapping[Any, Any], apply: Callable[..., Any]
) -> Any:
    """Return a symbolic number from its symbols: ``apply(operator, a, b)`` for every
    step. ``value_of``: by ``expression``, numbers that are there already.

    Raises KeyError for a symbol that is not known, Inexpressible where there is no
    operator.
    """
    value = value_of.get(x.node.expr)
    if value is not None:
        return value
    return _computed(x.node.expr, value_of.__getitem__, apply)


def hinted(x: Any, mode: Any) -> Any:
    """Return a value with its sizes as they were when it was traced."""
    if not isinstance(x, torch.Tensor):
        return hint_of(x)
    if not is_open(x):
        return x
    shape, stride = hint_shape(x.shape), hint_shape(x.stride())
    offset = hint_of(x.storage_offset())
    with mode, torch.no_grad():
        if offset:
            ends = [(n - 1) * step for n, step in zip(shape, stride, strict=True)]
            flat = torch.empty([offset + 1 + sum(ends)], dtype=x.dtype, device=x.device)
            tensor = flat.as_strided(shape, stride, offset)
        else:
            tensor = torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device)
    return tensor.requires_grad_() if x.requires_grad else tensor


def divisors_asked(names: Sequence[str], mode: Any) -> dict[str, int]:
    """Return name of a symbol -> the divisor that guards require of it, for those in
    ``names``."""
    from torch.utils._sympy.functions import Mod

    divisors: dict[str, int] = {}
    for guard in mode.shape_env.guards:
        for part in guard.expr.atoms(Mod):
            base, by = part.args
            times, symbol = base.as_coeff_Mul()
            if by.is_Integer and str(symbol) in names:
                k = int(by) // math.gcd(int(by), int(times))
                divisors[str(symbol)] = math.lcm(divisors.get(str(symbol), 1), k)
    return {name: k for name, k in divisors.items() if k > 1}


def fixed(symbols: Sequence[torch.SymInt]) -> list[int]:
    """Return the positions of the symbols that guards have fixed to one size."""
    return [i for i, s in enumerate(symbols) if s.node.expr.is_number]


def guards_of(symbols: Sequence[torch.SymInt], names: Sequence[str], mode: Any) -> str:
    """Return the condition on sizes under which the program that was traced and
    compiled with these symbols holds: Python, in which they have ``names``."""
    env = mode.shape_env
    code = env.produce_guards_expression(list(symbols)) or "True"
    for i, name in enumerate(names):
        code = code.replace(f"L['t{i}']", name)
    return code


def guard_functions() -> dict[str, Any]:
    """Return the functions that the text of ``guards_of`` calls, by name."""
    from torch.fx.experimental import symbolic_shapes

    return dict(symbolic_shapes.SYMPY_INTERP)


def code_of(x: Any) -> str:
    """Return a number as Python, in which a symbol has its name. Raises Inexpressible
    where it is computed by more than sums and products."""
    import sympy

    if not isinstance(x, torch.SymInt):
        return repr(x)
    parts = {type(part) for part in sympy.preorder_traversal(x.node.expr)}
    plain = (sympy.Add, sympy.Mul, sympy.Symbol, sympy.Integer)
    if not all(issubclass(kind, plain) for kind in parts):
        raise Inexpressible(str(x))
    return f"({x.node.expr})"
