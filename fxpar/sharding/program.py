"""The Program, a graph as sharding sees it: values, ops with rules, inputs and outputs.

``read_program`` makes one of an ATen graph. A value is one tensor: the result of a
node, or one element of a tuple result (``getitem`` nodes are names for those, not ops).
Also what nodes say of themselves: the user's line, whether they are of the backward,
or of the update of a training step.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxpar.sharding.factors import Axes, Rule
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.op_table import tensors_of
from fxpar.sharding.spec import Spec

# Of a node of a graph at the sizes it was traced with: the node of the graph with open
# sizes that it stands for.
OPEN = "fxpar_open"

# Where in a training step a node is, in ``meta["custom"]``, which all passes keep.
PHASE = "fxpar_phase"


@dataclass(frozen=True)
class Input:
    """One graph input."""

    # Of the argument or parameter.
    name: str
    # "input", "parameter", "buffer", "tangent" or "state".
    kind: str = "input"
    # The spec it is laid out in; None lets the plan choose.
    rest: Spec | None = None
    # How the program should use the value, as a hint (entries per dim, or a Spec);
    # ``rest`` is no hint.
    use: Spec | Sequence[str] | None = None
    # The dim that an axis of stages splits too at rest, as the minor axis.
    stage_dim: int | None = None
    # Whether a search that chooses its layout splits it over as many ranks as it can.
    splits: bool = False

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of it only."""
        return self.rest is not None and not self.rest.is_whole

    @property
    def along_stages(self) -> str:
        """The layout along an axis of stages: "split" by it, "whole" at every place,
        or, where the plan chooses the layout, "own": at the places that read it."""
        if self.stage_dim is not None:
            return "split"
        return "own" if self.rest is None else "whole"


@dataclass(frozen=True)
class Output:
    """One graph output."""

    # Of the result, or of what it is the gradient or new value of.
    name: str
    # "output", "gradient" or "mutation".
    kind: str = "output"
    # The input that the latter two belong to.
    of: int | None = None
    # The spec it must have; None: as ``lie`` says.
    rest: Spec | None = None
    # "open" as the plan has it, "even" the same but for dims of unequal shards, or
    # "whole".
    lie: str = "open"
    # As of an Input.
    stage_dim: int | None = None

    @property
    def is_free(self) -> bool:
        """Whether the plan chooses its layout."""
        return self.rest is None and self.lie == "open"

    def spec(self, settled: Spec) -> Spec:
        """The spec of the output, of which the value settled in a spec."""
        if self.rest is not None:
            return self.rest
        if self.lie in ("open", "even"):
            return settled.without_partial()
        return Spec.whole(len(settled.dims))


@dataclass(frozen=True)
class Signature:
    """What the inputs and outputs of a graph are."""

    # In graph order.
    inputs: tuple[Input, ...]
    # In graph order.
    outputs: tuple[Output, ...]
    # Of each "tangent" input its index and the output it belongs to.
    tangents: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Value:
    """One tensor of the program, in global shape."""

    # In ``Program.values``.
    index: int
    # Of its node, with the number of the result where an op has several.
    name: str
    # Global, a size that is left open at its hint.
    shape: tuple[int, ...]
    # Of its elements.
    dtype: torch.dtype
    # Its shape with the sizes that the program leaves open as symbols.
    open: tuple[Any, ...] = field(default=(), compare=False)
    # Of the manual regions that it is made in: it differs between their ranks, though
    # its spec has none of them.
    manual: Axes = field(default=(), compare=False)

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
    """One call."""

    # In ``Program.ops``.
    index: int
    # Of its node.
    name: str
    # What it calls.
    target: Any
    # Sized for this call.
    rule: Rule
    # Values it reads, in order of the rule.
    operands: tuple[int, ...]
    # Values it makes, in order of the rule.
    results: tuple[int, ...]
    # Of the graph.
    node: fx.Node = field(repr=False)
    # Without, the table has none: ``rule`` keeps all dims whole.
    has_rule: bool = True
    # Equal for calls of one op on equal constants, dtypes, shapes and strides; of one
    # program.
    kind: int = -1

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
    """All values and ops in topological order, and where each value is used."""

    # By index.
    values: list[Value]
    # In order of the graph.
    ops: list[Op]
    # Value of each input; None: not a tensor.
    inputs: list[int | None]
    # Value of each output; None: not a tensor.
    outputs: list[int | None]
    # Of the graph.
    signature: Signature
    # By value (op index, position among its results).
    producers: dict[int, tuple[int, int]]
    # By value (op index, operand position) of each reader.
    uses: list[list[tuple[int, int]]]
    # By node and position among its results.
    value_of: dict[tuple[fx.Node, int], int]
    # Values whose dtype is the one to reduce in: what they are computed from, one
    # operand an op, is not reduced before.
    reduce_here: frozenset[int] = frozenset()
    # No dim is split into unequal shards, unless a hint asks.
    even: bool = False
    # A schedule is chosen, which may have ranks swap queries of causal attentions, so
    # that all have as much to do.
    balances: bool = False

    @cached_property
    def returned(self) -> frozenset[int]:
        """The values among the outputs."""
        return frozenset(v for v in self.outputs if v is not None)

    @cached_property
    def backward(self) -> frozenset[int]:
        """Ops of the backward of a joint graph."""
        late = depending_on_tangents(self.ops[0].node.graph) if self.ops else ()
        return frozenset(op.index for op in self.ops if op.node in late)

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
    return line_of(trace) if trace else None


