"""The arithmetic of one op: flops, smallest dim, the points it runs over, whether it is
a view, whether it can be fused.

In: a node with fake values (``meta["val"]``), of a graph in global shapes or in local
ones. Out: numbers and yes or no. Reads the op's name, arguments and shapes alone; never
changes a node. The roofline that these numbers enter is ``Hardware.seconds``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from fxpar import _torch

aten = torch.ops.aten
prims = torch.ops.prims
_DOT = "fxpar.dot.default"  # by its name: the op is registered by ``passes``

# Made of no operand: every kernel that needs one of these makes it.
CONSTANTS = {
    aten.full.default,
    aten.full_like.default,
    aten.scalar_tensor.default,
    aten.zeros.default,
    aten.ones.default,
    aten.empty.memory_format,
    prims.iota.default,
}
# Of all that an operand holds, these read as much as they give.
_INDEXED = {
    aten.embedding.default,
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten._unsafe_masked_index.default,
    aten.gather.default,
    aten.index_select.default,
}
# These need whole rows, though nothing gets smaller. Second argument: the dim; of the
# backward ones the third.
_ROWS = {
    aten.cumsum.default: 1,
    aten.cumprod.default: 1,
    aten._softmax.default: 1,
    aten._log_softmax.default: 1,
    aten._softmax_backward_data.default: 2,
    aten._log_softmax_backward_data.default: 2,
}
_RESHAPES = {aten.reshape.default, aten._unsafe_view.default}
_GENERATED = {"aten", "prims", "fxpar", "inductor_prims"}
_ALONE = ("aten.sort", "aten.topk", "aten.nonzero", "aten.unique", "aten.median")
_RANDOM = ("fxpar.rand", "fxpar.seeds", "aten.rand", "prims.inductor")
_UNORDERED = ("index_put", "index_add", "index_copy", "aten.scatter", "dense_backward")

# Classes of light ops by name, as ``hardware.LIGHT`` has them; all else is a step.
_CLASSES = {
    "div": "root",
    "reciprocal": "root",
    "sqrt": "root",
    "rsqrt": "root",
    "exp": "exp",
    "sigmoid": "exp",
    "_softmax": "exp",
    "_log_softmax": "exp",
    "log": "log",
    "log1p": "log",
    "sin": "sin",
    "cos": "sin",
    "tanh": "tanh",
    "erf": "erf",
    "gelu": "erf",
    "random": "draw",
    "randint": "draw",
    "inductor_random": "draw",
}

# A reduction to few rows takes a second kernel to add up, from so many columns on.
_FEW, _MANY = 64, 8192

# Flops of attention for a pair of query and key and an element of a head, where torch's
# registry has no formula: forward, backward.
_ATTENTION = (4.0, 10.0)

# Position of the first factor of a product of matrices.
_PRODUCTS = {
    aten.mm: 0,
    aten.bmm: 0,
    aten.addmm: 1,
    aten.baddbmm: 1,
    aten._scaled_mm: 0,
}


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a node's value."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [v for v in value if isinstance(v, torch.Tensor)]
    return []


def nbytes_of(value: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return math.prod(value.shape) * value.dtype.itemsize


def bytes_of(node: fx.Node) -> int:
    """Bytes of the tensors that a node gives."""
    return sum(map(nbytes_of, tensors_in(node.meta.get("val"))))


def flops_of(node: fx.Node) -> float:
    """Flops of a contraction, convolution or attention; 0 for all else."""
    target = node.target
    if not contracts(target):
        return 0.0
    if _name(target) == _DOT:
        return 2.0 * math.prod(_sizes(node).values())
    packet = getattr(target, "overloadpacket", None)
    if packet in flop_registry:
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda n: n.meta["val"]
        )
        count = flop_registry[packet]
        return float(count(*args, **kwargs, out_val=node.meta["val"]))
    query, key = _attended(node)
    each = _ATTENTION["backward" in _name(target)]
    return each * math.prod(query.shape) * key.shape[-2]


@cache
def family_of(target: Any) -> str:
    """Of what contracts: which peak it has, as ``Hardware.peak`` knows it."""
    found = "attention" if "attention" in _name(target) else ""
    found = "convolution" if "convolution" in _name(target) else found
    return f"{found} backward" if found and "backward" in _name(target) else found


def least_of(node: fx.Node) -> float:
    """The smallest of m, n and k of what ``flops_of`` counts."""
    target = node.target
    if _name(target) == _DOT:
        left, right, result = _words(node)
        return least_of_factors(left, right, result, _sizes(node))
    packet = getattr(target, "overloadpacket", target)
    if packet in _PRODUCTS:
        first = _PRODUCTS[packet]
        a, b = (node.args[first + i].meta["val"].shape for i in range(2))
        return float(min(a[-2], a[-1], b[-1]))
    if "attention" in _name(target):
        query, key = _attended(node)
        return float(min(query.shape[-2], query.shape[-1], key.shape[-2]))
    return _least_of_convolution(node)


def least_of_factors(
    left: Collection[str],
    right: Collection[str],
    result: Collection[str],
    size: Mapping[str, float],
) -> float:
    """The smallest of m, n and k of a product of two operands by named factors."""
    a, b = set(left), set(right)
    parts = a - b, b - a, (a & b).difference(result)
    return float(min(math.prod(size[f] for f in part) for part in parts))


def _least_of_convolution(node: fx.Node) -> float:
    """Of the product it is: points by channels out, by channels in and window."""
    late = node.target is aten.convolution_backward.default
    made = node.args[0].meta["val"] if late else node.meta["val"]
    weight = node.args[2 if late else 1].meta["val"].shape
    points = made.shape[0] * math.prod(made.shape[2:])
    groups = node.args[-2] if late else node.args[-1]
    return float(min(points, weight[0] // groups, math.prod(weight[1:])))


def _words(node: fx.Node) -> list[list[str]]:
    """Factors of both operands and of the result of ``fxpar::dot``."""
    left, right = node.args[2].split("->")
    return [word.split() for word in (*left.split(","), right)]


def _sizes(node: fx.Node) -> dict[str, int]:
    size: dict[str, int] = {}
    for word, operand in zip(_words(node), node.args[:2], strict=False):
        size.update(zip(word, operand.meta["val"].shape, strict=True))
    return size


def _is_flex(target: Any) -> bool:
    return _name(target).startswith("flex_attention")


def _attended(node: fx.Node) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key; most backwards have the gradient before them."""
    first = int("backward" in _name(node.target) and not _is_flex(node.target))
    query, key = node.args[first : first + 2]
    return query.meta["val"], key.meta["val"]


