"""Defines the few ops that fxpar adds to a graph, with fake and autograd functions.

In: tensors, with specs and meshes as text. Out: registered ops. Ops in global shapes
run on one device, so a graph can be run after each pass.
``fxpar::reshard(x, source, target, mesh)`` changes a spec, still in global shapes: the
identity on the one-device value. ``fxpar::permute`` is a collective that gives each
member of a group the tensor of one other member. Collectives of a local graph name
their group by axes, ``"fxpar:dp+tp"`` in mesh order, which binding replaces by the name
of the process group. Never: an op here plans or rewrites a graph.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import fx
from torch.fx.traceback import get_current_meta

from fxpar import _torch
from fxpar._torch.objects import define_op
from fxpar.errors import ShardError
from fxpar.sharding.factors import sides
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import line_of
from fxpar.sharding.rank_ints import rank_here
from fxpar.sharding.spec import Spec

c10d = torch.ops._c10d_functional

GROUP_PREFIX = "fxpar:"


def group_name(mesh: Mesh, axes: Sequence[str]) -> str:
    """Return the symbolic group of ``axes`` or parts of axes, in mesh order."""
    return GROUP_PREFIX + "+".join(mesh.ordered(axes))


def group_of_call(node: fx.Node) -> str:
    """Return the name of the process group of a functional collective."""
    return str(node.kwargs.get("group_name", node.args[-1]))


def group_axes(name: str) -> tuple[str, ...]:
    """Return the axes of a group name; the inverse of ``group_name``."""
    return tuple(name.removeprefix(GROUP_PREFIX).split("+"))


@torch.library.custom_op("fxpar::reshard", mutates_args=())
def reshard(x: torch.Tensor, source: str, target: str, mesh: str) -> torch.Tensor:
    """Return the global value; localizing makes this collectives and slices."""
    return x.clone()


@torch.library.custom_op("fxpar::permute", mutates_args=())
def permute(x: torch.Tensor, sources: Sequence[int], group: str) -> torch.Tensor:
    """Give member i of the group the ``x`` of member ``sources[i]``.

    Exists only until binding, which makes it one ``all_to_all_single``.
    """
    raise RuntimeError("fxpar::permute runs bound to a process group, or simulated")


# Moves rows between ranks: ``x`` has the local operands, joined along a dim, the result
# this rank's ``rows`` of all results, joined. ``exchange``: text of
# ``row_moves.Exchange``. Exists only until binding, as ``fxpar::permute``.
define_op(
    "fxpar::move_rows(Tensor x, int dim, SymInt rows, str exchange, str mesh, "
    "str group) -> Tensor",
    lambda x, dim, rows, *_: x.new_empty([*x.shape[:dim], rows, *x.shape[dim + 1 :]]),
)


@torch.library.custom_op("fxpar::dot", mutates_args=())
def dot(lhs: torch.Tensor, rhs: torch.Tensor, equation: str) -> torch.Tensor:
    """Contract by named factors, ``"b s h, h o -> b s o"``. Planning sees every dim
    by itself; localizing makes it views around one mm or bmm."""
    numbers: dict[str, int] = {}
    left, right, out = (
        [numbers.setdefault(factor, len(numbers)) for factor in word]
        for word in sides(equation)
    )
    return torch.einsum(lhs, left, rhs, right, out).contiguous()


@dot.register_fake
def _(lhs: torch.Tensor, rhs: torch.Tensor, equation: str) -> torch.Tensor:
    left, right, out = sides(equation)
    size = dict(zip((*left, *right), (*lhs.shape, *rhs.shape), strict=True))
    return lhs.new_empty([size[f] for f in out])


@torch.library.custom_op("fxpar::constrain", mutates_args=())
def constrain(x: torch.Tensor, spec: str) -> torch.Tensor:
    """Return a copy of ``x`` that carries a hint: entries per dim joined by commas as
    in ``sharding.hints``."""
    return x.clone()


constrain.register_autograd(
    lambda ctx, grad: (torch.ops.fxpar.constrain(grad, ctx.spec), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "spec", inputs[1]),
)


@torch.library.custom_op("fxpar::with_gradient_of", mutates_args=())
def with_gradient_of(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``x`` whose gradient goes to ``other``, of the same shape."""
    return x.clone()


with_gradient_of.register_autograd(lambda ctx, gradient: (None, gradient))


@torch.library.custom_op("fxpar::mean_over_ranks", mutates_args=())
def mean_over_ranks(x: torch.Tensor, spec: str) -> torch.Tensor:
    """Return the gradient of a parameter whose spec at rest is ``spec``, as the mean
    over the ranks of manual axes (``sharding.manual_axes``); a copy on one device."""
    return x.clone()


