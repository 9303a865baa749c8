"""What leaves a graph that is fed parts of the batch: results as each rank would have
them with its own part alone, on average over the ranks.

In: a Dynamo graph, which computes the program of the global batch. Out: the same graph,
its results divided by the number of parts as often as they grow with the batch
(``sharding.growth``): a sum over the batch leaves as the mean over ranks, and so does
its gradient; a mean leaves as it is. Of a sum of both the summands are divided apart,
through the linear ops that lead to the result. Whole numbers are not divided: a count
leaves as the rank's own.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpar import _compat
from fxpar.errors import FxparWarning, compose
from fxpar.runtime.names import Named
from fxpar.runtime.step_forward import fake_of, globally
from fxpar.sharding.growth import FIXED, Growth, growths, unknown
from fxpar.sharding.program import user_line
from fxpar.sharding.spec import Spec

# Arguments of the program with so many times the batch of one rank.
Sized = Callable[[int], Sequence[Any]]


@dataclass(frozen=True)
class LocalResults:
    """``own``: names of results that leave as this rank's summand, by position.
    ``notes``: what was done to results, for the plan."""

    own: Mapping[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def said(self, specs: Mapping[int, Spec], parts: int) -> tuple[str, ...]:
        """The notes on a plan in which results have these specs."""
        summands = [name for i, name in self.own.items() if specs[i].partial]
        whole = [name for i, name in self.own.items() if specs[i].is_whole]
        return (
            *self.notes,
            *(f"result {x} counts over the batch: each rank's own" for x in summands),
            *(
                f"{x} counts over the batch in a way that no rank does by itself: it is "
                f"that of all {parts} ranks on each"
                for x in whole
            ),
        )


def scale_results(
    gm: fx.GraphModule, named: Sequence[Named], sized: Sized, parts: int
) -> LocalResults:
    """Divide the results of a Dynamo graph, in place; warn of those that grow and
    cannot be."""
    results = list(gm.graph.output_node().args[0])
    if not any(_may_grow(x) for x in results):
        return LocalResults()
    _name_mutated(gm.graph)
    found = _Growths(gm, named, sized, parts)
    own, notes, unclear = {}, [], []
    for k, x in enumerate(results):
        if not isinstance(x, fx.Node) or found.last[k].is_fixed:
            continue
        grown, whole = found.last[k], not _is_floating(x)
        if whole and grown.power == 1.0 and not grown.mixed:
            own[k] = x.name
            continue
        scaled = None if whole else _divided(gm.graph, x, grown, found.of, parts)
        if scaled is None:
            unclear.append((x, grown))
            continue
        results[k] = scaled
        notes.append(_note(x, grown, parts))
        if grown.power not in (-1.0, 1.0):
            _warn_nonlinear(x, grown, parts)
    output = gm.graph.output_node()
    output.args = (type(output.args[0])(results),)
    gm.graph.lint()
    gm.recompile()
    notes += [f"result {x.name} is of the whole batch: {_why(g)}" for x, g in unclear]
    if unclear:
        _warn_unclear(unclear, parts)
    return LocalResults(own, tuple(notes))


def _note(x: fx.Node, grown: Growth, parts: int) -> str:
    if grown.power == 1.0:
        how = " in part" if grown.mixed else ""
        return f"result {x.name} grows with the batch{how}: the mean over {parts} ranks"
    how = f"as the batch to the power {grown.power:g}"
    return f"result {x.name} grows {how}: divided by {parts} to that power"


def _why(grown: Growth) -> str:
    if grown.power is None:
        return f"how it grows with the batch is not known ({grown.why})"
    return f"terms that grow with the batch to the power {grown.power:g} cannot be told"


def _warn_unclear(unclear: Sequence[tuple[fx.Node, Growth]], parts: int) -> None:
    x, grown = unclear[0]
    more = f" (and {len(unclear) - 1} more)" if len(unclear) > 1 else ""
    text = compose(
        f"with FXPAR_INPUTS=local result {x.name}{more} is what one device has for the "
        f"whole batch, {parts} times that of a rank: {_why(grown)}",
        where=user_line(x),
        fix=_FIX,
    )
    warnings.warn(text, FxparWarning, stacklevel=2)


def _warn_nonlinear(x: fx.Node, grown: Growth, parts: int) -> None:
    text = compose(
        f"with FXPAR_INPUTS=local result {x.name}, which grows as the batch to the power "
        f"{grown.power:g}, is divided by {parts} to that power: that is the mean over "
        "ranks only if their parts are alike",
        where=user_line(x),
        fix=_FIX,
    )
    warnings.warn(text, FxparWarning, stacklevel=2)


_FIX = "return sums and means over the batch, and compute with them outside the model"


def _example(x: fx.Node) -> Any:
    return x.meta.get("example_value", x.meta.get("val"))


def _is_floating(x: fx.Node) -> bool:
    value = _example(x)
    return value.dtype.is_floating_point or value.dtype.is_complex


def _may_grow(x: Any) -> bool:
    """Whether a result is a tensor that the graph computes."""
    if not isinstance(x, fx.Node) or x.op == "placeholder":
        return False
    value = _example(x)
    return isinstance(value, torch.Tensor) and value.dtype != torch.bool


# Growth of the values of a Dynamo graph


class _Growths:
    """``last``: of each result, as it leaves. ``of``: of nodes on linear ways to the
    results, when they are made."""

    def __init__(
        self, gm: fx.GraphModule, named: Sequence[Named], sized: Sized, parts: int
    ) -> None:
        results = gm.graph.output_node().args[0]
        self.ways = _linear_ways(results)
        try:
            traced = [self._traced(gm, named, sized(n)) for n in (parts, 2 * parts)]
            inputs = [_of_input(named[i]) for i in traced[0].inputs]
            found = growths(traced[0].graph, traced[1].graph, inputs)
        except Exception as error:  # compiling it says what is wrong
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            found = [unknown(f"it cannot be traced: {why}")] * 10**6
        count = len(results)
        self.last = found[:count]
        self.of = dict(zip(self.ways, found[count:], strict=False))

    def _traced(
        self, gm: fx.GraphModule, named: Sequence[Named], args: Sequence[Any]
    ) -> _Traced:
        """The ATen graph of the program without its backward. Outputs: the results,
        then the values of ``ways``."""
        probe = _compat.copy_graph(gm)
        twins = dict(zip(gm.graph.nodes, probe.graph.nodes, strict=True))
        output = probe.graph.output_node()
        kept = [x if isinstance(x, fx.Node) else None for x in output.args[0]]
        for node in self.ways:
            twin = twins[node]
            with probe.graph.inserting_after(twin):
                kept.append(probe.graph.call_method("clone", (twin,)))
        output.args = (tuple(kept),)
        probe.recompile()
        forward = globally(probe, named, args)
        return _aten(forward.module, args)


def _of_input(named: Named) -> Growth:
    return Growth(1.0) if named.kind == "summand" else FIXED


@dataclass(frozen=True)
class _Traced:
    """An ATen graph; ``inputs``: for each placeholder the position of the argument."""

    graph: fx.Graph
    inputs: tuple[int, ...]


def _aten(gm: fx.GraphModule, args: Sequence[Any]) -> _Traced:
    """The functional ATen graph of a Dynamo graph on concrete shapes, whose outputs are
    those of ``gm``."""
    mode = _compat.fake_mode_of(args) or _compat.new_fake_mode()
    tensors, places = [], []
    placeholders = gm.graph.find_nodes(op="placeholder")
    for i, (node, x) in enumerate(zip(placeholders, args, strict=True)):
        if isinstance(x, torch.Tensor):
            tensors.append(fake_of(x, mode))
            places.append(i)
        else:
            node.replace_all_uses_with(x)
            gm.graph.erase_node(node)
    gm.recompile()
    traced = _compat.export_forward(gm, tensors, mode)
    output = traced.graph.output_node()
    values: list[Any] = [None] * len(gm.graph.output_node().args[0])
    for x, desc in zip(output.args[0], output.meta["desc"], strict=True):
        kind, place = _compat.descriptor(desc)
        if kind == "output":
            values[place] = x
    output.args = (tuple(values),)
    inputs = traced.graph.find_nodes(op="placeholder")
    given = [_compat.descriptor(node.meta["desc"])[1] for node in inputs]
    return _Traced(traced.graph, tuple(places[i] for i in given))


# Dynamo's own ops that are linear: in all tensors at once, or in one of two


_TOGETHER: dict[Any, Any] = {
    **{f: operator.add for f in (operator.add, operator.iadd)},
    **{f: operator.sub for f in (operator.sub, operator.isub)},
    **{f: f for f in (torch.add, torch.sub, torch.subtract, torch.stack, torch.cat)},
    **{f: f for f in (operator.neg, torch.neg, torch.sum, torch.mean, torch.squeeze)},
    **{f: f for f in (torch.unsqueeze, torch.reshape, torch.flatten, torch.clone)},
    **{f"{f}_": f for f in ("add", "sub")},
    **{f: f for f in "add sub neg sum mean view reshape squeeze unsqueeze".split()},
    **{f: f for f in "flatten to float double half bfloat16 clone contiguous".split()},
    **{f: f for f in "type_as expand detach".split()},
}

_ONE_OF_TWO: dict[Any, Any] = {
    **{f: operator.mul for f in (operator.mul, operator.imul)},
    **{f: operator.truediv for f in (operator.truediv, operator.itruediv)},
    **{f: f for f in (torch.mul, torch.div, torch.multiply, torch.divide)},
    **{f"{f}_": f for f in ("mul", "div")},
    **{f: f for f in "mul div".split()},
}

# Their results may show what is written to their operand later.
_VIEWS = frozenset(
    "view reshape squeeze unsqueeze flatten to float double half bfloat16 contiguous "
    "type_as expand detach".split()
) | {torch.squeeze, torch.unsqueeze, torch.reshape, torch.flatten}


def _is_linear(node: fx.Node) -> bool:
    return node.target in _TOGETHER or node.target in _ONE_OF_TWO


def _linear_ways(results: Sequence[Any]) -> list[fx.Node]:
    """Tensors that results are reached from by linear ops alone."""
    seen: dict[fx.Node, None] = {}
    rest = [x for x in results if _may_grow(x)]
    while rest:
        node = rest.pop()
        if node in seen or not isinstance(_example(node), torch.Tensor):
            continue
        seen[node] = None
        if _is_linear(node):
            rest += node.all_input_nodes
    return list(seen)


def _divided(
    graph: fx.Graph,
    result: fx.Node,
    grown: Growth,
    known: dict[fx.Node, Growth],
    parts: int,
) -> fx.Node | None:
    """A result, what grows in it divided; None if that cannot be."""
    if grown.power is not None and not grown.mixed:
        return _times(graph, result, parts**-grown.power, graph.output_node())
    return _Apart(graph, known, parts).value(result)


def _times(graph: fx.Graph, x: fx.Node, factor: float, before: fx.Node) -> fx.Node:
    with graph.inserting_before(before):
        made = graph.call_function(operator.mul, (x, factor))
    made.meta = {k: v for k, v in x.meta.items() if k in _KEPT}
    return made


_KEPT = ("example_value", "stack_trace", "nn_module_stack", "custom")


@dataclass
class _Apart:
    """Copies of the linear ops that lead to a result, on summands divided apart."""

    graph: fx.Graph
    known: dict[fx.Node, Growth]
    parts: int

    def value(self, node: Any) -> fx.Node | None:
        """What takes the place of a node; None if nothing can."""
        grown = self.known.get(node, FIXED) if isinstance(node, fx.Node) else FIXED
        if grown.is_fixed:
            return node  # type: ignore[no-any-return]
        if grown.power is None:
            return None
        if not grown.mixed:
            factor = self.parts**-grown.power
            return _times(self.graph, node, factor, node.next)
        if _shows_writes(node):
            return None
        terms = [x for x in node.all_input_nodes if x in self.known]
        if node.target in _ONE_OF_TWO:
            first = node.args[0] if node.target not in _PRODUCTS else None
            terms = [x for x in terms if not self.known[x].is_fixed]
            if len(terms) != 1 or first not in (None, terms[0]):
                return None
            kept = self.known[terms[0]].power == grown.power
        elif node.target in _TOGETHER:
            kept = max(self.known[x].power or 0.0 for x in terms) == grown.power
        else:
            return None
        return self._copy(node, terms) if kept else None

    def _copy(self, node: fx.Node, terms: Sequence[fx.Node]) -> fx.Node | None:
        new = {x: self.value(x) for x in terms}
        if any(x is None for x in new.values()):
            return None
        target = _TOGETHER.get(node.target) or _ONE_OF_TWO[node.target]
        swap = fx.node.map_arg(
            (node.args, dict(node.kwargs)), lambda x: new.get(x) or x
        )
        with self.graph.inserting_before(node):
            made = self.graph.create_node(node.op, target, *swap)
        made.meta = {k: v for k, v in node.meta.items() if k in _KEPT}
        return made


_PRODUCTS = frozenset({operator.mul, operator.imul, torch.mul, torch.multiply, "mul"})
_PRODUCTS |= {"mul_"}


# Writes


def _writes(node: fx.Node) -> bool:
    """Whether a node changes its first argument, and returns it."""
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    return node.target in (operator.iadd, operator.isub, operator.imul) or (
        node.target is operator.itruediv
    )


def _name_mutated(graph: fx.Graph) -> None:
    """Let what reads a tensor after a write to it read what the write returns, which is
    the same tensor."""
    for node in graph.nodes:
        first = node.args[0] if node.args else None
        if not _writes(node) or not isinstance(first, fx.Node):
            continue
        if isinstance(_example(first), torch.Tensor):
            later = set(_after(node))
            first.replace_all_uses_with(node, lambda user, later=later: user in later)


def _after(node: fx.Node) -> Iterator[fx.Node]:
    node = node.next
    while node.op != "root":
        yield node
        node = node.next


def _shows_writes(node: fx.Node) -> bool:
    """Whether the value of a node may have changed since it was made, other than by
    what took its name."""
    operands = node.all_input_nodes
    written = any(
        x.target is operator.setitem or x.kwargs.get("out") or x.kwargs.get("inplace")
        for x in node.users
    )
    viewed = node.target in _VIEWS and any(
        _writes(user) and user.args[0] in (x, node) for x in operands for user in x.users
    )
    return written or viewed
