"""``fxpar.shard``: a model's parameters become DTensors, each rank holding its part.

In: a module with plain parameters (on any device, or on meta), before an optimizer is
made. Out: the same module, its parameters laid out as hints, a sample's plan or ZeRO-3
say (``propagate.at_rest``), its classes swapped (``sharded_modules``) so that its code
still sees global tensors. Buffers stay as they are.
"""

from __future__ import annotations

import contextlib
import fnmatch
import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from fxpar import _torch
from fxpar.choose_plan import planned
from fxpar.config import PREFIX, Options, nearest
from fxpar.errors import HintError, MeshError, ShardError
from fxpar.passes.boundaries import read_signature
from fxpar.runtime.at_rest.crossings import part_of
from fxpar.runtime.at_rest.dtensor_ops import (
    complete_partials,
    draw_as_one_device,
    orthogonalize_whole,
)
from fxpar.runtime.at_rest.sharded_modules import HOME, Home, ParameterAtRest, adopt
from fxpar.runtime.ranks import consensus
from fxpar.runtime.ranks.check_inputs import check_same
from fxpar.runtime.ranks.groups import Ranks, device_mesh_of, join, settle
from fxpar.runtime.tracing import TracedCall
from fxpar.sharding.axis_parts import parts_among
from fxpar.sharding.factors import Axes
from fxpar.sharding.hints import (
    Entries,
    axes_of,
    check,
    check_chunks,
    entries,
    load,
    spec_hints,
)
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.pipeline_axis import pipeline_axis, without_stages
from fxpar.sharding.plan import Plan
from fxpar.sharding.plan_request import Request, choices, named_machine, plan_mode
from fxpar.sharding.program import Input
from fxpar.sharding.propagate.at_rest import at_rest, is_worth_chunks
from fxpar.sharding.propagate.conventions import batch_axes
from fxpar.sharding.rest_over_stages import split_over_stages
from fxpar.sharding.search.mesh_candidates import read_auto
from fxpar.sharding.search.run_search import SearchOptions
from fxpar.sharding.spec import Spec

# A sample plan: parameter name -> the spec it is used in.
Uses = Mapping[str, Spec]


def shard(
    model: nn.Module,
    mesh: str | Mesh | Any = None,
    sample: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
    hints: Mapping[str, Entries] | str | None = None,
) -> nn.Module:
    """Lay the parameters of ``model`` out over the mesh, in place; returns the model.

    mesh: text, a Mesh or a DeviceMesh; by default FXPAR_MESH, or one axis over all
      ranks. sample: ``(args, kwargs)`` of a call, from which the planner finds how each
      parameter is used, and of ``auto`` the mesh. hints: as for ``fxpar.plan``, by
      default FXPAR_HINTS.

    Axes that hints, or the sample's plan, use for some parameter lie as these say, and
    nowhere else. Every other axis splits each parameter further, on a dim that no hint
    closes: one that it divides, else, of matrices that are much of the model, one that
    it cuts into chunks as ``torch.chunk`` does (ZeRO-3); so does an axis of stages,
    where it divides. Ranks must hold equal parameters; those that differ are taken
    from rank 0.

    Raises ShardError if an optimizer holds a parameter, if the model was sharded
    before, or keeps a parameter where it cannot be swapped; HintError, MeshError.
    """
    model = getattr(model, "_orig_mod", model)
    _refuse(model)
    options = Options.read({"mesh": mesh})
    _same_mesh(mesh)
    ranks = join(options)
    if ranks.mesh.size == 1:
        return model
    all_hints = load(hints if hints is not None else options.hints)
    table = spec_hints(all_hints)
    if hints is not None and len(table) < len(all_hints):
        pinned = next(name for name in all_hints if name not in table)
        raise HintError(
            f"hint {pinned!r} pins to a stage, not parameters at rest",
            fix="give it to torch.compile(options={'hints': ...}) or in FXPAR_HINTS",
        )
    uses: Uses = {}
    if sample is not None:
        ranks, uses = _uses(model, ranks, sample, table, options)
    elif ranks.open:
        raise MeshError(
            "FXPAR_MESH=auto is not chosen yet, and fxpar.shard has no call to choose "
            "it for",
            fix="pass the arguments of one call: fxpar.shard(model, sample=(args, "
            "kwargs)), or name the axes of the mesh",
        )
    settle(ranks, ranks.mesh)
    mesh = _with_parts(ranks.mesh, table, uses)
    ranks = replace(ranks, mesh=mesh)
    layout = _layout(model, mesh, table, uses, strict=hints is not None)
    check_same(
        [
            (name, "parameter", p.detach())
            for name, p in model.named_parameters()
            if not p.is_meta
        ],
        ranks.mesh,
    )
    _swap(model, ranks, layout)
    return model


