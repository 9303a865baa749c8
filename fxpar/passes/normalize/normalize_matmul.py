"""Undoes the views around matrix products.

``F.linear`` on ``[b, s, h]`` reaches ATen as view to ``[b*s, h]``, mm, view back, and a
batched matmul of attention as view to ``[b*h, s, d]``, bmm, view back. A merged dim can
be split by the axes of its major part only, so the views hide sequence, head and fused
projection dims from sharding. In: an ATen graph. Out: the same graph with mm, bmm,
addmm and baddbmm as ``fxpar::dot`` over the unmerged dims, biases added separately.
Never: a result changes other than by the rounding of a bias addition.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fxpar._torch.objects import argument
from fxpar._torch.symbols import expressions
from fxpar.graph.builder import Builder, shape_of
from fxpar.sharding.factors import sides
from fxpar.sharding.op_facts import op_facts_of

aten = torch.ops.aten

Words = list[str]


def undo_views_around_matmul(graph: fx.Graph, rewriter: Builder) -> None:
    """Replace every matmul by a ``fxpar::dot`` over the dims that its views merged."""
    graph.eliminate_dead_code()  # what earlier steps replaced is not a reader
    for node in list(graph.nodes):
        if node.op == "call_function" and op_facts_of(node.target).equation:
            _Contraction(node, rewriter).rewrite()
    _sums_of_merged(graph, rewriter)
    _cancel_views(graph, rewriter)


def merged_groups(source: Sequence[int], target: Sequence[int]) -> list[int] | None:
    """Return how many source dims each target dim merges, or None if the view is not a
    plain merge; a target dim of size 1 may merge none."""
    groups, i = [], 0
    for size in target:
        n, count = 1, 0
        if size == 1 and (i == len(source) or source[i] != 1):
            groups.append(0)
            continue
        while i < len(source) and (n < size or count == 0):
            n *= source[i]
            i += 1
            count += 1
        if n != size or count == 0:
            return None
        groups.append(count)
    if i < len(source):
        if any(size != 1 for size in source[i:]):
            return None
        groups[-1] += len(source) - i
    return groups


def before_views(node: Any) -> fx.Node:
    """Return the source of a chain of views, or the node itself if it is no view."""
    return next(reversed([*_views_of(node)]), node)


def _views_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the source of a view, and the source of that one if it is a view too."""
    while op_facts_of(node.target).reshapes:
        node = node.args[0]
        yield node


class _Contraction:
    """Is a product while it becomes a dot: two operands, an equation, the view back."""

    def __init__(self, node: fx.Node, rewriter: Builder) -> None:
        self.node, self.rewriter = node, rewriter
        *self.words, self.result = sides(op_facts_of(node.target).equation)
        biased = node.target in (aten.addmm.default, aten.baddbmm.default)
        self.bias = node.args[0] if biased else None
        self.operands: list[fx.Node] = list(node.args[1:3] if biased else node.args[:2])
        self.fresh = (f"x{i}" for i in itertools.count())

    def rewrite(self) -> None:
        # Orders first on both sides: a side that is split by the other's view must show
        # its own view, for the two to cancel.
        while any(self._absorb_order(i) for i in (0, 1)) or any(
            self._absorb_view(i) for i in (0, 1)
        ):
            pass
        node, build = self.node, self.rewriter
        with build.before(node):
            equation = (
                ", ".join(" ".join(w) for w in self.words)
                + " -> "
                + " ".join(self.result)
            )
            result = build.call(torch.ops.fxpar.dot.default, *self.operands, equation)
            if self.bias is not None:
                result = self._add_bias(result)
            if shape_of(result) != shape_of(node):
                result = build.call(aten.view.default, result, list(shape_of(node)))
        build.replace(node, result)

    def _absorb_order(self, i: int) -> bool:
        """Look through one permute or empty expand of operand ``i``."""
        operand = self.operands[i]
        if operand.op != "call_function":
            return False
        if operand.target is aten.permute.default:
            order = operand.args[1]
            inverse = [0] * len(order)
            for position, source_dim in enumerate(order):
                inverse[source_dim % len(order)] = position
            self.words[i] = [self.words[i][d] for d in inverse]
            self.operands[i] = operand.args[0]
            return True
        if operand.target is aten.expand.default and shape_of(operand) == shape_of(
            operand.args[0]
        ):
            self.operands[i] = operand.args[0]
            return True
        return False

    def _absorb_view(self, i: int) -> bool:
        """Look through one merging view or stacking cat of operand ``i``."""
        operand = self.operands[i]
        if operand.op != "call_function":
            return False
        if op_facts_of(operand.target).reshapes:
            return any(self._split_by(i, source) for source in _views_of(operand))
        if operand.target is aten.cat.default:
            stacked = stack_of_equal(operand, self.rewriter)
            return stacked is not None and self._split_by(i, stacked)
        return False

    def _split_by(self, i: int, source: fx.Node) -> bool:
        """Use ``source``, of which operand ``i`` is a merging view, in its place."""
        shape = shape_of(source)
        groups = merged_groups(shape, shape_of(self.operands[i]))
        if groups is None or all(n == 1 for n in groups):
            return False
        at, parts, sizes = 0, {}, {}
        for word, count in zip(self.words[i], groups, strict=True):
            if count != 1:
                parts[word] = [next(self.fresh) for _ in range(count)]
                sizes[word] = shape[at : at + count]
            at += count
        # Dims of size 1 are only dropped where another dim splits, so that this ends.
        if 0 in groups and not any(
            sum(n != 1 for n in rows) > 1 for rows in sizes.values()
        ):
            return False
        other_operand = 1 - i
        self._split_operand(other_operand, parts, sizes)
        self.operands[i] = source
        self.words[i] = self._split_words(self.words[i], parts)
        self.result = self._split_words(self.result, parts)
        return True

    def _split_operand(self, i: int, parts: dict, sizes: dict) -> None:
        words, operand = self.words[i], self.operands[i]
        if not any(word in parts for word in words):
            return
        shape: list[int] = []
        for word, size in zip(words, shape_of(operand), strict=True):
            shape += sizes.get(word, [size])
        source = before_views(operand)
        if shape_of(source) == tuple(shape):  # the unmerged value itself
            self.operands[i] = source
        else:
            with self.rewriter.before(self.node):
                self.operands[i] = self.rewriter.call(aten.view.default, operand, shape)
        self.words[i] = self._split_words(words, parts)

    @staticmethod
    def _split_words(words: Words, parts: dict[str, Words]) -> Words:
        return [part for word in words for part in parts.get(word, [word])]

    def _add_bias(self, product: fx.Node) -> fx.Node:
        """Return ``beta * bias + alpha * product``, with the bias in unmerged dims."""
        build, bias, full = self.rewriter, self.bias, shape_of(self.node)
        scale = self.node.kwargs
        if scale.get("alpha", 1) != 1:
            product = build.call(aten.mul.Tensor, product, scale["alpha"])
        if scale.get("beta", 1) != 1:
            bias = build.call(aten.mul.Tensor, bias, scale["beta"])
        groups = merged_groups(shape_of(product), full)
        assert groups is not None, "a dot's result always merges to the product's shape"
        shape: list[int] = []
        missing = len(full) - len(shape_of(bias))
        at = sum(groups[:missing])
        for count, size in zip(groups[missing:], shape_of(bias), strict=True):
            part = list(shape_of(product)[at : at + count])
            shape += part if size != 1 else [1] * count
            at += count
        if tuple(shape) != shape_of(bias):
            bias = build.call(aten.view.default, bias, shape)
        return build.call(aten.add.Tensor, product, bias)


