"""Run code written for one rank inside code written for one device: manual regions.

In: a function, and the specs of its tensors. Out: ``shard_map`` marks where a program
goes into shapes local along some axes of the mesh and back
(``graph.region_ops``). While its function is traced, the names of those axes
stand for process groups in torch's functional collectives. Outside of compiled code,
and without a mesh, an axis has one rank, and the function runs unchanged. Specs are
read into entries, made of tuples and text alone, which Dynamo traces.

A user's mistake is text until it is raised where it can be: at once, or, while Dynamo
traces, by the backend, for which ``fxpar::refuse`` is put in the graph. Never: a plan
decided here.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpar import _torch
from fxpar.config import Options
from fxpar.errors import FxparError, RegionError
from fxpar.features.regions.manual_regions import FUNCTIONAL
from fxpar.graph import region_ops as _region_ops  # noqa: F401  (registers ops)
from fxpar.runtime.ranks.groups import join
from fxpar.runtime.tracing import MESH, raised_at, users_line
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.spec import Spec

Entry = tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, str], ...]]


def entries_of(specs: Any, name: str) -> tuple[Entry | None | str, ...]:
    """Return entries as (axes per dim, partial axes), or text on what is wrong."""
    if specs is None or isinstance(specs, (Spec, str)):
        specs = (specs,)
    return tuple(_entry(spec, f"{name}[{i}]") for i, spec in enumerate(specs))


def _entry(spec: Any, name: str) -> Entry | None | str:
    """Return the entry of one spec, or text that says what is wrong with it."""
    if spec is None:
        return None
    if isinstance(spec, Spec):
        return spec.dims, spec.partial
    if isinstance(spec, str) or not isinstance(spec, (tuple, list)):
        return f"{name} is {spec!r}: a spec is a tuple of axes per dim, or None"
    dims = [(x,) if isinstance(x, str) else tuple(x or ()) for x in spec]
    return tuple(dims), ()


def misfit(
    entries: tuple[Entry | None | str, ...],
    tensors: list[torch.Tensor],
    sizes: dict[str, int],
    name: str,
) -> tuple[str, str]:
    """Return what is wrong with specs, and what to do about it; both "" if they fit."""
    what = "arguments" if name == "in_specs" else "results"
    if len(entries) != len(tensors):
        wrong = f"{name} has {len(entries)} entries for {len(tensors)} tensor {what}"
        return wrong, "give one spec per tensor; None is whole"
    for i, entry in enumerate(entries):
        if entry is None:
            continue
        if isinstance(entry, str):
            return entry, 'write ("dp", None, "tp"), Spec(...) or None for each tensor'
        dims, partial = entry
        shape = tensors[i].shape
        if len(dims) > len(shape):
            wrong = f"{name}[{i}] has {len(dims)} dims, its tensor {list(shape)}"
            return wrong, "give at most one entry per dim"
        used = [axis for split in dims for axis in split] + [a for a, _ in partial]
        for axis in used:
            if used.count(axis) > 1:
                return f"{name}[{i}] uses axis {axis!r} twice", "name it once"
            if sizes and axis not in sizes:
                wrong = (
                    f"{name}[{i}] names axis {axis!r}, which is none of the region's"
                )
                return wrong, f"name one of them: {', '.join(sizes)}"
        if partial and name == "in_specs":
            wrong = f"{name}[{i}] is partial: no rank's summand is given"
            return wrong, "let it enter whole, or split"
        for d, split in enumerate(dims if sizes and name == "in_specs" else ()):
            count = 1
            for axis in split:
                count *= sizes[axis]
            if shape[d] % count:
                wrong = (
                    f"{name}[{i}]: dim {d} of size {shape[d]} does not divide over "
                    f"{'+'.join(split)} ({count} ranks)"
                )
                return wrong, "pad it outside, or leave the dim whole"
    return "", ""


def spelled(entry: Any, ndim: int) -> tuple[list[Any], str]:
    """Return the axes of every dim, and the spec as text."""
    split, partial = entry if entry is not None else ((), ())
    dims = [*split, *[()] * (ndim - len(split))]
    text = "[" + ", ".join(["+".join(axes) or "_" for axes in dims]) + "]"
    if partial:
        clauses = ", ".join([f"{op}: {axis}" for axis, op in partial])
        text += f" partial({clauses})"
    return dims, text


def hint_of(dims: list[Any]) -> str:
    """Return axes per dim as the text of a hint, each dim open to more axes."""
    return ",".join(["+".join(axes) + "?" for axes in dims])


@dataclass(frozen=True)
class _Open:
    """Is a region whose function is being traced, or is running on one rank."""

    mesh: Mesh | None  # None: every axis has one rank
    axes: tuple[str, ...]  # axes of the mesh that the function runs over


class _Regions:
    """Holds the open regions of one trace, the innermost last."""

    def __init__(self) -> None:
        self.open: list[_Open] = []
        self.trace: Any = None
        self.numbers = itertools.count()

    def begin(self) -> None:
        """Forget the regions of a trace that was given up."""
        trace = _torch.dynamo.current_trace()
        if trace is not self.trace:
            self.open.clear()
            self.trace = trace


_regions = _Regions()


def _traced_mesh() -> Mesh | None:
    """Return the mesh that code is traced for; None if it is not known."""
    mesh_source = MESH.get()
    if mesh_source is not None:
        return mesh_source()
    from fxpar.runtime.calls.outside_graphs import options_of_call

    return mesh_of(options_of_call())


def mesh_of(options: Options | None) -> Mesh | None:
    """Return the mesh of these options, None if it cannot be made: others say why."""
    if options is None:
        return None
    try:
        return join(options).mesh
    except FxparError:
        return None


@torch.compiler.assume_constant_result
def _enter(axes: tuple[str, ...] | None, compiling: bool) -> tuple[Any, ...]:
    """Open a region. Returns (mesh, number, axes with their sizes, what is wrong, what
    to do); the mesh is "" where every axis has one rank."""
    _regions.begin()
    mesh = _traced_mesh() if compiling else None
    open_axes = {axis for region in _regions.open for axis in region.axes}
    wrong, fix = "", ""
    if mesh is None:
        _regions.open.append(_Open(None, ()))
        return "", 0, (), "", ""
    chosen = axes
    if chosen is None:
        chosen = tuple(axis for axis in mesh.names if axis not in open_axes)
    for axis in chosen:
        if axis not in mesh.sizes:
            wrong = (
                f"shard_map goes over axis {axis!r}, which mesh {mesh} does not have"
            )
            fix = f"name axes of the mesh: {', '.join(mesh.names)}"
        elif axis in open_axes:
            wrong = f"shard_map goes over axis {axis!r} inside a region that does"
            fix = f"leave {axis!r} to one of the two: axes=(...)"
    if not chosen:
        wrong = f"shard_map goes over no axis of mesh {mesh}"
        fix = "name at least one in axes=(...)"
    if wrong:
        _regions.open.append(_Open(None, ()))
        return "", 0, (), wrong, fix
    _regions.open.append(_Open(mesh, chosen))
    _torch.distributed.name_axes(mesh.sizes)
    number = next(_regions.numbers)
    pairs = tuple((axis, mesh.sizes[axis]) for axis in mesh.ordered(chosen))
    return str(mesh), number, pairs, "", ""


@torch.compiler.assume_constant_result
def _give_up() -> None:
    """Let the open region run as on one rank, since it is refused."""
    _regions.open[-1] = _Open(None, ())


@torch.compiler.assume_constant_result
def _leave() -> None:
    """Close the innermost region."""
    _regions.open.pop()
    if not any(region.mesh for region in _regions.open):
        _torch.distributed.name_axes(None)


@torch.compiler.assume_constant_result
def _axis(name: str) -> tuple[str, int, str]:
    """Return (mesh, size of the axis, what is wrong) inside the innermost region."""
    mesh = next((r.mesh for r in reversed(_regions.open) if r.mesh is not None), None)
    if mesh is None:
        return "", 1, ""
    open_axes = {axis for region in _regions.open for axis in region.axes}
    if name not in open_axes:
        names = ", ".join(sorted(open_axes))
        wrong = f"axis {name!r} is not one of this manual region, which has {names}"
        return "", 1, wrong
    return str(mesh), mesh.sizes[name], ""


def shard_map(
    fn: Callable[..., Any],
    in_specs: Sequence[Any],
    out_specs: Sequence[Any],
    axes: Sequence[str] | None = None,
    *,
    bodies: Sequence[tuple[Callable[..., Any], Sequence[Any], Sequence[Any]]] = (),
) -> Callable[..., Any]:
    """Make ``fn`` a manual region: it is written for one rank, and called by code that
    is written for one device.

    ``y = fxpar.shard_map(fn, in_specs, out_specs)(x)``. Inside ``fn`` tensors have the
    shapes that one rank holds along ``axes`` (default: all of the mesh); other axes
    stay automatic. There ``fxpar.axis_index`` and ``fxpar.axis_size`` say where a rank
    is, and ``torch.distributed._functional_collectives`` (``all_reduce``,
    ``all_gather_tensor``, ``reduce_scatter_tensor``, ``all_to_all_single``) and
    ``fxpar.permute`` take an axis for the group.

    in_specs, out_specs: one entry per tensor argument and per tensor result, in order:
      a Spec, a tuple as in ``Spec(...)`` ("dp", None, "tp"), or None for whole. A dim
      split over axes has its size divided by theirs inside. A result may be
      ``Spec(..., partial={"tp": "sum"})``: each rank has a summand. Arguments that are
      not tensors are passed unchanged.
    axes: those of the mesh that ``fn`` handles.
    bodies: other ways to compute the same, each ``(fn, in_specs, out_specs)``. A search
      takes the one whose plan is predicted to be the fastest; anything else the first,
      which is ``fn``.

    The gradient of an argument that is whole is the sum of the gradients on all ranks.
    Tensors that ``fn`` closes over have no gradient; pass them. Outside of compiled
    code, and without a mesh, ``fn`` runs unchanged, and each axis has one rank.

    Raises RegionError, naming the line: for specs that do not fit, a dim that does not
    divide, an unknown axis, a result said to be whole that differs between ranks,
    collectives of other groups, random numbers inside.
    """
    ways = tuple(
        (body, entries_of(ins, "in_specs"), entries_of(outs, "out_specs"))
        for body, ins, outs in ((fn, in_specs, out_specs), *bodies)
    )
    over = (axes,) if isinstance(axes, str) else axes
    over = None if over is None else tuple(over)

    def mapped(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return _chosen(ways, over, args, kwargs)
        with _closed():
            return _chosen(ways, over, args, kwargs)

    return mapped


@contextlib.contextmanager
def _closed() -> Iterator[None]:
    """Close on exit the regions that begin inside, whatever is raised."""
    before = len(_regions.open)
    try:
        yield
    except FxparError:
        raise
    except (ValueError, RuntimeError) as error:
        if not torch.compiler.is_compiling() or "group" not in str(error):
            raise
        what = f"a collective of torch.distributed inside a manual region: {error}"
        raise RegionError(what, where=raised_at(error), fix=FUNCTIONAL) from error
    finally:
        while len(_regions.open) > before:
            _leave()


Body = tuple[
    Callable[..., Any], tuple[Entry | None | str, ...], tuple[Entry | None | str, ...]
]


def _chosen(
    bodies: tuple[Body, ...],
    over: tuple[str, ...] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a region with these bodies: all are traced, one is kept later
    (``manual_regions.keep_bodies``). On one rank the first runs."""
    number = _fork() if len(bodies) > 1 and torch.compiler.is_compiling() else -1
    if number < 0:
        return _mapped(*bodies[0], over, args, kwargs)
    leaves, tree = _torch.fake.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    forked = [
        torch.ops.fxpar.fork_bodies(leaves[i], len(bodies), number) for i in places
    ]
    results, trees = [], []
    for k, body in enumerate(bodies):
        for i, own in zip(places, forked, strict=True):
            leaves[i] = own[k]
        own_args, own_kwargs = _torch.fake.tree_unflatten(leaves, tree)
        out, its_tree = _torch.fake.tree_flatten(
            _mapped(*body, over, own_args, own_kwargs)
        )
        results.append(out)
        trees.append(its_tree)
    first = results[0]
    places = [i for i, leaf in enumerate(first) if isinstance(leaf, torch.Tensor)]
    wrong = _difference(results, trees)
    if wrong:
        _refuse(first, places, wrong, "let all bodies return the same tensors")
        return _torch.fake.tree_unflatten(first, trees[0])
    for i in places:
        each = [out[i] for out in results]
        first[i] = torch.ops.fxpar.choose_body(each, number)
    return _torch.fake.tree_unflatten(first, trees[0])


