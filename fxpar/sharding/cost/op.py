"""Computes the arithmetic of one op: flops, dims, the points it runs over, whether it
is a view, whether it can be fused.

In: a node with fake values (``meta["val"]``), of a graph in global shapes or in local
ones. Out: numbers and yes or no, and the seconds of such a call by itself
(``kernel_seconds``), by the roofline of ``Hardware``. Reads the op's facts, arguments
and shapes alone. Never: changes a node.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from fxpar import _torch
from fxpar._torch.objects import argument, tensors_in
from fxpar._torch.symbols import hint_numel, hint_shape
from fxpar.sharding.cost.hardware_table import NO_DIMS, Hardware, ProductDims
from fxpar.sharding.cost.visible_pairs import (
    hidden_share,
    is_packed,
    seen_share,
    sequence_dim,
)
from fxpar.sharding.factors import sides
from fxpar.sharding.op_facts import OpFacts, op_facts_of
from fxpar.sharding.program import tensors_at

aten = torch.ops.aten
_DOT = "fxpar.dot.default"  # by its name: the op is registered by ``passes``

# Namespaces of ops that Inductor generates.
_GENERATED = {"aten", "prims", "fxpar", "inductor_prims"}

# Namespaces of ops whose operands are known by their places.
_KNOWN = {"aten", "fxpar", "higher_order", "torch_attn"}

# A reduction to fewer rows than _FEW takes a second kernel to add up if each row has at
# least _MANY columns.
_FEW, _MANY = 64, 8192

# Flops of attention for a pair of query and key and an element of a head, forward and
# backward. Torch's registry has no formula for all, and none for heads that queries
# share before 2.13.
_ATTENTION = (4.0, 10.0)


# Sizes of the dims of several tensors.
Shapes = Sequence[Sequence[float]]


def nbytes_of(value: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements, open sizes as they were traced."""
    return hint_numel(value) * value.dtype.itemsize


def bytes_of(node: fx.Node) -> int:
    """Return the bytes of the tensors that a node gives."""
    return sum(map(nbytes_of, tensors_in(node.meta.get("val"))))


def flops_of(node: fx.Node) -> float:
    """Return the flops of a contraction, convolution or attention; 0 for all else. For
    a causal attention in a local graph, the flops of the rank that sees most."""
    if not is_contraction(node.target):
        return 0.0
    return _flops_unmasked(node) * (
        seen_share(node) if _is_attention(node.target) else 1
    )


def hidden_flops_of(node: fx.Node) -> float:
    """Return flops of the pairs that a causal mask hides, which ``flops_of`` leaves
    out."""
    if not _is_attention(node.target):
        return 0.0
    return _flops_unmasked(node) * hidden_share(node)


def _flops_unmasked(node: fx.Node) -> float:
    """Return the flops if each query sees each key."""
    target, shapes = node.target, _traced_shapes(node)
    if _name(target) == _DOT:
        return 2.0 * math.prod(_sizes(node, shapes).values())
    if _is_convolution(target):
        windows, _, weight = _convolved(node, shapes)
        gradients = sum(node.args[-1][:2]) if _is_backward(target) else 1
        return 2.0 * windows[0] * math.prod((*windows[2:], *weight)) * gradients
    if _is_attention(target) and not (_is_users(target) or _is_counted_packed(node)):
        query, key = _attended(node, shapes)
        each = _ATTENTION[_is_backward(target)]
        return each * math.prod(query) * key[sequence_dim(target)]
    first = op_facts_of(target).product
    if first is not None and target.namespace == "aten":
        return 2.0 * math.prod((*shapes[first], shapes[first + 1][-1]))
    count = flop_registry[target.overloadpacket]
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    args = [x for x in args if not isinstance(x, torch.dtype)]  # few formulas take one
    return float(count(*args, **kwargs, out_val=node.meta["val"]))


def _is_counted_packed(node: fx.Node) -> bool:
    """Return whether torch counts a packed attention by its documents. Torch 2.11 does
    not: there each query counts as if it saw all keys."""
    return is_packed(node) and node.target.overloadpacket in flop_registry


@cache
def family_of(target: Any) -> str:
    """Return the family by which ``Hardware.peak`` finds the peak of a contraction."""
    family = "attention" if _is_attention(target) else ""
    family = "convolution" if "convolution" in _name(target) else family
    return f"{family} backward" if family and _is_backward(target) else family


