"""Traces graphs with segments that repeat: one segment of each kind is traced.

In: a graph that is about to be traced, and its kinds of segments. Out: nodes of all
segments: the others get copies of the first one's (``traced_segments``), so that the
traced graph is the one that tracing each gives. Meanwhile autograd sees a segment as
one op. Never: copies for a kind that does more than ``segment_kinds`` allows; all its
segments are traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from fxpar._torch import node_copies as nodes_of
from fxpar._torch import segment_kinds as kinds_of
from fxpar._torch import traced_segments
from fxpar._torch import traced_values as values_of
from fxpar._torch.node_copies import Memories
from fxpar._torch.segment_kinds import FindKinds, SegmentKind
from fxpar._torch.traced_segments import Copies, TracedKind


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
                traced = TracedKind(kind, self)
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

    def __init__(self, traced: TracedKind, index: int) -> None:
        self.traced, self.kind, self.index = traced, traced.kind, index
        self.nodes = self.kind.segments[index]
        self.reads = [node for node, _ in self.kind.operands[index]]
        self.copies = Copies()
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
        conditions = kinds_of.conditions_of(values, numbers)
        if conditions is None:
            return False
        if not kinds_of.can_be_copied(kind, values, conditions):
            return False
        if self.index == 0:
            traced.conditions = conditions
            traced.texts = nodes_of.users_texts(self.nodes)
            return True
        if traced.conditions != conditions:
            return False
        metadata = nodes_of.users_metadata(traced.texts, self.nodes)
        self.copies.metadata = metadata or {}
        return metadata is not None

    def _look_at(self, values: Sequence[Any]) -> None:
        """Run the first segment, before anything is traced, to see what it does."""
        traced, kind = self.traced, self.kind

        def run() -> Sequence[Any]:
            self._run_nodes()
            return [traced.interpreter.env[self.nodes[i]] for i in kind.results]

        assert traced.conditions is not None
        outs = kinds_of.look_at(kind, values, run, traced.conditions)
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
            self.copies = traced_segments.trace_first(traced, operands, self.before)
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
        return traced_segments.gradients_of(self.traced, tangents, self.copies)


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
