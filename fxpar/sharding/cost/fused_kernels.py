"""Finds the kernels that Inductor makes: the launches of a graph, in order, and the
memory that each reads and writes.

In: nodes with fake values, one after the other, of a local graph or of a program in
global shapes. Out: ``Launches``: the buffers that each launch reads and writes in
memory. Light ops (pointwise, reductions, casts, copies) join the kernel of the light
ops they read, as Inductor fuses them: while no other launch has read it, or, after
that, if all operands of the op are there when the kernel runs. Views cost nothing, and
a value that only its own kernel reads is never in memory. Contractions, convolutions,
attention and ops that Inductor does not generate are kernels by themselves. Never:
changes a graph.

The order is that of the nodes: a kernel runs where the last of its ops stood when
another launch first read it. None spans forward and backward, which are compiled
separately. Collectives and waits are added by ``passes.simulate.launches``, prices of
launches by ``passes.simulate.simulate_step``; a search asks ``program_kernels``.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpar._torch.objects import tensors_in
from fxpar._torch.symbols import hint_numel
from fxpar.sharding.cost.hardware_table import NO_DIMS, ProductDims
from fxpar.sharding.cost.op import (
    Domain,
    dims_of,
    domain_of,
    family_of,
    flops_of,
    hidden_flops_of,
    is_light,
    is_unordered,
    is_view,
    light_operations,
    nbytes_of,
)
from fxpar.sharding.op_facts import OpFacts, op_facts_of


@dataclass(eq=False, slots=True)
class Buffer:
    """Is one tensor that a launch reads or makes."""

    # The node that makes it, or the placeholder of an input.
    node: fx.Node
    # Bytes of all of it, at the sizes of the graph.
    nbytes: int
    # Whether it is in memory; a tensor that only its own kernel reads is not.
    written: bool = True
    # Place in the order from which on it can be read; None while its kernel grows.
    ready: float | None = -1.0
    # The collective that is waited for before the buffer is read.
    late: Launch | None = None


@dataclass(eq=False, slots=True)
class Launch:
    """Is a kernel, a collective, or a wait."""

    # "fused", "contraction" or "alone"; the kind of a collective; or "wait".
    kind: str
    # The nodes it computes.
    nodes: list[fx.Node]
    # Its place in the order of the graph.
    order: float
    # Whether it belongs to the backward.
    backward: bool
    # Bytes it reads of each buffer.
    reads: dict[Buffer, int] = field(default_factory=dict)
    # Results of its nodes, in memory or not.
    makes: list[Buffer] = field(default_factory=list)
    # Flops of a contraction.
    flops: float = 0.0
    # Flops of the pairs that the causal mask of an attention hides.
    hidden_flops: float = 0.0
    # Dims of a contraction.
    dims: ProductDims = NO_DIMS
    # Dtype of the first floating-point operand of a contraction.
    dtype: torch.dtype = torch.float32
    # The family by which ``Hardware.peak`` finds the peak of a contraction.
    family: str = ""
    # Operations on elements, as ``Hardware.light`` counts.
    light: Counter[str] = field(default_factory=Counter)
    # Axes of a collective; none for any other launch.
    axes: tuple[str, ...] = ()
    # Bytes on this rank before a collective.
    before: int = 0
    # Bytes on this rank after it.
    after: int = 0
    # The collective that a wait waits for.
    of: Launch | None = None

    @property
    def name(self) -> str:
        """Return the name of its last op; unique."""
        implied = self.of is not None and self.nodes[-1] is self.of.nodes[-1]
        return self.nodes[-1].name + ("_wait" if implied else "")

    @property
    def writes(self) -> list[Buffer]:
        """Return the buffers it leaves in memory."""
        return [buffer for buffer in self.makes if buffer.written]

    @property
    def moved(self) -> int:
        """Return the bytes that pass between the device and its memory."""
        return sum(self.reads.values()) + sum(b.nbytes for b in self.writes)


@dataclass(frozen=True)
class Launches:
    """Holds all launches of a graph, its inputs and its results."""

    # Sorted by their places in the order.
    launches: list[Launch]
    # Placeholders and constants of the graph.
    inputs: list[Buffer]
    # Buffers of the tensors of each result.
    outputs: list[list[Buffer]]


@dataclass(eq=False, slots=True)
class TensorView:
    """Is a tensor as a node gives it."""

    # The node that makes the tensor; for a view, the node of the viewed tensor.
    node: fx.Node
    # None for a constant.
    buffer: Buffer | None
    # Elements of it that are seen.
    points: int
    # Bytes of an element.
    itemsize: int
    # The kernel of light ops that makes it, if one does.
    kernel: _Growing | None = None

    @property
    def home(self) -> _Growing | None:
        return self.kernel.now() if self.kernel is not None else None


@dataclass(eq=False, slots=True)
class _Growing:
    """Is a kernel of light ops."""

    # The launch so far.
    launch: Launch
    # The points that all of its ops run over together.
    domain: Domain
    # Bytes that it reads of each view.
    seen: dict[TensorView, int] = field(default_factory=dict)
    # Whether another launch has read it.
    closed: bool = False
    # Whether no op can follow in it.
    final: bool = False
    # The kernel it was merged into.
    into: _Growing | None = None

    def now(self) -> _Growing:
        """Return the kernel it is part of by now."""
        root = self
        while root.into is not None:
            root = root.into
        if self.into is not None:
            self.into = root
        return root


class KernelReader:
    """Reads nodes in order; ``fused=False``: a kernel for each op."""

    def __init__(self, fused: bool = True) -> None:
        self.fused = fused
        self.values: dict[fx.Node, list[TensorView | None]] = {}
        self.done: list[Launch] = []
        self.inputs: list[Buffer] = []
        self.outputs: list[list[Buffer]] = []
        self.growing: dict[_Growing, None] = {}
        self.backward = False
        self.at = 0.0

    def step(self, node: fx.Node, at: float, backward: bool) -> None:
        """Read the next node, at its place in the order."""
        self.at = at
        if node.op in ("placeholder", "get_attr"):
            self.add_inputs(node)
            return
        if node.op == "output":
            self.returned(node.args[0])
            return
        if backward and not self.backward:
            self.close_all()
            self.backward = True
        self.values[node] = self.call(node)

    def launches(self) -> Launches:
        """Close all kernels and return the launches that were read."""
        self.close_all()
        used = [x for x in self.done if x.kind != "fused" or x.writes]
        used.sort(key=lambda launch: launch.order)
        return Launches(used, self.inputs, self.outputs)

    def add_inputs(self, node: fx.Node) -> None:
        """Add the inputs of the graph; a part of a graph may be given an op's
        results."""

        def buffered(value: Any) -> TensorView | None:
            if not isinstance(value, torch.Tensor):
                return None
            buffer = Buffer(node, nbytes_of(value))
            self.inputs.append(buffer)
            return _value(node, buffer, value)

        value = node.meta.get("val")
        values = value if isinstance(value, (list, tuple)) else [value]
        self.values[node] = [buffered(each) for each in values]

    def returned(self, results: Any) -> None:
        """Note the results that the graph returns."""
        for result in results if isinstance(results, (list, tuple)) else [results]:
            values = self.values[result] if isinstance(result, fx.Node) else []
            self.outputs.append([self._touch(v) for v in values if v is not None])

    def operands(self, node: fx.Node) -> list[TensorView]:
        values = self.values
        return [
            view
            for read in node.all_input_nodes
            for view in values[read]
            if view is not None
        ]

    def call(self, node: fx.Node) -> list[TensorView | None]:
        """Return the values that a call gives."""
        target, value = node.target, node.meta.get("val")
        if target is operator.getitem:
            element: Any = self.values[node.args[0]][node.args[1]]
            return element if isinstance(element, list) else [element]
        operands = self.operands(node)
        if not operands and not tensors_in(value):
            return []
        facts = op_facts_of(target)
        if operands and (facts.view or (facts.reshapes and is_view(node))):
            of = operands[0].node, operands[0].buffer
            return [_value(*of, v, operands[0].kernel) for v in tensors_in(value)]
        if facts.constant and self.fused:
            return [_value(node, None, value)]
        if is_light(target):
            return self._light(node, operands, facts)
        return self._alone(node, operands, flops_of(node))

    def settle(self, of: Launch, nodes: list[fx.Node], at: float) -> None:
        self.done.append(Launch("wait", nodes, at, self.backward, of=of))
        for buffer in of.makes:
            buffer.late, buffer.ready = None, at

    def _alone(
        self, node: fx.Node, operands: list[TensorView], flops: float
    ) -> list[TensorView | None]:
        launch = self.alone_launch(node, "contraction" if flops else "alone")
        for value in operands:
            self.read(launch, value)
        if op_facts_of(node.target).mutates:
            return [operands[0]]
        if flops:
            values = (read.meta.get("val") for read in node.all_input_nodes)
            dtypes = [x.dtype for x in values if isinstance(x, torch.Tensor)]
            floating = (dtype for dtype in dtypes if dtype.is_floating_point)
            launch.flops, launch.dims = flops, dims_of(node)
            launch.hidden_flops = hidden_flops_of(node)
            launch.dtype = next(floating, torch.float32)
            launch.family = family_of(node.target)
        return self.make(node, launch)

    def alone_launch(self, node: fx.Node, kind: str) -> Launch:
        launch = Launch(kind, [node], self.at, self.backward)
        self.done.append(launch)
        return launch

    def make(
        self, node: fx.Node, launch: Launch, kernel: _Growing | None = None
    ) -> list[TensorView | None]:
        """Return fresh buffers for a node's results, in lists nested as those."""
        views = self._outputs_of(node, node.meta.get("val"), launch, kernel)
        return views if isinstance(views, list) else [views]

    def _outputs_of(
        self, node: fx.Node, value: Any, launch: Launch, kernel: _Growing | None
    ) -> Any:
        if isinstance(value, torch.Tensor):
            ready = self.at if kernel is None else None
            view = _value(node, None, value, kernel)
            nbytes = view.points * view.itemsize
            view.buffer = Buffer(node, nbytes, kernel is None, ready)
            launch.makes.append(view.buffer)
            return view
        if isinstance(value, (list, tuple)):
            return [self._outputs_of(node, each, launch, kernel) for each in value]
        return None

    def _touch(self, value: TensorView) -> Buffer:
        """Return the buffer of a value that a launch reads from memory: written, and
        finished."""
        if value.buffer is None:
            value.buffer = self._materialized(value)
        buffer = value.buffer
        if value.kernel is not None:
            self._close(value.kernel.now())
        if buffer.late is not None:
            late = buffer.late
            # A result of the phase may be that of its last op.
            self.settle(late, late.nodes, max(late.order, self.at - 0.5))
        buffer.written = True
        return buffer

    def _materialized(self, value: TensorView) -> Buffer:
        """Return the buffer of a constant that has to be in memory, made by a kernel of
        its own."""
        at = self.at - 0.5
        launch = Launch("fused", [value.node], at, self.backward)
        buffer = Buffer(value.node, value.points * value.itemsize, ready=at)
        launch.makes.append(buffer)
        self.done.append(launch)
        return buffer

    def read(self, launch: Launch, value: TensorView, points: float = math.inf) -> int:
        """Let a launch read at most ``points`` elements of a value; return the
        bytes."""
        self._touch(value)
        nbytes = int(min(points, value.points)) * value.itemsize
        _count(launch, value, nbytes)
        return nbytes

    def _light(
        self, node: fx.Node, operands: list[TensorView], facts: OpFacts
    ) -> list[TensorView | None]:
        """Let a light op join the kernels it reads from, or start one."""
        domain = domain_of(node, [value.points for value in operands], facts)
        kernel = self._joined(operands, domain) if self.fused else None
        if kernel is None:
            launch = Launch("fused", [], self.at, self.backward)
            kernel = _Growing(launch, domain)
            self.growing[kernel] = None
        launch = kernel.launch
        launch.nodes.append(node)
        launch.light[facts.work] += light_operations(node, domain.points, facts)
        kernel.domain = kernel.domain.joined(domain)
        if not kernel.closed:
            launch.order = self.at
        most = math.inf if domain.rows else domain.points
        for value in operands:
            if value in kernel.seen or value.home is kernel:
                continue
            if value.buffer is not None:  # constants are made on the way
                kernel.seen[value] = self.read(launch, value, most)
        result = self.make(node, launch, kernel)
        kernel.final = domain.is_split or (facts.scatters and is_unordered(node))
        if kernel.closed:
            for buffer in launch.makes:
                buffer.ready = launch.order
        elif kernel.final or not self.fused:
            self._close(kernel)
        return result

    def _joined(self, operands: list[TensorView], domain: Domain) -> _Growing | None:
        """Return the kernel that an op over ``domain`` becomes part of, None if there
        is none; kernels that still grow are merged for it."""
        kernels = {k: None for v in operands if (k := v.home) is not None}
        home: _Growing | None = None
        for kernel in sorted(kernels, key=lambda k: -k.domain.points):
            if kernel.closed or not kernel.domain.fits(domain):
                continue
            if home is None:
                home = kernel
            elif home.domain.fits(kernel.domain):
                self._merge(home, kernel)
            else:
                continue
            domain = domain.joined(home.domain)
        return home or self._late(operands, kernels, domain)

    def _late(
        self,
        operands: list[TensorView],
        kernels: dict[_Growing, None],
        domain: Domain,
    ) -> _Growing | None:
        """Return the last of the closed kernels an op reads from, if all other operands
        are there before it; else None."""
        closed = [k for k in kernels if k.closed]
        if not closed:
            return None
        last = max(closed, key=lambda k: k.launch.order)
        if last.final or last.launch.backward != self.backward:
            return None
        if not last.domain.fits(domain):
            return None
        for value in operands:
            buffer = value.buffer
            if buffer is None or value.home is last:
                continue
            if buffer.ready is None or buffer.late is not None:
                return None
            if buffer.ready >= last.launch.order:
                return None
        return last

    def _merge(self, home: _Growing, other: _Growing) -> None:
        """Let one growing kernel become part of another."""
        del self.growing[other]
        other.into = home
        home_launch, other_launch = home.launch, other.launch
        home_launch.nodes += other_launch.nodes
        home_launch.makes += other_launch.makes
        home_launch.light += other_launch.light
        home.domain = home.domain.joined(other.domain)
        for value, nbytes in other.seen.items():
            if value not in home.seen:
                home.seen[value] = nbytes
                _count(home_launch, value, nbytes)

    def _close(self, kernel: _Growing) -> None:
        if kernel.closed:
            return
        del self.growing[kernel]
        kernel.closed = True
        self.done.append(kernel.launch)
        for buffer in kernel.launch.makes:
            buffer.ready = kernel.launch.order

    def close_all(self) -> None:
        """Close all kernels, so that none grows further."""
        for kernel in list(self.growing):
            self._close(kernel)


def _count(launch: Launch, value: TensorView, nbytes: int) -> None:
    """Add bytes to those a launch reads of a buffer, all of the buffer at most."""
    buffer = value.buffer
    assert buffer is not None, "constants are not read"
    read = launch.reads.get(buffer, 0) + nbytes
    launch.reads[buffer] = min(read, buffer.nbytes)


def _value(
    node: fx.Node,
    buffer: Buffer | None,
    tensor: torch.Tensor,
    kernel: _Growing | None = None,
) -> TensorView:
    size, itemsize = hint_numel(tensor), tensor.dtype.itemsize
    return TensorView(node, buffer, size, itemsize, kernel)
