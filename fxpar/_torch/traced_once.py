"""Traces graphs with segments that repeat: one segment of each kind is traced.

In: a graph that is about to be traced, and its kinds of segments. Out: nodes of all
segments: the others get copies of the first one's, so that the traced graph is the one
that tracing each gives. The forward is traced in its place, the backward when gradients
for the kind are first asked for. Meanwhile autograd sees a segment as one op.

A kind is looked at once, as its first segment runs before anything is traced. It may
give new tensors; where autograd records nothing and ops are made functional, also write
to its operands, and give views that could as well be tensors of their own. Where it
does more (changes a mode, gives other views), all its segments are traced. Never: a
copy with metadata that nodes traced there would not have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx

from fxpar._torch import traced_values as values_of
from fxpar._torch.objects import memory_of
from fxpar._torch.traced_values import Memories, TracedNode


@dataclass
class SegmentKind:
    """Holds segments of a graph that are equal, node for node."""

    # The nodes of each, in order.
    segments: list[list[fx.Node]]
    # The tensors that each reads from outside: a node, and the position in the segment
    # of the node that reads it, or None for all others.
    operands: list[list[tuple[fx.Node, int | None]]]
    # The numbers that each reads from outside, in this order.
    numbers: list[list[fx.Node]]
    # Positions of nodes whose values are read outside, in one segment at least.
    results: list[int]
    # Which of the results keep their elements until they are last read, and are no
    # results of the graph: for these it makes no difference that they share memory.
    lasting: list[bool]
    # Whether the first segment ran before anything is traced.
    is_checked: bool = False
    # Whether every segment has to be traced, found out then.
    refused: bool = False
    # Operands it writes to, found out then.
    written: tuple[int, ...] = ()


# Finds what repeats in a graph that is about to be traced.
FindKinds = Callable[[fx.GraphModule], list[SegmentKind]]


@dataclass(frozen=True)
class _Conditions:
    """Holds what the nodes traced for a segment depend on in addition to those of the
    graph."""

    # As ``modes`` when it runs.
    modes: tuple[Any, ...]
    # The numbers that it reads.
    numbers: tuple[int, ...]
    # For each operand the first one that has the same memory.
    sharing: tuple[int, ...]


def _conditions_of(values: Sequence[Any], numbers: Sequence[Any]) -> _Conditions | None:
    """Return the conditions of a segment with these operands; None if it has to be
    traced."""
    parts = list(map(values_of.part_of, values))
    if not all(map(values_of.is_value, parts)):
        return None
    tracer = values_of.tracer()
    if tracer and None in [values_of.node_of(x, tracer) for x in parts]:
        return None
    fakes = [values_of.fake_of(x) for x in parts]
    if not all(map(values_of.is_plain, fakes)):
        return None
    if not all(type(x) is int for x in numbers):
        return None
    memories = list(map(memory_of, fakes))
    sharing = tuple(memories.index(memory) for memory in memories)
    return _Conditions(values_of.modes(), tuple(numbers), sharing)


def _can_be_copied(
    kind: SegmentKind, values: Sequence[Any], conditions: _Conditions
) -> bool:
    """Return whether each operand that a segment writes to has memory that no other
    operand has, and neither autograd nor a view sees it."""
    if not kind.written:
        return True
    if torch.is_inference_mode_enabled() or any(x.requires_grad for x in values):
        return False
    for i in kind.written:
        x = values[i]
        if not values_of.is_functional(x) or x._is_view():
            return False
        if conditions.sharing.count(conditions.sharing[i]) > 1:
            return False
    return True


def _has_own_results(
    outs: Sequence[Any], values: Sequence[Any], lasting: Sequence[bool]
) -> bool:
    """Return whether results are tensors of their own, or could be."""
    if not all(map(values_of.is_value, outs)):
        return False
    if any(x.requires_grad for x in (*outs, *values)):
        lasting = [False] * len(outs)
    separate = [x for x, may in zip(outs, lasting, strict=True) if not may]
    own = [memory_of(values_of.fake_of(x)) for x in separate]
    others = {memory_of(values_of.fake_of(x)) for x in values}
    is_view = any(x._is_view() for x in separate)
    return not is_view and len(set(own)) == len(own) and not others.intersection(own)


def traced_once(find: FindKinds | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which AOTAutograd traces one segment of each kind that
    ``find`` finds in a graph."""
    from unittest import mock

    from torch._functorch._aot_autograd import graph_capture_wrappers
    from torch.fx.experimental import symbolic_shapes

    if find is None:
        return contextlib.nullcontext()
    kinds: dict[fx.Graph, list[SegmentKind]] = {}
    plain = symbolic_shapes.PropagateUnbackedSymInts

    def interpreter(module: fx.GraphModule) -> Any:
        if values_of.functional_mode() is None:
            return plain(module)
        if module.graph not in kinds:  # it is run twice
            kinds[module.graph] = find(module)
        return _interpreter(plain)(module, kinds[module.graph])

    return mock.patch.object(  # it runs Dynamo's graphs
        graph_capture_wrappers, "PropagateUnbackedSymInts", interpreter
    )


