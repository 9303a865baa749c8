"""Chooses the mesh to plan on: the axes that are needed in parts.

``refine`` returns the request's mesh, or one refined (``Mesh.refined``) by the parts
that hints, specs and code name, by those that attention needs (two key-value heads on
tp=4 are split over tp:(1)2, with a copy on each rank along tp:(2)2), and, without a
search, by those that views of a split dim need.
In: a Program and the Request it is planned for. Out: a mesh.
Never: changes a mesh of which nothing needs parts, so that plans stay the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from fxpar.errors import HintError, MeshError
from fxpar.sharding import shard_sizes
from fxpar.sharding.decide import decide_on
from fxpar.sharding.hints import axes_of
from fxpar.sharding.mesh import Mesh, axis_of, part_name, parts_among
from fxpar.sharding.plan_request import Request
from fxpar.sharding.program import Input, Output, Program, is_view, user_line
from fxpar.sharding.propagate.conventions import (
    SEQUENCE,
    batch_axes,
    heads_of,
    is_batch_name,
    parameter_roots,
)
from fxpar.sharding.reshard.route import reshard_seconds
from fxpar.sharding.search.run_search import SearchOptions, has_too_many_axes
from fxpar.sharding.spec import Spec

# Axes that by name split dims other than heads.
_NO_HEADS = (*SEQUENCE, "ep", "expert")


def refine(
    program: Program, request: Request, heads: Sequence[int] | None = None
) -> Mesh:
    """Return the mesh to plan on. ``heads``: ``head_counts`` of the program, if known.

    Raises HintError for parts that the mesh does not have, that do not nest, or that
    would cut an axis which is needed whole.
    """
    named_axes = list(_named_axes(program, request))
    named_parts = [(what, at, parts_among(axes)) for what, at, axes in named_axes]
    mesh = request.mesh
    whole = _needed_whole(program, mesh)
    for what, where, names in named_parts:
        try:
            mesh = mesh.refined(names)
        except MeshError as error:
            text = f"{what}: {error.what}"
            raise HintError(text, where=where, fix=error.fix) from error
    for axis in (axis for axis in whole if axis not in mesh.sizes):
        what, where = next(
            (row[:2] for row in named_parts if axis_of(axis) in map(axis_of, row[2])),
            (f"mesh {mesh}", None),
        )
        raise HintError(
            f"{what}: axis {axis!r} has no parts here: {whole[axis]}",
            where=where,
            fix="name the whole axis",
        )
    if request.mode == "replicate":
        return mesh
    open_ = [
        axis
        for axis, size in mesh.unrefined.axes
        if axis not in map(axis_of, whole)
        and axis not in map(axis_of, batch_axes(mesh))
        and axis.lower() not in _NO_HEADS
        and set(mesh.unrefined.speeds_of(axis)) == {1.0}
        and any(size % n == 0 for n in range(2, size))
    ]
    if open_ and heads is None:
        heads = head_counts(program)
    parts = mesh
    # Each number of heads can be split over a part of an axis that does not divide it.
    for count, axis in itertools.product(heads or (), open_):
        fit = math.gcd(count, mesh.axis_size(axis))
        if 1 < fit < mesh.axis_size(axis):
            parts = _also(parts, part_name(axis, 1, fit))
    if isinstance(request.mode, SearchOptions):
        return mesh if has_too_many_axes(parts) else parts
    named = {axis for *_, axes in named_axes for axis in axes} - {*whole}
    may_be_cut = [
        axis
        for axis in parts.names
        if axis in named and not is_batch_name(axis) and not parts.unlike
    ]
    return _for_views(program, request.on(parts), may_be_cut)


def _for_views(program: Program, request: Request, axes: Sequence[str]) -> Mesh:
    """Return the mesh of the request, or, if reshards then take less time, one with the
    parts of ``axes`` that are needed by views that split a dim."""
    mesh = parts = request.mesh
    for op in program.ops:
        for dim in op.rule.operands[0] if is_view(op) else ():
            rows = [op.rule.size[factor] for factor in dim]
            for axis in axes if len(rows) > 1 else ():
                fit = math.gcd(rows[0], mesh.axis_size(axis))
                divides = math.prod(rows) % mesh.axis_size(axis) == 0
                if divides and 1 < fit < mesh.axis_size(axis):
                    parts = _also(parts, part_name(axis, 1, fit))
    if parts is mesh:
        return mesh
    seconds = {}
    for each in (mesh, parts):
        on = request.on(each)
        decision = decide_on(replace(program, signature=on.as_planned), on)
        seconds[each] = reshard_seconds(decision.program, decision.edges, each)
    return min(seconds, key=seconds.__getitem__)


def rounded(mesh: Mesh, axes: Sequence[str], rows: int) -> Mesh:
    """Return the mesh with shares along ``axes`` that divide a batch of ``rows``, and
    any view of a dim as these rows times others, if each rank has some."""
    for axis in axes:
        sizes = [
            shard_sizes.piece(rows, mesh, axis, i)[1]
            for i in range(mesh.axis_size(axis))
        ]
        if min(sizes) > 0:
            mesh = mesh.with_shares({axis: tuple(map(float, sizes))})
    return mesh


def _named_axes(
    program: Program, request: Request
) -> Iterator[tuple[str, str | None, Sequence[str]]]:
    """Yield (source that names axes or parts, the user's line or None, these axes)."""
    for pattern, hint in request.hints.items():
        what = f"hint {pattern!r}"
        yield what, None, axes_of(hint, what)
    for op in program.ops:
        if op.target is torch.ops.fxpar.constrain.default:
            what = "fxpar.constrain"
            names = axes_of(str(op.node.args[1]).split(","), what)
            yield what, user_line(op.node), names
    signature = request.signature
    inputs, outputs = signature.inputs, signature.outputs
    rest = [(x.name, x.at_rest) for ends in (inputs, outputs) for x in ends]
    for name, spec in (*rest, *((x.name, x.use) for x in inputs)):
        if spec is not None:
            what = f"spec given for {name}"
            axes = spec.axes if isinstance(spec, Spec) else axes_of(spec, what)
            yield what, None, axes


def _needed_whole(program: Program, mesh: Mesh) -> dict[str, str]:
    """Return axes, and parts of axes, that cannot be cut -> the reason."""
    out: dict[str, str] = {}
    for op in program.ops:
        out |= dict.fromkeys(op.rule.pin, "a manual region is over it")
    ends: list[tuple[Input | Output, int]] = [*program.tensor_inputs]
    for end, v in (*ends, *program.tensor_outputs):
        dims = end.at_rest.dims if end.at_rest is not None else ()
        for rows, axes in zip(program.values[v].shape, dims, strict=False):
            has_axes = all(map(mesh.has, axes))
            if has_axes and not shard_sizes.is_even(rows, mesh, axes):
                why = f"{end.name} has {rows} rows in unequal shards"
                out |= dict.fromkeys(axes, why)
    return out


def head_counts(program: Program) -> tuple[int, ...]:
    """Return the numbers of heads that weights have, each once."""
    roots, counts = parameter_roots(program), dict[int, None]()
    for op in program.ops:
        if op.rule.contracted and not roots.keys().isdisjoint(op.operands):
            heads = (heads_of(program, op, factor, roots) for factor in op.rule.free)
            counts |= dict.fromkeys(n for n in heads if n is not None)
    return tuple(counts)


def _also(mesh: Mesh, part: str) -> Mesh:
    """Return the mesh with one more part, if that nests."""
    try:
        return mesh.refined([part])
    except MeshError:
        return mesh
