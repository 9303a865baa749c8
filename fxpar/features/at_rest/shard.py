"""Lay out a model's parameters as DTensors: ``fxpar.shard``.

In: a module with plain parameters (on any device, or on meta), before an optimizer is
made. Out: the same module, its parameters laid out as hints, a sample's plan or ZeRO-3
say (``parameter_layouts``), each rank holding its part, its classes swapped
(``sharded_modules``) so that its code still sees global tensors. State dicts of whole
tensors still load. Never: a change to buffers.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor

from fxpar import _torch
from fxpar._torch.objects import live_optimizers, parameters_of
from fxpar.config import PREFIX, Options
from fxpar.errors import HintError, MeshError, ShardError
from fxpar.features.at_rest.crossings import dtensor_of, part_of, with_part
from fxpar.features.at_rest.dtensor_ops import (
    draw_as_one_device,
    part_held,
    serve_parts,
)
from fxpar.features.at_rest.sharded_modules import (
    AT_REST,
    Home,
    ParameterAtRest,
    adopt,
)
from fxpar.features.at_rest.used_layouts import (
    Uses,
    decided,
    layouts_of,
    uses_of,
    with_parts,
)
from fxpar.runtime.calibrate.measure import measure_first
from fxpar.runtime.ranks import mean_gradients, meeting
from fxpar.runtime.ranks.check_inputs import check_options, check_same, options_text
from fxpar.runtime.ranks.groups import HOME, Ranks, device_mesh_of, join, settle
from fxpar.runtime.ranks.presence import user_line
from fxpar.runtime.tracing import TracedCall
from fxpar.sharding.hints import (
    Entries,
    load,
    spec_hints,
)
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan_request import read_auto
from fxpar.sharding.program import Input
from fxpar.sharding.propagate.conventions import batch_axes
from fxpar.sharding.spec import Spec


def shard(
    model: nn.Module,
    mesh: str | Mesh | Any = None,
    sample: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
    hints: Mapping[str, Entries] | str | None = None,
) -> nn.Module:
    """Lay the parameters of ``model`` out over the mesh, in place; returns the model.

    mesh: text, a Mesh or a DeviceMesh; by default FXPAR_MESH, or one axis over all
      ranks.
    sample: ``(args, kwargs)`` of a call, from which the planner finds how each
      parameter is used, and, with ``auto``, the mesh.
    hints: as for ``fxpar.plan``, by default FXPAR_HINTS.

    Axes that hints name split parameters only as hints say. Every other axis splits
    each parameter further, on a dim that no hint closes: one that it divides, else, of
    matrices that are much of the model, one that it cuts into chunks as ``torch.chunk``
    does (ZeRO-3); so does an axis of stages, where it divides. Without hints, the
    sample's plan, or that of the first call, lays parameters out as it uses them. Ranks
    must hold equal parameters; those that differ are taken from rank 0.

    Raises ShardError if an optimizer holds a parameter, if the model was sharded
    before, or keeps a parameter where it cannot be swapped; HintError, MeshError.
    """
    result, model = model, getattr(model, "_orig_mod", model)
    _refuse(model)
    options = Options.read({"mesh": mesh})
    _same_mesh(mesh)
    ranks = join(options).whole
    if ranks.mesh.size == 1:
        return result
    check_options(options_text(options, ranks), "fxpar.shard")
    measure_first(options)
    all_hints = load(hints if hints is not None else options.hints)
    table = spec_hints(all_hints)
    if hints is not None and len(table) < len(all_hints):
        pinned = next(name for name in all_hints if name not in table)
        raise HintError(
            f"hint {pinned!r} pins parameters to a pipeline stage, which "
            "fxpar.shard does not take",
            fix="give it to torch.compile(options={'hints': ...}) or in FXPAR_HINTS",
        )
    uses: Uses = {}
    if sample is not None:
        ranks, uses = _uses(model, ranks, sample, table, options)
    elif ranks.open:
        raise MeshError(
            "the mesh of FXPAR_MESH=auto is not chosen yet, and fxpar.shard was "
            "given no call to choose it for",
            fix="pass the arguments of one call: fxpar.shard(model, sample=(args, "
            "kwargs)), or name the axes of the mesh",
        )
    settle(ranks, ranks.mesh)
    mesh = with_parts(ranks.mesh, table, uses)
    ranks = replace(ranks, mesh=mesh)
    layouts = layouts_of(model, mesh, table, uses, strict=hints is not None)
    check_same(
        [
            (name, "parameter", p.detach())
            for name, p in model.named_parameters()
            if not p.is_meta
        ]
    )
    # Hints on some parameters fix the layout of all.
    is_default = sample is None and all(not x.hint for x in layouts.values())
    swap_parameters(model, ranks, layouts, movable=is_default)
    return result


def is_sharded(model: nn.Module) -> bool:
    """Return whether ``fxpar.shard`` laid out this model."""
    return HOME in getattr(model, "_orig_mod", model).__dict__


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Let gradients of a model add up unreduced on each rank inside this block; the
    first backward of a forward outside it reduces the sum. As DDP's ``no_sync``: put
    the forward inside as well. Costs memory for gradients that batch axes do not split.

    Raises ShardError on more than one rank if the model is not sharded and did not run
    with ``inputs="local"``.
    """
    model = getattr(model, "_orig_mod", model)
    home = model.__dict__.get(HOME)
    if home is None:
        with mean_gradients.unreduced(model.parameters()):
            yield
        return
    home.waiting, before = True, home.waiting
    try:
        yield
    finally:
        home.waiting = before
        home.unreduced = True
        _reduce_later(model, home)