def run(module: fx.GraphModule, kinds: Sequence[SegmentKind], *args: Any) -> Any:
    """Return the results of a graph. Where it is traced, one segment of each kind is
    for all; before that it must run once, each segment by itself, to look at the first
    of each kind."""
    return _interpreter(fx.Interpreter)(module, kinds).run(*args)


@dataclass(frozen=True)
class _TracedBackward:
    """Holds what was traced of the backward of a segment."""

    # All nodes that were traced, in order.
    nodes: list[TracedNode]
    # Nodes of the gradients of the results.
    tangents: list[fx.Node | None]
    # The gradients of the operands.
    gradients: list[Any]
    # Their nodes.
    gradient_nodes: list[fx.Node | None]


@dataclass
class _TracedKind:
    """Holds what was traced of a kind, in one run of the graph."""

    # The segments.
    kind: SegmentKind
    # The interpreter that runs the graph.
    interpreter: Any
    # Conditions of the first segment.
    conditions: _Conditions | None = None
    # A fake tensor like each result.
    likes: list[Any] = field(default_factory=list)
    # Whether each result has a gradient.
    differentiable: list[bool] = field(default_factory=list)
    # Nodes of the operands of the first.
    operands: list[fx.Node] = field(default_factory=list)
    # Nodes of the results of the first.
    results: list[fx.Node] = field(default_factory=list)
    # Nodes of the values that the first writes to operands.
    written: list[fx.Node] = field(default_factory=list)
    # All nodes that were traced of the forward of the first, in order.
    nodes: list[TracedNode] = field(default_factory=list)
    # Values in place of its operands, where autograd's record of it begins.
    leaves: list[Any] = field(default_factory=list)
    # Its results.
    outs: list[Any] = field(default_factory=list)
    # Autograd's number of the last node before it.
    begin: int = 0
    # Autograd's number of the last node in it.
    end: int = 0
    # By the forms of the gradients of results, and which of these are one tensor.
    backwards: dict[Any, _TracedBackward] = field(default_factory=dict)
    # ``users_texts`` of the first.
    texts: list[dict[str, str]] = field(default_factory=list)


@dataclass
class _Copies:
    """Holds nodes of one segment in place of those of the first."""

    # Node of the first -> the node in its place.
    nodes: dict[fx.Node, fx.Node] = field(default_factory=dict)
    # Number of a checkpointed region of the first -> the number in its place.
    regions: dict[int, int] = field(default_factory=dict)
    # Metadata of the user's code: name -> its text at the first -> its value here.
    metadata: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Autograd's number of the last node before it.
    begin: int = 0

    def add(
        self,
        traced_nodes: Sequence[TracedNode],
        nodes: dict[fx.Node, fx.Node],
        traced: _TracedKind,
        other: int,
        tracer: Any,
    ) -> None:
        """Add copies of nodes, which read what ``nodes`` has in place of their
        operands, and add the copies to ``nodes``. Numbers that autograd gave to nodes
        of the first forward become those of this segment; others become ``other``."""
        from torch._higher_order_ops import wrap

        memories = Memories(nodes)
        regions = _regions(traced_nodes, self.regions)
        self.regions |= {i: next(wrap.uid) for i in regions}
        with values_of.untraced():
            for node in traced_nodes:
                meta = node.copy(tracer.graph, nodes).meta
                if "val" in meta:
                    meta["val"] = memories.like(meta["val"])
                if "ac_graph_id" in meta:
                    meta["ac_graph_id"] = self.regions[meta["ac_graph_id"]]
                if "seq_nr" in meta:
                    number = meta["seq_nr"] - traced.begin
                    is_own = 0 < number <= traced.end - traced.begin
                    meta["seq_nr"] = self.begin + number if is_own else other
                for name, values in self.metadata.items():
                    if name in meta:
                        meta[name] = values.get(repr(meta[name]), meta[name])