def _with_parts(mesh: Mesh, table: Mapping[str, Entries], uses: Uses) -> Mesh:
    """The mesh of all parameters: of the axes, and those parts of axes, that hints and
    the sample's plan name. Raises HintError for parts that the mesh does not have."""
    for spec in uses.values():
        mesh = mesh.refined(spec.axes)
    for pattern, hint in table.items():
        what = f"hint {pattern!r}"
        try:
            mesh = mesh.refined(parts_among(axes_of(hint, what)))
        except MeshError as error:
            raise HintError(f"{what}: {error.what}", fix=error.fix) from error
    return mesh


def is_sharded(model: nn.Module) -> bool:
    """Whether ``fxpar.shard`` laid out this model."""
    return HOME in getattr(model, "_orig_mod", model).__dict__


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Inside, gradients of a sharded model are added up on each rank unreduced; the
    first backward of a forward outside reduces the sum. As DDP's ``no_sync``: put the
    forward inside as well. Costs memory for gradients that batch axes do not split.

    Raises ShardError if the model is not sharded (on more than one rank).
    """
    model = getattr(model, "_orig_mod", model)
    home = model.__dict__.get(HOME)
    if home is None:
        if _world_size() > 1:
            raise ShardError(
                "no_sync needs a model whose parameters rest sharded",
                fix="call fxpar.shard(model) before the optimizer is made",
            )
        yield
        return
    home.waiting, before = True, home.waiting
    try:
        yield
    finally:
        home.waiting = before
        home.unreduced = True
        _reduce_later(model, home)


def _world_size() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1


def _reduce_later(model: nn.Module, home: Home) -> None:
    """Let the next backward outside ``no_sync`` reduce gradients."""
    if home.hooked:
        return
    home.hooked = True

    def reduce(parameter: Any) -> None:
        if not home.waiting:
            home.unreduced = False
            _reduce(parameter)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(reduce)


def _reduce(parameter: Any) -> None:
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def _refuse(model: nn.Module) -> None:
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
                "stands in its place",
            )
    ours = {id(p) for p in model.parameters()}
    for optimizer in _optimizers():
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        if any(id(p) in ours for p in parameters):
            raise ShardError(
                f"a {type(optimizer).__name__} holds parameters of the model that "
                f"fxpar.shard would replace",
                fix="make the optimizer after model = fxpar.shard(model)",
            )


def _optimizers() -> list[torch.optim.Optimizer]:
    return [
        candidate
        for candidate in gc.get_objects()
        if issubclass(type(candidate), torch.optim.Optimizer)
        and hasattr(candidate, "param_groups")
    ]


def _same_mesh(mesh: Any) -> None:
    """Raise MeshError if a mesh is given that FXPAR_MESH contradicts."""
    from_environment = os.environ.get(f"{PREFIX}MESH")
    if (
        mesh is None
        or not from_environment
        or mesh == from_environment
        or read_auto(from_environment)
    ):
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


@dataclass(frozen=True)
class _Layout:
    spec: Spec
    hint: str


def _layout(
    model: nn.Module,
    mesh: Mesh,
    table: Mapping[str, Entries],
    uses: Uses,
    *,
    strict: bool,
) -> dict[int, _Layout]:
    """Where each parameter rests, by its id. Raises HintError."""
    names_of: dict[int, list[str]] = {}
    parameters = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(p), []).append(name)
        parameters[id(p)] = p
    matched: set[str] = set()
    stages = pipeline_axis(mesh)
    of_stage = without_stages(mesh)
    decided = _axes_in_use(table, uses, [name for n in names_of.values() for name in n])
    decided = {*mesh.parts(filter(mesh.has, decided))}
    wanted: dict[int, tuple[Any, ...]] = {}  # what ``at_rest`` takes
    hints: dict[int, str] = {}
    for key, names in names_of.items():
        shape = tuple(parameters[key].shape)
        hit = [
            (pattern, hint)
            for pattern, hint in table.items()
            if any(fnmatch.fnmatchcase(name, pattern) for name in names)
        ]
        matched.update(pattern for pattern, _ in hit)
        dims: Sequence[Axes] = ()
        closed: Sequence[bool] = ()
        if hit:
            what = f"hint {hit[-1][0]!r} on {names[0]}"
            dims, closed = entries(hit[-1][1], len(shape), what)
            check(dims, of_stage, what)
            dims = tuple(map(mesh.parts, dims))
            check_chunks(dims, shape, mesh, what)
        else:
            use = next((uses[name] for name in names if name in uses), None)
            dims = use.refined(mesh).dims if use is not None else ()
        words = [
            ("+".join(axes) + "?") if not shut else ("+".join(axes) or "_")
            for axes, shut in zip(dims, closed or [False] * len(dims), strict=True)
        ]
        wanted[key] = shape, of_stage, dims, closed, decided
        hints[key] = ",".join(words)
    alike = stages is not None or not is_worth_chunks(wanted.values())
    layouts = {}
    for key, (shape, *lies) in wanted.items():
        spec = at_rest(shape, *lies, alike=alike)
        if stages is not None:
            spec = split_over_stages(spec, shape, mesh, stages)
        layouts[key] = _Layout(spec, hints[key])
    unmatched = [pattern for pattern in table if pattern not in matched]
    if strict and unmatched:
        first_names = [names[0] for names in names_of.values()]
        hint = (
            nearest(unmatched[0], first_names)
            or f"names are such as {', '.join(first_names[:4])}"
        )
        raise HintError(f"hint {unmatched[0]!r} matches no parameter", fix=hint)
    return layouts


def _axes_in_use(
    table: Mapping[str, Entries], uses: Uses, names: Sequence[str]
) -> set[str]:
    """Axes that hints or a sample's plan use for some parameter: where they are not
    used the parameter is whole, as in tensor parallelism, and not split for memory."""
    axes = {axis for spec in uses.values() for axis in spec.sharded_axes}
    for pattern, hint in table.items():
        if fnmatch.filter(names, pattern):
            axes |= {*axes_of(hint, f"hint {pattern!r}")}
    return axes


def _uses(
    model: nn.Module,
    ranks: Ranks,
    sample: tuple[Sequence[Any], Mapping[str, Any]],
    table: Mapping[str, Entries],
    options: Options,
) -> tuple[Ranks, Uses]:
    """The ranks, on a mesh that may be chosen here, and how the planner would use each
    parameter in the sample's call."""
    if any(p.is_meta for p in model.parameters()):
        leaves, tree = _torch.fake.tree_flatten(sample)
        sample = _torch.fake.tree_unflatten(
            [x.to("meta") if isinstance(x, torch.Tensor) else x for x in leaves], tree
        )
    args, kwargs = sample
    grad = any(p.requires_grad for p in model.parameters())
    call = TracedCall(model, tuple(args), dict(kwargs), grad)
    module, fake_mode = call.trace()

    def declare(kind: str, payload: Any, node: fx.Node) -> Input:
        return call.declare(kind, payload, node, [None] * call.count)

    mode: str | SearchOptions | Plan = "propagate"
    if options.plan == "search":
        mode = plan_mode(options.plan, options)
    request = Request(
        without_stages(ranks.mesh),
        read_signature(module.graph, declare),
        table,
        mode,
        meshes=choices(ranks.mesh, mode, local=options.inputs == "local")
        if ranks.open
        else (),
        cached=True,
        name="the sample's call",
        rank=ranks.rank,
        named_hardware=named_machine(options),
    )
    try:
        decision = planned(module.graph, fake_mode, request).decision
    except Exception as error:
        consensus.abort(error)
        raise
    if ranks.open:
        ranks = settle(ranks, decision.mesh)
    program = decision.program
    rests = Spec.in_chunks if pipeline_axis(ranks.mesh) is None else Spec.evened
    uses = {
        declared.name: rests(
            decision.settled[v], decision.mesh, program.values[v].shape
        ).joined(decision.mesh)
        for declared, v in zip(program.signature.inputs, program.inputs, strict=True)
        if v is not None and declared.kind == "parameter"
    }
    return ranks, uses