def is_view(node: fx.Node) -> bool:
    """Whether a call gives its first operand's memory, seen in another way."""
    if node.target in _RESHAPES:
        source = node.args[0].meta["val"]
        return viewable(source.shape, source.stride(), node.meta["val"].shape)
    return bool(getattr(node.target, "is_view", False))


def viewed(node: fx.Node) -> fx.Node:
    """The node whose memory a chain of views shows; itself where it is no view."""
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def viewable(
    shape: Sequence[int], stride: Sequence[int], target: Sequence[int]
) -> bool:
    """Whether strided memory can be seen in another shape without a copy."""
    runs: list[int] = []  # sizes of neighbouring dims that lie in memory as one
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
def changes_operand(target: Any) -> bool:
    """Whether an op writes to its first operand."""
    return _torch.objects.is_mutable(target)


@cache
def contracts(target: Any) -> bool:
    """Whether an op is a contraction, a convolution or attention."""
    counted = getattr(target, "overloadpacket", None) in flop_registry
    attends = "scaled_dot_product" in _name(target) or _is_flex(target)
    return counted or _name(target) == _DOT or attends


@cache
def is_light(target: Any) -> bool:
    """Whether Inductor generates the op, and so can fuse it."""
    if contracts(target) or not isinstance(target, _torch.inductor.OpOverload):
        return False
    if changes_operand(target):
        return False
    return target.namespace in _GENERATED and not _name(target).startswith(_ALONE)


def is_pointwise(node: fx.Node) -> bool:
    """Whether the op is light and each element of its result is made by itself."""
    target = node.target
    if not is_light(target) or target in _INDEXED or target in _ROWS:
        return False
    if is_unordered(node) or _name(target).startswith(_RANDOM):
        return False
    reads = [t for n in node.all_input_nodes for t in tensors_in(n.meta.get("val"))]
    return not domain_of(node, reads).rows


def light_class(node: fx.Node) -> str:
    """What a light op does with each point, a class of ``hardware.LIGHT``."""
    packet = getattr(node.target, "overloadpacket", None)
    return _CLASSES.get(getattr(packet, "__name__", ""), "step")


def is_unordered(node: fx.Node) -> bool:
    """Whether its threads write in any order: nothing follows in the same kernel. Into
    a constant Inductor writes by comparing indices instead."""
    if not _writes_by_index(node.target):
        return False
    into = node.args[0]
    compared = node.target is aten.scatter.value and isinstance(into, fx.Node)
    return not (compared and into.target in CONSTANTS)


@cache
def _writes_by_index(target: Any) -> bool:
    return any(part in _name(target) for part in _UNORDERED)


@cache
def _name(target: Any) -> str:
    return str(target)


@dataclass(frozen=True)
class Domain:
    """What a light op runs over."""

    points: int
    # That it reduces ``points`` to; 0: it reduces nothing.
    rows: int = 0

    @property
    def is_split(self) -> bool:
        """Whether it takes a kernel more to add up."""
        return 0 < self.rows < _FEW and self.points >= self.rows * _MANY

    def fits(self, other: Domain) -> bool:
        """Whether both can be one kernel: one number of points (what has fewer is
        computed again for each), of rows and columns where something is reduced."""
        if self.rows and other.rows:
            return self == other
        if not (self.rows or other.rows):
            return True
        reduced, plain = (self, other) if self.rows else (other, self)
        return plain.points <= reduced.rows or plain.points == reduced.points

    def joined(self, other: Domain) -> Domain:
        """That of both in one kernel."""
        return Domain(max(self.points, other.points), self.rows or other.rows)


def domain_of(node: fx.Node, operands: Iterable[torch.Tensor]) -> Domain:
    """The domain of a light op."""
    made = [math.prod(v.shape) for v in tensors_in(node.meta.get("val"))]
    read = max((math.prod(v.shape) for v in operands), default=0)
    most, least = max(made, default=0), min(made, default=0)
    if node.target in _ROWS:
        value, dim = node.args[0].meta["val"], node.args[_ROWS[node.target]]
        return Domain(read, read // max(1, value.shape[dim] if value.dim() else 1))
    if node.target in _INDEXED:
        return Domain(most)
    if is_unordered(node):
        return Domain(max(read, most))
    if least < max(read, most):
        return Domain(max(read, most), max(1, least))
    return Domain(most)
