"""Makes the rule of an op that runs graphs of its own from the rules of the ops inside.

A *body* is such a graph: a branch of ``cond``, the step of ``scan``, ``map`` and
``while_loop``. Dims of its values that share a factor of an op form one *class*: an
axis that splits one dim of it splits all of them, and no collective is needed inside,
so that ranks never meet in a branch that some do not take. A class becomes a factor of
the call's rule where every op can run with it split; where ops sum over it, only if the
partial sums reach results of the call through ops that let them pass. A value that a
loop carries has one spec, and is partial before a step if it is partial after it.
In: the arguments and results of a call, and a function that reads a body as a Program.
Out: ``Inside``, with the rule, and strategies of the ops inside.
Never: changes a graph, or puts a reshard into a body.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.sharding.factors import Axes, Dims, Rule
from fxpar.sharding.op_table import tensors_of
from fxpar.sharding.strategy import Strategy


@dataclass(frozen=True)
class Ties:
    """Says how a call's tensors become tensors of its bodies, which take equal
    inputs."""

    # In the order of the call: branches, or the condition of a loop and its step.
    bodies: tuple[fx.GraphModule, ...]
    # For each placeholder the position of its operand (None: no tensor), and whether it
    # is one slice of the operand along dim 0.
    inputs: tuple[tuple[int | None, bool], ...]
    # For each body, for each of its outputs, the position of the result that it gives
    # (None: none), and whether it is a slice of it.
    outputs: tuple[tuple[tuple[int | None, bool], ...], ...]
    # How many outputs of the last body are its first inputs in the next iteration.
    carried: int = 0
    # Whether different ranks may take different slices.
    splits_slices: bool = False


@dataclass(frozen=True)
class CallForm:
    """Holds the positions of an op's arguments that are its bodies and their inputs."""

    # The bodies that compute results.
    bodies: tuple[int, ...]
    # The lists that are inputs of each body, in order.
    inputs: tuple[int, ...]
    # The list of inputs of which a body takes a row at each step; results that are not
    # carried are then stacked rows.
    rows: int | None = None
    # The list of inputs that a loop carries from step to step.
    carried: int | None = None
    # The test of a loop; None: it has none.
    test: int | None = None


FORMS: dict[str, CallForm] = {
    "higher_order::cond": CallForm((1, 2), (3,)),
    "higher_order::map_impl": CallForm((0,), (1, 2), rows=1),
    "higher_order::scan": CallForm((0,), (1, 2, 3), rows=2, carried=1),
    "higher_order::while_loop": CallForm((1,), (2, 3), carried=2, test=0),
}


def ties_of(target: Any, args: Sequence[Any], result: Any) -> Ties | None:
    """Return how a call's tensors become tensors of its bodies; None if the op is not
    known, or if a loop takes, carries or gives a value that is no tensor."""
    form = FORMS.get(_torch.aot.higher_order_name(target))
    results = result if isinstance(result, (list, tuple)) else [result]
    if form is None or not all(isinstance(x, torch.Tensor) for x in results):
        return None
    first = int(isinstance(args[0], torch.Tensor))  # the condition of a branch
    inputs: list[tuple[int | None, bool]] = []
    for i in form.inputs:
        for x in args[i]:
            is_tensor = isinstance(x, torch.Tensor)
            inputs.append((first if is_tensor else None, i == form.rows))
            first += is_tensor
    carried = 0 if form.carried is None else len(args[form.carried])
    if any(i is None for i, _ in inputs[:carried]):
        return None
    sliced = form.rows is not None
    outputs = tuple((i, sliced and i >= carried) for i in range(len(results)))
    tests = [] if form.test is None else [form.test]
    return Ties(
        tuple(args[i] for i in (*tests, *form.bodies)),
        tuple(inputs),
        (*[((None, False),)] * len(tests), *[outputs] * len(form.bodies)),
        carried,
        splits_slices=sliced and form.carried is None,
    )


if TYPE_CHECKING:
    from fxpar.sharding.program import Op, Program

# A dim of a value of a body, or a factor of one of its ops.
Key = tuple[str, int, int, Any]


@dataclass
class Flow:
    """Says which values are partial where a class is split, and how they pass on."""

    # Position of a carried value -> the reduction that it needs before each step.
    carry: Mapping[int, str]
    # (body, value) -> the reduction that it still needs.
    partial: dict[tuple[int, int], str] = field(default_factory=dict)
    # (body, value): zeros, which are partial sums of themselves.
    zero: set[tuple[int, int]] = field(default_factory=set)
    # (body, op) -> (reduction, passage) of its partial operands.
    passes: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)
    # Position of a result -> the reduction that it still needs.
    results: dict[int, str] = field(default_factory=dict)
    # Whether every op can run, and every value leave, like this.
    fits: bool = True


