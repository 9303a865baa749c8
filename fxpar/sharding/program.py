"""A graph as sharding sees it: values, ops with rules, inputs and outputs.

``read`` takes an ATen graph with global fake values (``meta["val"]``) and returns a
Program; it never changes the graph. A value is one tensor: the result of a node, or one
element of a tuple result (``getitem`` nodes are names for those, not ops).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.errors import PlanError, RuleError
from fxpar.sharding.body_rules import Inside, inside
from fxpar.sharding.factors import Axes, Rule
from fxpar.sharding.rules import row_of
from fxpar.sharding.rules.manual import manual_axes, pinned
from fxpar.sharding.rules.op_facts import op_facts_of
from fxpar.sharding.rules.table import evaluate, tensors_of
from fxpar.sharding.spec import Spec

# Of a node of a graph at the sizes it was traced with: the node of the graph with open
# sizes that it stands for.
OPEN = "fxpar_open"


@dataclass(frozen=True)
class Input:
    """One graph input. ``rest``: the spec it lies in; None lets the plan choose.

    ``kind``: "input", "summand", "parameter", "buffer", "tangent" or "state".
    ``use``: how the program should use the value, as a hint (entries per dim, or a
    Spec); where it lies is no hint.
    """

    name: str
    kind: str = "input"
    rest: Spec | None = None
    use: Spec | Sequence[str] | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of it only."""
        return self.rest is not None and not self.rest.is_whole


@dataclass(frozen=True)
class Output:
    """One graph output. ``kind``: "output", "gradient" or "mutation"; ``of``: the input
    that the latter two belong to. ``rest``: the spec it must have; without one ``lie``
    says: "open" as the plan has it, "even" the same but for dims whose shards are not
    alike, "whole", "batch", split over the batch axes of the Signature on dim 0 if the
    plan has it so, else whole, or "summand", a sum over them if the plan makes it so,
    else whole."""

    name: str
    kind: str = "output"
    of: int | None = None
    rest: Spec | None = None
    lie: str = "open"

    def spec(self, settled: Spec, made: Spec, batch: Axes) -> Spec:
        """Where the output rests, given the specs its value was made and settled in."""
        if self.rest is not None:
            return self.rest
        if self.lie in ("open", "even"):
            return settled.without_partial()
        whole = Spec.whole(len(settled.dims))
        if self.lie == "batch" and settled.dims[:1] == (batch,):
            return Spec.of([batch, *whole.dims[1:]])
        sums = [(axis, "sum") for axis in batch]
        if self.lie == "summand" and batch and set(sums) <= set(made.partial):
            return Spec.of(whole.dims, sums)
        return whole


@dataclass(frozen=True)
class Signature:
    """What the inputs and outputs of a graph are, in graph order.

    ``tangents``: for each "tangent" input its index and the output it belongs to.
    ``batch``: in local mode the axes over which ranks feed parts of the batch; what
    crosses the border on them is scaled so that gradients are of the global mean.
    """

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    tangents: tuple[tuple[int, int], ...] = ()
    batch: Axes = ()


@dataclass(frozen=True)
class Value:
    """One tensor of the program, in global shape."""

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    # Its shape with the sizes that the program leaves open as symbols.
    open: tuple[Any, ...] = field(default=(), compare=False)

    @property
    def sizes(self) -> tuple[Any, ...]:
        """The shape, open sizes as symbols."""
        return self.open or self.shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Op:
    """One call. ``operands``/``results``: indices of values, in order of the rule.

    ``known`` is False where the table has no rule: ``rule`` then keeps all dims whole.
    """

    index: int
    name: str
    target: Any
    rule: Rule
    operands: tuple[int, ...]
    results: tuple[int, ...]
    node: fx.Node = field(repr=False)
    known: bool = True

    @property
    def tensors(self) -> tuple[int, ...]:
        return self.operands + self.results

    @property
    def is_zero(self) -> bool:
        """Whether the op makes a constant zero, which is its own partial sum."""
        target, args = self.node.target, self.node.args
        if target is torch.ops.aten.full.default:
            return args[1] == 0
        return target is torch.ops.aten.zeros.default


@dataclass(frozen=True, eq=False)
class Program:
    """All values and ops in topological order, and where each value is used.

    ``inputs``: value index per tensor input (None: not a tensor). ``outputs``: value
    index per output (None: not a tensor). ``uses[v]``: (op index, operand position).
    ``reduce_here``: values whose dtype is the one to reduce in: what they are computed
    from, one operand an op, is not reduced before.
    """

    values: list[Value]
    ops: list[Op]
    inputs: list[int | None]
    outputs: list[int | None]
    signature: Signature
    producers: dict[int, tuple[int, int]]
    uses: list[list[tuple[int, int]]]
    value_of: dict[tuple[fx.Node, int], int]
    reduce_here: frozenset[int] = frozenset()

    def named(self, name: str) -> int | None:
        """Index of the value with this name."""
        return next((v.index for v in self.values if v.name == name), None)


