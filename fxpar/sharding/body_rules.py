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
# Class -> the reduction over it that a value still needs if the class is split.
Partials = dict[Key, str]


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
    # (body, value) -> classes over which it is partial.
    partial: dict[tuple[int, int], Partials] = field(default_factory=dict)
    # (body, op) -> (class, reduction, passage) of its partial operands.
    passes: dict[tuple[int, int], list[tuple[Key, str, int]]] = field(
        default_factory=dict
    )
    # Position of a carried value -> classes over which it is partial.
    carry: dict[int, Partials] = field(default_factory=dict)
    # (body, value): zeros, which are partial sums of themselves.
    zero: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        for b, program in enumerate(self.programs):
            for op in program.ops:
                self._join_op(b, op)
        self._join_ends()
        self._keep_whole()
        while self._flow(trial=True):
            pass
        while self._flow():
            pass

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

    def _set_whole(self, key: Key) -> bool:
        """Mark a class as whole; return whether it was not before."""
        key = self.find(key)
        fresh = key not in self.whole
        self.whole.add(key)
        return fresh

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

    def _flow(self, *, trial: bool = False) -> bool:
        """Follow partial values through the bodies; return whether classes became whole
        or more carried values partial, so that it has to be repeated. ``trial``: find
        the values that may be carried as partial sums; the other carried values count
        as zeros, and no class becomes whole."""
        self.partial, self.passes, self.zero = {}, {}, set()
        before = set(self.whole)
        changed = False
        for b, program in enumerate(self.programs):
            for j in range(self.ties.carried):
                v = program.inputs[j]
                if v is None:
                    continue
                partials = self.carry.get(j, {})
                free_partials = {c: r for c, r in partials.items() if self.is_free(c)}
                self.partial[b, v] = free_partials
                if trial and not free_partials:
                    self.zero.add((b, v))
            for op in program.ops:
                changed |= self._through(b, op)
        carried = sum(map(len, self.carry.values()))
        changed |= self._leave()
        if trial:
            self.whole = before
            return sum(map(len, self.carry.values())) > carried
        return changed

    def _through(self, b: int, op: Op) -> bool:
        """Find the classes over which an op's results are partial; return whether
        classes became whole."""
        rule, changed = op.rule, False
        class_of = {f: self.find(("factor", b, op.index, f)) for f in rule.factors}
        partials: list[Partials] = [{} for _ in op.results]
        for j, contracted in enumerate(rule.contracted_by):
            for f in sorted(contracted):
                if self.is_free(class_of[f]):
                    partials[j][class_of[f]] = rule.reduction.get(f, "sum")
        summed: Partials = {c: r for partial in partials for c, r in partial.items()}
        reads = [dict(self.partial.get((b, v), {})) for v in op.operands]
        for i in rule.accumulates:
            have = {class_of[f] for dim in rule.operands[i] for f in dim}
            for c, r in summed.items():
                if c not in have and reads[i].pop(c, None) != r:
                    changed |= self._set_whole(c)
        for c in sorted({c for read in reads for c in read}):
            reduction_passage = (
                None if c in class_of.values() else self._passage(b, op, c, reads)
            )
            if reduction_passage is None:
                changed |= self._set_whole(c)
                continue
            self.passes.setdefault((b, op.index), []).append((c, *reduction_passage))
            for partial in partials:
                partial[c] = reduction_passage[0]
        zero = self._zero_operands(b, op)
        if op.is_zero or any(
            "sum" in p.reductions and zero >= {*p.operands} for p in rule.passages
        ):
            self.zero.update((b, v) for v in op.results)
        for v, partial in zip(op.results, partials, strict=True):
            shape = self.programs[b].values[v].shape
            dims = {self.find(("dim", b, v, d)) for d in range(len(shape))}
            for c in dims & partial.keys():
                changed |= self._set_whole(c)
            self.partial[b, v] = partial
        return changed

    def _passage(
        self, b: int, op: Op, c: Key, reads: Sequence[Partials]
    ) -> tuple[str, int] | None:
        """Return (reduction, passage) by which operands that are partial over a class
        pass through an op; None if they cannot."""
        partial = {i for i, read in enumerate(reads) if c in read}
        reductions = {reads[i][c] for i in partial}
        zero = self._zero_operands(b, op)
        for p, passage in enumerate(op.rule.passages):
            group = set(passage.operands)
            if partial <= group <= partial | zero and len(reductions) == 1:
                (reduction,) = reductions
                if reduction in passage.reductions and (
                    group == partial or reduction == "sum"
                ):
                    return reduction, p
        return None

    def _zero_operands(self, b: int, op: Op) -> set[int]:
        """Return the operands of an op that are zeros."""
        return {i for i, v in enumerate(op.operands) if (b, v) in self.zero}

    def _leave(self) -> bool:
        """Mark as whole the classes over which bodies disagree on a result, or a
        carried value is not partial both before and after; return whether anything
        changed."""
        changed = False
        for partials, j, bodies in self._results():
            for c, r in partials.items():
                if any(
                    self.partial.get((b, v), {}).get(c) != r
                    and not (r == "sum" and (b, v) in self.zero)
                    for b, v in bodies
                ):
                    changed |= self._set_whole(c)
                elif j < self.ties.carried and c not in self.carry.get(j, {}):
                    self.carry.setdefault(j, {})[c] = r
                    changed = True
            if j < self.ties.carried:
                lost_axes = self.carry.get(j, {}).keys() - partials.keys()
                for c in filter(self.is_free, sorted(lost_axes)):
                    changed |= self._set_whole(c)
        for b, program in enumerate(self.programs):
            for v, (i, _) in zip(program.outputs, self.ties.outputs[b], strict=True):
                # the condition of a loop, equal on all ranks
                if i is None and v is not None:
                    for c in self.partial.get((b, v), {}):
                        changed |= self._set_whole(c)
        return changed or self._agree()

    def _results(self) -> list[tuple[Partials, int, list[tuple[int, int]]]]:
        """Return for each result the classes over which some body makes it partial, its
        position, and the (body, value) pairs that give it."""
        out = []
        for j in range(len(self.results)):
            bodies = [
                (b, v)
                for b, program in enumerate(self.programs)
                for v, (i, _) in zip(program.outputs, self.ties.outputs[b], strict=True)
                if i == j and v is not None
            ]
            partials: Partials = {}
            for at in bodies:
                partials |= self.partial.get(at, {})
            out.append((partials, j, bodies))
        return out

    def _agree(self) -> bool:
        """Mark as whole each class that has two reductions, that no operand of the call
        has, or over which only some carried values are partial; return whether any is
        new."""
        changed = False
        operands = [
            {self.find(("operand", -1, i, d)) for d in range(len(shape))}
            for i, shape in enumerate(self.operands)
        ]
        have = set().union(*operands)
        reductions: Partials = {}
        for partials, _, _ in self._results():
            for c, r in partials.items():
                if c not in have or reductions.setdefault(c, r) != r:
                    changed |= self._set_whole(c)
        for j, carried in self.carry.items():
            i = self.ties.inputs[j][0] or 0
            for c in reductions.keys() - operands[i] - carried.keys():
                if any(self.is_free(x) for x in carried):
                    changed |= self._set_whole(c)
        return changed

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
        rule = Rule(operands, results, tuple(sizes.items()), whole, even=True)
        equal_over, reductions = set[tuple[int, str]](), dict[str, str]()
        for partials, j, _ in self._results():
            sums = {self.names[c]: r for c, r in partials.items() if c in self.names}
            reductions |= sums
            have = {f for dim in results[j] for f in dim}
            equal_over |= {(j, f) for f in rule.factors if f not in have | sums.keys()}
        partial = [
            j
            for j, partials in self.carry.items()
            if partials.keys() & self.names.keys()
        ]
        return replace(
            rule,
            reductions=tuple(reductions.items()),
            equal_over=frozenset(equal_over),
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
                (axis, reduction, p)
                for c, reduction, p in self.passes.get((b, op.index), ())
                for axis in of.get(c, ())
            ),
        )

    def axes_of(self, v: int, b: int, axes: Mapping[str, Axes]) -> list[Axes]:
        """Return the axes that split each dim of a value of a body."""
        shape = self.programs[b].values[v].shape
        names = (self.names.get(self.find(("dim", b, v, d))) for d in range(len(shape)))
        return [axes.get(name, ()) if name else () for name in names]


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