@cache
def _interpreter(base: Any) -> Any:
    class SegmentInterpreter(base):
        """Runs a graph with segments that repeat."""

        def __init__(
            self, module: fx.GraphModule, kinds: Sequence[SegmentKind]
        ) -> None:
            super().__init__(module)
            # Autograd's number of the last node of the forward, once a backward begins.
            self.last_number: int | None = None
            self.segments: dict[fx.Node, _Segment] = {}
            for kind in kinds:
                traced = _TracedKind(kind, self)
                for i, nodes in enumerate(kind.segments):
                    self.segments[nodes[0]] = _Segment(traced, i)

        def run_node(self, n: fx.Node) -> Any:
            segment = self.segments.get(n)
            if segment is None:
                return super().run_node(n)
            segment.run()
            return self.env[n]

        def run_by_itself(self, node: fx.Node) -> None:
            """Run a node of a segment."""
            try:
                self.env[node] = super().run_node(node)
            except Exception as error:  # as it is said of other nodes
                text = f"{error}\n\nWhile executing {node.format_node()}"
                error.args = (text, *error.args[1:])
                raise

    return SegmentInterpreter


class _Segment:
    """Is a segment of a kind, in one run of the graph."""

    def __init__(self, traced: _TracedKind, index: int) -> None:
        self.traced, self.kind, self.index = traced, traced.kind, index
        self.nodes = self.kind.segments[index]
        self.reads = [node for node, _ in self.kind.operands[index]]
        self.copies = _Copies()
        self.before = 0  # autograd's number before it is an op

    def run(self) -> None:
        """Put the values of the segment into the interpreter."""
        interpreter, kind = self.traced.interpreter, self.kind
        values = [interpreter.env[node] for node in self.reads]
        is_traced = values_of.tracer() is not None
        fits = self._can_be_copy(values)
        if fits and self.index == 0 and not is_traced:
            self._look_at(values)
        elif not fits or not (is_traced or values_of.functional_mode()):
            self._run_nodes()
        else:
            self.before = values_of.last_number()
            is_op = torch.is_grad_enabled() and any(x.requires_grad for x in values)
            outs = _segment_op().apply(self, *values) if is_op else self.forward(values)
            interpreter.env.update(dict.fromkeys(self.nodes))
            for at, out in zip(kind.results, outs, strict=True):
                interpreter.env[self.nodes[at]] = out

    def _run_nodes(self) -> None:
        for node in self.nodes:
            self.traced.interpreter.run_by_itself(node)

    def _can_be_copy(self, values: Sequence[Any]) -> bool:
        """Return whether the segment may be a copy of the first, or the one that is
        copied."""
        traced, kind = self.traced, self.kind
        if kind.refused or (values_of.tracer() and not kind.is_checked):
            return False
        numbers = [traced.interpreter.env[node] for node in kind.numbers[self.index]]
        conditions = _conditions_of(values, numbers)
        if conditions is None:
            return False
        if not _can_be_copied(kind, values, conditions):
            return False
        if self.index == 0:
            traced.conditions = conditions
            traced.texts = values_of.users_texts(self.nodes)
            return True
        if traced.conditions != conditions:
            return False
        metadata = values_of.users_metadata(traced.texts, self.nodes)
        self.copies.metadata = metadata or {}
        return metadata is not None

    def _look_at(self, values: Sequence[Any]) -> None:
        """Run the first segment, before anything is traced, and note what it does."""
        traced, kind = self.traced, self.kind
        assert traced.conditions is not None
        parts = list(map(values_of.part_of, values))

        def state() -> Any:
            forms = list(map(values_of.form_of, parts))
            return values_of.tokens(), values_of.modes(), forms

        before, counts = state(), list(map(values_of.writes_to, parts))
        self._run_nodes()
        outs = [traced.interpreter.env[self.nodes[i]] for i in kind.results]
        writes = zip(counts, map(values_of.writes_to, parts), strict=True)
        kind.written = tuple(i for i, (n, now) in enumerate(writes) if n != now)
        kind.is_checked = True
        kind.refused = (
            state() != before
            or not _has_own_results(outs, parts, kind.lasting)
            or not _can_be_copied(kind, values, traced.conditions)
        )
        if not kind.refused:
            traced.differentiable = [x.requires_grad for x in outs]
            traced.likes = list(map(values_of.fake_of, outs))

    def forward(self, operands: Sequence[Any]) -> list[Any]:
        """Return the results, of which autograd knows nothing, and write to
        operands."""
        tracer, traced = values_of.tracer(), self.traced
        targets = [operands[i] for i in self.kind.written]
        if tracer is None:
            memories = Memories({})
            with values_of.untraced() as value:
                for x in targets:
                    values_of.write(x, memories.like(values_of.fake_of(x)))
                return [value(memories.like(x)) for x in traced.likes]
        if self.index == 0:
            self.copies = _trace_first(traced, operands, self.before)
        else:
            self._copy(operands, tracer)
        copies = self.copies.nodes
        with values_of.untraced():
            for x, node in zip(targets, traced.written, strict=True):
                values_of.write(x, values_of.fake_for(copies[node], tracer))
        return [values_of.value_of(copies[node], tracer) for node in traced.results]

    def _copy(self, operands: Sequence[Any], tracer: Any) -> None:
        traced, own = self.traced, self.copies
        parts = map(values_of.part_of, operands)
        nodes = [values_of.node_of(x, tracer) for x in parts]
        own.begin = values_of.last_number()
        own.nodes = dict(zip(traced.operands, nodes, strict=True))
        own.add(traced.nodes, own.nodes, traced, self.before, tracer)
        values_of.skip_numbers(traced.end - traced.begin)

    def backward(self, tangents: Sequence[Any]) -> list[Any]:
        """Return the gradients of the operands."""
        traced, tracer = self.traced, values_of.tracer()
        if traced.interpreter.last_number is None:
            traced.interpreter.last_number = values_of.last_number()
        nodes = [x if x is None else values_of.node_of(x, tracer) for x in tangents]
        forms = (x if x is None else (x.dtype, x.shape, x.stride()) for x in tangents)
        key = tuple(forms), tuple(map(nodes.index, nodes))
        if key not in traced.backwards:
            traced.backwards[key] = _trace_backward(traced, tangents, nodes, tracer)
        backward = traced.backwards[key]
        own = dict(self.copies.nodes)
        for node, mine in zip(backward.tangents, nodes, strict=True):
            if node is not None:
                own[node] = mine
        last = traced.interpreter.last_number
        self.copies.add(backward.nodes, own, traced, last, tracer)
        gradients = []
        for node, like in zip(backward.gradient_nodes, backward.gradients, strict=True):
            part = values_of.value_of(node and own.get(node, node), tracer)
            gradients.append(values_of.around(part, like))
        return gradients


