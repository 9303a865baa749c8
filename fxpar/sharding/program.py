"""Holds the Program, a graph as sharding sees it: values, ops with rules, inputs and
outputs.

``read_program`` makes one of an ATen graph. A value is one tensor: the result of a
node, or one element of a tuple result (``getitem`` nodes are names for those, not ops).
In: nodes and their ``meta``. Out: facts of a node: its user's line, whether it is in
the backward, or in the update of a training step.
Never: changes a graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import fx

from fxpar.errors import is_library
from fxpar.sharding.factors import Axes, Rule
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.op_table import tensors_of
from fxpar.sharding.spec import Spec

# Key in a node's meta: the node of the graph with open sizes that this node of the
# graph with the traced sizes stands for.
OPEN = "fxpar_open"

# Key in ``meta["custom"]``, which all passes keep: the phase of a training step.
PHASE = "fxpar_phase"


@dataclass(frozen=True)
class Input:
    """Describes one graph input."""

    # The argument's or parameter's name.
    name: str
    # "input", "parameter", "buffer", "tangent", "state" or "size".
    kind: str = "input"
    # The spec it is laid out in; None lets the plan choose.
    at_rest: Spec | None = None
    # How the program should use the value, as a hint (entries per dim, or a Spec);
    # ``at_rest`` is no hint.
    use: Spec | Sequence[str] | None = None
    # The dim that an axis of stages also splits at rest, as the minor axis.
    stage_dim: int | None = None
    # Whether a search that chooses its layout splits it over as many ranks as it can,
    # and along an axis of stages.
    splits: bool = False

    @property
    def is_sharded(self) -> bool:
        """Return whether each rank holds only a part of it."""
        return self.at_rest is not None and not self.at_rest.is_whole

    @property
    def along_stages(self) -> str:
        """Return the layout along an axis of stages: "split" by it, "whole" at every
        place, or, where the plan chooses the layout, "own": at the places that read it.
        """
        if self.stage_dim is not None:
            return "split"
        if self.at_rest is not None:
            return "whole"
        return "split" if self.splits else "own"


@dataclass(frozen=True)
class Output:
    """Describes one graph output."""

    # The name of the result, or of the input whose gradient or new value it is.
    name: str
    # "output", "gradient" or "mutation".
    kind: str = "output"
    # The input of a gradient or a mutation.
    of: int | None = None
    # The spec it must have; None: as ``layout`` says.
    at_rest: Spec | None = None
    # "open": as the plan has it; "even": the same, but whole in dims of unequal shards;
    # "whole".
    layout: str = "open"
    # As in an Input.
    stage_dim: int | None = None

    @property
    def is_free(self) -> bool:
        """Return whether the plan chooses its layout."""
        return self.at_rest is None and self.layout == "open"

    def spec(self, settled: Spec) -> Spec:
        """Return the spec of the output, given the spec in which its value settled."""
        if self.at_rest is not None:
            return self.at_rest
        if self.layout in ("open", "even"):
            return settled.without_partial()
        return Spec.whole(len(settled.dims))


@dataclass(frozen=True)
class Signature:
    """Describes the inputs and outputs of a graph."""

    # In graph order.
    inputs: tuple[Input, ...]
    # In graph order.
    outputs: tuple[Output, ...]
    # For each "tangent" input, its index and the index of its output.
    tangents: tuple[tuple[int, int], ...] = ()

    @property
    def has_layouts(self) -> bool:
        """Return whether an input or output has a layout that no plan chooses."""
        ends: list[Input | Output] = [*self.inputs, *self.outputs]
        return any(end.at_rest is not None for end in ends)

    def with_layouts(self, change: Callable[[Any, Spec], Any]) -> Signature:
        """Return the signature with ``change`` of each input and output that has a
        layout, given it and its spec at rest."""

        def changed(end: Any) -> Any:
            return end if end.at_rest is None else change(end, end.at_rest)

        inputs, outputs = map(changed, self.inputs), map(changed, self.outputs)
        return Signature(tuple(inputs), tuple(outputs), self.tangents)


@dataclass(frozen=True)
class Value:
    """Describes one tensor of the program, in global shape."""

    # In ``Program.values``.
    index: int
    # Its node's name, with the number of the result where an op has several.
    name: str
    # Global; a size that is left open has its hint.
    shape: tuple[int, ...]
    # The dtype of its elements.
    dtype: torch.dtype
    # Its shape with the sizes that the program leaves open as symbols.
    open: tuple[Any, ...] = field(default=(), compare=False)
    # Axes of the manual regions that it is made in: it differs between their ranks,
    # though its spec has none of these axes.
    manual: Axes = field(default=(), compare=False)

    @property
    def sizes(self) -> tuple[Any, ...]:
        """Return the shape, with open sizes as symbols."""
        return self.open or self.shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Op:
    """Describes one call."""

    # In ``Program.ops``.
    index: int
    # Its node's name.
    name: str
    # The op that it calls.
    target: Any
    # Sized for this call.
    rule: Rule
    # Values it reads, in order of the rule.
    operands: tuple[int, ...]
    # Values it makes, in order of the rule.
    results: tuple[int, ...]
    # In the graph.
    node: fx.Node = field(repr=False)
    # Whether the table has a rule; if not, ``rule`` keeps all dims whole.
    has_rule: bool = True

    @property
    def tensors(self) -> tuple[int, ...]:
        return self.operands + self.results

    @property
    def is_zero(self) -> bool:
        """Return whether the op makes a constant zero, which is its own partial sum."""
        is_full = self.node.target is torch.ops.aten.full.default
        return is_full and self.node.args[1] == 0


@dataclass(frozen=True, eq=False)
class Program:
    """Holds all values and ops in topological order, and where each value is used."""

    # By index.
    values: list[Value]
    # In order of the graph.
    ops: list[Op]
    # Value of each input; None: not a tensor.
    inputs: list[int | None]
    # Value of each output; None: not a tensor.
    outputs: list[int | None]
    # The graph's signature.
    signature: Signature
    # Value -> (op index, position among its results).
    producers: dict[int, tuple[int, int]]
    # By value: (op index, operand position) of each reader.
    uses: list[list[tuple[int, int]]]
    # (node, position among its results) -> value.
    value_of: dict[tuple[fx.Node, int], int]
    # Values whose dtype is the right one to reduce in: the values they are computed
    # from, by ops of one operand, are not reduced earlier.
    reduce_here: frozenset[int] = frozenset()
    # Whether dims are split into equal shards only, unless a hint asks otherwise.
    even: bool = False
    # Whether a schedule will be chosen, which may let ranks swap queries of causal
    # attention, so that all compute equally much.
    balances: bool = False
    # Whether what is gathered of parameters for the forward is kept for the backward.
    keeps_gathered: bool = False
    # What ``kernels_of`` has returned; where ops or sizes change, one begins anew.
    kernel_cache: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def tensor_inputs(self) -> list[tuple[Input, int]]:
        """Return the inputs that are tensors, each with its value."""
        pairs = zip(self.signature.inputs, self.inputs, strict=True)
        return [(declared, v) for declared, v in pairs if v is not None]

    @cached_property
    def tensor_outputs(self) -> list[tuple[Output, int]]:
        """Return the outputs that are tensors, each with its value."""
        pairs = zip(self.signature.outputs, self.outputs, strict=True)
        return [(declared, v) for declared, v in pairs if v is not None]

    @cached_property
    def returned(self) -> frozenset[int]:
        """Return the values among the outputs."""
        return frozenset(v for v in self.outputs if v is not None)

    @cached_property
    def backward(self) -> frozenset[int]:
        """Return the ops of the backward of a joint graph."""
        late = depending_on_tangents(self.ops[0].node.graph) if self.ops else ()
        return frozenset(op.index for op in self.ops if op.node in late)

    @cached_property
    def constants(self) -> frozenset[int]:
        """Return the values that depend on no input. Random values are left out:
        drawing the whole on each rank is expensive."""
        constants = {v.index for v in self.values} - set(self.producers)
        constants -= {v for v in self.inputs if v is not None}
        for op in self.ops:
            is_aten = getattr(op.target, "namespace", "") in ("aten", "prims")
            if is_aten and op.has_rule and constants.issuperset(op.operands):
                constants.update(op.results)
        return frozenset(constants)

    @cached_property
    def sharded(self) -> frozenset[int]:
        """Return the values of the parameters of which each rank holds a part."""
        inputs = self.tensor_inputs
        return frozenset(v for x, v in inputs if x.kind == "parameter" and x.is_sharded)

    @cached_property
    def of_sharded(self) -> dict[int, frozenset[int]]:
        """Return the values made of ``sharded`` alone, as ``derived``."""
        return self.derived(self.sharded)

    def derived(self, roots: Collection[int]) -> dict[int, frozenset[int]]:
        """Return ``roots`` and the values computed from them alone, each with the roots
        it is computed from."""
        values = {v: frozenset({v}) for v in roots}
        for op in self.ops if roots else ():
            if op.operands and all(v in values for v in op.operands):
                of = frozenset[int]().union(*(values[v] for v in op.operands))
                values.update(dict.fromkeys(op.results, of))
        return values

    @cached_property
    def gathered_again(self) -> frozenset[int]:
        """Return the values made of parameters, at rest or with an open layout, that
        forward and backward each gather.

        These are all but the values of parameters that the last reader of the forward
        and the first of the backward share; readers of vectors alone do not count.
        Between the two little else is gathered: such values would be dropped and
        gathered again at once (FSDP2 keeps the parameters of its root gathered for this
        reason).
        """
        parameters = [x for x in self.tensor_inputs if x[0].kind == "parameter"]
        stored = self.sharded | {v for x, v in parameters if x.at_rest is None}
        if not stored:
            return frozenset()
        roots = self.derived(stored)
        large = {v for v in stored if len(self.values[v].shape) > 1} or stored
        last: frozenset[int] = frozenset()
        first: frozenset[int] | None = None
        for op in self.ops:
            of = frozenset[int]().union(*(roots.get(v, ()) for v in op.operands))
            if large.isdisjoint(of) or not roots.keys().isdisjoint(op.results):
                continue
            if op.index not in self.backward:
                last = of
            elif first is None:
                first = of
        still_there = last & (first or frozenset())
        return frozenset(v for v, of in roots.items() if still_there.isdisjoint(of))

    @cached_property
    def gathered_twice(self) -> frozenset[int]:
        """Return the values that forward and backward each gather for themselves."""
        return frozenset() if self.keeps_gathered else self.gathered_again

    def named(self, name: str) -> int | None:
        """Return the index of the value with this name; None if there is none."""
        return next((v.index for v in self.values if v.name == name), None)


def user_line(node: fx.Node) -> str | None:
    """Return the user's own source line a node comes from, as ``file:line: code``.

    Innermost frame outside of libraries (``is_library``); None if unknown.
    """
    trace = node.meta.get("stack_trace")
    return line_of(trace) if trace else None


@lru_cache(maxsize=1 << 14)
def line_of(trace: str) -> str | None:
    """Return ``user_line`` of a stack trace; cached, as repeated layers have the same
    few."""
    lines = trace.strip().splitlines()
    user_frame = None
    for i, line in enumerate(lines):
        line = line.strip()
        if line.startswith("File "):
            parts = line.split('"')
            path = parts[1] if len(parts) > 1 else "?"
            if is_library(path):
                continue
            number = line.split("line ")[-1].split(",")[0]
            code = lines[i + 1].strip() if i + 1 < len(lines) else ""
            user_frame = f"{path}:{number}: {code}"
    return user_frame


def is_view(op: Op) -> bool:
    """Return whether the op only views its operand differently; some ops copy elements
    where strides do not allow a view."""
    if len(op.operands) != 1 or len(op.results) != 1:
        return False
    facts = op_facts_of(op.target)
    return facts.view or facts.reshapes


def is_contraction(op: Op) -> bool:
    """Return whether two operands share a factor that is summed over. Indices and masks
    are not counted: an op that adds at indices multiplies nothing."""
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
    """Return the tangents of a joint graph and the nodes computed from them."""
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
    """Return nodes that the backward runs: of a joint graph, and those tagged as
    such."""
    late_nodes = depending_on_tangents(graph)
    tagged = (n for n in graph.nodes if n.meta.get("partitioner_tag") == "is_backward")
    return late_nodes.union(n for n in tagged if n.op == "call_function")


def ancestors(
    nodes: Iterable[fx.Node], among: Collection[fx.Node] | None = None
) -> set[fx.Node]:
    """Return the nodes, and all nodes that they are computed from; if ``among`` is
    given, by nodes in it alone."""
    sources = set(nodes)
    stack = list(sources)
    while stack:
        for read in stack.pop().all_input_nodes:
            if read not in sources and (among is None or read in among):
                sources.add(read)
                stack.append(read)
    return sources


def descendants(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes, and all nodes that are computed from them."""
    results = set(nodes)
    stack = list(results)
    while stack:
        new = stack.pop().users.keys() - results
        results |= new
        stack += new
    return results


