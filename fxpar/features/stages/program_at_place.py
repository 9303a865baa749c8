"""Makes the program of the ranks at one place along the pipeline axis.

In: the graph of all stages (``lay_out_stages``), lowered. Out: a new graph of the same
inputs and results with the nodes of one place: values go from place to place by
``fxpar::send``, ``receive`` and ``share``, which start where the value was made, in the
order of the one graph, and are waited for where it is first read. Each message is
chained to the one before it, so that no later pass changes their order, and a result
waits for what was sent. Messages of the forward do not wait for those of the backward.
Random numbers are drawn at every place, read there or not: they come from rank 0, and
the generators of all ranks stay equal. Never: a node of another place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.graph.builder import PLACE, Builder
from fxpar.graph.pipeline_ops import EVERY
from fxpar.sharding.op_facts import is_draw
from fxpar.sharding.program import depending_on_tangents

aten = torch.ops.aten
ours = torch.ops.fxpar


def program_at(graph: fx.Graph, place: int) -> fx.Graph:
    """Return the graph of one place. Nodes keep their names."""
    program = _PlaceProgram(graph, place)
    program.run()
    program.program.eliminate_dead_code()
    program.program.lint()
    return program.program


class _PlaceProgram:
    def __init__(self, graph: fx.Graph, place: int) -> None:
        self.graph, self.place, self.program = graph, place, fx.Graph()
        mode = _torch.fake.mode_of([node.meta.get("val") for node in graph.nodes])
        self.build = Builder(self.program, mode or _torch.fake.new_fake_mode())
        self.backward = depending_on_tangents(graph)
        self.copies: dict[fx.Node, fx.Node] = {}
        # Value that arrives -> the message to wait for.
        self.arriving: dict[fx.Node, fx.Node] = {}
        # The last message, and what results wait for: messages sent, and draws; each
        # for the forward (False) and for the backward (True).
        self.last: dict[bool, fx.Node | None] = {False: None, True: None}
        self.awaited: dict[bool, list[fx.Node]] = {False: [], True: []}

    def run(self) -> None:
        tag = 0
        for node in self.graph.nodes:
            if node.op == "output":
                self._output(node)
            elif node.target in _MESSAGES:
                with self.build.at(node):
                    _MESSAGES[node.target](self, node, tag)
                tag += node.target is not ours.spread.default
            elif node.meta.get(PLACE, EVERY) in (self.place, EVERY):
                self._copy(node)

    def _copy(self, node: fx.Node) -> None:
        copy = self.copies[node] = self.program.node_copy(node, self._value)
        if is_draw(node):
            self.awaited[node in self.backward].append(copy)

    def _value(self, node: fx.Node) -> fx.Node:
        """Return a value, waited for where it arrives."""
        if node not in self.copies:
            with self.build.at(node):
                self.copies[node] = self.build.wait(self.arriving[node])
        return self.copies[node]

    def _chained(self, node: fx.Node, target: Any, *args: Any) -> fx.Node:
        """Append a message after the last one, which replaces ``None`` among the
        arguments."""
        is_backward = node in self.backward
        last = self.last[is_backward]
        if last is None and is_backward:
            # A gradient that the backward is given: what arrives at a place depends on
            # nothing else there, and may not be taken for a part of the forward.
            inputs = self.graph.find_nodes(op="placeholder")
            last = self.copies[next(n for n in inputs if n in self.backward)]
        message = self.build.call(target, *(last if a is None else a for a in args))
        message.meta.pop("recompute", None)
        self.last[is_backward] = message
        return message

    def _transfer(self, node: fx.Node, tag: int) -> None:
        value, source, target, group = node.args
        if self.place == source:
            self._send(node, self._value(value), target, tag, group)
        elif self.place == target:
            self._receive(node, source, tag, group)

    def _scatter(self, node: fx.Node, tag: int) -> None:
        value, source, places, group = node.args
        if self.place != source:
            self._receive(node, source, tag, group)
            return
        x, size = self._value(value), node.meta["val"].shape[0]
        for i in range(places):
            part = self.build.call(aten.slice.Tensor, x, 0, i * size, (i + 1) * size)
            if i == source:
                self.copies[node] = part
            else:
                self._send(node, part, i, tag, group)

    def _send(
        self, node: fx.Node, x: fx.Node, target: int, tag: int, group: str
    ) -> None:
        ends = (target, tag, group)
        token = self._chained(node, ours.send.default, x, None, *ends)
        self.awaited[node in self.backward].append(token)

    def _receive(self, node: fx.Node, source: int, tag: int, group: str) -> None:
        val = node.meta["val"]
        fields = (list(val.shape), val.dtype, val.device)
        ends = (source, tag, group)
        self.arriving[node] = self._chained(
            node, ours.receive.default, None, *fields, *ends
        )

    def _broadcast(self, node: fx.Node, _: int) -> None:
        value, source, group = node.args
        val = node.meta["val"]
        if self.place == source:
            x = self._value(value)
        else:
            x = self.build.call(
                aten.empty.memory_format,
                list(val.shape),
                dtype=val.dtype,
                device=val.device,
            )
        self.arriving[node] = self._chained(
            node, ours.share.default, x, None, source, group
        )

    def _output(self, node: fx.Node) -> None:
        results = list(node.args[0])
        values = [self._value(r) if isinstance(r, fx.Node) else r for r in results]
        for is_backward in (False, True):
            at = _smallest(results, self.backward, is_backward)
            if at is None or not self.awaited[is_backward]:
                continue
            with self.build.at(results[at]):
                after_sends = ours.after_sends.default
                values[at] = self.build.call(
                    after_sends, values[at], self.awaited[is_backward]
                )
        copy = self.program.output(type(node.args[0])(values))
        copy.meta = dict(node.meta)


_MESSAGES: dict[Any, Callable[[_PlaceProgram, fx.Node, int], None]] = {
    ours.transfer.default: _PlaceProgram._transfer,
    ours.spread.default: _PlaceProgram._broadcast,
    ours.scatter.default: _PlaceProgram._scatter,
}


def _smallest(
    results: Sequence[Any], backward: set[fx.Node], of_backward: bool
) -> int | None:
    """Return the index of the smallest result of a forward, or of a backward; None if
    it has none."""
    sizes = {
        i: node.meta["val"].numel()
        for i, node in enumerate(results)
        if isinstance(node, fx.Node)
        and isinstance(node.meta.get("val"), torch.Tensor)
        and (node in backward) == of_backward
    }
    return min(sizes, key=sizes.__getitem__, default=None)