@cache
def _segment_op() -> Any:
    """Return the op that autograd sees in place of a segment."""

    class RepeatedSegment(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, segment: _Segment, *operands: Any) -> Any:
            ctx.segment = segment
            ctx.set_materialize_grads(False)
            outs = segment.forward(operands)
            flags = segment.traced.differentiable
            fixed = [x for x, flag in zip(outs, flags, strict=True) if not flag]
            ctx.mark_non_differentiable(*fixed)
            return tuple(outs)

        @staticmethod
        def backward(ctx: Any, *tangents: Any) -> Any:
            return None, *ctx.segment.backward(tangents)

    return RepeatedSegment


def _trace_first(traced: _TracedKind, operands: Sequence[Any], before: int) -> _Copies:
    """Trace the first segment for all of its kind, and for autograd to go back through.
    ``before``: autograd's number of the last node before there was an op for it."""
    tracer, kind = values_of.tracer(), traced.kind
    parts = list(map(values_of.part_of, operands))
    traced.operands = [values_of.node_of(x, tracer) for x in parts]
    assert traced.conditions is not None
    env, nodes, reads = traced.interpreter.env, kind.segments[0], kind.operands[0]
    leaves = traced.leaves = [_leaf(x, tracer) for x in operands]
    last, traced.begin = values_of.last_node(tracer.graph), values_of.last_number()
    read_values = {node: env.get(node) for node, _ in reads}
    shared = {n: x for (n, at), x in zip(reads, leaves, strict=True) if at is None}
    with torch.set_grad_enabled(traced.conditions.modes[0]):
        for i, node in enumerate(nodes):
            own = {n: x for (n, at), x in zip(reads, leaves, strict=True) if at == i}
            env.update(shared | own)
            traced.interpreter.run_by_itself(node)
    traced.outs = [env[nodes[i]] for i in kind.results]
    env.update(read_values)
    keep_lines(traced.outs)
    traced.end = values_of.last_number()
    traced.nodes = values_of.traced_since(last, tracer.graph)
    traced.results = [values_of.node_of(x, tracer) for x in traced.outs]
    traced.written = [values_of.node_of(leaves[i], tracer) for i in kind.written]
    traced.differentiable = [x.requires_grad for x in traced.outs]
    kind.refused = not values_of.can_be_copied(traced.nodes)
    for x in traced.nodes:
        # A node without a number of its own has that of the node before it.
        if x.meta.get("seq_nr") == traced.begin:
            x.node.meta["seq_nr"] = before
    same = {node: node for node in [*traced.operands, *(x.node for x in traced.nodes)]}
    regions = {i: i for i in _regions(traced.nodes)}
    return _Copies(same, regions, begin=traced.begin)


