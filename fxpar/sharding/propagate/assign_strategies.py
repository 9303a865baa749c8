"""Turns a spec per value into a strategy per op: which axes split which factor.

In: the propagated State. Out: one Strategy per op. Where all tensors of an op agree
there is nothing to decide. Where several factors want an axis, every assignment is
priced: resharding the operands, resharding the result to its value's spec, and the op's
own work, which an unused axis leaves undivided. Two rules come before the price: an
axis that came from the dim of experts stays on the factor it splits there, so rows go
to their experts; else one that came from a batch dim does, so data parallelism gathers
parameters and never the batch (ZeRO; GSPMD section 5).

``make_as_read``. In: the strategies, and the spec each value settles
in. Out: both, changed: an input whose layout the plan chooses is fed in the one that
its reader reads; of values made of constants alone, such as positions that count up and
masks of them, a rank computes the part that it reads, or the whole. Never: changes the
graph.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, MutableSequence, Sequence
from functools import cached_property

from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.cost.program_kernels import Work, seconds, work_alone
from fxpar.sharding.factors import Axes, Rule
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Op, Program
from fxpar.sharding.propagate.propagation import State
from fxpar.sharding.reshard.route import price_of
from fxpar.sharding.shift_messages import messages_of
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import (
    Strategy,
    fits,
    operand_spec,
    project,
    result_spec,
    specs,
)

# Beyond this many assignments axes are decided one after another, largest first.
_JOINT = 64


def choose(
    program: Program,
    state: State,
    fed: Collection[int],
    mesh: Mesh,
    hardware: Hardware,
) -> list[Strategy]:
    """Return a strategy per op; ``hardware``, and the links of ``mesh``, price ties.
    ``fed``: inputs that are fed as they are read."""
    specs = [state.spec(v.index) for v in program.values]
    weights = program.of_sharded
    # A value that is fed, or made, in the layout in which it is read needs no reshard.
    open_ = program.constants.union(fed)
    cache: dict = {}
    out = []
    for op in program.ops:
        origins = [
            (i, axis, origin)
            for i, v in enumerate(op.tensors)
            for axis, origin in state.origins[v].items()
        ]
        batch = frozenset((i, axis) for i, axis, origin in origins if origin.batch)
        experts = frozenset((i, axis) for i, axis, origin in origins if origin.experts)
        stored = tuple(v in weights for v in op.operands)
        free = tuple(v in open_ for v in op.operands)
        own = tuple(specs[v] for v in op.tensors)
        messages = messages_of(op) if op.rule.sends else None
        key = (op.rule, own, batch, experts, stored, free, op.target, messages)
        if key not in cache:
            conventional = (experts, batch)
            choice = _Choice(
                program, op, specs, conventional, stored, free, mesh, hardware
            )
            cache[key] = choice.strategy()
        out.append(cache[key])
    return out


class _Choice:
    """Decides the strategy of one op, from the specs of its tensors."""

    def __init__(
        self,
        program: Program,
        op: Op,
        specs: list[Spec],
        fixed: tuple[frozenset[tuple[int, str]], ...],
        stored: tuple[bool, ...],
        free: tuple[bool, ...],
        mesh: Mesh,
        hardware: Hardware,
    ) -> None:
        self.program, self.op, self.mesh = program, op, mesh
        self.hardware = hardware
        self.specs = [specs[v] for v in op.tensors]
        self.views = [
            project(dims, spec, op.rule.size, mesh, even=op.rule.evenly)
            for dims, spec in zip(op.rule.tensors, self.specs, strict=True)
        ]
        # Sets of (tensor, axis): axes that stay on their factors, firmest set first.
        self.fixed = fixed
        self.free = free  # operands that are fed, or made, in any layout
        experts, batch = ({axis for _, axis in kind} for kind in fixed)
        # A parameter is gathered over what splits the batch, whatever is chosen.
        self.priced = [
            spec.without(batch - experts) if ours else spec
            for spec, ours in zip(self.specs, stored, strict=False)
        ]

    @cached_property
    def work(self) -> Work:
        return work_alone(self.op, self.program.values)

    def strategy(self) -> Strategy:
        options = self._options()
        if not options:
            return Strategy(self.op.rule.pinned)
        if all(len(factors) == 1 for factors in options.values()):
            single = self._build({a: factors[0] for a, factors in options.items()})
            if single is not None and self._is_without_reshards(single):
                return single
        best = self._best({a: (*factors, None) for a, factors in options.items()})
        return best if best is not None else Strategy(self.op.rule.pinned)

    def _options(self) -> dict[str, tuple[str, ...]]:
        """Return for each axis the factors that some tensor of the op splits by it."""
        whole, pin, options = self.op.rule.whole, self.op.rule.pin, {}
        for axis in dict.fromkeys(a for spec in self.specs for a in spec.sharded_axes):
            if axis in pin:
                continue
            factors: dict[str, int] = {}
            for i, view in enumerate(self.views):
                for factor, axes in view.items():
                    if axis in axes and factor not in whole:
                        rank = factors.get(factor, len(self.fixed))
                        factors[factor] = min(rank, self._rank(i, axis))
            first = min(factors.values(), default=0)
            if factors:
                options[axis] = tuple(f for f, rank in factors.items() if rank == first)
        return options

    def _rank(self, tensor: int, axis: str) -> int:
        """Return how firmly a tensor's axis stays on its factor; 0 is the firmest."""
        for rank, kind in enumerate(self.fixed):
            if (tensor, axis) in kind:
                return rank
        return len(self.fixed)

    def _build(self, factor_of: dict[str, str | None]) -> Strategy | None:
        """Return the strategy of an axis -> factor assignment; None if it is not
        expressible.

        Axes that share a factor are ordered as in the tensor that has most of them.
        """
        rule: Rule = self.op.rule
        axes_of: dict[str, Axes] = dict(rule.pinned)
        for factor in dict.fromkeys(f for f in factor_of.values() if f):
            axes = [a for a, f in factor_of.items() if f == factor]
            lead = max(
                (view.get(factor, ()) for view in self.views),
                key=lambda have: sum(a in axes for a in have),
            )
            place = {a: i for i, a in enumerate(lead)}
            axes_of[factor] = tuple(sorted(axes, key=lambda a: place.get(a, len(lead))))
        if not fits(rule, axes_of, self.mesh):
            return None
        return Strategy(tuple(axes_of.items()))

    def _is_without_reshards(self, strategy: Strategy) -> bool:
        """Return whether no tensor needs resharding, other than reducing a partial
        result."""
        n = len(self.op.operands)
        pairs = zip(specs(self.op.rule, strategy), self.specs, strict=True)
        return all(
            have == want if i < n else have.dims == want.dims
            for i, (have, want) in enumerate(pairs)
        )

    def _best(self, options: dict[str, tuple[str | None, ...]]) -> Strategy | None:
        if math.prod(map(len, options.values())) <= _JOINT:
            combinations = itertools.product(*options.values())
            pairs = (zip(options, x, strict=True) for x in combinations)
            return min((self._build(dict(x)) for x in pairs), key=self._cost)
        factor_of: dict[str, str | None] = {}
        for axis in sorted(options, key=lambda a: -self.mesh.sizes[a]):
            trials = [{**factor_of, axis: factor} for factor in options[axis]]
            costs = [(self._cost(self._build(t)), i) for i, t in enumerate(trials)]
            factor_of = trials[min(costs)[1]]
        return self._build(factor_of)

    def _cost(self, strategy: Strategy | None) -> float:
        """Return the seconds of operands resharded, results settled, and the op's
        work."""
        if strategy is None:
            return math.inf
        op, mesh, values = self.op, self.mesh, self.program.values
        total = seconds(op, self.work, strategy, mesh, self.hardware)
        for i, (v, spec) in enumerate(
            zip(op.tensors, specs(op.rule, strategy), strict=True)
        ):
            if i >= len(op.operands):
                total += price_of(values[v], spec, self.specs[i], mesh)
            elif not self.free[i]:
                total += price_of(values[v], self.priced[i], spec, mesh)
        return total