@dataclass
class Inside:
    """Holds the bodies of one call, with their dims grouped into classes."""

    # How the call's tensors become inputs and outputs of the bodies.
    ties: Ties
    # One for each body, in order.
    programs: Sequence[Program]
    # Shapes of the call's operands.
    operands: Sequence[tuple[int, ...]]
    # Shapes of the call's results.
    results: Sequence[tuple[int, ...]]
    # Key -> another of its class, up to the key that names the class (``find``).
    leader: dict[Key, Key] = field(default_factory=dict)
    # Leader of a class -> the greatest common divisor of the sizes of its dims.
    size: dict[Key, int] = field(default_factory=dict)
    # Leaders of classes that no axis may split.
    whole: set[Key] = field(default_factory=set)
    # By the class that is split, of the free classes of the call's dims.
    flows: dict[Key, Flow] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for b, program in enumerate(self.programs):
            for op in program.ops:
                self._join_op(b, op)
        self._join_ends()
        self._keep_whole()
        self._follow()

    # Classes: disjoint sets of keys.

    def find(self, key: Key) -> Key:
        """Return the key that names the class of a dim or a factor."""
        while self.leader.setdefault(key, key) != key:
            key = self.leader[key]
        return key

    def _join(self, a: Key, b: Key, size: int) -> None:
        a, b = self.find(a), self.find(b)
        self.size[a] = math.gcd(self.size.get(a, 0), self.size.get(b, 0), size)
        if a != b:
            self.leader[b] = a
            if b in self.whole:
                self.whole.add(a)

    def _set_whole(self, key: Key) -> None:
        self.whole.add(self.find(key))

    def is_free(self, key: Key) -> bool:
        """Return whether an axis may split a class."""
        leader = self.find(key)
        return leader not in self.whole and self.size.get(leader, 1) > 1

    def _join_op(self, b: int, op: Op) -> None:
        """Join each dim of an op's tensors with its major factor."""
        rule = op.rule
        for v, dims in zip(op.tensors, rule.tensors, strict=True):
            shape = self.programs[b].values[v].shape
            for d, (dim, n) in enumerate(zip(dims, shape, strict=True)):
                dim_key: Key = ("dim", b, v, d)
                keys: list[Key] = [
                    ("factor", b, op.index, f) for f in dim if rule.size[f] > 1
                ]
                self._join(dim_key, keys[0] if keys else dim_key, n)
                for key in keys:
                    self._join(key, key, rule.size[key[3]])
                for key in keys[1:] if keys else [dim_key]:
                    self._set_whole(key)
        for f in rule.whole | rule.exchanged:
            self._set_whole(("factor", b, op.index, f))

    def _join_ends(self) -> None:
        """Join the same input of all bodies, the same output of all bodies, and each
        carried value's input with its output."""
        for b, program in enumerate(self.programs):
            for kind, values, ties in (
                ("operand", program.inputs, self.ties.inputs),
                ("result", program.outputs, self.ties.outputs[b]),
            ):
                for v, (i, sliced) in zip(values, ties, strict=True):
                    if v is None or i is None:
                        continue
                    for d, n in enumerate(program.values[v].shape):
                        self._join((kind, -1, i, d + sliced), ("dim", b, v, d), n)
        for j in range(self.ties.carried):
            i = self.ties.inputs[j][0]
            for d, n in enumerate(self.results[j]):
                self._join(("operand", -1, i or 0, d), ("result", -1, j, d), n)
        if self.ties.splits_slices:
            self._join_slices()

    def _join_slices(self) -> None:
        """Join dim 0 of all operands and results that are slices: ranks may have some
        each."""
        ends = [("operand", i, self.operands) for i, cut in self.ties.inputs if cut]
        ends += [("result", i, self.results) for i, cut in self.ties.outputs[0] if cut]
        kind, first, _ = ends[0]
        for other, i, shapes in ends:
            if i is not None and first is not None:
                self._join((kind, -1, first, 0), (other, -1, i, 0), shapes[i][0])

    def _ends(self) -> list[list[Key]]:
        """Return the dims of each of the call's operands and results."""
        return [
            [(kind, -1, i, d) for d in range(len(shape))]
            for kind, shapes in (("operand", self.operands), ("result", self.results))
            for i, shape in enumerate(shapes)
        ]

    def _keep_whole(self) -> None:
        """Mark as whole each class that has two dims of one value, or a dim of a
        constant of a body."""
        dims = self._ends()
        dims += [
            [("dim", b, v.index, d) for d in range(len(v.shape))]
            for b, program in enumerate(self.programs)
            for v in program.values
        ]
        for keys in dims:
            leaders = [self.find(key) for key in keys]
            for key in leaders:
                if leaders.count(key) > 1:
                    self._set_whole(key)
        for b, program in enumerate(self.programs):
            for v in program.values:
                if v.index not in program.producers and v.index not in program.inputs:
                    for d in range(len(v.shape)):
                        self._set_whole(("dim", b, v.index, d))

    # Partial sums: where they arise, pass through ops, and leave.

    def _follow(self) -> None:
        """Add the flows of the free classes of the call's dims; classes become whole
        that have none, that are reduced and in no operand of the call, or over which
        only some carried values are partial."""
        classes = {self.find(key) for key in itertools.chain(*self._ends())}
        classes = set(filter(self.is_free, classes))
        operands = [
            {self.find(("operand", -1, i, d)) for d in range(len(shape))}
            for i, shape in enumerate(self.operands)
        ]
        everywhere = set().union(*operands)
        for c in sorted(classes):
            flow = self._flow_of(c)
            if flow is not None and (c in everywhere or not flow.results):
                self.flows[c] = flow
        for j in range(self.ties.carried):
            dims = operands[self.ties.inputs[j][0] or 0]
            if any(j in flow.carry for flow in self.flows.values()):
                self.flows = {
                    c: flow
                    for c, flow in self.flows.items()
                    if j in flow.carry or c in dims or not flow.results
                }
        self.whole |= classes - self.flows.keys()

    def _flow_of(self, c: Key) -> Flow | None:
        """Return what is partial where a class is split; None if an op or an end cannot
        have it so."""
        carry: dict[int, str] = {}
        # A trial finds the values that may be carried as partial sums: the other
        # carried values count as zeros, and what does not fit does not matter.
        trial = True
        while True:
            flow = self._flow(c, carry, trial)
            if not (flow.fits or trial):
                return None
            new = {
                j: r
                for j, r in flow.results.items()
                if j < self.ties.carried and j not in carry
            }
            if not (new or trial):
                return flow
            trial = trial and bool(new)
            carry |= new

    def _flow(self, c: Key, carry: Mapping[int, str], trial: bool) -> Flow:
        """Follow partial values through the bodies. They do not fit where bodies
        disagree on a result, a carried value is not partial both before and after, or
        results have different reductions."""
        flow = Flow(dict(carry))
        ends: dict[int | None, set[tuple[int, int]]] = defaultdict(set)
        for b, program in enumerate(self.programs):
            for j, v in enumerate(program.inputs[: self.ties.carried]):
                if v is not None and j in carry:
                    flow.partial[b, v] = carry[j]
                elif v is not None and trial:
                    flow.zero.add((b, v))
            for op in program.ops:
                self._through(b, op, c, flow)
            for v, (i, _) in zip(program.outputs, self.ties.outputs[b], strict=True):
                if v is not None:
                    ends[i].add((b, v))
        for i, values in ends.items():
            reductions = {flow.partial[x] for x in values if x in flow.partial}
            zero = flow.zero if reductions == {"sum"} else set()
            agree = len(reductions) == 1 and values <= flow.partial.keys() | zero
            if i is not None and agree:
                (flow.results[i],) = reductions
            elif reductions:  # or the condition of a loop, equal on all ranks, is
                flow.fits = False
        flow.fits &= flow.carry.keys() <= flow.results.keys()
        flow.fits &= len({*flow.results.values()}) < 2
        return flow

    def _through(self, b: int, op: Op, c: Key, flow: Flow) -> None:
        """Add the results of an op that are partial or zeros."""
        rule = op.rule
        of_class = {
            f for f in rule.factors if self.find(("factor", b, op.index, f)) == c
        }
        sums: dict[int, str] = {}
        for i, contracted in enumerate(rule.contracted_by):
            for f in sorted(contracted & of_class):
                sums[i] = rule.reduction.get(f, "sum")
        reads = {i: flow.partial.get((b, v)) for i, v in enumerate(op.operands)}
        for i in rule.accumulates if sums else ():
            if of_class.isdisjoint(itertools.chain(*rule.operands[i])):
                flow.fits &= {reads.pop(i)} == {*sums.values()}
        partial = {i: r for i, r in reads.items() if r is not None}
        zero = {i for i, v in enumerate(op.operands) if (b, v) in flow.zero}
        if partial:
            passage = None if of_class else _passage(rule, partial, zero)
            if passage is None:
                flow.fits = False
            else:
                flow.passes[b, op.index] = passage
                sums = dict.fromkeys(range(len(op.results)), passage[0])
        if op.is_zero or any(
            "sum" in p.reductions and zero >= {*p.operands} for p in rule.passages
        ):
            flow.zero.update((b, v) for v in op.results)
        for i, r in sums.items():
            v = op.results[i]
            shape = self.programs[b].values[v].shape
            dims = {self.find(("dim", b, v, d)) for d in range(len(shape))}
            flow.fits &= c not in dims
            flow.partial[b, v] = r

    # Results: the rule of the call, and strategies of the ops inside.

    @cached_property
    def names(self) -> dict[Key, str]:
        """Return the name of a factor of the call's rule for each free class."""
        out: dict[Key, str] = {}
        for key in itertools.chain(*self._ends()):
            if self.is_free(key):
                out.setdefault(self.find(key), f"f{len(out)}")
        return out

    @cached_property
    def rule(self) -> Rule | None:
        """Return the rule of the call; None if nothing of it can be split."""
        if not self.names:
            return None
        sizes: dict[str, int] = {name: self.size[c] for c, name in self.names.items()}
        operands, results = (
            tuple(self._words(kind, i, x, sizes) for i, x in enumerate(shapes))
            for kind, shapes in (("operand", self.operands), ("result", self.results))
        )
        whole = frozenset(sizes) - set(self.names.values())
        rule = Rule(operands, results, tuple(sizes.items()), whole)
        equal_over, reductions = set[tuple[int, str]](), dict[str, str]()
        for j in range(len(results)):
            sums = {
                self.names[c]: flow.results[j]
                for c, flow in self.flows.items()
                if j in flow.results
            }
            reductions |= sums
            have = {f for dim in results[j] for f in dim}
            equal_over |= {(j, f) for f in rule.factors if f not in have | sums.keys()}
        partial = {j for flow in self.flows.values() for j in flow.carry}
        return replace(
            rule,
            reductions=tuple(reductions.items()),
            equal_over=frozenset(equal_over),
            evenly=frozenset(sizes),
            accumulates=tuple(sorted(self.ties.inputs[j][0] or 0 for j in partial)),
        )

    def _words(
        self, kind: str, i: int, shape: Sequence[int], sizes: dict[str, int]
    ) -> Dims:
        """Return the factors of a tensor's dims; where a class divides a dim, the rest
        of the dim is a factor that stays whole."""
        out: list[tuple[str, ...]] = []
        for d, n in enumerate(shape):
            name = self.names.get(self.find((kind, -1, i, d)))
            if name is None:
                out.append(())
            elif sizes[name] == n:
                out.append((name,))
            else:
                rest_factor = f"{name}{kind[0]}{i}d{d}"
                sizes[rest_factor] = n // sizes[name]
                out.append((name, rest_factor))
        return tuple(out)

    def strategy(self, b: int, op: Op, axes: Mapping[str, Axes]) -> Strategy:
        """Return the strategy of an op of a body where ``axes`` split the factors of
        the call's rule."""
        of = {c: axes.get(name, ()) for c, name in self.names.items()}
        factors = [
            (f, of.get(self.find(("factor", b, op.index, f)), ()))
            for f in op.rule.factors
        ]
        return Strategy(
            tuple((f, split) for f, split in factors if split),
            tuple(
                (axis, *flow.passes[b, op.index])
                for c, flow in self.flows.items()
                if (b, op.index) in flow.passes
                for axis in of[c]
            ),
        )

    def axes_of(self, v: int, b: int, axes: Mapping[str, Axes]) -> list[Axes]:
        """Return the axes that split each dim of a value of a body."""
        shape = self.programs[b].values[v].shape
        names = (self.names.get(self.find(("dim", b, v, d))) for d in range(len(shape)))
        return [axes.get(name, ()) if name else () for name in names]


def _passage(
    rule: Rule, partial: Mapping[int, str], zero: set[int]
) -> tuple[str, int] | None:
    """Return (reduction, passage) by which partial operands pass through an op; None if
    they cannot."""
    reduction, *others = {*partial.values()}
    for p, passage in enumerate(() if others else rule.passages):
        group, extra = {*passage.operands}, zero if reduction == "sum" else set()
        if (
            reduction in passage.reductions
            and partial.keys() <= group <= partial.keys() | extra
        ):
            return reduction, p
    return None


def inside(
    target: Any,
    args: Sequence[Any],
    result: Any,
    read_program: Callable[[fx.GraphModule], Program],
) -> Inside | None:
    """Return the bodies of a call, given its arguments as values; None if the op is not
    known to run bodies. ``read_program`` reads a body as a Program."""
    ties = ties_of(target, args, result)
    if ties is None:
        return None
    operands, results = (
        [tuple(map(int, t.shape)) for t in tensors_of(x)] for x in (args, result)
    )
    return Inside(ties, [read_program(body) for body in ties.bodies], operands, results)