def followed(
    node: fx.Node,
    step: Callable[[fx.Node], Iterable[fx.Node]],
    passes: Callable[[fx.Node], bool],
) -> list[fx.Node]:
    """Return the readers or the operands of a node (``step``), through those that
    ``passes`` says."""
    out, stack = list[fx.Node](), [node]
    while stack:
        for other in step(stack.pop()):
            (stack if passes(other) else out).append(other)
    return out


def demand(
    nodes: Iterable[fx.Node],
    order: dict[fx.Node, None],
    among: Collection[fx.Node] | None = None,
) -> None:
    """Append nodes to the order, each after all that it reads; if ``among`` is given,
    after what it reads of these."""
    for node in nodes:
        stack = [node]
        while stack:
            top = stack[-1]
            missing = [
                read
                for read in top.all_input_nodes
                if read not in order and (among is None or read in among)
            ]
            if top in order or not missing:
                order.setdefault(stack.pop())
            else:
                stack += reversed(missing)


def phase_of(node: fx.Node) -> str | None:
    """Return the phase of a node of a training step: "forward", "backward" or "update";
    None elsewhere."""
    return (node.meta.get("custom") or {}).get(PHASE)


def tensor_nodes(node: fx.Node) -> list[fx.Node]:
    """Return the nodes of a call's tensor operands, positional then keyword, repeats
    kept."""
    return tensors_among((node.args, node.kwargs))


def tensors_at(node: fx.Node) -> list[torch.Tensor]:
    """Return the fake tensors that a call reads, then those that it gives."""
    operands = [x.meta["val"] for x in tensor_nodes(node)]
    return operands + tensors_of(node.meta["val"])


def tensors_among(arguments: Any) -> list[fx.Node]:
    """Return the nodes with a tensor among arguments, in order, repeats kept."""
    operands: list[fx.Node] = []

    def visit(arg: fx.Node) -> fx.Node:
        if isinstance(arg.meta.get("val"), torch.Tensor):
            operands.append(arg)
        return arg

    fx.node.map_arg(arguments, visit)
    return operands


def element_of(node: fx.Node) -> tuple[fx.Node, int]:
    """Return the op whose result a getitem takes, and the place among its tensors; -1
    for a result that is no tensor."""
    place, val = 0, node.meta.get("val")
    while node.target is operator.getitem:
        source, key = node.args
        place += len(tensors_of(source.meta["val"][:key]))
        node = source
    return node, place if isinstance(val, torch.Tensor) else -1