def _swap(model: nn.Module, ranks: Ranks, layout: Mapping[int, _Layout]) -> None:
    """Replace parameters by their parts and classes by those that gather them."""
    home = Home(str(ranks.mesh), _batch(ranks.mesh))
    parts: dict[int, nn.Parameter] = {}
    originals = list(model.parameters())  # ids stay taken while parameters change
    modules = list(model.named_modules())
    for name, module in modules:
        _refuse_hidden(module, name, layout)
    for _, module in modules:
        rests = {}
        for key, p in list(_torch.objects.own_parameters(module).items()):
            if p is None:
                continue
            lies = layout[id(p)]
            if id(p) not in parts:
                parts[id(p)] = _resting(p, lies.spec, ranks)
            _torch.objects.own_parameters(module)[key] = parts[id(p)]
            rests[key] = ParameterAtRest(tuple(p.shape), str(lies.spec), lies.hint)
        if rests or module is model:
            adopt(module, home, rests, root=module is model)
            module.register_load_state_dict_pre_hook(_take_parts)
        if isinstance(module, nn.RNNBase):
            _torch.dynamo.list_recurrent_weights(module)
    del originals


def _batch(mesh: Mesh) -> tuple[str, ...]:
    return tuple(axis for axis in batch_axes(mesh) if mesh.sizes[axis] > 1)