def _difference(results: list[list[Any]], trees: list[Any]) -> str:
    """Return how the results of bodies differ; "" if they do not."""
    for k in range(1, len(results)):
        if trees[k] != trees[0]:
            return f"bodies[{k - 1}] of a manual region returns another structure"
        for i, (x, y) in enumerate(zip(results[0], results[k], strict=True)):
            if not isinstance(x, torch.Tensor):
                continue
            one, other = (x.dtype, list(x.shape)), (y.dtype, list(y.shape))
            if one != other:
                return (
                    f"result {i} of bodies[{k - 1}] of a manual region is {other[0]} "
                    f"{other[1]}, that of the first body {one[0]} {one[1]}"
                )
    return ""


@torch.compiler.assume_constant_result
def _fork() -> int:
    """Return a number for a region with several bodies; -1 without a mesh."""
    _regions.begin()
    return -1 if _traced_mesh() is None else next(_regions.numbers)


def _mapped(
    fn: Callable[..., Any],
    ins: tuple[Entry | None | str, ...],
    outs: tuple[Entry | None | str, ...],
    over: tuple[str, ...] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call the function as a region. Dynamo traces this code unchanged."""
    leaves, tree = _torch.fake.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    compiling = torch.compiler.is_compiling()
    mesh, number, pairs, wrong, fix = _enter(over, compiling)
    sizes = dict(pairs)
    if not wrong:
        wrong, fix = misfit(ins, [leaves[i] for i in places], sizes, "in_specs")
        if wrong and mesh:
            _give_up()
    if wrong:
        mesh = ""
        _refuse(leaves, places, wrong, fix)
    axes = "+".join([axis for axis, _ in pairs])
    if mesh:
        for i, entry in zip(places, ins, strict=True):
            leaves[i] = _entered(leaves[i], entry, mesh, axes, number)
    args, kwargs = _torch.fake.tree_unflatten(leaves, tree)
    if compiling:
        out = fn(*args, **kwargs)
    else:
        with _torch.distributed.axes_of_one_rank():
            out = _torch.distributed.finished(fn(*args, **kwargs))
    results, tree = _torch.fake.tree_flatten(out)
    places = [i for i, leaf in enumerate(results) if isinstance(leaf, torch.Tensor)]
    if not wrong:
        placed = [results[i] for i in places]
        wrong, fix = misfit(outs, placed, sizes, "out_specs")
        if wrong:
            _refuse(results, places, wrong, fix)
        elif mesh:
            for i, entry in zip(places, outs, strict=True):
                results[i] = _left(results[i], entry, mesh, axes, number)
    _leave()
    return _torch.fake.tree_unflatten(results, tree)


def _refuse(leaves: list[Any], places: list[int], wrong: str, fix: str) -> None:
    """Raise what is wrong; Dynamo, which would take that for the program's own error,
    gets it as an op on one of the tensors."""
    if not torch.compiler.is_dynamo_compiling():
        raise RegionError(wrong, where=users_line(), fix=fix)
    refuse = torch.ops.fxpar.refuse
    if places:
        leaves[places[0]] = refuse(leaves[places[0]], wrong, fix)
    else:
        refuse(torch.zeros(()), wrong, fix)


def _entered(
    x: torch.Tensor, entry: Any, mesh: str, axes: str, number: int
) -> torch.Tensor:
    """Return this rank's part of an argument, hinted to be split so outside."""
    dims, text = spelled(entry, x.dim())
    if any(dims):
        x = torch.ops.fxpar.constrain(x, hint_of(dims))
    return torch.ops.fxpar.enter_region(x, text, mesh, axes, number)


def _left(
    x: torch.Tensor, entry: Any, mesh: str, axes: str, number: int
) -> torch.Tensor:
    """Return the global value of a result."""
    dims, text = spelled(entry, x.dim())
    x = torch.ops.fxpar.leave_region(x, text, mesh, axes, number)
    return torch.ops.fxpar.constrain(x, hint_of(dims)) if any(dims) else x


def axis_index(name: str) -> torch.Tensor:
    """Return this rank's place along an axis, inside the function of ``shard_map``: a
    tensor without dims (int64, on the CPU), since one program runs on all ranks.

    Outside of compiled code, and without a mesh, it is 0. Raises RegionError if the
    region does not have the axis.
    """
    mesh, _, wrong = _axis(name)
    _check_axis(wrong)
    if not mesh:
        return torch.zeros((), dtype=torch.int64, device="cpu")
    return torch.ops.fxpar.axis_index(name, mesh)


def axis_size(name: str) -> int:
    """Return the number of ranks along an axis, inside the function of ``shard_map``.

    Outside of compiled code, and without a mesh, it is 1. Raises RegionError if the
    region does not have the axis.
    """
    _, size, wrong = _axis(name)
    _check_axis(wrong)
    return size


def permute(x: torch.Tensor, to: Sequence[int], axis: str) -> torch.Tensor:
    """Send ``x`` from each rank to another along an axis, inside the function of
    ``shard_map``: rank ``i`` of the axis sends to ``to[i]``, as in torch's
    ``permute_tensor``, but in one program for all ranks. Gradients are sent back.

    Raises RegionError if ``to`` is not a permutation of the axis's ranks, or the region
    does not have the axis.
    """
    mesh, size, wrong = _axis(axis)
    _check_axis(wrong)
    if sorted(to) != list(range(size)) and not wrong:
        wrong = f"permute sends to {list(to)}, which is no order of {size} ranks"
        leaves = [x]
        _refuse(leaves, [0], wrong, "name each rank of the axis once")
        return leaves[0]
    if not mesh:
        return x.clone()
    sources = [0] * size
    for source, target in enumerate(to):
        sources[target] = source
    return torch.ops.fxpar.collective(x, "permute", sources, "", mesh, axis)


def _check_axis(wrong: str) -> None:
    if wrong:
        _refuse(
            [], [], wrong, "name one of them, or give it to the region in axes=(...)"
        )