# Where a sharded module's forward passes through on its way to the user's.
_OURS = str(Path(__file__).parents[1] / "runtime")


def user_line(node: fx.Node) -> str | None:
    """The user's own source line a node comes from, as ``file:line: code``.

    Innermost frame outside torch and fxpar; None if unknown.
    """
    trace = node.meta.get("stack_trace")
    if not trace:
        return None
    lines = trace.strip().splitlines()
    found = None
    for i, line in enumerate(lines):
        line = line.strip()
        if line.startswith("File "):
            parts = line.split('"')
            path = parts[1] if len(parts) > 1 else "?"
            if path.startswith(_OURS) or "/torch/" in path and "site-packages" in path:
                continue
            number = line.split("line ")[-1].split(",")[0]
            code = lines[i + 1].strip() if i + 1 < len(lines) else ""
            found = f"{path}:{number}: {code}"
    return found


def _whole_rule(shapes: Sequence[Sequence[int]], operands: int) -> Rule:
    dims = [
        tuple((f"t{i}d{d}",) for d in range(len(shape)))
        for i, shape in enumerate(shapes)
    ]
    sizes = tuple(
        (f"t{i}d{d}", n) for i, shape in enumerate(shapes) for d, n in enumerate(shape)
    )
    return Rule(
        tuple(dims[:operands]),
        tuple(dims[operands:]),
        sizes,
        frozenset(name for name, _ in sizes),
    )


def _whole(node: fx.Node) -> Rule:
    """The rule of a call of which nothing is split."""
    tensors = [x.meta["val"] for x in tensor_nodes(node)]
    shapes = [tuple(t.shape) for t in tensors + tensors_of(node.meta["val"])]
    return _whole_rule(shapes, len(tensors))


def _key(target: Any, args: Any, kwargs: Any) -> Any:
    """Hashable description of a call, tensors by shape and dtype."""

    def freeze(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return ("T", tuple(x.shape), x.dtype, tuple(x.stride()))
        if isinstance(x, (list, tuple)):
            return tuple(freeze(y) for y in x)
        if isinstance(x, dict):
            return tuple((k, freeze(y)) for k, y in x.items())
        return (type(x), x)

    return target, freeze(args), freeze(kwargs)


class RuleReader:
    """Rules of calls, shared by calls of equal op, shapes and attributes."""

    def __init__(self) -> None:
        self._cache: dict[Any, tuple[Rule, bool]] = {}

    def __call__(self, node: fx.Node) -> tuple[Rule, bool]:
        """(rule, known). Raises RuleError naming the node if a row does not fit."""
        if node.meta.get("fxpar_whole"):
            return _whole(node), not _torch.aot.higher_order_name(node.target)
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda n: n.meta["val"]
        )
        key = _key(node.target, args, kwargs)
        try:
            if key in self._cache:
                return self._cache[key]
        except TypeError:
            key = None
        made = self._make(node, args, kwargs)
        if key is not None:
            self._cache[key] = made
        return made

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


