"""Registers the ops of a manual region: its edges, its collectives, a rank's place.

``fxpar::enter_region(x, spec, mesh, axes, region)`` takes this rank's part of a global
value, ``fxpar::leave_region`` joins parts: between them a graph is in shapes local
along ``axes``. ``fxpar::collective`` is one exchange along axes of the mesh, with the
kinds and arguments of ``collective_nodes``; ``fxpar::axis_index`` is this rank's place
along an axis. ``fxpar::refuse`` carries an error to where it may be raised. In: tensors
in a traced graph. Out: fake values and gradients. Never: in a local graph: ``localize``
removes the edges and makes the rest steps.

Gradients are those of all ranks' programs together: a value that enters whole has the
sum of all ranks' gradients, one that leaves whole gives each rank an equal share of its
own.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from fxpar._torch.objects import define_op
from fxpar.errors import PlanError
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.rank_ints import rank_here
from fxpar.sharding.reshard.steps import KINDS
from fxpar.sharding.spec import Spec

# Reduction of a partial result -> the share of its gradient that each rank gets.
_SHARES = {"sum": lambda k: 1.0, "avg": lambda k: 1 / k}


def _entered(x: torch.Tensor, spec: str, mesh: str, *_: Any) -> torch.Tensor:
    return x.new_empty(Spec.parse(spec).local_shape(Mesh.parse(mesh), x.shape))


def _left(x: torch.Tensor, spec: str, mesh: str, *_: Any) -> torch.Tensor:
    dims, its_mesh = Spec.parse(spec).dims, Mesh.parse(mesh)
    counts = [its_mesh.count(axes) for axes in dims]
    return x.new_empty([n * k for n, k in zip(x.shape, counts, strict=True)])


def _exchanged(
    x: torch.Tensor, kind: str, dims: list[int], op: str, mesh: str, axes: str
) -> torch.Tensor:
    named = () if kind == "permute" else dims
    size = Mesh.parse(mesh).count(axes.split("+"))
    return x.new_empty(KINDS[kind].shape(x.shape, named, size))


def _refuse(x: torch.Tensor, what: str, fix: str) -> NoReturn:
    raise PlanError(what, fix=fix)


_EDGE = "(Tensor x, str spec, str mesh, str axes, int region) -> Tensor"
define_op(f"fxpar::enter_region{_EDGE}", _entered)
define_op(f"fxpar::leave_region{_EDGE}", _left)
define_op(
    "fxpar::collective(Tensor x, str kind, int[] dims, str op, str mesh, str axes) "
    "-> Tensor",
    _exchanged,
)
define_op(
    "fxpar::axis_index(str axis, str mesh) -> Tensor",
    lambda axis, mesh: torch.empty((), dtype=torch.int64),
    lambda axis, mesh: torch.tensor(Mesh.parse(mesh).index(rank_here(), (axis,))),
)
define_op(
    "fxpar::refuse(Tensor x, str what, str fix) -> Tensor",
    lambda x, *_: torch.empty_like(x),
    _refuse,
)


def _edge_context(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.spec, ctx.mesh, ctx.axes, ctx.region = inputs


def _enter_backward(ctx: Any, grad: torch.Tensor) -> Any:
    """Leave the region with the gradient of each rank's own part, or with a summand of
    the gradient of what entered whole."""
    spec, axes = Spec.parse(ctx.spec), ctx.axes.split("+")
    sums = [(axis, "sum") for axis in axes if axis not in spec.sharded_axes]
    text = str(Spec.of(spec.dims, sums))
    out = torch.ops.fxpar.leave_region(grad, text, ctx.mesh, ctx.axes, ctx.region)
    return out, None, None, None, None


def _leave_backward(ctx: Any, grad: torch.Tensor) -> Any:
    """Enter the region with the gradient of each rank's part or summand, or with an
    equal share of the gradient of what all ranks have."""
    spec, axes, mesh = Spec.parse(ctx.spec), ctx.axes.split("+"), Mesh.parse(ctx.mesh)
    share = 1 / mesh.count([axis for axis in axes if axis not in spec.axes])
    for axis, reduction in spec.partial:
        if reduction not in _SHARES:
            raise PlanError(
                f"a result of a manual region that is partial by {reduction} over "
                f"{axis} has no gradient",
                fix='reduce it inside, or declare it partial by "sum"',
            )
        share *= _SHARES[reduction](mesh.sizes[axis])
    text = str(spec.without_partial())
    out = torch.ops.fxpar.enter_region(grad, text, ctx.mesh, ctx.axes, ctx.region)
    return out if share == 1 else out * share, None, None, None, None


for _name, _backward in (
    ("fxpar::enter_region", _enter_backward),
    ("fxpar::leave_region", _leave_backward),
):
    torch.library.register_autograd(_name, _backward, setup_context=_edge_context)


def _collective_context(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.kind, ctx.dims, ctx.op, ctx.mesh, ctx.axes = inputs


def _collective_backward(ctx: Any, grad: torch.Tensor) -> Any:
    """Send back what each rank sent. The only kind that is traced with its gradient is
    the permute: torch differentiates its own collectives."""
    assert ctx.kind == "permute", ctx.kind
    back = [0] * len(ctx.dims)
    for i, source in enumerate(ctx.dims):
        back[source] = i
    call = torch.ops.fxpar.collective
    out = call(grad, ctx.kind, back, ctx.op, ctx.mesh, ctx.axes)
    return out, None, None, None, None, None


torch.library.register_autograd(
    "fxpar::collective", _collective_backward, setup_context=_collective_context
)

EDGES = (torch.ops.fxpar.enter_region.default, torch.ops.fxpar.leave_region.default)
