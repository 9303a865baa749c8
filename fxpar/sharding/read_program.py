"""Reads a graph as a Program: its values, its ops with their rules.

In: an ATen graph with global fake values (``meta["val"]``) and its Signature. Out: a
Program. A rule comes from the op's row, or from the bodies that the call runs; an op
without either is read as whole. The bags of an embedding bag are a factor if the
positions where they begin are constants, one length from each other, as they are for an
input of two dims. Never: changes the graph, or guesses a length that it does not say.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.errors import PlanError, RuleError
from fxpar.sharding.body_rules import Inside, inside
from fxpar.sharding.factors import Rule
from fxpar.sharding.near_rows import ADDED, READ, computed, reaches_of, with_windows
from fxpar.sharding.op_table import evaluate, make, tensors_of
from fxpar.sharding.ops import row_of
from fxpar.sharding.ops.embedding import BAGS, in_even_bags
from fxpar.sharding.ops.own_op_rules import axes_inside, manual_axes, pinned
from fxpar.sharding.program import (
    OPEN,
    Input,
    Op,
    Program,
    Signature,
    Value,
    element_of,
    tensor_nodes,
    tensors_at,
    user_line,
)
from fxpar.sharding.shift_messages import NAME as SHIFT


def bag_length(node: fx.Node) -> int | None:
    """Return how many indices each bag has; None if the graph does not say, or they
    differ."""
    if node.target not in BAGS:
        return None
    at = BAGS[node.target][0].index("ib")
    indices, offsets = node.args[at : at + 2]
    (count,), (bags,) = indices.meta["val"].shape, offsets.meta["val"].shape
    are_known = isinstance(count, int) and isinstance(bags, int)
    if not are_known or bags < 2 or not count or count % bags:
        return None
    length = count // bags
    with _torch.aot.as_compiled():
        begins = computed(offsets, {})
        if begins is None:
            return None
        is_even = torch.equal(begins.long(), torch.arange(bags) * length)
    return length if is_even else None


def _whole(node: fx.Node) -> Rule:
    """Return the rule of a call of which nothing is split."""
    shapes, n = [tuple(x.shape) for x in tensors_at(node)], len(tensor_nodes(node))
    words = [[f"t{i}d{d}!" for d in range(len(x))] for i, x in enumerate(shapes)]
    pairs = zip(itertools.chain(*words), itertools.chain(*shapes), strict=True)
    # Sizes may depend on data, which ``read`` refuses.
    return make(words[:n], words[n:], {word[:-1]: size for word, size in pairs})


class RuleReader:
    """Is a reader of rules, which calls of equal op, shapes and attributes share."""

    def __init__(self) -> None:
        self._cache: dict[Any, tuple[Rule, bool]] = {}

    def __call__(self, node: fx.Node) -> tuple[Rule, bool]:
        """Return (rule, known). Raises RuleError naming the node if a row does not
        fit."""
        if node.meta.get("fxpar_whole"):
            return _whole(node), not _torch.aot.higher_order_name(node.target)
        reaches = reaches_of(node) if node.target in READ + ADDED else ()
        length = bag_length(node)
        call = self._frozen(node.args), self._frozen(node.kwargs)
        key: Any = (node.target, call, reaches, length)
        try:
            if key in self._cache:
                return self._cache[key]
        except TypeError:
            key = None
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda n: n.meta["val"]
        )
        rule, has_rule = self._make(node, args, kwargs)
        if has_rule and reaches:
            rule = with_windows(rule, node, reaches)
        if has_rule and length is not None:
            shapes = [tuple(x.shape) for x in tensors_at(node)]
            rule = in_even_bags(rule, node.target, node.args, shapes, length)
        if key is not None:
            self._cache[key] = rule, has_rule
        return rule, has_rule

    def _frozen(self, x: Any) -> Any:
        """Return an argument's part of a key: of tensors their shape, dtype and
        strides."""
        if isinstance(x, fx.Node):
            x = x.meta["val"]
        if isinstance(x, torch.Tensor):
            return "T", tuple(x.shape), x.dtype, tuple(x.stride())
        if isinstance(x, (list, tuple)):
            return tuple(map(self._frozen, x))
        if isinstance(x, dict):
            return tuple((k, self._frozen(y)) for k, y in x.items())
        # repr, as 0.0 == -0.0.
        return (float, repr(x)) if type(x) is float else (type(x), x)

    def _make(self, node: fx.Node, args: Any, kwargs: Any) -> tuple[Rule, bool]:
        row, rule = row_of(node.target), None
        if row is not None:
            try:
                rule = evaluate(row, args, dict(kwargs), node.meta["val"])
            except RuleError as error:
                raise RuleError(
                    f"the rule of {node.target} does not fit: {error.what}",
                    where=user_line(node),
                    fix='correct the rule given to fxpar.rule("...")',
                ) from error
        if rule is not None:
            return rule, True
        bodies = inside(node.target, args, node.meta["val"], read_body)
        if bodies is not None and bodies.rule is not None:
            return bodies.rule, True
        return _whole(node), False


def _at_open_sizes(rule: Rule, node: fx.Node) -> Rule:
    """Return the rule with dims whole along which rows move, if their sizes are open:
    the rows that ranks send each other are known for one size alone, except for a
    shift."""
    source = node.meta.get(OPEN)
    if source is None or not rule.moves or str(node.target) == SHIFT:
        return rule
    values = tensors_at(source)
    open_dims = {
        moves.dim
        for moves in rule.moves
        if any(_torch.symbols.is_open(x.shape[moves.dim]) for x in values)
    }
    factors = (f for t in rule.tensors for d in open_dims for f in t[d])
    moves = tuple(m for m in rule.moves if m.dim not in open_dims)
    return replace(rule, moves=moves, whole=rule.whole.union(factors))


def read(graph: fx.Graph, signature: Signature) -> Program:
    """Return the Program of an ATen graph with fake values on every node.

    Raises RuleError if a rule does not fit its call, PlanError on a size that depends
    on data.
    """
    values: list[Value] = []
    ops: list[Op] = []
    inputs: list[int | None] = []
    outputs: list[int | None] = []
    producers: dict[int, tuple[int, int]] = {}
    uses: list[list[tuple[int, int]]] = []
    value_of: dict[tuple[fx.Node, int], int] = {}
    rules, manual = RuleReader(), manual_axes(graph)
    names = {node.name for node in graph.nodes if node.op != "placeholder"}

    def new_value(node: fx.Node, i: int, tensor: torch.Tensor, name: str) -> int:
        index = len(values)
        if _torch.fake.is_data_dependent(tensor):
            raise PlanError(
                f"{name} ({node.target}) has a size that depends on data",
                where=user_line(node),
                fix="compute it outside of the compiled code",
            )
        shape = tuple(map(int, tensor.shape))
        source, inside = node.meta.get(OPEN), axes_inside(node, manual)
        open_shape = tuple(tensors_of(source.meta["val"])[i].shape) if source else ()
        values.append(Value(index, name, shape, tensor.dtype, open_shape, inside))
        uses.append([])
        value_of[node, i] = index
        return index

    for node in graph.nodes:
        val = node.meta.get("val")
        if node.op == "placeholder":
            name = signature.inputs[len(inputs)].name
            while name in names:
                name += "'"
            names.add(name)
            tensor = isinstance(val, torch.Tensor)
            inputs.append(new_value(node, 0, val, name) if tensor else None)
        elif node.op == "get_attr":
            if isinstance(val, torch.Tensor):
                new_value(node, 0, val, node.name)
        elif node.op == "output":
            results = node.args[0]
            for arg in (results,) if isinstance(results, fx.Node) else results:
                value = value_of.get((arg, 0)) if isinstance(arg, fx.Node) else None
                outputs.append(value)
        elif node.target is operator.getitem:
            source = element_of(node)
            if source in value_of:
                value_of[node, 0] = value_of[source]
        else:
            tensors = tensors_of(val)
            if not tensors:
                continue
            rule, has_rule = rules(node)
            rule = _at_open_sizes(rule, node)
            rule = pinned(rule, manual.get(node, {}))
            operands = tuple(value_of[n, 0] for n in tensor_nodes(node))
            single = isinstance(val, torch.Tensor)
            results = tuple(
                new_value(node, i, t, node.name if single else f"{node.name}.{i}")
                for i, t in enumerate(tensors)
            )
            op = Op(
                len(ops),
                node.name,
                node.target,
                rule,
                operands,
                results,
                node,
                has_rule,
            )
            ops.append(op)
            for position, v in enumerate(operands):
                uses[v].append((op.index, position))
            for position, v in enumerate(results):
                producers[v] = (op.index, position)
    marked = (n for n, i in value_of if i == 0 and n.meta.get("fxpar_reduce_here"))
    reduce_here = frozenset(value_of[n, 0] for n in marked)
    return Program(
        values,
        ops,
        inputs,
        outputs,
        signature,
        producers,
        uses,
        value_of,
        reduce_here,
    )


def with_open_sizes(program: Program) -> Program:
    """Return the program of a graph at its hints with the nodes of the graph with open
    sizes."""
    return replace(
        program,
        ops=[replace(op, node=op.node.meta[OPEN]) for op in program.ops],
        value_of={(node.meta[OPEN], i): v for (node, i), v in program.value_of.items()},
        kernel_cache={},
    )


def with_sizes_closed(program: Program) -> Program:
    """Return a program whose open sizes are fixed at their hints, for lowering."""
    return replace(program, values=[replace(v, open=()) for v in program.values])


def read_body(body: fx.GraphModule) -> Program:
    """Return the Program of a graph that an op runs, with open inputs and outputs."""
    places = [node.name for node in body.graph.nodes if node.op == "placeholder"]
    return read(body.graph, Signature(tuple(map(Input, places)), ()))


def inside_of(node: fx.Node) -> Inside | None:
    """Return the bodies of a call; None if the op is not known to run bodies."""
    args = fx.node.map_arg(node.args, lambda n: n.meta["val"])
    return inside(node.target, args, node.meta["val"], read_body)