def _reduce_later(model: nn.Module, home: Home) -> None:
    """Let the next backward outside ``no_sync`` reduce gradients that are partial over
    batch axes to their parameters' layout."""

    def reduce(parameter: Any) -> None:
        if home.waiting:
            return
        home.unreduced, gradient = False, parameter.grad
        if (
            isinstance(gradient, DTensor)
            and gradient.placements != parameter.placements
        ):
            parameter.grad = gradient.redistribute(placements=parameter.placements)

    for p in model.parameters():  # some may have been frozen until now
        before = home.hooked.get(id(p))
        if p.requires_grad and (before is None or before() is not p):
            p.register_post_accumulate_grad_hook(reduce)
            home.hooked[id(p)] = weakref.ref(p)


def _refuse(model: nn.Module) -> None:
    """Raise ShardError for a model that cannot be sharded: it was before, a parameter
    has no shape yet or is a DTensor, or an optimizer holds one."""
    if any(HOME in module.__dict__ for module in model.modules()):
        raise ShardError(
            "fxpar.shard was called on this model before",
            fix="call it once, on the whole model",
        )
    for name, p in model.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ShardError(
                f"parameter {name} has no shape yet",
                fix="run the lazy module once before fxpar.shard",
            )
        if isinstance(p, DTensor):
            raise ShardError(
                f"parameter {name} is a DTensor already",
                fix="remove the parallelize_module or fully_shard call: fxpar.shard "
                "does their work",
            )
    ours = {id(p) for p in model.parameters()}
    for optimizer in live_optimizers():
        if any(id(p) in ours for p in parameters_of(optimizer)):
            raise ShardError(
                f"optimizer {type(optimizer).__name__} holds parameters of the model "
                f"that fxpar.shard would replace",
                fix="make the optimizer after model = fxpar.shard(model)",
            )


def _same_mesh(mesh: Any) -> None:
    """Raise MeshError if a mesh is given that FXPAR_MESH contradicts."""
    from_environment = os.environ.get(f"{PREFIX}MESH")
    if mesh is None or not from_environment or read_auto(from_environment):
        return
    described = mesh
    if hasattr(mesh, "mesh_dim_names"):
        described = Mesh.from_device_mesh(mesh)
    elif not read_auto(mesh):
        described = Mesh.parse(mesh)
    if read_auto(mesh) or described.axes != Mesh.parse(from_environment).axes:
        raise MeshError(
            f"fxpar.shard was given mesh {described}, FXPAR_MESH is {from_environment}",
            fix="leave mesh= out, or unset FXPAR_MESH",
        )


def _uses(
    model: nn.Module,
    ranks: Ranks,
    sample: tuple[Sequence[Any], Mapping[str, Any]],
    table: Mapping[str, Entries],
    options: Options,
) -> tuple[Ranks, Uses]:
    """Return the ranks, on a mesh that may be chosen here, and the spec in which the
    planner would use each parameter in the sample's call."""
    match sample:
        case [list() | tuple(), Mapping()]:
            pass
        case _:
            raise ShardError(
                "the sample is not the pair (args, kwargs) of a call",
                fix="for a call model(x, y=z) pass sample=((x,), {'y': z})",
            )
    if any(p.is_meta for p in model.parameters()):
        leaves, tree = _torch.fake.tree_flatten(sample)
        sample = _torch.fake.tree_unflatten(
            [x.to("meta") if isinstance(x, torch.Tensor) else x for x in leaves], tree
        )
    args, kwargs = sample
    grad = any(p.requires_grad for p in model.parameters())
    call = TracedCall(model, tuple(args), dict(kwargs), grad)

    def declare(kind: str, payload: Any, node: fx.Node) -> Input:
        declared = call.declare(kind, payload, node, [None] * call.count)
        if kind == "parameter":
            return replace(declared, splits=True)
        fed = options.inputs == "global" and kind in ("input", "buffer")
        value = node.meta["val"]
        if not fed or not isinstance(value, torch.Tensor):
            return declared
        return replace(declared, at_rest=Spec.whole(value.dim()))

    with meeting.reporting():
        what = call, declare, ranks, table, options
        decision = decided(*what, name="the sample's call")
    if ranks.open:
        ranks = settle(ranks, decision.mesh)
    return ranks, uses_of(decision)


