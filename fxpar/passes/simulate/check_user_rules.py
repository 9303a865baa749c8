"""Checks rules of ops, on small random tensors.

``OneOp`` holds a sample call as a graph of one node. ``OneOp.check`` localizes it under
a strategy that its rule allows (``case`` and ``passing`` give some) with the real
passes, runs every rank on random summands and shards of the operands, joins the results
and compares them with the op's own.

``check_user_rules`` checks rules that users gave. In: the decision about a program.
Out: nothing, or RuleError for a rule by which ranks would compute other numbers than
one device: each factor that the rule allows an axis to split is split, each operand
that it allows to be partial gets random summands. An op that cannot be run here is a
warning. A rule is checked once in a process for the same sizes. Never: communicates, or
changes the random state.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.errors import RuleError, warn
from fxpar.passes.localize import insert_reshards, localize
from fxpar.passes.simulate.emulate_collectives import gather, scatter
from fxpar.passes.simulate.lockstep import run_lockstep
from fxpar.sharding.decide import Decision
from fxpar.sharding.factors import Passage, Rule
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_table import tensors_of
from fxpar.sharding.ops import user_row_of
from fxpar.sharding.program import Input, Op, Output, Signature, tensor_nodes, user_line
from fxpar.sharding.read_program import read
from fxpar.sharding.reshard.route import connect
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import Strategy, fits, specs

# A mesh, and a strategy of the op on it.
Case = tuple[Mesh, Strategy]


class OneOp:
    """Is the call ``target(*args, **kwargs)`` as a graph of global fake values."""

    def __init__(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        self.target, self.args, self.kwargs = target, args, kwargs
        self.operands = tensors_of((args, kwargs))
        self.mode = _torch.fake.new_fake_mode()
        self.graph = fx.Graph()
        inputs = []
        for i, x in enumerate(self.operands):
            inputs.append(self.graph.placeholder(f"x{i}"))
            inputs[-1].meta["val"] = self.mode.from_tensor(x)
        nodes = iter(inputs)
        node = self.graph.call_function(
            target,
            *_map_tensors(lambda _: next(nodes), (args, kwargs)),
        )
        fakes = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with self.mode:
            val = target(*fakes[0], **fakes[1])
        node.meta["val"] = val
        self.graph.output(tuple(self._results(node, val)))
        signature = Signature(
            tuple(Input(n.name) for n in inputs),
            tuple(Output(f"y{i}") for i in range(len(tensors_of(val)))),
        )
        self.program = read(self.graph, signature)

    def _results(self, node: fx.Node, val: Any) -> list[fx.Node]:
        if isinstance(val, torch.Tensor):
            return [node]
        results = []
        for i, x in enumerate(val):
            if isinstance(x, torch.Tensor):
                results.append(self.graph.call_function(operator.getitem, (node, i)))
                results[-1].meta["val"] = x
        return results

    @property
    def rule(self) -> Rule | None:
        """Return the rule of the call, sized; None if its row has none."""
        op = self.program.ops[0]
        return op.rule if op.has_rule else None

    def expected(self) -> list[torch.Tensor]:
        """Return the results on one device."""
        copies = _map_tensors(torch.Tensor.clone, (self.args, self.kwargs))
        return tensors_of(self.target(*copies[0], **copies[1]))

    def localized(self, strategy: Strategy, mesh: Mesh) -> fx.Graph:
        """Return the local graph under a strategy that needs no reshard."""
        op = self.program.ops[0]
        tensor_specs = specs(op.rule, strategy)
        settled = [Spec.whole(len(v.shape)) for v in self.program.values]
        for v, spec in zip(op.tensors, tensor_specs, strict=True):
            settled[v] = spec
        n, signature = len(op.operands), self.program.signature
        program = replace(
            self.program,
            signature=Signature(
                tuple(
                    replace(x, at_rest=spec)
                    for x, spec in zip(signature.inputs, tensor_specs[:n], strict=True)
                ),
                tuple(
                    replace(x, at_rest=spec)
                    for x, spec in zip(signature.outputs, tensor_specs[n:], strict=True)
                ),
            ),
        )
        edges = connect(program, [strategy], settled, mesh)
        assert not edges.reshards, edges.reshards
        decision = Decision(program, mesh, (strategy,), tuple(settled), edges, ())
        return localize(insert_reshards(self.graph, decision), decision, self.mode)

    def check(
        self,
        strategy: Strategy,
        mesh: Mesh,
        expected: Sequence[torch.Tensor] | None,
        generator: torch.Generator,
    ) -> None:
        """Raise unless all ranks together compute what the op computes. ``expected``
        None: only shapes are compared, since values are arbitrary."""
        local = self.localized(strategy, mesh)
        if any(x.is_meta for x in self.operands):
            return  # no kernel: localizing has compared the shapes
        n, tensor_specs = len(self.operands), specs(self.program.ops[0].rule, strategy)
        parts = [
            scatter(x.clone(), spec, mesh, partial(decomposed, generator=generator))
            for x, spec in zip(self.operands, tensor_specs[:n], strict=True)
        ]
        ranks = [[part[r] for part in parts] for r in range(mesh.size)]
        outs = run_lockstep(local, mesh, ranks)
        for i, spec in enumerate(tensor_specs[n:]):
            if expected is None:
                value = self.program.values[self.program.ops[0].results[i]]
                for rank, out in enumerate(outs):
                    shape = spec.rank_shape(mesh, value.shape, rank)
                    assert tuple(out[i].shape) == shape
                continue
            got = gather([out[i] for out in outs], spec, mesh)
            close(got, expected[i], [*self.operands, *expected])


def _map_tensors(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    return _torch.fake.tree_map(
        lambda x: fn(x) if isinstance(x, torch.Tensor) else x, tree
    )


def close(
    got: torch.Tensor, want: torch.Tensor, involved: Sequence[torch.Tensor]
) -> None:
    """Check that two tensors are equal up to the rounding of the coarsest dtype of
    ``involved``."""
    assert got.dtype == want.dtype, f"{got.dtype} instead of {want.dtype}"
    dtypes = {x.dtype for x in involved if x.is_floating_point() or x.is_complex()}
    # 1e-9 for float64, 1e-4 for float32, 5e-2 for bfloat16; complex as their parts.
    rounding = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
    tolerance = max(1e-9, rounding**0.57)
    torch.testing.assert_close(
        readable(got), readable(want), rtol=tolerance, atol=tolerance, equal_nan=True
    )


def readable(x: torch.Tensor) -> torch.Tensor:
    """Return the same numbers in a dtype that can be compared: few ops take 8-bit
    floats."""
    return x.float() if x.dtype.itemsize == 1 and x.is_floating_point() else x


def decomposed(
    x: torch.Tensor, reduction: str, count: int, generator: torch.Generator
) -> list[torch.Tensor]:
    """Return ``count`` random tensors that ``reduction`` combines to ``x``."""
    exact = not (x.is_floating_point() or x.is_complex())
    whole = exact and x.dtype != torch.bool

    def noise() -> torch.Tensor:
        random = torch.rand(x.shape, generator=generator, dtype=torch.float64)
        if x.dtype == torch.bool:
            return (random < 0.5).to(x.device)
        return (random * 4 if exact else random).to(x.device, x.dtype)

    if reduction == "sum" and (whole or not exact):
        others = [noise() for _ in range(count - 1)]
        return [x - sum(others), *others] if others else [x]
    if reduction == "avg":
        others = [noise() for _ in range(count - 1)]
        return [x - sum(others), *(x + other for other in others)]
    if reduction == "product" and not exact:
        others = [0.5 + noise() for _ in range(count - 1)]
        return [x / math.prod(others), *others]
    # For each element, a random rank has the value; the others values that lose.
    owner = torch.randint(0, count, x.shape, generator=generator).to(x.device)
    weaker = {
        "max": (lambda: x & noise())
        if x.dtype == torch.bool
        else (lambda: x - noise()),
        "min": (lambda: x | noise())
        if x.dtype == torch.bool
        else (lambda: x + noise()),
        "sum": lambda: x & noise(),  # of bools: whether any is True
        "product": lambda: x | noise() if x.dtype == torch.bool else torch.ones_like(x),
    }[reduction]
    return [torch.where(owner == i, x, weaker()) for i in range(count)]


def reductions_of(passage: Passage, one: OneOp) -> list[str]:
    """Return the passage's reductions that exist for its operands' dtypes."""
    operands = [one.operands[i] for i in passage.operands]
    exact = not all(x.is_floating_point() or x.is_complex() for x in operands)
    ordered = not any(x.is_complex() for x in operands)
    exist = {"avg": not exact, "max": ordered, "min": ordered}
    return [op for op in passage.reductions if exist.get(op, True)]


def majors(rule: Rule, factor: str) -> list[str]:
    """Return the factors above ``factor`` in some dim, which must be split completely
    for ``factor`` to be split."""
    enclosing = []
    for dim in (dim for dims in rule.tensors for dim in dims if factor in dim):
        enclosing += [f for f in dim[: dim.index(factor)] if rule.size[f] > 1]
    return list(dict.fromkeys(enclosing))


def case(
    rule: Rule, splits: dict[str, list[tuple[str, int]]], *passes: Any
) -> Case | None:
    """Return a mesh and a strategy that split each factor by the given (axis, size)
    pairs, and the factors above it completely; None if that is impossible."""
    split = dict(splits)
    for factor in splits:
        for i, major in enumerate(majors(rule, factor)):
            have = math.prod(n for _, n in split.get(major, []))
            if rule.size[major] % have:
                return None
            if rule.size[major] > have:
                rest = (f"{factor}{i}", rule.size[major] // have)
                split[major] = [*split.get(major, []), rest]
    if any(f in rule.whole for f in split):
        return None
    sizes = dict(pair for pairs in split.values() for pair in pairs)
    sizes |= {axis: 2 for axis, _, _ in passes}
    mesh = Mesh(tuple(sorted(sizes.items())))
    strategy = Strategy(
        tuple((f, tuple(axis for axis, _ in pairs)) for f, pairs in split.items()),
        passes,
    )
    return (mesh, strategy) if fits(rule, strategy.axes_of, mesh) else None


def passing(one: OneOp, rule: Rule) -> Iterator[Case | None]:
    """Yield a case for each passage and reduction, with all factors whole."""
    for p, passage in enumerate(rule.passages):
        for reduction in reductions_of(passage, one):
            yield case(rule, {}, ("p", reduction, p))


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
        rule = str(op.rule), op.rule.passages, op.rule.evenly, sizes
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
        actual = zip(dims, _torch.symbols.hint_shape(x.meta["val"].shape), strict=True)
        # A dim without factors has as many rows as in the program.
        shapes.append([math.prod(sizes[f] for f in d) if d else n for d, n in actual])
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
