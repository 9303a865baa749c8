"""Describes how one tensor is laid out on the mesh: per dim an ordered tuple of axes,
plus partial axes.

Written as JAX writes a PartitionSpec: ``Spec("dp", None, ("tp", "sp"))``. Axes on one
dim go major to minor; ``"tp:2"`` is a part of one (see ``mesh``). A partial axis
means that each rank along it holds a summand (or another unreduced operand) of the
value.
In: axes, text, or DTensor placements. Out: specs, local shapes, slices, placements.
Never: uses DTensor placements outside of ``Spec.to_placements`` and
``Spec.from_placements``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fxpar.errors import SpecError
from fxpar.sharding import shard_sizes
from fxpar.sharding.mesh import Mesh, full_name, is_name, overlapping

REDUCTIONS = ("sum", "avg", "max", "min", "product")

Entry = str | Iterable[str] | None


def _entry(entry: Entry) -> tuple[str, ...]:
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (full_name(entry),)
    if not isinstance(entry, Iterable):
        raise SpecError(
            f"a dim cannot be split over {entry!r}",
            fix='name axes for each dim, None for none: Spec("dp", None, ("tp", "sp"))',
        )
    return tuple(full_name(name) for name in entry)


@dataclass(frozen=True, init=False, repr=False)
class Spec:
    """Is an immutable, hashable layout, e.g. ``Spec("dp", None, partial={"tp":
    "sum"})``."""

    # One tuple of axes per tensor dim.
    dims: tuple[tuple[str, ...], ...]
    # (axis, reduction) pairs, sorted by axis. Raises SpecError if an axis is used twice
    # or a reduction is unknown.
    partial: tuple[tuple[str, str], ...]

    def __init__(
        self, *dims: Entry, partial: Mapping[str, str] | Iterable = ()
    ) -> None:
        pairs = partial.items() if isinstance(partial, Mapping) else partial
        object.__setattr__(self, "dims", tuple(_entry(entry) for entry in dims))
        reductions = sorted((full_name(axis), op) for axis, op in map(tuple, pairs))
        object.__setattr__(self, "partial", tuple(reductions))
        # Not ``self.axes``: Dynamo, which traces this, has no cached properties.
        used = [axis for dim in self.dims for axis in dim]
        used += [axis for axis, _ in self.partial]
        twice = overlapping(used)
        if twice is not None:
            one, other = twice
            raise SpecError(
                f"axis {one!r} is used twice in {self}"
                if one == other
                else f"axes {one!r} and {other!r} overlap in {self}",
                fix="an axis may split one dim only, or be partial",
            )
        for _, op in self.partial:
            if op not in REDUCTIONS:
                raise SpecError(f"unknown reduction {op!r}", fix=f"use {REDUCTIONS}")

    @classmethod
    def of(cls, dims: Iterable[Iterable[str]], partial: Iterable = ()) -> Spec:
        """Return a spec from axis tuples; the inverse of ``.dims``, ``.partial``."""
        return cls(*dims, partial=partial)

    @classmethod
    def whole(cls, ndim: int) -> Spec:
        """Return the spec of a full value that is equal on every rank."""
        return cls(*([None] * ndim))

    @cached_property
    def sharded_axes(self) -> tuple[str, ...]:
        return tuple(axis for dim in self.dims for axis in dim)

    @cached_property
    def partial_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis, _ in self.partial)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Return every axis used, on dims or partial."""
        return self.sharded_axes + self.partial_axes

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Return the kinds of its reductions: an average and a sum are one kind, since
        they commute. With several the spec does not say which comes first."""
        return frozenset("sum" if op == "avg" else op for _, op in self.partial)

    @property
    def is_whole(self) -> bool:
        return not self.axes

    def without_partial(self) -> Spec:
        return Spec(*self.dims)

    def without(self, axes: Collection[str]) -> Spec:
        """Return the spec with no dim split over ``axes``."""
        return Spec.of(
            [[a for a in dim if a not in axes] for dim in self.dims], self.partial
        )

    def clear_of(self, axes: Collection[str]) -> Spec:
        """Return the spec without some axes, on dims and as reductions."""
        partial = [(axis, op) for axis, op in self.partial if axis not in axes]
        return Spec.of(self.without(axes).dims, partial)

    def refined(self, mesh: Mesh) -> Spec:
        """Return the spec in axes of a refined mesh. Raises MeshError as
        ``mesh.parts``."""
        if all(axis in mesh.sizes for axis in self.axes):
            return self
        partial = [
            (part, op) for axis, op in self.partial for part in mesh.parts([axis])
        ]
        return Spec.of(map(mesh.parts, self.dims), partial)

    def joined(self, mesh: Mesh) -> Spec:
        """Return the spec as users write it: parts that make up an axis become that
        axis. Inverse of ``refined``."""
        if not any(":" in axis for axis in self.axes):
            return self
        partial = []
        for reduction in dict.fromkeys(op for _, op in self.partial):
            axes = mesh.ordered([axis for axis, op in self.partial if op == reduction])
            partial += [(axis, reduction) for axis in mesh.joined(axes)]
        return Spec.of(map(mesh.joined, self.dims), partial)

    def check(self, mesh: Mesh, shape: Sequence[int]) -> None:
        """Raise SpecError unless the spec fits this mesh and the number of dims."""
        if len(self.dims) != len(shape):
            raise SpecError(f"{self} has {len(self.dims)} dims, tensor {list(shape)}")
        for axis in self.axes:
            if not mesh.has(axis):
                raise SpecError(
                    f"{self} names axis {axis!r}, which mesh {mesh} does not have",
                    fix=f"use one of {mesh.names}",
                )

    def is_even(self, mesh: Mesh, shape: Sequence[int]) -> bool:
        """Return whether all ranks hold equally much of a global ``shape``."""
        pairs = zip(shape, self.dims, strict=True)
        return all(shard_sizes.is_even(size, mesh, axes) for size, axes in pairs)

    def evened(self, mesh: Mesh, shape: Sequence[int]) -> Spec:
        """Return the spec without the splits that give unequal shards."""
        return self._where(shard_sizes.is_even, mesh, shape)

    def in_chunks(self, mesh: Mesh, shape: Sequence[int]) -> Spec:
        """Return the spec without the splits that a DTensor's ``Shard`` cannot
        express."""
        return self._where(shard_sizes.is_in_chunks, mesh, shape)

    def _where(
        self, test: Callable[..., bool], mesh: Mesh, shape: Sequence[int]
    ) -> Spec:
        pairs = zip(shape, self.dims, strict=True)
        dims = [axes if test(size, mesh, axes) else () for size, axes in pairs]
        return Spec.of(dims, self.partial)

    def local_shape(self, mesh: Mesh, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the largest shard of a global ``shape``: the shape that
        every rank holds where the axes divide it. Raises SpecError as ``check``."""
        self.check(mesh, shape)
        pairs = zip(shape, self.dims, strict=True)
        return tuple(shard_sizes.largest(size, mesh, axes) for size, axes in pairs)

    def slices(self, mesh: Mesh, shape: Sequence[int], rank: int) -> tuple[slice, ...]:
        """Return the slices of a global ``shape`` that a rank's shard covers. Raises
        SpecError as ``check``."""
        self.check(mesh, shape)
        shard_slices = []
        for size, axes in zip(shape, self.dims, strict=True):
            start, rows = shard_sizes.shard(size, mesh, axes, rank)
            shard_slices.append(slice(start, start + rows))
        return tuple(shard_slices)

    def rank_shape(
        self, mesh: Mesh, shape: Sequence[int], rank: int
    ) -> tuple[int, ...]:
        """Return the shape one rank holds of a global ``shape``. Raises SpecError as
        ``check``."""
        return tuple(s.stop - s.start for s in self.slices(mesh, shape, rank))

    def format(self, shape: Sequence[int] | None = None, dtype: str = "") -> str:
        """Return text: without a shape ``[dp, _, tp+sp]``, with one ``f32[8@dp,
        64]``."""
        entries = []
        for i, axes in enumerate(self.dims):
            names = "+".join(axes)
            if shape is None:
                entries.append(names or "_")
            else:
                entries.append(f"{shape[i]}@{names}" if names else f"{shape[i]}")
        text = f"{dtype}[{', '.join(entries)}]"
        if self.partial:
            by_op: dict[str, list[str]] = {}
            for axis, op in self.partial:
                by_op.setdefault(op, []).append(axis)
            inside = ", ".join(f"{op}: {'+'.join(a)}" for op, a in by_op.items())
            text += f" partial({inside})"
        return text

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Return the spec of either form of ``format``. Raises SpecError on any other
        text."""
        match = re.fullmatch(r"\s*\w*\[([^\]]*)\](?:\s*partial\((.*)\))?\s*", text)
        if not match:
            raise SpecError(f"cannot read spec {text!r}", fix="write [dp, _, tp+sp]")
        dims: list[tuple[str, ...]] = []
        for entry in match[1].split(",") if match[1].strip() else []:
            entry = entry.strip()
            size, at, names = entry.rpartition("@")
            whole = not at and (entry == "_" or entry.isdigit())
            axes = () if whole else tuple(names.split("+"))
            if not all(map(is_name, axes)) or (at and not size.isdigit()):
                raise SpecError(f"cannot read {entry!r} in spec {text!r}")
            dims.append(axes)
        partial = {}
        for clause in match[2].split(",") if match[2] else []:
            op, _, names = clause.partition(":")
            for axis in names.strip().split("+"):
                if not is_name(axis):
                    raise SpecError(f"cannot read {clause!r} in spec {text!r}")
                partial[axis] = op.strip()
        return cls(*dims, partial=partial)

    def __str__(self) -> str:
        return self.format()

    def __repr__(self) -> str:
        dims = [repr(a[0]) if len(a) == 1 else repr(a or None) for a in self.dims]
        partial = f"partial={dict(self.partial)}" if self.partial else ""
        return f"Spec({', '.join(dims + [partial] * bool(partial))})"

    def to_placements(self, mesh: Mesh) -> tuple:
        """Return DTensor placements, one per mesh axis, for a DeviceMesh of the same
        axes.

        DTensor splits a dim by mesh order, major first. Where this spec has an axis
        more major than the order of the mesh implies, the earlier mesh axis becomes a
        strided shard, whose split factor is the number of shards made by the axes that
        are later in the mesh but more major in the spec. For a spec with parts,
        ``mesh.refined(spec.axes)`` has the axes. Raises MeshError if ``mesh`` does not
        have them.
        """
        from fxpar._torch.dtensor import Partial, Replicate, Shard, strided_shard

        spec = self.refined(mesh)
        order = {name: i for i, name in enumerate(mesh.names)}
        where = {
            axis: (d, i) for d, a in enumerate(spec.dims) for i, axis in enumerate(a)
        }
        reductions = dict(spec.partial)
        out = []
        for axis in mesh.names:
            if axis in where:
                dim, i = where[axis]
                major_axes = [a for a in spec.dims[dim][:i] if order[a] > order[axis]]
                split = mesh.count(major_axes)
                out.append(strided_shard(dim, split) if split > 1 else Shard(dim))
            elif axis in reductions:
                out.append(Partial(reductions[axis]))
            else:
                out.append(Replicate())
        return tuple(out)

    @classmethod
    def from_placements(cls, placements: Sequence, mesh: Mesh, ndim: int) -> Spec:
        """Return the spec of placements; the inverse of ``to_placements``. Raises
        SpecError on a strided shard whose split factor is no product of later axes on
        the same dim."""
        dims: list[list[str]] = [[] for _ in range(ndim)]
        partial = {}
        for axis, placement in reversed(list(zip(mesh.names, placements, strict=True))):
            if placement.is_partial():
                partial[axis] = placement.reduce_op
            elif not placement.is_replicate():
                dim = dims[placement.dim % ndim]
                factor = getattr(placement, "split_factor", 1)
                # Later axes are already in `dim`; those this one strides over are a
                # major prefix of it.
                place = next(
                    (i for i in range(len(dim) + 1) if mesh.count(dim[:i]) == factor),
                    None,
                )
                if place is None:
                    raise SpecError(f"no axis order expresses placement {placement}")
                dim.insert(place, axis)
        return cls(*dims, partial=partial)
