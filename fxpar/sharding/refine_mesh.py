"""The axes that a plan needs in parts, found before anything is planned.

In: a Program and the Request it is planned for. Out: the mesh to plan on: that of the
request, or one refined (``Mesh.refined``) by the parts that hints, specs and code name,
and by those that attention takes: two key-value heads on tp=4 lie over tp:(1)2, a copy
on each rank along tp:(2)2. Where nothing needs parts it is the mesh itself, and nothing
is planned otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from fxpar.errors import HintError, MeshError
from fxpar.sharding import shard_sizes
from fxpar.sharding.axis_parts import axis_of, part_name, parts_among
from fxpar.sharding.hints import axes_of
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan_request import Request
from fxpar.sharding.program import Program, user_line
from fxpar.sharding.propagate.conventions import (
    SEQUENCE,
    batch_axes,
    heads_of,
    parameter_roots,
)
from fxpar.sharding.search.run_search import SearchOptions, has_too_many_axes
from fxpar.sharding.spec import Spec

# Axes that by name split something else than heads.
_NO_HEADS = (*SEQUENCE, "ep", "expert")


def refine(program: Program, request: Request) -> Mesh:
    """The mesh to plan on.

    Raises HintError for parts that the mesh does not have, that do not nest, or that
    would cut an axis which is needed whole.
    """
    mesh, asked = request.mesh, list(_asked(program, request))
    whole = _needed_whole(program, mesh)
    for what, where, names in asked:
        try:
            mesh = mesh.refined(names)
        except MeshError as error:
            text = f"{what}: {error.what}"
            raise HintError(text, where=where, fix=error.fix) from error
    for axis in (axis for axis in whole if axis not in mesh.sizes):
        what, where = next(
            (found[:2] for found in asked if axis_of(axis) in map(axis_of, found[2])),
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
    parts = _for_heads(program, mesh, open_)
    searches = isinstance(request.mode, SearchOptions)
    return mesh if searches and has_too_many_axes(parts) else parts


def _asked(
    program: Program, request: Request
) -> Iterator[tuple[str, str | None, list[str]]]:
    """What names parts, the user's line if there is one, and the parts."""
    for pattern, hint in request.hints.items():
        what = f"hint {pattern!r}"
        yield what, None, parts_among(axes_of(hint, what))
    for op in program.ops:
        if op.target is torch.ops.fxpar.constrain.default:
            what = "fxpar.constrain"
            names = axes_of(str(op.node.args[1]).split(","), what)
            yield what, user_line(op.node), parts_among(names)
    signature = request.signature
    rests = [(end.name, end.rest) for end in signature.inputs]
    rests += [(end.name, end.rest) for end in signature.outputs]
    uses = [(end.name, end.use) for end in signature.inputs]
    for name, given in (*rests, *uses):
        if given is not None:
            what = f"spec given for {name}"
            named = given.axes if isinstance(given, Spec) else axes_of(given, what)
            yield what, None, parts_among(named)


def _needed_whole(program: Program, mesh: Mesh) -> dict[str, str]:
    """Axes, and parts of axes, that cannot be cut, and why."""
    out: dict[str, str] = {}
    for op in program.ops:
        out |= dict.fromkeys(op.rule.pin, "a manual region is over it")
    signature = program.signature
    ends = [
        (end.name, end.rest, v)
        for end, v in zip(signature.inputs, program.inputs, strict=True)
    ]
    ends += [
        (end.name, end.rest, v)
        for end, v in zip(signature.outputs, program.outputs, strict=True)
    ]
    for name, rest, v in ends:
        shape = program.values[v].shape if v is not None else ()
        for rows, axes in zip(shape, rest.dims if rest else (), strict=False):
            known = all(map(mesh.has, axes))
            if known and not shard_sizes.is_even(rows, mesh, axes):
                why = f"{name} lies in shards of {rows} rows that are not alike"
                out |= dict.fromkeys(axes, why)
    return out


def _for_heads(program: Program, mesh: Mesh, axes: Sequence[str]) -> Mesh:
    """The mesh with the parts of these axes that heads can be split over where the axis
    does not divide them."""
    roots = parameter_roots(program) if axes else {}
    for op in program.ops:
        if not op.rule.contracted or roots.keys().isdisjoint(op.operands):
            continue
        for factor in op.rule.free:
            # One head divides by nothing.
            heads = heads_of(program, op, factor, roots) or 1
            for axis in axes:
                fit = math.gcd(heads, mesh.axis_size(axis))
                if 1 < fit < mesh.axis_size(axis):
                    mesh = _also(mesh, part_name(axis, 1, fit))
    return mesh


def _also(mesh: Mesh, part: str) -> Mesh:
    """The mesh with one more part, if that nests."""
    try:
        return mesh.refined([part])
    except MeshError:
        return mesh