def stack_of_equal(cat: fx.Node, rewriter: Builder) -> fx.Node | None:
    """Return the stack that a cat of equal pieces merges, built before it, or None."""
    if "fxpar_stack" in cat.meta:
        return cat.meta["fxpar_stack"]
    pieces = cat.args[0]
    dim = argument(cat, "dim") % len(shape_of(cat))
    if len(pieces) < 2 or len({expressions(shape_of(p)) for p in pieces}) != 1:
        return None
    if shape_of(pieces[0])[dim] == 1:
        return None  # a stack already
    with rewriter.before(cat):
        parts = [rewriter.call(aten.unsqueeze.default, p, dim) for p in pieces]
        cat.meta["fxpar_stack"] = rewriter.call(aten.cat.default, parts, dim)
    return cat.meta["fxpar_stack"]


def _sums_of_merged(graph: fx.Graph, rewriter: Builder) -> None:
    """Replace ``sum(view(x), dims)`` by a sum over the dims that the view merged."""
    for node in list(graph.nodes):
        if node.target is not aten.sum.dim_IntList or node.args[1] is None:
            continue
        view = node.args[0]
        source = before_views(view)
        source = source.meta.get("fxpar_stack", source)
        if source is view:
            continue
        groups = merged_groups(shape_of(source), shape_of(view))
        if groups is None or 0 in groups or all(n == 1 for n in groups):
            continue
        starts = list(itertools.accumulate([0, *groups]))
        dims = sorted(d % len(groups) for d in node.args[1])
        merged_dims = [i for d in dims for i in range(starts[d], starts[d + 1])]
        keep = argument(node, "keepdim")
        with rewriter.before(node):
            total = rewriter.call(
                aten.sum.dim_IntList, source, merged_dims, keep, **node.kwargs
            )
            if shape_of(total) != shape_of(node):
                total = rewriter.call(aten.view.default, total, list(shape_of(node)))
        rewriter.replace(node, total)


def _cancel_views(graph: fx.Graph, rewriter: Builder) -> None:
    """Replace ``view(view(x))`` by one view, and erase views to the same shape."""
    for node in list(graph.nodes):
        if not op_facts_of(node.target).reshapes:
            continue
        source = before_views(node)
        if shape_of(source) == shape_of(node):
            rewriter.replace(node, source)
        elif source is not node.args[0]:
            with rewriter.before(node):
                view = rewriter.call(aten.reshape.default, source, list(shape_of(node)))
            rewriter.replace(node, view)