def _resting(p: nn.Parameter, spec: Spec, ranks: Ranks) -> nn.Parameter:
    """The DTensor parameter that holds this rank's part of a plain one."""
    part = part_of(p.detach(), spec, ranks.mesh, ranks.rank)
    part = part.clone(memory_format=torch.contiguous_format)
    device = p.device.type
    if p.is_meta:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    complete_partials()
    orthogonalize_whole()
    if device == "cpu":
        draw_as_one_device()
    shape = torch.Size(p.shape)
    lies = DTensor.from_local(
        part,
        device_mesh_of(ranks.mesh, device),
        spec.to_placements(ranks.mesh),
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
    parameter = nn.Parameter(lies, requires_grad=p.requires_grad)
    parameter.__dict__.update(p.__dict__)
    return parameter


def _refuse_hidden(module: nn.Module, name: str, layout: Mapping[int, _Layout]) -> None:
    """Raise ShardError if a module keeps parameters elsewhere too."""
    for key, value in module.__dict__.items():
        if _torch.dynamo.lists_recurrent_weights(module, key):
            continue
        if key.startswith("_parameters") or key in ("_modules", "_buffers"):
            continue
        inside = value if isinstance(value, (list, tuple)) else [value]
        if isinstance(value, dict):
            inside = list(value.values())
        if any(isinstance(x, nn.Parameter) and id(x) in layout for x in inside):
            raise ShardError(
                f"{type(module).__name__} {name or 'model'} keeps a parameter in its "
                f"attribute {key!r} too, where it cannot be sharded",
                fix="read parameters as self.<name> where they are used",
            )


def _take_parts(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Let ``load_state_dict`` take whole tensors, each rank its part."""
    for key in module.__dict__.get("_fxpar_rests", {}):
        name, resting = prefix + key, _torch.objects.own_parameters(module)[key]
        whole = state_dict.get(name)
        if (
            isinstance(whole, torch.Tensor)
            and isinstance(resting, DTensor)
            and not isinstance(whole, DTensor)
            and whole.shape == resting.shape
        ):
            mesh = Mesh.from_device_mesh(resting.device_mesh)
            spec = Spec.from_placements(resting.placements, mesh, resting.dim())
            part = part_of(whole, spec, mesh, resting.device_mesh.get_rank())
            state_dict[name] = DTensor.from_local(
                part.contiguous(),
                resting.device_mesh,
                resting.placements,
                run_check=False,
                shape=resting.shape,
                stride=resting.stride(),
            )
