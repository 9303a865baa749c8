"""Reports ops without a rule, each with a rule that might fit.

In: a program. Out: one warning per op, with the user's line and a rule read off the
shapes of one call.
Never: changes the program.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from fxpar import _torch
from fxpar.errors import (
    RuleError,
    UnknownOpError,
    warn,
)
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_table import parse_rule
from fxpar.sharding.program import Op, Program, user_line

Shape = Sequence[int]


def report_unknown(program: Program, mesh: Mesh, strict: bool) -> None:
    """Issue one warning per unknown op that is repeated along an axis; raise
    UnknownOpError under ``strict``."""
    unknown: dict[Any, list[Op]] = {}
    axes = [axis for axis, size in mesh.axes if size > 1]
    for op in program.ops:
        # Inside a manual region an op runs on the rank's own shard.
        if not op.has_rule and (not axes or not op.rule.pin.keys() >= {*axes}):
            # Of an op with an effect, the op that is kept in order.
            name = _torch.aot.higher_order_name(op.target)
            in_order = name == "higher_order::with_effects"
            target = op.node.args[1] if in_order else op.target
            unknown.setdefault(str(target), []).append(op)
    for name, calls in unknown.items():
        size = sum(program.values[v].nbytes for op in calls for v in op.operands)
        what = (
            f"{name} has no sharding rule: its operands are made whole on every rank "
            f"({len(calls)} calls, {size} bytes)"
        )
        where = user_line(calls[0].node)
        fix = _how_to_split(program, calls[0])
        if strict:
            raise UnknownOpError(what, where=where, fix=fix)
        warn(what, where=where, fix=fix)


def _how_to_split(program: Program, op: Op) -> str:
    """Return the fix for an unknown op: a rule that fits its own tensors."""
    if not isinstance(op.target, _torch.inductor.OpOverload):
        return "keep it out of the compiled model if whole operands cost too much"
    operands, results = (
        [program.values[v].shape for v in side] for side in (op.operands, op.results)
    )
    fits = example(operands, results)
    if fits is None:
        return "nothing of it can be split: leave it, or compute it outside"
    call = f'fxpar.rule("{op.target.name()}", "{fits}")'
    return (
        f'give it a rule, and take "!" off each dim along which no row of a result '
        f"depends on other rows: {call}"
    )


def example(operands: Sequence[Shape], results: Sequence[Shape]) -> str | None:
    """Return a rule that fits tensors of these shapes and keeps every dim whole; None
    if text has no rule for them, or no dim is both in an operand and in a result. Dims
    of one size share a factor, those at the same place first."""
    shapes, sizes = [*operands, *results], dict[str, int]()
    words = [_words(shape, sizes) for shape in shapes]
    operand_names, result_names = (
        {name for dims in side for name in dims}
        for side in (words[: len(operands)], words[len(operands) :])
    )
    if not operand_names & result_names - {"_"}:
        return None
    text = [
        " ".join("_" if name == "_" else f"{name}!" for name in dims) for dims in words
    ]
    rule = f"{', '.join(text[: len(operands)])} -> {', '.join(text[len(operands) :])}"
    try:
        parse_rule(rule).with_sizes(shapes)
    except RuleError:
        return None
    return rule


def _words(shape: Shape, sizes: dict[str, int]) -> list[str]:
    """Return a factor for each dim; ``sizes`` has the existing ones, and gets the new
    ones."""
    out: list[str] = []
    for i, size in enumerate(shape):
        fits = [name for name, n in sizes.items() if n == size and name not in out]
        letters = iter([*string.ascii_lowercase, *(f"d{k}" for k in range(99))])
        if size == 1:
            name = "_"
        elif fits:
            name = next((f for f in fits if list(sizes).index(f) == i), fits[0])
        else:
            name = next(x for x in letters if x not in sizes)
            sizes[name] = size
        out.append(name)
    return out