@lru_cache(maxsize=1 << 14)
def line_of(trace: str) -> str | None:
    """``user_line`` of a stack trace; all layers that repeat have the same few."""
    lines = trace.strip().splitlines()
    user_frame = None
    for i, line in enumerate(lines):
        line = line.strip()
        if line.startswith("File "):
            parts = line.split('"')
            path = parts[1] if len(parts) > 1 else "?"
            if path.startswith(_OURS) or "/torch/" in path and "site-packages" in path:
                continue
            number = line.split("line ")[-1].split(",")[0]
            code = lines[i + 1].strip() if i + 1 < len(lines) else ""
            user_frame = f"{path}:{number}: {code}"
    return user_frame


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


def depending_on_tangents(graph: fx.Graph) -> set[fx.Node]:
    """Nodes of a joint graph that are computed from tangents, and these."""
    late_nodes: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            late = str(node.target).startswith("tangents")
        else:
            late = not late_nodes.isdisjoint(node.all_input_nodes)
        if late and node.op != "output":
            late_nodes.add(node)
    return late_nodes


def backward_of(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that the backward runs: those of a joint graph, and those tagged so."""
    late_nodes = depending_on_tangents(graph)
    tagged = (n for n in graph.nodes if n.meta.get("partitioner_tag") == "is_backward")
    return late_nodes.union(n for n in tagged if n.op == "call_function")


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes, and all that they are computed from."""
    sources = set(nodes)
    stack = list(sources)
    while stack:
        for read in stack.pop().all_input_nodes:
            if read not in sources:
                sources.add(read)
                stack.append(read)
    return sources


def phase_of(node: fx.Node) -> str | None:
    """In the graph of a training step: "forward", "backward" or "update"."""
    return (node.meta.get("custom") or {}).get(PHASE)


def values_by_node(program: Program) -> dict[fx.Node, int]:
    """The value that each node of the graph gives that makes one: of an op with several
    results its ``getitem`` nodes."""
    out: dict[fx.Node, int] = {}
    for op in program.ops:
        if isinstance(op.node.meta["val"], torch.Tensor):
            out[op.node] = op.results[0]
        elements = [node for node in op.node.users if node.target is operator.getitem]
        for node in elements:
            elements += [user for user in node.users if user.target is operator.getitem]
            place = element_of(node)[1]
            if place >= 0:
                out[node] = op.results[place]
    return out


def tensor_nodes(node: fx.Node) -> list[fx.Node]:
    """The nodes of a call's tensor operands, positional then keyword, repeats kept."""
    operands: list[fx.Node] = []

    def visit(arg: fx.Node) -> fx.Node:
        if isinstance(arg.meta.get("val"), torch.Tensor):
            operands.append(arg)
        return arg

    fx.node.map_arg((node.args, node.kwargs), visit)
    return operands


def element_of(node: fx.Node) -> tuple[fx.Node, int]:
    """The op whose result a getitem takes, and the place among its tensors; of a result
    that is no tensor, -1."""
    place, val = 0, node.meta.get("val")
    while node.target is operator.getitem:
        source, key = node.args
        place += len(tensors_of(source.meta["val"][:key]))
        node = source
    return node, place if isinstance(val, torch.Tensor) else -1