def read(graph: fx.Graph, signature: Signature) -> Program:
    """The Program of an ATen graph with fake values on every node.

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
    taken = {node.name for node in graph.nodes if node.op != "placeholder"}

    def new_value(node: fx.Node, i: int, tensor: torch.Tensor, name: str) -> int:
        index = len(values)
        if _torch.fake.depends_on_data(tensor):
            raise PlanError(
                f"{name} ({node.target}) has a size that depends on data",
                where=user_line(node),
                fix="compute it outside of the compiled code",
            )
        shape = tuple(map(int, tensor.shape))
        values.append(Value(index, name, shape, tensor.dtype, _open_shape(node, i)))
        uses.append([])
        value_of[node, i] = index
        return index

    for node in graph.nodes:
        val = node.meta.get("val")
        if node.op == "placeholder":
            name = signature.inputs[len(inputs)].name
            while name in taken:
                name += "'"
            taken.add(name)
            tensor = isinstance(val, torch.Tensor)
            inputs.append(new_value(node, 0, val, name) if tensor else None)
        elif node.op == "get_attr":
            if isinstance(val, torch.Tensor):
                new_value(node, 0, val, node.name)
        elif node.op == "output":
            results = node.args[0]
            for arg in (results,) if isinstance(results, fx.Node) else results:
                found = value_of.get((arg, 0)) if isinstance(arg, fx.Node) else None
                outputs.append(found)
        elif node.target is operator.getitem:
            source = _element(node)
            if source in value_of:
                value_of[node, 0] = value_of[source]
        else:
            tensors = tensors_of(val)
            if not tensors:
                continue
            rule, known = rules(node)
            rule = pinned(rule, manual.get(node, {}))
            operands = tuple(value_of[n, 0] for n in tensor_nodes(node))
            single = isinstance(val, torch.Tensor)
            results = tuple(
                new_value(node, i, t, node.name if single else f"{node.name}.{i}")
                for i, t in enumerate(tensors)
            )
            op = Op(
                len(ops), node.name, node.target, rule, operands, results, node, known
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


def _open_shape(node: fx.Node, i: int) -> tuple[Any, ...]:
    """Shape of a tensor that a node gives, where the node stands for one of a graph
    with open sizes."""
    if OPEN not in node.meta:
        return ()
    return tuple(tensors_of(node.meta[OPEN].meta["val"])[i].shape)


def with_open_sizes(program: Program) -> Program:
    """The program of a graph at its hints, of the nodes that those stand for."""
    return replace(
        program,
        ops=[replace(op, node=op.node.meta[OPEN]) for op in program.ops],
        value_of={(node.meta[OPEN], i): v for (node, i), v in program.value_of.items()},
    )


def read_body(body: fx.GraphModule) -> Program:
    """The Program of a graph that an op runs: its inputs and outputs lie open."""
    places = [node.name for node in body.graph.nodes if node.op == "placeholder"]
    return read(body.graph, Signature(tuple(map(Input, places)), ()))


def inside_of(node: fx.Node) -> Inside | None:
    """The bodies of a call; None if it has none that are known."""
    args = fx.node.map_arg(node.args, lambda n: n.meta["val"])
    return inside(node.target, args, node.meta["val"], read_body)


def is_view(op: Op) -> bool:
    """Whether the op only looks at its operand in another way; some move elements
    where strides do not allow that."""
    if len(op.operands) != 1 or len(op.results) != 1:
        return False
    facts = op_facts_of(op.target)
    return facts.view or facts.reshapes


def contracts(op: Op) -> bool:
    """Whether two operands share a factor that is summed over. Indices and masks are
    no factors of a product: what adds at indices multiplies nothing."""
    floating = {
        i
        for i, node in enumerate(tensor_nodes(op.node))
        if node.meta["val"].dtype.is_floating_point
    }
    return any(
        len(floating.intersection(op.rule.where[f])) > 1
        for f in op.rule.contracted
        if f in op.rule.where
    )


def backward_ops(program: Program) -> set[int]:
    """Ops of the backward of a joint graph."""
    late = depending_on_tangents(program.ops[0].node.graph) if program.ops else ()
    return {op.index for op in program.ops if op.node in late}


def depending_on_tangents(graph: fx.Graph) -> set[fx.Node]:
    """Nodes of a joint graph that are computed from tangents, and these."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            late = str(node.target).startswith("tangents")
        else:
            late = not found.isdisjoint(node.all_input_nodes)
        if late and node.op != "output":
            found.add(node)
    return found


def backward_of(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that the backward runs: those of a joint graph, and those tagged so."""
    found = depending_on_tangents(graph)
    tagged = (n for n in graph.nodes if n.meta.get("partitioner_tag") == "is_backward")
    return found.union(n for n in tagged if n.op == "call_function")


def values_by_node(program: Program) -> dict[fx.Node, int]:
    """The value that each node of the graph gives that makes one: of an op with several
    results its ``getitem`` nodes."""
    out: dict[fx.Node, int] = {}
    for op in program.ops:
        if isinstance(op.node.meta["val"], torch.Tensor):
            out[op.node] = op.results[0]
        taken = [node for node in op.node.users if node.target is operator.getitem]
        for node in taken:
            taken += [user for user in node.users if user.target is operator.getitem]
            place = _element(node)[1]
            if place >= 0:
                out[node] = op.results[place]
    return out


def tensor_nodes(node: fx.Node) -> list[fx.Node]:
    """The nodes of a call's tensor operands, positional then keyword, repeats kept."""
    found: list[fx.Node] = []

    def visit(arg: fx.Node) -> fx.Node:
        if isinstance(arg.meta.get("val"), torch.Tensor):
            found.append(arg)
        return arg

    fx.node.map_arg((node.args, node.kwargs), visit)
    return found


def _element(node: fx.Node) -> tuple[fx.Node, int]:
    """The op whose result a getitem takes, and the place among its tensors; of a result
    that is no tensor, -1."""
    before, val = 0, node.meta.get("val")
    while node.target is operator.getitem:
        source, key = node.args
        before += len(tensors_of(source.meta["val"][:key]))
        node = source
    return node, before if isinstance(val, torch.Tensor) else -1