def swap_parameters(
    model: nn.Module,
    ranks: Ranks,
    layouts: Mapping[nn.Parameter, ParameterAtRest],
    *,
    movable: bool,
) -> None:
    """Replace parameters by their shards, and classes by those that gather them.
    ``movable``: whether the first graph to read a parameter lays it out as it uses it.
    """
    sizes = ranks.mesh.sizes
    batch = tuple(axis for axis in batch_axes(ranks.mesh) if sizes[axis] > 1)
    home = Home(str(ranks.mesh), batch, round=meeting.meetings())
    home.movable = {x.name for x in layouts.values()} if movable else set()
    specs = {p: Spec.parse(x.spec) for p, x in layouts.items()}
    home.is_even = all(spec.is_even(ranks.mesh, p.shape) for p, spec in specs.items())
    parts: dict[nn.Parameter, nn.Parameter] = {}
    modules = list(model.named_modules())
    for name, module in modules:
        _refuse_hidden(module, name, layouts)
    for _, module in modules:
        infos = {}
        for key, p in list(_torch.objects.own_parameters(module).items()):
            if p is None:
                continue
            if p not in parts:
                parts[p] = _resting(p, specs[p], ranks)
                setattr(parts[p], HOME, home)
            _torch.objects.own_parameters(module)[key] = parts[p]
            infos[key] = layouts[p]
        if infos or module is model:
            adopt(module, home, infos, root=module is model)
            module.register_load_state_dict_pre_hook(_take_parts)
        if isinstance(module, nn.RNNBase):
            _torch.dynamo.list_recurrent_weights(module)


def _resting(p: nn.Parameter, spec: Spec, ranks: Ranks) -> nn.Parameter:
    """Return the DTensor parameter that holds this rank's part of a plain one."""
    part = part_of(p.detach(), spec, ranks.mesh, ranks.rank)
    part = part.clone(memory_format=torch.contiguous_format)
    device = p.device.type
    if p.is_meta:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    serve_parts()
    if device == "cpu":
        draw_as_one_device()
    layout = device_mesh_of(ranks.mesh, device), spec.to_placements(ranks.mesh)
    strides = torch.empty(p.shape, device="meta").stride()
    dtensor = dtensor_of(part, *layout, p.shape, strides)
    parameter = nn.Parameter(dtensor, requires_grad=p.requires_grad)
    parameter.__dict__.update(p.__dict__)
    return parameter


def _refuse_hidden(
    module: nn.Module, name: str, layouts: Mapping[nn.Parameter, ParameterAtRest]
) -> None:
    """Raise ShardError if a module keeps parameters elsewhere too."""
    for key, value in module.__dict__.items():
        if isinstance(module, nn.RNNBase) and key == "_flat_weights":
            continue
        if key.startswith("_parameters") or key in ("_modules", "_buffers"):
            continue
        inside = value if isinstance(value, (list, tuple)) else [value]
        if isinstance(value, dict):
            inside = list(value.values())
        if any(isinstance(x, nn.Parameter) and x in layouts for x in inside):
            raise ShardError(
                f"{type(module).__name__} {name or 'model'} keeps a parameter in its "
                f"attribute {key!r} too, where it cannot be sharded",
                fix="read parameters as self.<name> where they are used",
            )


def _take_parts(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Let ``load_state_dict`` take whole tensors, each rank its part. Raises ShardError
    for the part of another rank."""
    for key in module.__dict__.get(AT_REST, {}):
        name, resting = prefix + key, _torch.objects.own_parameters(module)[key]
        whole = state_dict.get(name)
        if isinstance(whole, DTensor):
            _refuse_others_part(name, whole)
        if (
            isinstance(whole, torch.Tensor)
            and isinstance(resting, DTensor)
            and not isinstance(whole, DTensor)
            and whole.shape == resting.shape
        ):
            part = part_held(resting, whole).contiguous()
            state_dict[name] = with_part(resting, part)


def _refuse_others_part(name: str, part: DTensor) -> None:
    """Raise ShardError if a DTensor was unpickled that another rank had pickled: it
    holds that rank's part, and the coordinates of its mesh say so."""
    mesh, rank = part.device_mesh, dist.get_rank()
    coordinates = mesh.get_coordinate()
    here = (mesh.mesh == rank).nonzero().flatten().tolist()
    if coordinates is None or list(coordinates) == here:
        return
    if any(placement.is_shard() for placement in part.placements):
        raise ShardError(
            f"rank {rank} loads the part of {name} that rank "
            f"{int(mesh.mesh[tuple(coordinates)])} saved",
            where=user_line(),
            fix="save by torch.distributed.checkpoint, or let rank 0 save whole "
            "tensors: get_model_state_dict(..., options=StateDictOptions("
            "full_state_dict=True))",
        )
