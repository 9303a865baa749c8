"""Makes results of a graph share memory, as they do on one device.

For ``return z, z[0]`` without a gradient a graph gives two values, each gathered by
itself. In: a Dynamo graph. Out: the graph without results that are views of others
(``return_once``), and a call that adds them as views (``with_views``): a write to one
is seen in all, and nothing is sent twice. Never: a view of an input, or one with a
gradient; AOTAutograd makes these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from fxpar import _torch

_symbols = _torch.symbols
_memory_of = _torch.objects.memory_of


@dataclass(frozen=True)
class StridedLayout:
    """Holds where the elements of a tensor are in its memory; numbers or symbols."""

    # Elements along each dim.
    size: tuple[Any, ...]
    # Distance from one element to the next along each dim, in elements.
    stride: tuple[Any, ...]
    # Number of elements of the memory before the first.
    offset: Any

    @staticmethod
    def of(x: torch.Tensor) -> StridedLayout:
        return StridedLayout(tuple(x.shape), x.stride(), x.storage_offset())

    def given(self, size_values: dict[str, int]) -> StridedLayout:
        """Return the layout with numbers for symbols, by their names."""

        def number(n: Any) -> Any:
            return _symbols.substituted(n, size_values)

        size, stride = map(number, self.size), map(number, self.stride)
        return StridedLayout(tuple(size), tuple(stride), number(self.offset))

    @property
    def span(self) -> range:
        """Return the range of memory from first to last element, for traced sizes."""
        sizes, strides = map(_symbols.hint_shape, (self.size, self.stride))
        begin = _symbols.hint_of(self.offset)
        if 0 in sizes:
            return range(begin, begin)
        last = sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
        return range(begin, begin + last + 1)


@dataclass(frozen=True)
class ResultView:
    """Is a result of a Dynamo graph that is a view of another result."""

    # Position of the view among the results.
    position: int
    # Position of the result that it is a view of.
    of: int
    # Layout of the view.
    layout: StridedLayout
    # Layout of that other result.
    layout_of: StridedLayout


def views_of_results(gm: fx.GraphModule) -> list[ResultView]:
    """Return the results of a Dynamo graph that are views of another one, whose
    elements are dense in its memory."""
    values = [_value(node) for node in gm.graph.output_node().args[0]]
    inputs = [*gm.graph.find_nodes(op="placeholder")]
    inputs += gm.graph.find_nodes(op="get_attr")
    input_memory = {_memory_of(x) for x in map(_value, inputs) if x is not None}
    size_values = dict.fromkeys(_places_of_sizes(gm), 2)
    layouts = {
        i: StridedLayout.of(x)
        for i, x in enumerate(values)
        if x is not None
        and _memory_of(x) not in input_memory
        and _is_known(x, size_values)
    }
    bases: list[int] = []
    views: list[ResultView] = []
    for i in sorted(layouts, key=lambda i: -len(layouts[i].span)):  # the largest first
        of = (base for base in bases if _is_view(values[i], values[base]))
        base = next(of, None)
        if base is not None:
            views.append(ResultView(i, base, layouts[i], layouts[base]))
        elif len(layouts[i].span) == _symbols.hint_of(values[i].numel()):
            bases.append(i)
    return views


def _value(node: Any) -> Any:
    """Return the value of a node if it is a tensor with strides, else None."""
    x = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    strided = isinstance(x, torch.Tensor) and x.layout == torch.strided
    return x if strided and not isinstance(x, DTensor) else None


def _is_known(x: torch.Tensor, size_values: dict[str, int]) -> bool:
    """Return whether the layout of ``x`` follows from the sizes in ``size_values``."""
    try:
        StridedLayout.of(x).given(size_values)
    except (KeyError, _symbols.Inexpressible):
        return False
    return True


def _is_view(x: torch.Tensor, base: torch.Tensor) -> bool:
    """Return whether ``x``, without a gradient, is in the memory of ``base``."""
    if x.requires_grad or x.dtype != base.dtype or _memory_of(x) != _memory_of(base):
        return False
    inside, around = StridedLayout.of(x).span, StridedLayout.of(base).span
    return around.start <= inside.start and inside.stop <= around.stop


def return_once(gm: fx.GraphModule, views: Sequence[ResultView]) -> fx.GraphModule:
    """Return a copy of a Dynamo graph without its results that are views of others."""
    once = _torch.dynamo.copy_graph(gm)
    output = once.graph.output_node()
    left_out = {view.position for view in views}
    results = [x for i, x in enumerate(output.args[0]) if i not in left_out]
    output.args = (type(output.args[0])(results),)
    once.recompile()
    return once


def with_views(
    gm: fx.GraphModule, views: Sequence[ResultView], call: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap ``call``, of ``return_once``'s graph, to return all results of ``gm``."""
    count, places = len(gm.graph.output_node().args[0]), _places_of_sizes(gm)
    left_out = {view.position for view in views}
    positions = [i for i in range(count) if i not in left_out]

    def viewing(*args: Any) -> Any:
        returned = call(*args)
        size_values = {
            name: args[i] if d is None else args[i].shape[d]
            for name, (i, d) in places.items()
        }
        results = dict(zip(positions, returned, strict=True))
        for view in views:
            layout, whole = (
                view.layout.given(size_values),
                view.layout_of.given(size_values),
            )
            if results[view.of].stride() != whole.stride:
                results[view.of] = _with_layout(results[view.of], whole)
            base = results[view.of].detach()
            begin = base.storage_offset() + layout.offset - whole.offset
            results[view.position] = base.as_strided(layout.size, layout.stride, begin)
        return type(returned)(results[i] for i in range(count))

    return viewing


def _with_layout(x: torch.Tensor, layout: StridedLayout) -> torch.Tensor:
    """Return a copy with dims in the order of these strides; gradients flow."""
    dims = sorted(range(x.dim()), key=lambda d: -layout.stride[d])
    inverse = [dims.index(d) for d in range(x.dim())]
    return x.permute(dims).contiguous().permute(inverse)


def _places_of_sizes(gm: fx.GraphModule) -> dict[str, tuple[int, int | None]]:
    """Map the name of each open size of a Dynamo graph to where its arguments have it:
    (position of a number, None), or (position of a tensor, dim)."""
    places: dict[str, tuple[int, int | None]] = {}
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        x = node.meta.get("example_value")
        sizes = enumerate(x.shape) if isinstance(x, torch.Tensor) else [(None, x)]
        for d, n in sizes:
            if _symbols.is_symbol(n):
                places.setdefault(str(_symbols.expression(n)), (i, d))
    return places
