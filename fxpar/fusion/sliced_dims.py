"""Finds the dims of values that can only be sliced together: the rows of a region.

In: a local graph with steps, and axes. Out: ``Rows``, one for each set of (value, dim)
that ops tie together by a factor of their rules: if one value of the set is sliced
along its dim, so may every other be. Only values equal on all ranks of the axes count;
ops without a rule, and ops that read a value that differs between ranks, tie nothing.
Never changes the graph.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpar.errors import RuleError
from fxpar.graph import collective_nodes
from fxpar.sharding.factors import Dims, Rule
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import tensor_nodes
from fxpar.sharding.read_program import RuleReader
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import is_expressible, project

Axes = tuple[str, ...]
Token = tuple[fx.Node, int]  # a value and one of its dims
Varies = Mapping[fx.Node, frozenset[str]]


@dataclass
class Rows:
    """Holds values of a graph that could be sliced, each along one dim."""

    # Value -> the dim along which it would be sliced; None: never.
    dims: dict[fx.Node, int | None] = field(default_factory=dict)
    # Op -> the values among ``dims`` that it reads as slices.
    ops: dict[fx.Node, set[fx.Node]] = field(default_factory=dict)
    # Ops that sum over the rows, so that their result must be reduced.
    sums: set[fx.Node] = field(default_factory=set)
    # Value -> the op that makes it.
    makers: dict[fx.Node, fx.Node] = field(default_factory=dict)
    # The all-reduces among the values.
    reduced: list[fx.Node] = field(default_factory=list)

    def put(self, value: fx.Node, dim: int) -> None:
        """Note a token; a value with two dims that are rows is never sliced."""
        if self.dims.setdefault(value, dim) != dim:
            self.dims[value] = None


class _Sets:
    """Holds disjoint sets of tokens that are tied together."""

    def __init__(self) -> None:
        self._number: dict[Token, int] = {}
        self._parent: list[int] = []

    def find(self, token: Token) -> int:
        i = self._number.setdefault(token, len(self._parent))
        if i == len(self._parent):
            self._parent.append(i)
        while self._parent[i] != i:
            self._parent[i] = self._parent[self._parent[i]]
            i = self._parent[i]
        return i

    def join(self, one: Token, other: Token) -> None:
        self._parent[self.find(other)] = self.find(one)


@dataclass(frozen=True)
class _Tie:
    """Holds the tokens of an op's operands and results for one of its factors."""

    node: fx.Node  # the op that ties the tokens
    reads: tuple[Token, ...]  # tokens of operands
    makes: tuple[Token, ...]  # tokens of results

    @property
    def tokens(self) -> tuple[Token, ...]:
        return self.reads + self.makes


def rows_of(graph: fx.Graph, mesh: Mesh, axes: Axes, varies: Varies) -> list[Rows]:
    """Return all rows with a result of an all-reduce along ``axes``."""
    sets, ties = _Sets(), list(_all_ties(graph, mesh, axes, varies))
    for tie in ties:
        for token in tie.tokens:
            sets.join(tie.tokens[0], token)
    groups: dict[int, Rows] = defaultdict(Rows)
    for node in graph.nodes:
        if (
            node.target is not collective_nodes.all_reduce
            or collective_nodes.axes_of(node) != axes
        ):
            continue
        for dim, size in enumerate(node.meta["val"].shape):
            if size and size % mesh.count(axes) == 0:
                rows = groups[sets.find((node, dim))]
                rows.put(node, dim)
                rows.reduced += [node] if node not in rows.reduced[-1:] else []
    for tie in ties:
        group = groups.get(sets.find(tie.tokens[0]))
        if group is None:
            continue
        for value, dim in tie.tokens:
            group.put(value, dim)
        group.ops.setdefault(tie.node, set()).update(v for v, _ in tie.reads)
        group.makers.update((value, tie.node) for value, _ in tie.makes)
        if not tie.makes:
            group.sums.add(tie.node)
    return list(groups.values())


def _all_ties(
    graph: fx.Graph, mesh: Mesh, axes: Axes, varies: Varies
) -> Iterator[_Tie]:
    """Yield one tie for each op and factor that slices could cut."""
    rules = RuleReader()
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        read = (*tensor_nodes(node), node)
        if any(set(axes) & varies[n] for n in read):
            continue
        if collective_nodes.is_step(node):
            yield from _step_ties(node, axes)
            continue
        results = _results(node)
        if results is None:
            continue
        try:
            rule, has_rule = rules(node)
        except RuleError:
            continue
        if has_rule and not rule.accumulates:
            for factor in (f for f in rule.free if f not in rule.exchanged):
                tie = _tie(node, rule, factor, mesh, axes, results)
                if tie is not None:
                    yield tie


def _results(node: fx.Node) -> list[fx.Node | None] | None:
    """Return the nodes that stand for a node's results; None if it is read as a
    tuple."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [node]
    if not isinstance(value, (tuple, list)):
        return None
    items = {u.args[1]: u for u in node.users if u.target is operator.getitem}
    if len(items) != len(node.users):
        return None
    positions = [i for i, v in enumerate(value) if isinstance(v, torch.Tensor)]
    return [items.get(i) for i in positions]


def _tie(
    node: fx.Node,
    rule: Rule,
    factor: str,
    mesh: Mesh,
    axes: Axes,
    results: list[fx.Node | None],
) -> _Tie | None:
    """Return the tokens that slices along the factor cut; None if the op cannot run on
    them."""
    if not all(
        is_expressible(dims, {factor: axes}, rule.size, mesh) for dims in rule.tensors
    ):
        return None

    def tokens(nodes: Any, tensors: tuple[Dims, ...]) -> tuple[Token, ...]:
        return tuple(
            (n, d)
            for n, dims in zip(nodes, tensors, strict=True)
            if n is not None
            for d in _places(dims, factor, rule, mesh, axes)
        )

    reads = tokens(tensor_nodes(node), rule.operands)
    makes = tokens(results, rule.results)
    lacks = [factor in contracted for contracted in rule.contracted_by]
    one = isinstance(node.meta["val"], torch.Tensor)
    sums = one and lacks[0] and reads and not makes
    return _Tie(node, reads, makes) if sums or (makes and not any(lacks)) else None


def _places(
    dims: Dims, factor: str, rule: Rule, mesh: Mesh, axes: Axes
) -> Iterator[int]:
    """Yield the dims of a tensor that are cut by slices along a factor."""
    for d, dim in enumerate(dims):
        if factor in dim:
            spec = Spec.of([axes if i == d else () for i in range(len(dims))])
            if project(dims, spec, rule.size, mesh) == {factor: axes}:
                yield d


def _step_ties(node: fx.Node, axes: Axes) -> Iterator[_Tie]:
    """Yield the ties of a step over other axes: the dims that it leaves as they are."""
    source: Any = node.args[0]
    if not set(collective_nodes.axes_of(node)) & set(axes):
        step_dims = collective_nodes.changed_dims(node)
        for dim in range(node.meta["val"].dim()):
            if dim not in step_dims:
                yield _Tie(node, ((source, dim),), ((node, dim),))
