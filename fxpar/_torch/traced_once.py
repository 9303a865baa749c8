"""AOTAutograd of a graph with segments that repeat: one of each kind is traced.

The first segment of a kind is traced as it stands, and its backward when gradients for
the kind are first asked for. The others get copies of these nodes, with the metadata
that their own would have, so that the traced graph is the one that comes of tracing
each. Autograd sees a segment as one op meanwhile. Where a segment does more than give
new tensors (it writes to what it is given, gives views, changes a mode), all of its
kind are traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx

from fxpar._torch import node_copies as nodes_of
from fxpar._torch.node_copies import Memories, TracedNode


@dataclass
class SegmentKind:
    """Segments of a graph that are alike, node for node."""

    # The nodes of each, in order.
    segments: list[list[fx.Node]]
    # What tensors each reads of what is computed outside: a node, and the position in
    # the segment of the one that reads it, or None for all others.
    operands: list[list[tuple[fx.Node, int | None]]]
    # What numbers each reads of what is computed outside, in this order.
    numbers: list[list[fx.Node]]
    # Positions of nodes whose values are read outside, in one segment at least.
    results: list[int]
    # Whether the first was seen to run, before anything is traced.
    is_checked: bool = False
    # Whether every one has to be traced, as was found out then.
    refused: bool = False


# Finds what repeats in a graph that is about to be traced.
FindKinds = Callable[[fx.GraphModule], list[SegmentKind]]


def traced_once(find: FindKinds | None) -> contextlib.AbstractContextManager[Any]:
    """Context in which AOTAutograd traces one segment of each kind that ``find`` finds
    in a graph."""
    from unittest import mock

    from torch._functorch._aot_autograd import graph_capture_wrappers

    name = "PropagateUnbackedSymInts"  # runs Dynamo's graphs
    if find is None or not hasattr(graph_capture_wrappers, name):
        return contextlib.nullcontext()
    kinds: dict[fx.Graph, list[SegmentKind]] = {}

    def interpreter(module: fx.GraphModule) -> Any:
        if module.graph not in kinds:  # it is run twice
            kinds[module.graph] = find(module)
        return _interpreter()(module, kinds[module.graph])

    return mock.patch.object(graph_capture_wrappers, name, interpreter)


@cache
def _interpreter() -> Any:
    from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts

    class SegmentInterpreter(PropagateUnbackedSymInts):
        """Runs a graph with segments that repeat."""

        def __init__(
            self, module: fx.GraphModule, kinds: Sequence[SegmentKind]
        ) -> None:
            super().__init__(module)
            self.segments: dict[fx.Node, _Segment] = {}
            if nodes_of.functional_mode() is None:
                return
            for kind in kinds:
                traced = _TracedKind(kind, self)
                for i, nodes in enumerate(kind.segments):
                    self.segments[nodes[0]] = _Segment(traced, i)

        def run(self, *args: Any, **how: Any) -> Any:
            outs = super().run(*args, **how)
            # Autograd's number of the last node of the forward.
            self.last_number = nodes_of.last_number()
            return outs

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


@dataclass(frozen=True)
class _Forward:
    """A segment that was traced, with what autograd knows of it."""

    # All that were traced, in order.
    nodes: list[TracedNode]
    # Values that stand for its operands, from which autograd knows it.
    leaves: list[Any]
    # Its results.
    outs: list[Any]
    # Autograd's number of the last node before it.
    begin: int
    # Autograd's number of the last node in it.
    end: int


@dataclass(frozen=True)
class _Backward:
    """What was traced of the backward of a segment."""

    # The forward that it reads from.
    forward: _Forward
    # All that were traced, in order.
    nodes: list[TracedNode]
    # Nodes of the gradients of the results.
    tangents: list[fx.Node | None]
    # Nodes of the gradients of the operands.
    gradients: list[fx.Node | None]


@dataclass
class _TracedKind:
    """What was traced of a kind, in one run of the graph."""

    # The segments.
    kind: SegmentKind
    # What runs the graph.
    interpreter: Any
    # What the meaning of ops depended on when the first ran.
    ambient: Any = None
    # The numbers that the first read.
    numbers: Sequence[Any] = ()
    # Which of its operands share memory: of each the first of them.
    sharing: list[int] = field(default_factory=list)
    # Of each result a fake tensor like it.
    likes: list[Any] = field(default_factory=list)
    # Whether each result has a gradient.
    differentiable: list[bool] = field(default_factory=list)
    # Nodes of the operands of the first.
    operands: list[fx.Node] = field(default_factory=list)
    # Nodes of the results of the first.
    results: list[fx.Node] = field(default_factory=list)
    # The first, once it is traced.
    forward: _Forward | None = None
    # By what is known of the gradients of results.
    backwards: dict[Any, _Backward] = field(default_factory=dict)


class _Segment:
    """A segment of a kind, in one run of the graph."""

    def __init__(self, traced: _TracedKind, index: int) -> None:
        self.traced, self.kind, self.index = traced, traced.kind, index
        self.nodes = self.kind.segments[index]
        self.reads = [node for node, _ in self.kind.operands[index]]
        # Of nodes of the first segment those in their place; of regions their numbers.
        self.copies: dict[fx.Node, fx.Node] = {}
        self.regions: dict[int, int] = {}
        self.metadata: dict[str, dict[str, Any]] = {}
        # Autograd's numbers before it is an op, and then before it runs.
        self.before = self.begin = 0

    def run(self) -> None:
        """Leave the values of the segment with the interpreter."""
        interpreter, kind = self.traced.interpreter, self.kind
        values = [interpreter.env[node] for node in self.reads]
        is_traced = nodes_of.tracer() is not None
        if not self._fits(values):
            self._run_nodes()
        elif self.index == 0 and not is_traced:
            self._look_at(values)
        else:
            self.before = nodes_of.last_number()
            is_op = torch.is_grad_enabled() and any(x.requires_grad for x in values)
            outs = _segment_op().apply(self, *values) if is_op else self.forward(values)
            interpreter.env.update(dict.fromkeys(self.nodes))
            for at, out in zip(kind.results, outs, strict=True):
                interpreter.env[self.nodes[at]] = out

    def _run_nodes(self) -> None:
        for node in self.nodes:
            self.traced.interpreter.run_by_itself(node)

    def _fits(self, values: Sequence[Any]) -> bool:
        """Whether it may be a copy of the first, or the one that is copied."""
        traced, kind = self.traced, self.kind
        if kind.refused or not all(map(nodes_of.is_functional, values)):
            return False
        tracer = nodes_of.tracer()
        if tracer and not kind.is_checked:
            return False
        if tracer and None in [nodes_of.node_of(x, tracer) for x in values]:
            return False
        fakes = [nodes_of.fake_of(x) for x in values]
        if not all(map(nodes_of.is_plain, fakes)):
            return False
        numbers = [traced.interpreter.env[node] for node in kind.numbers[self.index]]
        if not all(type(x) is int for x in numbers):
            return False
        memories = list(map(nodes_of.memory_of, fakes))
        sharing = [memories.index(memory) for memory in memories]
        if self.index == 0:
            traced.ambient, traced.sharing = _ambient(), sharing
            traced.numbers = numbers
            return True
        if traced.ambient != _ambient() or traced.sharing != sharing:
            return False
        if traced.numbers != numbers:
            return False
        metadata = nodes_of.users_metadata(kind.segments[0], self.nodes)
        self.metadata = metadata or {}
        return metadata is not None

    def _look_at(self, values: Sequence[Any]) -> None:
        """Run the first, before anything is traced, to see what it does."""

        def state() -> Any:
            tokens = dict(nodes_of.functional_mode()._tokens)
            return [*map(nodes_of.writes_to, values)], tokens, _ambient()

        traced, kind, before = self.traced, self.kind, state()
        self._run_nodes()
        outs = [traced.interpreter.env[self.nodes[i]] for i in kind.results]
        kind.is_checked = True
        kind.refused = state() != before or not _are_apart(outs, values)
        if not kind.refused:
            traced.differentiable = [x.requires_grad for x in outs]
            traced.likes = list(map(nodes_of.fake_of, outs))

    def forward(self, operands: Sequence[Any]) -> list[Any]:
        """The results, of which autograd knows nothing."""
        tracer, traced = nodes_of.tracer(), self.traced
        if tracer is None:
            memories = Memories({})
            with nodes_of.untraced() as functional:
                return [functional(memories.like(x)) for x in traced.likes]
        nodes = [nodes_of.node_of(x, tracer) for x in operands]
        self.begin = nodes_of.last_number()
        if self.index == 0:
            self._trace_first(operands, nodes, tracer)
        else:
            first = traced.forward
            assert first is not None
            self.copies = dict(zip(traced.operands, nodes, strict=True))
            self._copy(first.nodes, self.copies, first, self.before, tracer)
            nodes_of.skip_numbers(first.end - first.begin)
        copies = self.copies
        return [nodes_of.value_of(copies[node], tracer) for node in traced.results]

    def _trace_first(
        self, operands: Sequence[Any], nodes: Sequence[Any], tracer: Any
    ) -> None:
        traced = self.traced
        forward = traced.forward = self._traced_forward(operands, tracer)
        traced.operands = list(nodes)
        traced.results = [nodes_of.node_of(x, tracer) for x in forward.outs]
        traced.differentiable = [x.requires_grad for x in forward.outs]
        self.copies = {node: node for node in nodes}
        self.copies |= {x.node: x.node for x in forward.nodes}
        self.regions = {i: i for i in _regions(forward.nodes)}
        self.kind.refused = not nodes_of.can_be_copied(forward.nodes)
        for x in forward.nodes:
            # Without a number of its own it has that of what stands before it.
            if x.meta.get("seq_nr") == forward.begin:
                x.node.meta["seq_nr"] = self.before

    def _traced_forward(self, operands: Sequence[Any], tracer: Any) -> _Forward:
        """Trace the first segment for autograd to go back through."""
        traced, env = self.traced, self.traced.interpreter.env
        reads = self.kind.operands[0]
        nodes = self.kind.segments[0]
        with nodes_of.untraced() as functional:
            leaves = [
                functional(nodes_of.fake_of(x)).requires_grad_(x.requires_grad)
                for x in operands
            ]
        begin, last = nodes_of.last_number(), nodes_of.last_node(tracer.graph)
        outer = {node: env.get(node) for node, _ in reads}
        shared = {n: x for (n, at), x in zip(reads, leaves, strict=True) if at is None}
        with torch.set_grad_enabled(traced.ambient.grad):
            for i, node in enumerate(nodes):
                own = {
                    n: x for (n, at), x in zip(reads, leaves, strict=True) if at == i
                }
                env.update(shared | own)
                traced.interpreter.run_by_itself(node)
        outs = [env[nodes[i]] for i in self.kind.results]
        env.update(outer)
        _keep_lines(outs)
        end = nodes_of.last_number()
        since = nodes_of.traced_since(last, tracer.graph)
        return _Forward(since, leaves, outs, begin, end)

    def backward(self, tangents: Sequence[Any]) -> list[Any]:
        """The gradients of the operands."""
        tracer, traced = nodes_of.tracer(), self.traced
        nodes = [x if x is None else nodes_of.node_of(x, tracer) for x in tangents]
        key = tuple(map(_strides_of, tangents)), tuple(map(nodes.index, nodes))
        if key not in traced.backwards:
            traced.backwards[key] = self._traced_backward(tangents, nodes, tracer)
        backward = traced.backwards[key]
        forward, first = backward.forward, traced.forward
        assert first is not None
        copies = dict(self.copies)
        for x, y in zip(forward.nodes, first.nodes, strict=True):
            copies[x.node] = copies[y.node]
        for node, mine in zip(backward.tangents, nodes, strict=True):
            if node is not None:
                copies[node] = mine
        last = traced.interpreter.last_number
        self._copy(backward.nodes, copies, forward, last, tracer)
        gradients = [x and copies.get(x, x) for x in backward.gradients]
        return [nodes_of.value_of(x, tracer) for x in gradients]

    def _traced_backward(
        self, tangents: Sequence[Any], tangent_nodes: list[fx.Node | None], tracer: Any
    ) -> _Backward:
        """Trace the backward of the first segment; its nodes leave the graph again."""
        traced, forward = self.traced, self.traced.forward
        assert forward is not None
        with nodes_of.taken_out(tracer.graph):
            if traced.backwards:  # autograd goes back through a forward once
                forward = self._traced_forward_again(forward, tracer)
            last = nodes_of.last_node(tracer.graph)
            pairs = zip(forward.outs, tangents, strict=True)
            used = [(x, t) for x, t in pairs if t is not None and x.requires_grad]
            places = [i for i, x in enumerate(forward.leaves) if x.requires_grad]
            results = torch.autograd.grad(
                [x for x, _ in used],
                [forward.leaves[i] for i in places],
                [t for _, t in used],
                allow_unused=True,
            )
            gradients: list[fx.Node | None] = [None] * len(forward.leaves)
            for i, x in zip(places, results, strict=True):
                gradients[i] = None if x is None else nodes_of.node_of(x, tracer)
            nodes = nodes_of.traced_since(last, tracer.graph)
        return _Backward(forward, nodes, tangent_nodes, gradients)

    def _traced_forward_again(self, forward: _Forward, tracer: Any) -> _Forward:
        operands = [nodes_of.value_of(x, tracer) for x in self.traced.operands]
        for x, leaf in zip(operands, forward.leaves, strict=True):
            x.requires_grad_(leaf.requires_grad)
        with torch.enable_grad():
            again = self._traced_forward(operands, tracer)
        nodes_of.skip_numbers(1)  # the last is that of other nodes
        return again

    def _copy(
        self,
        traced_nodes: Sequence[TracedNode],
        copies: dict[fx.Node, fx.Node],
        forward: _Forward,
        other: int,
        tracer: Any,
    ) -> None:
        """Add copies of nodes, which read what ``copies`` has in the place of what they
        read; it has theirs then. Numbers that autograd gave nodes of ``forward`` are
        those of this segment; for others there is ``other``."""
        memories = Memories(copies)
        own = {i: nodes_of.new_region() for i in _regions(traced_nodes, self.regions)}
        self.regions |= own
        with nodes_of.untraced():
            for traced in traced_nodes:
                meta = traced.copy(tracer.graph, copies).meta
                if "val" in meta:
                    meta["val"] = memories.like(meta["val"])
                if "ac_graph_id" in meta:
                    meta["ac_graph_id"] = self.regions[meta["ac_graph_id"]]
                if "seq_nr" in meta:
                    number = meta["seq_nr"] - forward.begin
                    is_own = 0 < number <= forward.end - forward.begin
                    meta["seq_nr"] = self.begin + number if is_own else other
                for name, values in self.metadata.items():
                    if name in meta:
                        meta[name] = values.get(repr(meta[name]), meta[name])


@dataclass(frozen=True)
class _Ambient:
    """What the meaning of ops depends on beside their operands."""

    # Whether autograd records.
    grad: bool
    # Whether it never will.
    inference: bool
    # Of each kind of device whether it casts, and to what.
    autocast: tuple[Any, ...]


def _ambient() -> _Ambient:
    kinds = ("cpu", "cuda")
    autocast = [
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in kinds
    ]
    inference = torch.is_inference_mode_enabled()
    return _Ambient(torch.is_grad_enabled(), inference, tuple(autocast))


@cache
def _segment_op() -> Any:
    """What autograd sees of a segment."""

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


def _are_apart(outs: Sequence[Any], values: Sequence[Any]) -> bool:
    """Whether results are tensors of their own."""
    if not all(map(nodes_of.is_functional, outs)) or any(x._is_view() for x in outs):
        return False
    own = [nodes_of.memory_of(nodes_of.fake_of(x)) for x in outs]
    others = {nodes_of.memory_of(nodes_of.fake_of(x)) for x in values}
    return len(set(own)) == len(own) and not others.intersection(own)


def _keep_lines(outs: Sequence[Any]) -> None:
    """Give what is traced of a backward the user's lines of the forward."""
    from torch._functorch._aot_autograd import logging_utils

    ends = [x.grad_fn for x in outs if x.grad_fn is not None]
    logging_utils.setup_stacktrace_preservation_hooks(ends)


def _strides_of(x: Any) -> Any:
    return None if x is None else (x.dtype, tuple(x.shape), x.stride())


def _regions(nodes: Sequence[TracedNode], but: Any = ()) -> Iterator[int]:
    """Numbers of checkpointed regions in nodes, in order, but these."""
    numbers = (x.meta["ac_graph_id"] for x in nodes if "ac_graph_id" in x.meta)
    return (i for i in dict.fromkeys(numbers) if i not in but)