@torch.library.custom_op("fxpar::shift", mutates_args=())
def shift(
    x: torch.Tensor, dim: int, by: int, fill: float | None = None
) -> torch.Tensor:
    """Return ``x`` with row ``i + by`` of a dim as row ``i``: cyclically, or, with
    ``fill``, that constant beyond the ends."""
    shifted = torch.roll(x, -by, dim).contiguous()
    if fill is not None:
        start = max(x.shape[dim] - by, 0) if by > 0 else 0
        shifted.narrow(dim, start, min(abs(by), x.shape[dim])).fill_(fill)
    return shifted


@torch.library.custom_op("fxpar::scan_back", mutates_args=())
def scan_back(x: torch.Tensor, dim: int, scan: str) -> torch.Tensor:
    """Scan (``cumsum`` or the like) from the last row of a dim to the first."""
    rows = getattr(torch, scan)(x.flip(dim), dim).flip(dim)
    return rows.contiguous()


@torch.library.custom_op("fxpar::choice_back", mutates_args=())
def choice_back(grad: torch.Tensor, places: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the gradient of a running choice (``cummax``): each row of ``grad`` is
    added at the row chosen for it, which is the row itself or the one chosen for the
    row before."""
    return torch.zeros_like(grad).scatter_add(dim, places, grad).contiguous()


@torch.library.custom_op("fxpar::sum_turns", mutates_args=())
def sum_turns(x: torch.Tensor, dim: int, turns: int) -> torch.Tensor:
    """Return the sum of ``turns`` consecutive parts of a dim."""
    return x.unflatten(dim, (turns, -1)).sum(dim)


@sum_turns.register_fake
def _(x: torch.Tensor, dim: int, turns: int) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] //= turns
    return x.new_empty(shape)


@torch.library.custom_op("fxpar::interleave", mutates_args=())
def interleave(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Return the first row of each part, then the second of each, and so on; the first
    parts may have one row more than the others."""
    rows = sum(x.shape[dim] for x in parts)
    out = parts[0].new_empty([*parts[0].shape[:dim], rows, *parts[0].shape[dim + 1 :]])
    for i, x in enumerate(parts):
        places = torch.arange(i, rows, len(parts), device=x.device)
        out.index_copy_(dim, places, x)
    return out


@interleave.register_fake
def _(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    shape = list(parts[0].shape)
    shape[dim] = sum(x.shape[dim] for x in parts)
    return parts[0].new_empty(shape)


# ``torch.cat``, which Inductor leaves to torch after ``register_lowerings``.
define_op("fxpar::join(Tensor[] parts, int dim) -> Tensor", torch.cat, torch.cat)


def _split_copied(x: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    # One kernel on a GPU; without ``out``, one for each part.
    parts = [x.new_empty(len(x), size) for size in sizes]
    torch.split_with_sizes_copy(x, sizes, 1, out=parts)
    return parts


define_op(
    "fxpar::split_copied(Tensor x, int[] sizes) -> Tensor[]",
    lambda x, sizes: [x.new_empty(len(x), size) for size in sizes],
    _split_copied,
)


@torch.library.custom_op("fxpar::kept", mutates_args=())
def kept(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of a value that is overwritten later; no pass removes the copy."""
    return x.clone()


for _op in (reshard, constrain, with_gradient_of, mean_over_ranks, kept):
    _op.register_fake(lambda x, *_: torch.empty_like(x))
for _op in (permute, shift, scan_back, choice_back):
    _op.register_fake(
        lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format)
    )


# The two crossings between one rank's shard and the global value, for parameters at
# rest. Spec, hint and mesh are text. ``reduce``: dtype in which gradients are
# reduced, "" for their own. ``home``: number of the model's ``sharded_modules.Home``.
# ``at_rest.crossings`` has the kernels: eagerly, every rank computes on global values,
# so ``to_global`` gathers and ``to_local`` is a slice.
define_op(
    "fxpar::to_global(Tensor local, SymInt[] shape, str spec, str hint, str mesh, "
    "str reduce, int home) -> Tensor",
    lambda local, shape, *_: local.new_empty(shape),
)


def _own_part(x: torch.Tensor, spec: str, mesh: str, reduce: str) -> torch.Tensor:
    layout, rank = Spec.parse(spec), rank_here()
    return x.new_empty(layout.rank_shape(Mesh.parse(mesh), x.shape, rank))


define_op(
    "fxpar::to_local(Tensor x, str spec, str mesh, str reduce) -> Tensor", _own_part
)


def refuse_sparse(gradient: torch.Tensor) -> None:
    """Raise ShardError if the gradient of a parameter at rest is sparse."""
    if gradient.layout is not torch.strided:
        raise ShardError(
            f"a sparse gradient of a parameter {list(gradient.shape)} that fxpar.shard "
            "split",
            where=line_of(get_current_meta().get("stack_trace") or ""),
            fix="use sparse=False",
        )


def _to_global_backward(ctx, grad: torch.Tensor):
    refuse_sparse(grad)
    grad = torch.ops.fxpar.to_local(grad, ctx.spec, ctx.mesh, ctx.reduce)
    return grad, *[None] * 6


def _to_global_context(ctx, inputs, output) -> None:
    _, _, ctx.spec, _, ctx.mesh, ctx.reduce, _ = inputs


torch.library.register_autograd(
    "fxpar::to_global", _to_global_backward, setup_context=_to_global_context
)


# An all-gather on CPU, for ``order_collectives.give_outputs``; waited for like those of
# torch.
def _gathered(x: torch.Tensor, count: int, group: str) -> torch.Tensor:
    return x.new_empty([count * (x.shape[0] if x.dim() else 1), *x.shape[1:]])


def _gather(x: torch.Tensor, count: int, group: str) -> torch.Tensor:
    out = _gathered(x, count, group)
    return c10d.all_gather_into_tensor_out(x.contiguous(), count, group, out=out)


define_op(
    "fxpar::all_gather_into_tensor(Tensor x, int count, str group) -> Tensor",
    _gathered,
    _gather,
)


def all_gather(x: torch.Tensor, count: int, group: str) -> torch.Tensor:
    """Start an all-gather by the op that ``give_outputs`` chooses; it is waited for by
    ``wait_tensor``."""
    on_cpu = x.is_cpu and not x.is_complex()
    return (torch.ops.fxpar if on_cpu else c10d).all_gather_into_tensor(x, count, group)


@functools.cache
def register_lowerings() -> None:
    """Tell Inductor of the ops above that passes add late; called where one is
    added."""
    aten, ours, rules = torch.ops.aten, torch.ops.fxpar, _torch.inductor_lowerings
    rules.lower_as_call(ours.join.default, aten.cat.default)
    rules.lower_as_copy(ours.kept.default)
    rules.lower_collective(ours.all_gather_into_tensor.default)


# A gather with the matmuls that read it, and a matmul with the reduce-scatter of its
# result, for ``overlap(..., fused=1)``. ``count``: ranks of the group, for shapes.
def _gather_matmul(
    x: torch.Tensor, ws: list[torch.Tensor], dim: int, count: int, group: str
) -> list[torch.Tensor]:
    if _torch.distributed.can_share_memory(x, group):
        _torch.distributed.register_symmetric_ops()
        fused = torch.ops.symm_mem.fused_all_gather_matmul
        whole, products = fused(x, ws, dim, group)
        return [y.contiguous() for y in (whole, *products)]
    rows = x.movedim(dim, 0).contiguous()
    whole = c10d.wait_tensor(all_gather(rows, count, group))
    whole = whole.movedim(0, dim).contiguous()
    return [whole, *(whole @ w for w in ws)]


def _gathered_matmul(
    x: torch.Tensor, ws: list[torch.Tensor], dim: int, count: int, group: str
) -> list[torch.Tensor]:
    whole = torch.cat([x] * count, dim)
    return [whole, *(whole @ w for w in ws)]


def _matmul_scatter(
    x: torch.Tensor, w: torch.Tensor, op: str, dim: int, count: int, group: str
) -> torch.Tensor:
    if _torch.distributed.can_share_memory(x, group):
        _torch.distributed.register_symmetric_ops()
        fused = torch.ops.symm_mem.fused_matmul_reduce_scatter
        return fused(x, w, op, dim, group).contiguous()
    rows = (x @ w).movedim(dim, 0).contiguous()
    mine = c10d.wait_tensor(c10d.reduce_scatter_tensor(rows, op, count, group))
    return mine.movedim(0, dim).contiguous()


define_op(
    "fxpar::gather_matmul(Tensor x, Tensor[] ws, int dim, int count, str group) "
    "-> Tensor[]",
    _gathered_matmul,
    _gather_matmul,
)
define_op(
    "fxpar::matmul_scatter(Tensor x, Tensor w, str op, int dim, int count, str group) "
    "-> Tensor",
    lambda x, w, op, dim, count, group: (x @ w).chunk(count, dim)[0].contiguous(),
    _matmul_scatter,
)
