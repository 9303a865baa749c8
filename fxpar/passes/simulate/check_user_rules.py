"""Checks rules that users gave to ops, on small random tensors.

In: the decision about a program. Out: nothing, or RuleError for a rule by which ranks
would compute other numbers than one device: each factor that the rule allows an axis to
split is split, each operand that it allows to be partial gets random summands, and the
ranks' results are joined and compared. An op that cannot be run here is a warning. A
rule is checked once in a process for the same sizes. Never: communicates, or changes
the random state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.errors import (
    RuleError,
    warn,
)
from fxpar.passes.simulate.one_op import OneOp, case, close, passing, readable
from fxpar.sharding.decide import Decision
from fxpar.sharding.ops import user_row_of
from fxpar.sharding.program import Op, tensor_nodes, user_line

# The most rows of a factor in a sample: shards of 3 and of 2 rows, and uneven ones.
_SMALL = (6, 7)
# The numbers of ranks on which small samples are tried.
_SMALL_COUNTS = (2, 3)
# An op may work in blocks of rows, which small shards split: where small samples fail,
# larger ones decide, on the number of ranks of each axis of the mesh, and of the axes
# over which the plan splits the factor.
_LARGE = (256, 1 << 62)
# The most elements of a tensor in a sample.
_MOST = 1 << 24

# Factor -> the numbers of ranks over which to split it.
Counts = Mapping[str, Sequence[int]]

# Keys of what was checked: op, sized rule, numbers of ranks, other arguments.
_CHECKED: set[Any] = set()


class _NotRun(Exception):
    """Is raised for a sample that cannot check the rule; the message says why."""


@dataclass(frozen=True)
class _Failure:
    """Is a way to run the op that gives other numbers than one device."""

    factor: str | None  # the factor that was split; None: an operand was partial
    is_uneven: bool  # whether shards had unequal sizes
    error: Exception  # the error of the run, or of the comparison


def check_user_rules(decision: Decision) -> None:
    """Raise RuleError for a rule of ``fxpar.rule`` that is wrong for a call of the
    program; warn of one that cannot be checked."""
    mesh = decision.mesh
    for op, strategy in zip(decision.program.ops, decision.strategies, strict=True):
        if not op.has_rule or user_row_of(op.target) is None:
            continue
        axes = [(axis,) for axis in mesh.names]
        counts = {
            factor: sorted({mesh.count(x) for x in (*axes, split)} - {1})
            for factor in op.rule.free
            for split in [strategy.axes_of.get(factor, ())]
        }
        sizes = tuple((f, _torch.symbols.hint_of(n)) for f, n in op.rule.sizes)
        rule = str(op.rule), op.rule.passages, op.rule.even, sizes
        key = op.target, rule, str(counts), _kind(op.node)
        if key not in _CHECKED:
            with _torch.aot.as_compiled(), torch.no_grad(), torch.random.fork_rng():
                _check(op, counts)
            _CHECKED.add(key)


def _kind(node: fx.Node) -> str:
    """Return the arguments of a call as text, without the sizes of tensors."""

    def text(x: fx.Node) -> str:
        value = x.meta.get("val")
        return str(value.dtype if isinstance(value, torch.Tensor) else value)

    return repr(fx.node.map_arg((node.args, node.kwargs), text))


def _check(op: Op, counts: Counts) -> None:
    try:
        failures = _failures(op, counts)
    except _NotRun as error:
        what = f"the rule '{op.rule}' of {op.target} is not checked: {error}"
        fix = "compare losses with one device, or FXPAR_VERIFY=1"
        warn(what, where=user_line(op.node), fix=fix)
        return
    if failures:
        first = failures[0]
        how = f"{first.factor!r} is split" if first.factor else "an operand is partial"
        raise RuleError(
            f"the rule '{op.rule}' of {op.target} is wrong: where {how}, ranks compute "
            f"other numbers than one device ({_first_line(first.error)})",
            where=user_line(op.node),
            fix=_fix(op, failures),
        )


def _fix(op: Op, failures: Sequence[_Failure]) -> str:
    factors = {x.factor for x in failures if x.factor and not x.is_uneven}
    if factors:
        corrected = replace(op.rule, whole=op.rule.whole.union(factors))
        return f'keep it whole: fxpar.rule("{op.target.name()}", "{corrected}")'
    if any(x.is_uneven for x in failures):
        return "give the rule even=True: shards are then of one size"
    return "leave out the mark (linear=, monotone=, movement=) that lets it be partial"


def _failures(op: Op, counts: Counts) -> list[_Failure]:
    """Return the failures of the rule; raises _NotRun if no sample can be run."""
    reasons: list[str] = []
    failures: list[_Failure] | None = None
    for most in _SMALL:
        try:
            few = dict.fromkeys(op.rule.free, _SMALL_COUNTS)
            failures = (failures or []) + _try(op, most, few)
        except _NotRun as error:
            reasons.append(str(error))
    for most in _LARGE:
        if failures == []:
            break
        try:
            failures = _try(op, most, counts)
        except _NotRun as error:
            reasons.append(str(error))
    if failures is None:
        raise _NotRun(reasons[0])
    return failures


def _try(op: Op, most: int, counts: Counts) -> list[_Failure]:
    """Return the failures of the rule on a sample of at most ``most`` rows of each
    factor; raises _NotRun."""
    one, want, generator = _sample(op, most)
    rule, failures = one.rule, []
    assert rule is not None
    splits = [
        (factor, n, case(rule, {factor: [("x", n)]}))
        for factor in rule.free
        for n in counts[factor]
    ]
    partials = [(None, 1, way) for way in passing(one, rule)]
    for factor, n, way in [*splits, *partials]:
        if way is None:
            continue
        mesh, strategy = way
        try:
            one.check(strategy, mesh, want, generator)
        except Exception as error:
            is_uneven = factor is not None and rule.size[factor] % n != 0
            failures.append(_Failure(factor, is_uneven, error))
    return failures


def _sample(op: Op, most: int) -> tuple[OneOp, list[torch.Tensor], torch.Generator]:
    """Return a call of the op on random tensors, its results, and the generator."""
    sizes = {f: min(_torch.symbols.hint_of(n), most) for f, n in op.rule.sizes}
    shapes = []
    for x, dims in zip(tensor_nodes(op.node), op.rule.operands, strict=True):
        actual = _torch.symbols.hint_shape(x.meta["val"].shape)
        shapes.append(
            [_size(dim, sizes, n) for dim, n in zip(dims, actual, strict=True)]
        )
    if any(torch.Size(shape).numel() > _MOST for shape in shapes):
        raise _NotRun("its tensors are too large for a sample")
    generator = torch.Generator().manual_seed(0)
    try:
        for draw in (torch.randn, torch.rand):
            args, kwargs = _arguments(op.node, shapes, draw, generator)
            one = OneOp(op.target, args, kwargs)
            want = one.expected()
            if all(readable(x).isfinite().all() for x in want):
                break
        if str(one.rule) != str(op.rule):
            raise _NotRun("it is another rule where dims are small")
        again = one.expected()
    except _NotRun:
        raise
    except Exception as error:
        raise _NotRun(f"a sample fails ({_first_line(error)})") from error
    try:
        for x, y in zip(want, again, strict=True):
            close(x, y, want)
    except AssertionError as error:
        raise _NotRun("the op gives other numbers at every call") from error
    return one, want, generator


def _size(dim: Sequence[str], sizes: dict[str, int], actual: int) -> int:
    """Return the rows of a dim of these factors; without factors, ``actual``."""
    rows = 1
    for factor in dim:
        rows *= sizes[factor]
    return rows if dim else actual


def _arguments(
    node: fx.Node, shapes: Sequence[Sequence[int]], draw: Any, generator: Any
) -> tuple[Any, Any]:
    """Return the arguments of a call with random tensors of other shapes; integer ones
    are zeros, then ones, which are valid as indices and offsets nearly everywhere."""
    sizes_left = iter(shapes)

    def argument(x: fx.Node) -> Any:
        value = x.meta["val"]
        if not isinstance(value, torch.Tensor):
            return _torch.symbols.hint_of(value)
        shape, dtype = next(sizes_left), value.dtype
        if dtype.is_floating_point or dtype.is_complex:
            wide = torch.complex128 if dtype.is_complex else torch.float64
            sample = draw(shape, generator=generator, dtype=wide)
        else:
            sample = torch.randint(0, 2, shape, generator=generator)
            if shape:  # offsets may not go back: an op that trusts them would crash
                sample = sample.sort().values
        return sample.to(value.device, dtype)

    return fx.node.map_arg((node.args, node.kwargs), argument)


def _first_line(error: Exception) -> str:
    lines = [x.strip() for x in str(error).splitlines() if x.strip()]
    numbers = [x for x in lines if x.startswith("Mismatched elements")]
    return (numbers or lines or [type(error).__name__])[0]
