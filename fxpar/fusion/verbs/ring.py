"""Passes parts along a ring: ``overlap`` runs a product overlapping with its collective
without a collective over all ranks.

In: a mesh, axes, a dim, the number of directions. Out: a ``Ring``, which has the parts
of the dim in the order in which a rank sees them, counted from its own: 0 is its own
part, 1 that of the next rank, -1 that of the rank before. One direction passes every
part all the way round; of two, each passes parts half of the way. Each hop is one
``permute`` step between neighbours. Never makes a graph that differs between ranks:
parts depend on the rank through ``Builder.offset`` alone.

The schemes are those of collective matmuls (Wang et al., ASPLOS 2023, section 5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fxpar.graph import collective_nodes
from fxpar.graph.builder import Builder
from fxpar.passes.lower import divided, is_divided_first
from fxpar.sharding.mesh import Mesh

aten = torch.ops.aten

Axes = tuple[str, ...]


def of_rank(
    build: Builder, x: fx.Node, axes: Sequence[str], source: Callable[[int], int]
) -> fx.Node:
    """Append ``x`` of another rank. ``source``: position of a rank along the axes ->
    that of the rank whose value it gets."""
    mesh = build.mesh
    index = [mesh.index(rank, axes) for rank in mesh.group(0, axes)]
    sources, along = tuple(index.index(source(i)) for i in index), mesh.ordered(axes)
    return collective_nodes.step(build, collective_nodes.permute, x, sources, along)


@dataclass(frozen=True)
class Ring:
    """Is the order of parts of a value that ranks pass on."""

    axes: Axes  # the axes along which ranks pass them on
    dim: int  # the dim of the value that is in parts
    # Each part once, counted from a rank's own, in the order in which the rank comes to
    # them.
    parts: tuple[int, ...]

    ranks = 1  # parts are contiguous

    @property
    def chunks(self) -> int:
        return len(self.parts)

    @classmethod
    def nearest_first(cls, mesh: Mesh, axes: Axes, dim: int, ways: int) -> Ring:
        """Return the ring that begins with a rank's own part, then parts as they arrive
        from the rank before, and, of two ways, from the next."""
        count = mesh.count(axes)
        before = count - 1 if ways == 1 else count // 2
        after = count - 1 - before
        parts = sorted(range(-before, after + 1), key=lambda part: (abs(part), part))
        return cls(axes, dim, tuple(parts))

    @classmethod
    def farthest_first(cls, mesh: Mesh, axes: Axes, dim: int, ways: int) -> Ring:
        """Return the ring that ends with a rank's own part, as sums are sent to the
        next rank, and, of two ways, to the rank before."""
        forward = cls.nearest_first(mesh, axes, dim, ways)
        return cls(axes, dim, tuple(-part for part in reversed(forward.parts)))

    def cut(self, build: Builder, x: fx.Node, dim: int, i: int) -> fx.Node:
        """Append the i-th part of a whole value along its ``dim``."""
        shape, count = list(x.meta["val"].shape), self.chunks
        split_shape = [*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :]]
        x = build.call(aten.reshape.default, x, split_shape)
        where = build.offset(self.axes, 1, self.parts[i], around=count)
        return build.call(aten.select.int, x, dim, where)

    def join(self, build: Builder, parts: list[fx.Node], dim: int) -> fx.Node:
        """Append the whole value of its parts; inverse of ``cut``. Parts are put in a
        row that begins with the next rank's and goes round almost twice, from which the
        whole is cut at an offset that depends on the rank."""
        count = self.chunks
        of = dict(zip((part % count for part in self.parts), parts, strict=True))
        row = [of[(1 + i) % count] for i in range(2 * count - 1)]
        size = parts[0].meta["val"].shape[dim]
        start = build.offset(self.axes, -size, (count - 1) * size)
        end = build.offset(self.axes, -size, (2 * count - 1) * size)
        x = build.call(aten.cat.default, row, dim)
        return build.contiguous(build.call(aten.slice.Tensor, x, dim, start, end))

    def passed(self, build: Builder, x: fx.Node, way: int) -> fx.Node:
        """Append ``x`` of the rank before (``way`` 1), or of the next (-1)."""
        count = build.mesh.count(self.axes)
        permuted = of_rank(build, x, self.axes, lambda i: (i - way) % count)
        permuted.meta["fxpar_chunk"] = True
        return permuted

    def arriving(self, build: Builder, own: fx.Node) -> Iterator[fx.Node]:
        """Yield the parts as they arrive, where each rank starts with its own; a rank
        passes one on before it is yielded here, and so before it is worked on."""
        arrived = {0: own}
        for part in self.parts:
            for way in (1, -1):
                further = part - way
                if further in self.parts and further not in arrived:
                    arrived[further] = self.passed(build, arrived[part], way)
            yield arrived[part]

    def reduced(
        self, build: Builder, parts: Callable[[int], fx.Node], op: str
    ) -> fx.Node:
        """Return a rank's own part of the reduction; ``parts(i)`` appends its i-th
        summand. The sum from a neighbour is added to it, and sent on. It is flat, since
        Inductor makes one op of a product and a sum, which would wait for the
        neighbour."""
        coming: dict[int, fx.Node] = {}
        for i, part in enumerate(self.parts):
            summand = parts(i)
            shape = list(summand.meta["val"].shape)
            summand = build.call(aten.reshape.default, summand, [-1])
            early = op == "avg" and is_divided_first(summand)
            if early:
                summand = divided(build, summand, self.chunks)
            for way in (1, -1):
                if way in coming and part * way >= 0:
                    combine = collective_nodes.COMBINE[op]
                    summand = build.call(combine, summand, coming.pop(way))
            if part:
                way = 1 if part > 0 else -1
                coming[way] = self.passed(build, summand, way)
        if op == "avg" and not early:
            summand = divided(build, summand, self.chunks)
        return build.call(aten.reshape.default, summand, shape)