def fed_as_read(program: Program, state: State) -> set[int]:
    """Return inputs whose layout the plan chooses, that have one reader and no
    gradient, and whose axes, if any, came from there: no seed contradicts the spec that
    reader needs."""
    signature = program.signature
    of = {out.of for out in signature.outputs}
    pairs = enumerate(zip(signature.inputs, program.inputs, strict=True))
    return {
        v
        for k, (declared, v) in pairs
        if v is not None
        and declared.kind == "input"
        and declared.at_rest is None
        and declared.use is None
        and k not in of
        and len(program.uses[v]) == 1
        and v not in program.returned
        and not any(state.closed[v])
        and v not in state.whole
        and all(origin.op is not None for origin in state.origins[v].values())
    }


def make_as_read(
    program: Program,
    fed: Collection[int],
    strategies: MutableSequence[Strategy],
    settled: MutableSequence[Spec],
    mesh: Mesh,
) -> None:
    """Give each constant value the spec in which it is read: split where all readers
    agree, else whole, of which any part is a slice; then each input of ``fed`` the spec
    in which its one reader reads it. Changes both lists."""
    constants = program.constants
    outputs = set(program.outputs)
    for op in reversed(program.ops):
        if len(op.results) != 1 or not constants.issuperset(op.results):
            continue
        (v,) = op.results
        reads = {x.without_partial() for x in specs_read(program, strategies, v)}
        if v in outputs:
            reads.add(settled[v])
        whole = Spec.whole(len(program.values[v].shape))
        need = reads.pop() if len(reads) == 1 else whole
        strategy = _strategy_for(op, need, mesh)
        if strategy is None:
            need, strategy = whole, Strategy(op.rule.pinned)
        strategies[op.index], settled[v] = strategy, need
    for v in fed:
        (need,) = specs_read(program, strategies, v)
        settled[v] = need.without_partial()


def specs_read(program: Program, strategies: Sequence[Strategy], v: int) -> set[Spec]:
    """Return the specs in which ops read a value."""
    return {
        operand_spec(program.ops[reader].rule, strategies[reader], i)
        for reader, i in program.uses[v]
    }


def _strategy_for(op: Op, spec: Spec, mesh: Mesh) -> Strategy | None:
    """Return the strategy by which an op makes its result in a spec; None if there is
    none."""
    rule = op.rule
    axes_of = project(rule.results[0], spec, rule.size, mesh, even=rule.evenly)
    strategy = Strategy((*rule.pinned, *axes_of.items()))
    if result_spec(rule, strategy, 0) != spec or rule.whole.intersection(axes_of):
        return None
    return strategy if fits(rule, axes_of, mesh) else None
