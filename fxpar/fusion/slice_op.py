"""Runs one op of a local graph on a slice, or refuses.

In: a node, and for some of its operands slices of them along one dim. Out: the node's
result on the slice, appended, with the dim of the result that is sliced; or ``Refused``
with the reason. An op may run on slices of a dim if its rule has one factor for them
and the result has that factor, as pointwise ops, reductions and norms over other dims,
products along rows of one operand (CoCoNeT, section 3.2; the conditions are those of
row-local ops). Other operands that have the factor are sliced, those without it are
left whole; either must be equal on all ranks of the axes. A factor that is summed over
leaves summands: the result is reduced at once. Shapes, indices and random numbers are
made local by ``passes.localize``, as everywhere. Never changes the node itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar._torch.symbols import Inexpressible
from fxpar.errors import PlanError, RuleError
from fxpar.graph import collective_nodes
from fxpar.graph.builder import Builder, value_of
from fxpar.passes.localize import local_form
from fxpar.sharding.factors import Dims, Rule
from fxpar.sharding.op_table import tensors_of
from fxpar.sharding.ops.local_call import LocalCall
from fxpar.sharding.program import tensor_nodes
from fxpar.sharding.read_program import RuleReader
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import Strategy, is_expressible, project, specs

Axes = tuple[str, ...]


class Refused(Exception):
    """Says why an op cannot run on slices, to be read after its name."""


@dataclass(frozen=True)
class SlicePart:
    """Is a slice of a value."""

    node: fx.Node  # it holds what the axes leave of ``dim``
    dim: int  # the dim of the value along which it is sliced


@dataclass(frozen=True)
class SlicedResult:
    """Is the result of an op on slices."""

    node: Any  # the new op; a tuple where several nodes give its results
    # For each of its results the dim that is sliced. None: the result is whole, and
    # equal on all ranks of the axes.
    dims: tuple[int | None, ...]


class Cutter:
    """Runs ops on slices over ``axes``.

    varies: node -> axes it varies over. pull: whole values that are computed on slices
    where only a slice is read. cut: appends the slice of any other, by default this
    rank's. grain: parts of a dim that slices keep together in order; more than the
    slices where each of them is made of several parts. outside_axes: more axes along
    which ranks have different slices at a time.
    """

    def __init__(
        self,
        build: Builder,
        axes: Axes,
        varies: Mapping[fx.Node, frozenset[str]],
        pull: Collection[fx.Node] = (),
        cut: Callable[[fx.Node, int], fx.Node] | None = None,
        grain: int = 1,
        outside_axes: Axes = (),
    ) -> None:
        self.build, self.axes, self.varies, self.pull = build, axes, varies, pull
        self.cut = cut or self._cut
        self.grain = grain
        self.outside_axes = {*axes, *outside_axes}
        self.pulled: dict[fx.Node, fx.Node] = {}
        self._rules = RuleReader()
        self._cuts: dict[tuple[fx.Node, int], fx.Node] = {}

    def on_parts(
        self, node: fx.Node, parts: Mapping[fx.Node, SlicePart]
    ) -> SlicedResult:
        """Append ``node`` on slices of those of its operands that ``parts`` has.

        Raises Refused. Operands that are not in ``parts`` are read as they are.
        """
        if collective_nodes.is_step(node):
            return self._step(node, parts)
        rule = self._rule(node)
        factors = [
            self._factor(rule, dims, parts[n].dim)
            for n, dims in zip(tensor_nodes(node), rule.operands, strict=True)
            if n in parts
        ]
        return self._run(node, rule, factors, parts)

    def _run(
        self,
        node: fx.Node,
        rule: Rule,
        factors: Sequence[str],
        parts: Mapping[fx.Node, SlicePart],
    ) -> SlicedResult:
        """Append ``node`` where slices cut ``factors``."""
        operands = tensor_nodes(node)
        for number in set(node.all_input_nodes).difference(operands):
            self._check_equal(number)
        tensor_specs = specs(rule, self._strategy(rule, factors))
        reads, results = tensor_specs[: len(operands)], tensor_specs[len(operands) :]
        args = [
            self._operand(n, spec, parts)
            for n, spec in zip(operands, reads, strict=True)
        ]
        result = self._call(node, rule, reads, results, iter(args))
        return self._reduced(node, result, results)

    def _rule(self, node: fx.Node) -> Rule:
        if node.op != "call_function" or not tensors_of(node.meta.get("val")):
            raise Refused("is no op on tensors")
        if _torch.aot.higher_order_name(node.target):
            raise Refused("runs graphs of its own, which no verb edits")
        try:
            rule, has_rule = self._rules(node)
        except RuleError as error:
            raise Refused(error.what) from error
        if not has_rule:
            raise Refused("has no sharding rule")
        return rule

    def _strategy(self, rule: Rule, factors: Sequence[str]) -> Strategy:
        """Return the strategy with all axes on the one factor that slices cut."""
        if len(set(factors)) != 1:
            raise Refused(f"would be cut along {sorted(set(factors))} at once")
        factor, mesh = factors[0], self.build.mesh
        if factor in rule.whole:
            raise Refused("reads all of the dim that is sliced")
        if factor in rule.exchanged:
            raise Refused("reads rows around each slice")
        if rule.size[factor] % self.grain:
            raise Refused("would cut through the parts that slices are made of")
        assignment = {factor: self.axes}
        if not all(
            is_expressible(t, assignment, rule.size, mesh) for t in rule.tensors
        ):
            raise Refused("would not have contiguous slices")
        return Strategy(((factor, self.axes),))

    def _factor(self, rule: Rule, dims: Dims, dim: int) -> str:
        """Return the factor that slices of ``dim`` of a tensor with factors ``dims``
        cut."""
        spec = Spec.of([self.axes if d == dim else () for d in range(len(dims))])
        factors = project(dims, spec, rule.size, self.build.mesh)
        if list(factors.values()) != [self.axes]:
            raise Refused("reads all of the dim that is sliced")
        return next(iter(factors))

    def _operand(
        self, node: fx.Node, spec: Spec, parts: Mapping[fx.Node, SlicePart]
    ) -> fx.Node:
        if node in parts:
            return parts[node].node
        self._check_equal(node)
        if spec.partial:
            raise Refused(f"would add {node.name} once on each rank")
        where = [d for d, axes in enumerate(spec.dims) if axes]
        return self.sliced(node, where[0]) if where else node

    def _check_equal(self, node: fx.Node) -> None:
        differ = [a for a in self.axes if a in self.varies.get(node, ())]
        if differ:
            raise Refused(
                f"reads {node.name}, which differs between ranks along {differ}"
            )

    def sliced(self, node: fx.Node, dim: int) -> fx.Node:
        """Return the slice of a whole value; if that was just gathered, the gather's
        operand."""
        if node.target is collective_nodes.all_gather and node.args[1:] == (
            dim,
            self.axes,
        ):
            source: Any = node.args[0]
            return source
        if (node, dim) not in self._cuts:
            pulls = node in self.pull and isinstance(node.meta["val"], torch.Tensor)
            piece = self._pulled(node, dim) if pulls else self.cut(node, dim)
            self._cuts[node, dim] = piece
        return self._cuts[node, dim]

    def _pulled(self, node: fx.Node, dim: int) -> fx.Node:
        """Return the slice of a value, computed on slices."""
        try:
            with self.build.at(node):
                pulled = self._backwards(node, dim)
        except Refused as error:
            raise Refused(f"needs {node.name} on slices, which {error}") from error
        self.pulled[node] = pulled.node
        return pulled.node

    def _backwards(self, node: fx.Node, dim: int) -> SlicedResult:
        if collective_nodes.is_step(node):
            source: Any = node.args[0]
            return self._step(node, {source: SlicePart(self.sliced(source, dim), dim)})
        rule = self._rule(node)
        factor = self._factor(rule, rule.results[0], dim)
        return self._run(node, rule, [factor], {})

    def _cut(self, node: fx.Node, dim: int) -> fx.Node:
        return collective_nodes.step(
            self.build, collective_nodes.slice_, node, dim, self.axes
        )

    def _call(
        self,
        node: fx.Node,
        rule: Rule,
        reads: tuple[Spec, ...],
        results: tuple[Spec, ...],
        args: Any,
    ) -> Any:
        values = [*tensor_nodes(node)]
        shapes = [tuple(map(int, n.meta["val"].shape)) for n in values]
        shapes += [tuple(map(int, t.shape)) for t in tensors_of(node.meta["val"])]

        def operand(n: fx.Node) -> fx.Node:
            return next(args) if isinstance(n.meta.get("val"), torch.Tensor) else n

        new_args, new_kwargs = fx.node.map_arg((node.args, node.kwargs), operand)
        call = LocalCall(self.build, node, rule, reads, results, tuple(shapes))
        try:
            return local_form(call, new_args, new_kwargs)
        except (Inexpressible, PlanError, RuntimeError, ValueError) as error:
            raise Refused(f"has no form on slices: {error}") from error

    def _reduced(
        self, node: fx.Node, result: Any, results: tuple[Spec, ...]
    ) -> SlicedResult:
        """Check shapes, and reduce a result that is summands."""
        mesh = self.build.mesh
        whole = tensors_of(node.meta["val"])
        local = tensors_of(value_of(result))
        for spec, want, have in zip(results, whole, local, strict=True):
            if tuple(have.shape) != spec.local_shape(mesh, want.shape):
                raise Refused(f"has no form on slices of {list(want.shape)}")
        if any(spec.partial for spec in results):
            if not isinstance(node.meta["val"], torch.Tensor):
                raise Refused("gives several results that would have to be reduced")
            ((_, op), *_) = results[0].partial
            result = collective_nodes.step(
                self.build, collective_nodes.all_reduce, result, op, self.axes
            )
            return SlicedResult(result, (None,))
        where = [[d for d, axes in enumerate(spec.dims) if axes] for spec in results]
        return SlicedResult(result, tuple(dims[0] if dims else None for dims in where))

    def _step(self, node: fx.Node, parts: Mapping[fx.Node, SlicePart]) -> SlicedResult:
        """Append a step over other axes, which does to a slice what it does to the
        whole."""
        source: Any = node.args[0]
        part = parts[source]
        if node.target in collective_nodes.MESSAGES:
            raise Refused("is a message, which both stages must change (share)")
        if self.outside_axes.intersection(collective_nodes.axes_of(node)):
            raise Refused("communicates along the same axes")
        if part.dim in collective_nodes.changed_dims(node):
            raise Refused("moves the dim that is sliced")
        step = collective_nodes.step(self.build, node.target, part.node, *node.args[1:])
        return SlicedResult(step, (part.dim,))


def results_of(
    node: fx.Node, sliced: SlicedResult
) -> dict[fx.Node, tuple[fx.Node, int | None]]:
    """Return the new (node, sliced dim) for each node that stands for a result of
    ``node``: itself, or the getitems of its tuple. Raises Refused."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return {node: (sliced.node, sliced.dims[0])}
    tensors = [i for i, v in enumerate(value) if isinstance(v, torch.Tensor)]
    dims = dict(zip(tensors, sliced.dims, strict=True))
    slices = {}
    for item in list(node.users):
        if item.target is not operator.getitem:
            raise Refused(f"gives a tuple that {item.name} reads")
        position: Any = item.args[1]
        if isinstance(sliced.node, tuple):
            copy = sliced.node[position]
        else:
            copy = node.graph.call_function(operator.getitem, (sliced.node, position))
            copy.meta = {**item.meta, "val": sliced.node.meta["val"][position]}
        slices[item] = copy, dims.get(position)
    return slices