def dims_of(node: fx.Node, shapes: Shapes | None = None) -> ProductDims:
    """Return the dims of the product that ``flops_of`` counts: of one of a batch of
    products, for an attention of queries and keys. ``shapes``: of its tensors, operands
    before results, if not as they were traced, e.g. those that a rank holds."""
    target = node.target
    shapes = _traced_shapes(node) if shapes is None else shapes
    if _name(target) == _DOT:
        left, right, result = sides(node.args[2])
        return dims_of_factors(left, right, result, _sizes(node, shapes))
    first = op_facts_of(target).product
    if first is not None:
        a, b = shapes[first : first + 2]
        m, k = a[-2:]
        if "outer" in _name(target):  # contracts the rows of both
            m, k = k, m
        return ProductDims(float(m), float(b[-1]), float(k))
    if _is_attention(target) and not _is_users(target):
        query, key = _attended(node, shapes)
        rows = sequence_dim(target)
        return ProductDims(float(query[rows]), float(key[rows]), float(query[-1]))
    if _is_convolution(target):
        # Of the equivalent product: points by channels, by the other channels and
        # window.
        slid, over, weight = _convolved(node, shapes)
        groups = max(1, over[1] / max(1, weight[1]))
        points, k = slid[0] * math.prod(slid[2:]), math.prod(weight[1:])
        return ProductDims(float(points), weight[0] / groups, float(k))
    return NO_DIMS  # an op of the user's, of which only flops are known


def _traced_shapes(node: fx.Node) -> Shapes:
    """Return the shapes of a call's operands, then of its results."""
    return [hint_shape(t.shape) for t in tensors_at(node)]


def dims_of_factors(
    left: Collection[str],
    right: Collection[str],
    result: Collection[str],
    size: Mapping[str, float],
) -> ProductDims:
    """Return the dims of a product of two operands by named factors. Factors that both
    operands and the result have count products; a window, which one operand has alone,
    is summed."""
    a, b, out = set(left), set(right), set(result)
    parts = (a & out) - b, (b & out) - a, (a | b) - out
    m, n, k = (float(math.prod(size[f] for f in part)) for part in parts)
    return ProductDims(m, n, k)


def _convolved(node: fx.Node, shapes: Shapes) -> Shapes:
    """Return shapes of the tensor with a point for each window, of the one that windows
    slide over, and of the weight; for a transposed convolution the first is its
    input."""
    backward = _is_backward(node.target)
    result_first = shapes[:3] if backward else (shapes[-1], *shapes[:2])
    windows, rows, weight = result_first
    if argument(node, "transposed"):
        windows, rows = rows, windows
    return windows, rows, weight


def _sizes(node: fx.Node, shapes: Shapes) -> dict[str, float]:
    size: dict[str, float] = {}
    for word, shape in zip(sides(node.args[2]), shapes[:2], strict=False):
        size.update(zip(word, shape, strict=True))
    return size


def _is_attention(target: Any) -> bool:
    return "attention" in _name(target) or "varlen_attn" in _name(target)


def _is_convolution(target: Any) -> bool:
    return "conv" in _name(target) and not _is_users(target)


def _is_users(target: Any) -> bool:
    """Return whether an op is none of torch's or ours."""
    return getattr(target, "namespace", "aten") not in _KNOWN


def _is_backward(target: Any) -> bool:
    return "backward" in _name(target)


def _is_flex(target: Any) -> bool:
    return _name(target).startswith("flex_attention")


@cache
def query_position(target: Any) -> int | None:
    """Return the position of an attention's queries among its operands; the keys
    follow. Most backwards have the gradient before the queries. None for any other
    op."""
    if not _is_attention(target):
        return None
    return int(_is_backward(target) and not _is_flex(target))


def _attended(node: fx.Node, shapes: Shapes) -> Shapes:
    """Return the shapes of query and key."""
    first = query_position(node.target)
    assert first is not None
    return shapes[first : first + 2]


def is_view(node: fx.Node) -> bool:
    """Return whether a call gives its first operand's memory, seen in another way."""
    facts = op_facts_of(node.target)
    if facts.reshapes and not facts.view:
        source = node.args[0].meta["val"]
        target = hint_shape(node.meta["val"].shape)
        return is_viewable(
            hint_shape(source.shape), hint_shape(source.stride()), target
        )
    return facts.view


def viewed(node: fx.Node) -> fx.Node:
    """Return the node whose memory a chain of views shows; itself where it is no
    view."""
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


@lru_cache(maxsize=1 << 14)
def is_viewable(
    shape: tuple[int, ...], stride: tuple[int, ...], target: tuple[int, ...]
) -> bool:
    """Return whether strided memory can be seen in another shape without a copy."""
    runs: list[int] = []  # sizes of neighbouring dims that are stored as one
    step = None
    for n, s in zip(reversed(shape), reversed(stride), strict=True):
        if n == 1:
            continue
        if s == step:
            runs[-1] *= n
        else:
            runs.append(n)
        step = n * s
    sizes = [n for n in target if n != 1]
    for run in runs:
        filled = 1
        while filled < run and sizes:
            filled *= sizes.pop()
        if filled != run:
            return False
    return True