def _leaf(x: Any, tracer: Any) -> Any:
    """Return a value like an operand, of which autograd knows nothing."""
    part = values_of.part_of(x)
    with values_of.untraced() as value:
        if values_of.is_functional(part):
            own = value(values_of.fake_of(part))
        else:
            own = values_of.fake_for(values_of.node_of(part, tracer), tracer)
        return values_of.around(own, x).requires_grad_(x.requires_grad)


def _trace_backward(
    traced: _TracedKind,
    tangents: Sequence[Any],
    tangent_nodes: list[fx.Node | None],
    tracer: Any,
) -> _TracedBackward:
    """Trace the backward of the first segment; its nodes leave the graph again."""
    with values_of.taken_out(tracer.graph):
        last = values_of.last_node(tracer.graph)
        pairs = zip(traced.outs, tangents, strict=True)
        used = [(x, t) for x, t in pairs if t is not None and x.requires_grad]
        places = [i for i, x in enumerate(traced.leaves) if x.requires_grad]
        results = torch.autograd.grad(
            [x for x, _ in used],
            [traced.leaves[i] for i in places],
            [t for _, t in used],
            retain_graph=True,  # others may go back through it with other tangents
            allow_unused=True,
        )
        gradients: list[Any] = [None] * len(traced.leaves)
        nodes: list[fx.Node | None] = [None] * len(traced.leaves)
        for i, x in zip(places, results, strict=True):
            if x is not None:
                gradients[i] = x
                nodes[i] = values_of.node_of(values_of.part_of(x), tracer)
        since = values_of.traced_since(last, tracer.graph)
    return _TracedBackward(since, tangent_nodes, gradients, nodes)


def keep_lines(outs: Sequence[Any]) -> None:
    """Give nodes traced in a backward the user's lines of the forward."""
    from torch._functorch._aot_autograd import logging_utils

    ends = [x.grad_fn for x in outs if x.grad_fn is not None]
    logging_utils.setup_stacktrace_preservation_hooks(ends)


def _regions(nodes: Sequence[TracedNode], but: Any = ()) -> Iterator[int]:
    """Yield numbers of checkpointed regions in nodes, in order, except for ``but``."""
    numbers = (x.meta["ac_graph_id"] for x in nodes if "ac_graph_id" in x.meta)
    return (i for i in dict.fromkeys(numbers) if i not in but)
