"""Choose the layout of each parameter at rest: hints, a sample's plan, else ZeRO-3.

In: a module with plain parameters, the mesh, hints by pattern, and the specs in which a
sample's plan uses parameters. Out: a ``ParameterLayout`` of each parameter. Never: a
change, or a read of a value, so that all ranks decide the same.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fxpar.errors import HintError, MeshError
from fxpar.option_values import nearest
from fxpar.sharding.hints import Entries, Hint, axes_of, check, check_chunks, read
from fxpar.sharding.mesh import Mesh, parts_among
from fxpar.sharding.pipeline_axis import pipeline_axis, without_stages
from fxpar.sharding.propagate.at_rest import FEW, at_rest, is_worth_chunks
from fxpar.sharding.propagate.conventions import batch_axes
from fxpar.sharding.rest_over_stages import split_over_stages
from fxpar.sharding.spec import Spec

# A sample plan: parameter name -> the spec it is used in.
Uses = Mapping[str, Spec]


@dataclass(frozen=True)
class ParameterLayout:
    """Holds the layout of one parameter at rest."""

    spec: Spec  # spec of the shards
    hint: str  # the hint on it, as ``constrain`` takes one; "" if there is none


def with_parts(mesh: Mesh, table: Mapping[str, Entries], uses: Uses) -> Mesh:
    """Return the mesh refined to the parts of axes that hints and the sample's plan
    name. Raises HintError for parts that the mesh does not have."""
    for spec in uses.values():
        mesh = mesh.refined(spec.axes)
    for pattern, hint in table.items():
        what = f"hint {pattern!r}"
        try:
            mesh = mesh.refined(parts_among(axes_of(hint, what)))
        except MeshError as error:
            raise HintError(f"{what}: {error.what}", fix=error.fix) from error
    return mesh


def layouts_of(
    model: nn.Module,
    mesh: Mesh,
    table: Mapping[str, Entries],
    uses: Uses,
    *,
    strict: bool,
) -> dict[int, ParameterLayout]:
    """Choose the layout of each parameter, by its id. ``strict``: each hint must match
    some parameter. Raises HintError."""
    names_of: dict[int, list[str]] = {}
    parameters = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(p), []).append(name)
        parameters[id(p)] = p
    if strict:
        _refuse_unmatched(table, list(names_of.values()))
    stages = pipeline_axis(mesh)
    decided = _axes_in_use(table, uses, [name for n in names_of.values() for name in n])
    decided = {*mesh.parts(filter(mesh.has, decided))}
    arguments: dict[int, tuple[Any, ...]] = {}  # arguments of ``at_rest``
    hints: dict[int, str] = {}
    for key, names in names_of.items():
        shape = tuple(parameters[key].shape)
        hint = _hint_of(names, shape, mesh, table, uses)
        elsewhere = {*decided, *hint.whole}
        arguments[key] = shape, without_stages(mesh), hint.dims, hint.closed, elsewhere
        hints[key] = ",".join(hint.words)
    even = stages is not None or not is_worth_chunks(arguments.values())
    layouts = {}
    for key, (shape, *rest) in arguments.items():
        spec = at_rest(shape, *rest, even=even)
        if stages is not None:
            spec = split_over_stages(spec, shape, mesh, stages)
        layouts[key] = ParameterLayout(spec, hints[key])
    return layouts


def layouts_as_used(
    uses: Mapping[str, tuple[Sequence[int], Spec]], mesh: Mesh, *, even: bool
) -> dict[str, Spec]:
    """Choose the layout of parameters from their shapes and the specs in which a
    program uses them: split as they are used along axes that do not split the batch,
    and further by all other axes. A parameter that is used whole along an axis that
    splits others stays whole along it, the smallest first, while a rank holds at most
    1 / ``FEW`` more. ``even``: all shards must have equal shapes."""
    used = {axis for _, use in uses.values() for axis in use.sharded_axes}
    specs, more, held = {}, {}, 0
    for key, (shape, use) in uses.items():
        use = use.without(batch_axes(mesh))
        use = use.evened(mesh, shape) if even else use.in_chunks(mesh, shape)
        least, as_used = (
            at_rest(shape, mesh, use.dims, (), elsewhere, even=even)
            for elsewhere in ((), used)
        )
        size = math.prod(least.local_shape(mesh, shape))
        specs[key], held = least, held + size
        more[key] = math.prod(as_used.local_shape(mesh, shape)) - size, as_used
    left = held // FEW
    for key, (size, as_used) in sorted(more.items(), key=lambda x: (x[1][0], x[0])):
        left -= size
        if left >= 0:
            specs[key] = as_used
    return specs


def _hint_of(
    names: Sequence[str],
    shape: tuple[int, ...],
    mesh: Mesh,
    table: Mapping[str, Entries],
    uses: Uses,
) -> Hint:
    """Return the last hint on a parameter, else its use as a hint, in mesh axes."""
    hits = [
        (pattern, hint)
        for pattern, hint in table.items()
        if any(fnmatch.fnmatchcase(name, pattern) for name in names)
    ]
    if not hits:
        use = next((uses[name] for name in names if name in uses), None)
        dims = use.refined(mesh).dims if use is not None else ()
        return Hint(dims, (False,) * len(dims), (None,) * len(dims))
    pattern, entry = hits[-1]
    what = f"hint {pattern!r} on {names[0]}"
    hint = read(entry, len(shape), what)
    check(hint, without_stages(mesh), what)
    dims = tuple(map(mesh.parts, hint.dims))
    check_chunks(dims, shape, mesh, what)
    return replace(hint, dims=dims, whole=mesh.parts(hint.whole))


def _refuse_unmatched(
    table: Mapping[str, Entries], names_of: Sequence[Sequence[str]]
) -> None:
    """Raise HintError if a hint is for no parameter."""
    every = [name for names in names_of for name in names]
    for pattern in table:
        if any(fnmatch.fnmatchcase(name, pattern) for name in every):
            continue
        first_names = [names[0] for names in names_of]
        hint = (
            nearest(pattern, first_names)
            or f"names are such as {', '.join(first_names[:4])}"
        )
        raise HintError(f"hint {pattern!r} matches no parameter", fix=hint)


def _axes_in_use(
    table: Mapping[str, Entries], uses: Uses, names: Sequence[str]
) -> set[str]:
    """Return the axes that hints or a sample's plan use for some parameter: where they
    do not split another parameter, it is whole along them, as in tensor parallelism,
    and not split for memory."""
    axes = {axis for spec in uses.values() for axis in spec.sharded_axes}
    for pattern, hint in table.items():
        if fnmatch.filter(names, pattern):
            axes |= {*axes_of(hint, f"hint {pattern!r}")}
    return axes