@cache
def is_contraction(target: Any) -> bool:
    """Return whether an op is a contraction, a convolution or attention."""
    counted = getattr(target, "overloadpacket", None) in flop_registry
    name = _name(target)
    attends = "scaled_dot_product" in name or "causal_attention" in name
    attends = attends or _is_flex(target)
    return counted or _name(target) == _DOT or attends


@cache
def is_light(target: Any) -> bool:
    """Return whether Inductor generates the op, and so can fuse it."""
    if is_contraction(target) or not isinstance(target, _torch.inductor.OpOverload):
        return False
    facts = op_facts_of(target)
    is_separate = facts.mutates or facts.alone or facts.communicates
    return target.namespace in _GENERATED and not is_separate


def is_pointwise(node: fx.Node) -> bool:
    """Return whether the op is light and each element of its result is made by
    itself."""
    target = node.target
    facts = op_facts_of(target)
    if not is_light(target) or facts.gathers or facts.rows is not None:
        return False
    if is_unordered(node) or facts.random:
        return False
    reads = (t for n in node.all_input_nodes for t in tensors_in(n.meta.get("val")))
    return not domain_of(node, map(hint_numel, reads)).rows


def light_operations(node: fx.Node, points: int, facts: OpFacts) -> int:
    """Return the element operations of a light op over ``points`` points: for a pool
    one per element of each window, with a window for each element of its smaller
    end."""
    position = facts.window
    if position is None:
        return points
    window: Any = node.args[position]
    ends = node.args[0].meta["val"], tensors_in(node.meta["val"])[0]
    return math.prod(window) * min(map(hint_numel, ends))


def is_unordered(node: fx.Node) -> bool:
    """Return whether its threads write in any order: nothing follows in the same
    kernel. Into a constant Inductor writes by comparing indices instead."""
    if not op_facts_of(node.target).scatters:
        return False
    into = node.args[0]
    compared = node.target is aten.scatter.value and isinstance(into, fx.Node)
    return not (compared and op_facts_of(into.target).constant)


@cache
def _name(target: Any) -> str:
    return str(target)


def kernel_seconds(node: fx.Node, on: Hardware, share: float = 1.0) -> float:
    """Return the seconds of a share of a call, as a kernel of its own without its
    launch: 0 for a view. An op that multiplies no matrices is bound by the memory it
    reads and writes."""
    results = tensors_in(node.meta.get("val"))
    if not results or is_view(node):
        return 0.0
    operands = [t for n in node.all_input_nodes for t in tensors_in(n.meta.get("val"))]
    nbytes = sum(map(nbytes_of, (*operands, *results))) * share
    flops = flops_of(node)
    if not flops:
        return on.streaming(nbytes)
    floating = (x.dtype for x in operands if x.dtype.is_floating_point)
    dtype, family = next(floating, results[0].dtype), family_of(node.target)
    hidden_flops = hidden_flops_of(node) * share
    return on.kernel(nbytes, flops * share, dims_of(node), dtype, family, hidden_flops)


@dataclass(frozen=True)
class Domain:
    """Holds the points that a light op runs over."""

    # Elements of the largest tensor that it gives, or reads all of.
    points: int
    # Rows that it reduces ``points`` to; 0: it reduces nothing.
    rows: int = 0

    @property
    def is_split(self) -> bool:
        """Return whether it takes a second kernel to add up."""
        return 0 < self.rows < _FEW and self.points >= self.rows * _MANY

    def fits(self, other: Domain) -> bool:
        """Return whether both can be one kernel: of equal points (an op with fewer is
        computed again for each), and of equal rows and columns where something is
        reduced."""
        if self.rows and other.rows:
            return self == other
        if not (self.rows or other.rows):
            return True
        reduced, plain = (self, other) if self.rows else (other, self)
        return plain.points <= reduced.rows or plain.points == reduced.points

    def joined(self, other: Domain) -> Domain:
        """Return the domain of both in one kernel."""
        points, rows = max(self.points, other.points), self.rows or other.rows
        if points == self.points and rows == self.rows:
            return self
        return Domain(points, rows)


def domain_of(
    node: fx.Node, reads: Iterable[int], facts: OpFacts | None = None
) -> Domain:
    """Return the domain of a light op that reads tensors of ``reads`` elements.
    ``facts``: of its target, if they are known."""
    sizes = list(map(hint_numel, tensors_in(node.meta.get("val"))))
    read = max(reads, default=0)
    most, least = max(sizes, default=0), min(sizes, default=0)
    facts = facts or op_facts_of(node.target)
    if facts.rows is not None:
        shape, dim = hint_shape(node.args[0].meta["val"].shape), node.args[facts.rows]
        return Domain(read, read // max(1, shape[dim] if shape else 1))
    if facts.gathers:
        return Domain(most)
    if facts.scatters and is_unordered(node):
        return Domain(max(read, most))
    if least < max(read, most):
        return Domain(max(read, most), max(1, least))
    return Domain(most)
